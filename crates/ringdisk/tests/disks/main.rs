//! `ringdisk serve`: disks of virtual machines, their upgrades, kills and migrations; disks of NBD
//! clients.

#![allow(clippy::unwrap_used)]

mod checkpoint;
mod checkpoint_fleece;
mod checkpoint_hangs;
mod checkpoint_kills;
#[path = "../common/mod.rs"]
mod common;
mod jobs;
mod keep;
mod keep_setup;
mod keep_upgrade;
mod limits;
mod migrate;
mod mirrors;
mod nbd;
mod nbd_crowd;
mod nbd_flush;
mod nbd_moves;
mod nbd_silent;
mod nbd_tls;
mod nbd_with_vhost;
mod nbd_with_vhost_upgrade;
mod other_host;
mod qemu_nbd;
mod qemu_nbd_options;
mod serve;
mod serve_cli;
mod serve_qemu;
mod upgrade;
mod upgrade_kill;
mod vhost_kill;
mod walk;
