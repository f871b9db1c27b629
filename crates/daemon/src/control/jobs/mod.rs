//! Jobs of a served disk: long changes of its images that run beside its clients.
//!
//! Promises: a job can be looked at, paused, slowed down, cancelled and waited for by any client of
//! the control socket, and goes on when the client that began it has left, if it was begun in the
//! background. A cancelled job leaves the disk as it was before. The end of the disk cancels its
//! jobs and waits for them; a successor goes on with them. Jobs that have ended stay in the list,
//! the last [`KEPT_MAX`] of them.
//!
//! Control thread; nothing here is on the path of a request of a client of the disk.
//!
//! Several jobs run at once where their images do not overlap ([`Claims`]).
//!
//! [`handed`] is what a successor gets of a job, which it begins in [`again`]; [`job`] is one of
//! them, [`list`] all of a disk, [`words`] what is said of them on the control socket.

mod again;
mod backup;
mod begin;
mod claims;
mod commands;
mod commit;
pub mod handed;
mod job;
pub mod keeper;
mod list;
mod mirror;
mod run;
mod stream;
pub mod words;
mod work;

pub use begin::UserWord;
pub(in crate::control) use begin::chain;
pub use claims::{Claims, Span};
pub use handed::{HandedJob, JobWords};
pub use job::{Job, Kind, NewJob, State};
pub use list::{Jobs, KEPT_MAX, Moving};

#[cfg(test)]
mod tests;
