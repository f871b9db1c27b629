//! Stops writing to an image that cannot be written safely any more.
//!
//! Promises: an image whose metadata would have been overwritten is marked corrupt and takes no
//! change any more; after a barrier that failed, and after metadata that could not be written, no
//! flush succeeds until the image is opened again.

use rustix::io::Errno;

use ringdisk_ring::Ring;

use super::Qcow2;
use crate::header::CORRUPT;
use crate::sync::{AtomicU8, Mutex, Ordering, lock};

/// All is well.
const SOUND: u8 = 0;
/// A flush failed.
const FLUSH_FAILED: u8 = 1;
/// The image is marked corrupt.
const CORRUPTED: u8 = 2;

/// What happened.
#[derive(Default)]
pub(super) struct Fault {
    state: AtomicU8,
    reason: Mutex<Option<String>>,
}

impl Qcow2 {
    /// Why the image takes no changes any more, or no flush succeeds: for people. `None`: all is
    /// well. Any thread.
    pub fn fault(&self) -> Option<String> {
        let fault = &self.engine().ok()?.fault;
        lock(&fault.reason).clone()
    }

    /// Refuses changes of an image that is marked corrupt (`EROFS`) or whose changes cannot be made
    /// durable (`EIO`).
    pub(crate) fn check_sound(&self) -> Result<(), Errno> {
        match self.engine()?.fault.state.load(Ordering::Relaxed) {
            SOUND => Ok(()),
            CORRUPTED => Err(Errno::ROFS),
            _ => Err(Errno::IO),
        }
    }

    /// Whether the image was marked corrupt since it was opened.
    pub(super) fn is_corrupted(&self) -> bool {
        self.engine().is_ok_and(|engine| engine.fault.state.load(Ordering::Relaxed) == CORRUPTED)
    }

    /// Metadata would be overwritten: the image is marked corrupt and changed no more. The answer
    /// is the error for the request that found it.
    pub(crate) async fn mark_corrupt(&self, ring: &Ring, reason: &str) -> Errno {
        let Ok(engine) = self.engine() else { return Errno::IO };
        let first = engine.fault.state.swap(CORRUPTED, Ordering::Relaxed) != CORRUPTED;
        if first {
            let text = format!(
                "'{}': {reason}; the image is marked corrupt and is read-only now: repair it with \
                 `ringdisk check --repair all`",
                self.file.name()
            );
            tracing::error!(disk = self.file.name(), event = "fault", "{text}");
            *lock(&engine.fault.reason) = Some(text);
            if self.info.version >= 3 {
                let _ = self
                    .change_header(ring, |header| {
                        header.set_incompatible(header.incompatible() | CORRUPT);
                    })
                    .await;
            }
        }
        Errno::IO
    }

    /// Remembers that a change could not be made durable. `ENOSPC` and `EDQUOT` of a write are not
    /// remembered: nothing is lost then, and a later flush can succeed.
    pub(super) fn note_flush_failure(&self, errno: Errno) {
        if !matches!(errno, Errno::NOSPC | Errno::DQUOT) {
            self.note_lost(errno);
        }
    }

    /// Remembers that what was written may be lost.
    pub(super) fn note_lost(&self, errno: Errno) {
        let Ok(engine) = self.engine() else { return };
        let swap = engine.fault.state.compare_exchange(
            SOUND,
            FLUSH_FAILED,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if swap.is_ok() {
            let text = format!(
                "'{}': writing metadata or a flush failed ({errno}), so what was written since the \
                 flush before may be lost; no flush succeeds until the image is opened again: look \
                 at the disk that holds it",
                self.file.name()
            );
            tracing::error!("{text}");
            *lock(&engine.fault.reason) = Some(text);
        }
    }
}
