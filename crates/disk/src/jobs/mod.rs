//! Long operations of the command-line tools on whole images that are not served.
//!
//! Promises: each job is an async function over open disks (or the names of images), reports to a
//! [`Progress`](crate::Progress), and ends soon after it was cancelled, leaving every image sound.

mod commit;
mod compare;
mod convert;
mod rebase;

pub use crate::limits::SECTOR_BYTES;
pub use commit::{Commit, commit};
pub use compare::{CompareOptions, Comparison, Difference, compare};
pub use convert::{ConvertOptions, ConvertReport, convert};
pub use convert::{SPARSE_BYTES_DEFAULT, TASKS_DEFAULT, TASKS_MAX, UNREADABLE_MAX};
pub use rebase::{Rebase, rebase};

/// In the message of a failed look at the tables of an image: a check says more.
pub const BAD_TABLES: &str = "its tables are damaged, or cannot be read";

/// The place of a byte cannot be found.
fn cannot_look_up(name: &str, offset: u64) -> String {
    format!("cannot find byte {offset} of the disk in '{name}': {BAD_TABLES}")
}
