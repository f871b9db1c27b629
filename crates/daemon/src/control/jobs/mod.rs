//! Jobs of a served disk: long changes of its images that run beside its clients.
//!
//! Promises: a job can be looked at, paused, slowed down, cancelled and waited for by any client of
//! the control socket, and goes on when the client that began it has left, if it was begun in the
//! background. A cancelled job leaves the disk as it was before. The end of the disk cancels its
//! jobs and waits for them. Jobs that have ended stay in the list, the last [`KEPT_MAX`] of them.
//!
//! Control thread; nothing here is on the path of a request of a client of the disk.
//!
//! [`job`] is one of them, [`list`] all of a disk, [`words`] what is said of them on the control
//! socket.

mod begin;
mod commands;
mod commit;
mod job;
mod list;
mod mirror;
mod run;
mod stream;
pub mod words;

pub(in crate::control) use begin::chain;
pub use job::{Job, Kind, NewJob, State};
pub use list::{Jobs, KEPT_MAX};

#[cfg(test)]
mod tests;
