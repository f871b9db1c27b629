//! One file for each command.
//!
//! Promises: a command turns its options into a request of a library, and prints what comes back;
//! the work is done there.

pub(crate) mod backup;
mod backup_job;
pub(crate) mod bitmap;
pub(crate) mod check;
mod checkpoint;
pub(crate) mod commit;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod ctl;
pub(crate) mod fstab;
pub(crate) mod info;
pub(crate) mod job;
pub(crate) mod lock_advice;
pub(crate) mod man;
pub(crate) mod map;
pub(crate) mod measure;
pub(crate) mod mirror;
pub(crate) mod mount;
pub(crate) mod ps;
pub(crate) mod qemu_img;
pub(crate) mod qemu_nbd;
pub(crate) mod rebase;
pub(crate) mod report;
pub(crate) mod resize;
pub(crate) mod restore;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod top;
pub(crate) mod topology;
pub(crate) mod umount;
