//! Checkpoints of disks that are served: the state of one or several disks at one instant, for
//! readers over NBD, while clients go on writing ([`ringdisk_disk::Checkpoint`]).
//!
//! Promises: all disks of a checkpoint have it or none has; a disk is held for at most
//! [`HOLD_MAX`], whatever becomes of the client; the serving process opens no name and makes no
//! socket: both are given to it.
//!
//! `running` are those of one disk, begun over `steps`; `exports` brings disks of one process to
//! one address; [`round`] is the client's side, for all disks.
//!
//! [`HOLD_MAX`]: crate::control::protocol::checkpoint::HOLD_MAX

mod accel;
mod exports;
pub mod round;
mod running;
mod steps;

pub(super) use accel::Accel;
pub(super) use running::Checkpoints;
