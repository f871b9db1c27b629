//! How an export ends by itself, and the last flush of its disk.
//!
//! Promises: each way in which an export ends by itself is one [`HaltReason`], whose text says what
//! clients have lost, if they have. The last flush does not wait for requests that may never end,
//! and its error is returned, never dropped. Control path; [`close_disk`] runs on a queue thread.

use std::fmt;
use std::time::Duration;

use ringdisk_disk::Disk;
use ringdisk_ring::{Errno, Ring};

use crate::{Error, ErrorKind};

/// Why an export was halted: it ended by itself, with errors to its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HaltReason {
    /// Reading from what delivers the requests failed with this errno.
    Device(&'static str, Errno),
    /// This peer refused a reply with this errno.
    Reply(&'static str, Errno),
    /// What this peer delivered is no request, and why not.
    Protocol(&'static str, String),
    /// A queue thread panicked: a defect of ringdisk.
    Panicked,
    /// A request was in flight for longer than the I/O timeout.
    Timeout(Duration),
    /// The last flush failed: what clients wrote may not be on stable storage.
    Flush(Errno),
    /// Requests were still in flight at a clean stop and had to be ended with errors.
    StillInFlight(usize),
    /// It was told to end at once while clients had so many open files.
    Forced(u64),
    /// A stop waited so long for the clients to close their files, of which so many are open.
    StillInUse(Duration, u64),
    /// The connection was aborted from outside while clients had so many open files.
    Aborted(u64),
    /// The storage below failed, and the export was to stop then (`--on-error stop`).
    GaveUp,
    /// The control thread could not go on: the kind and the text of its error.
    Failed(ErrorKind, String),
}

impl HaltReason {
    /// What the user can do, if we know.
    #[must_use]
    pub fn hint_text(&self) -> Option<&'static str> {
        match self {
            HaltReason::GaveUp => {
                Some("requests that were not answered go on when the disk is served again")
            }
            _ => None,
        }
    }
}

impl From<Error> for HaltReason {
    fn from(error: Error) -> HaltReason {
        HaltReason::Failed(error.kind(), error.to_string())
    }
}

impl fmt::Display for HaltReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HaltReason::Device(device, errno) => {
                write!(f, "export halted: reading {device} failed: {errno}")
            }
            HaltReason::Reply(peer, errno) => {
                write!(f, "export halted: {peer} refused a reply: {errno}")
            }
            HaltReason::Protocol(peer, error) => {
                write!(f, "export halted: {peer} is out of step: {error}")
            }
            HaltReason::Panicked => write!(
                f,
                "export halted: a queue thread panicked; this is a defect of ringdisk, please \
                 report it with the message above"
            ),
            HaltReason::Timeout(limit) => write!(
                f,
                "export halted: a request took longer than the I/O timeout of {limit:?}; \
                 the storage below the image does not answer"
            ),
            HaltReason::Flush(errno) => write!(
                f,
                "the last flush of the image failed ({errno}): recent writes may be lost; check \
                 the storage and the image"
            ),
            HaltReason::StillInFlight(count) => write!(
                f,
                "{count} requests were still in flight and ended with errors; the storage below \
                 the image does not answer"
            ),
            HaltReason::Forced(count) => write!(
                f,
                "ended at once although in use ({}): what the users had not written yet is lost",
                open_files(*count)
            ),
            HaltReason::StillInUse(limit, count) => write!(
                f,
                "still in use {limit:?} after the stop ({}), and ended all the same: what the \
                 users had not written yet is lost",
                open_files(*count)
            ),
            HaltReason::Aborted(count) => write!(
                f,
                "the connection was aborted (`umount -f`, or fusectl) while in use ({}): what the \
                 users had not written yet is lost",
                open_files(*count)
            ),
            HaltReason::GaveUp => f.write_str("stopped after an I/O error (--on-error stop)"),
            HaltReason::Failed(_, text) => f.write_str(text),
        }
    }
}

impl std::error::Error for HaltReason {}

/// A number of open files, in words.
fn open_files(count: u64) -> String {
    if count == 1 { String::from("1 open file") } else { format!("{count} open files") }
}

/// The end of a disk: what clients wrote reaches stable storage, and its images are closed.
///
/// * `is_drained`: no request is in flight. Otherwise a flush comes first: closing, which flushes
///   too, waits for requests, and some may never end.
///
/// Errors: those of the storage; what clients wrote may not be on stable storage then.
pub async fn close_disk(disk: &Disk, ring: &Ring, is_drained: bool) -> Result<(), Errno> {
    let flushed = if is_drained { Ok(()) } else { disk.flush(ring).await };
    flushed.and(disk.close(ring).await)
}
