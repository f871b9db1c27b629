//! The kinds of jobs of a disk, from the command that asks for one to what it does.
//!
//! Promises: control thread; a job goes into the list of the disk ([`crate::control::jobs`]) before
//! it does anything.
//!
//! `commit`, `stream`, `mirror` and `backup` make a job of a command, and `resume` one of what
//! another process has begun; `begin` runs it; `work` is what it does.

mod backup;
mod begin;
mod commit;
mod mirror;
mod names;
mod resume;
mod stream;
mod target;
mod work;

pub(super) use names::chain;
