//! Long operations on whole images: what the tools do when nobody serves them.
//!
//! Promises: each job is an async function over open disks (or the names of images), reports to a
//! [`Progress`](crate::Progress), and ends soon after it was cancelled, leaving every image sound.

mod commit;
mod rebase;

pub use commit::{Commit, commit};
pub use rebase::{Rebase, rebase};
