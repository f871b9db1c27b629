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
//! [`Job`] is one of them, [`Jobs`] all of a disk; [`handed_job`] is what a successor gets of a
//! job. What each kind does is above this, in [`crate::control::disk`].

mod claims;
mod commands;
pub(in crate::control) mod description;
pub mod handed_job;
mod job;
pub mod keeper;
mod kind;
mod list;
pub(in crate::control) mod run;
mod user_word;

pub use claims::{Claims, Span};
pub use description::{HandedJob, JobWords};
pub use job::{Job, NewJob, State};
pub use kind::Kind;
pub use list::{Jobs, KEPT_MAX, Moving};
pub use user_word::UserWord;

#[cfg(test)]
mod tests;
