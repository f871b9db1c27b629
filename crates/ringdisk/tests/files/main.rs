//! Served files: bytes, sizes, errors, ends and crashes, over whichever transport
//! `RINGDISK_TEST_TRANSPORT` names. `./test uring` runs all of them over io_uring.

mod backups;
mod broken;
mod bytes;
mod coherence;
#[path = "../common/mod.rs"]
mod common;
mod concurrent_jobs;
mod copy_on_read;
mod crash;
mod ctl;
mod full_targets;
mod jobs;
mod lifecycle;
mod limits;
mod mirror_targets;
mod mirrors;
mod semantics;
mod storage;
mod user;
mod verify;
