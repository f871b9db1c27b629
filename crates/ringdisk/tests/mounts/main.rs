//! What `ringdisk mount` offers beside bytes: how a mount ends, survives and changes while it is in
//! use, parts of disks, passthrough, zero-copy and io_uring.

mod busy;
mod cancelled_changes;
mod client_memory;
mod commit;
#[path = "../common/mod.rs"]
mod common;
mod keep;
mod nbd_silent;
mod passthrough;
mod refused;
mod snapshot_rounds;
mod stopped_server;
mod upgrade;
mod uring;
mod windows;
