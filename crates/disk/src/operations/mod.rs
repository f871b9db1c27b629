//! Long operations of the command-line tools on whole images that are not served.
//!
//! Promises: each operation is an async function over open disks (or the names of images), reports
//! to a [`Progress`](crate::Progress), and ends soon after it was cancelled, leaving every image
//! sound.

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
use ringdisk_qcow2::GuestOffset;
use ringdisk_ring::Errno;

use crate::{Cause, Error};

/// The place of a byte cannot be found.
fn cannot_look_up(name: &str, offset: GuestOffset, errno: Errno) -> Error {
    let doing = format!(
        "cannot find byte {offset} of the disk in '{name}': its tables are damaged, or cannot be \
         read"
    );
    Error::os(doing, errno).because(Cause::BadTables)
}
