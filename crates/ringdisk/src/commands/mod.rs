//! One file for each command.

pub(crate) mod bitmap;
pub(crate) mod check;
pub(crate) mod commit;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod create;
pub(crate) mod ctl;
pub(crate) mod info;
pub(crate) mod look;
pub(crate) mod man;
pub(crate) mod map;
pub(crate) mod measure;
pub(crate) mod mount;
mod open;
pub(crate) mod operation;
pub(crate) mod output;
pub(crate) mod own_image;
pub(crate) mod qemu_nbd;
pub(crate) mod rebase;
pub(crate) mod reopen;
pub(crate) mod resize;
pub(crate) mod serve;
mod shown;
pub(crate) mod snapshot;
pub(crate) mod topology;
pub(crate) mod umount;
