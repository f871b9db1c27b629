//! One file for each command.

pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod create;
pub(crate) mod ctl;
pub(crate) mod info;
pub(crate) mod look;
pub(crate) mod man;
pub(crate) mod map;
pub(crate) mod mount;
pub(crate) mod output;
pub(crate) mod umount;
