//! The work of a backup.
//!
//! Promises: what the helper process holds for its target stays until its end. It does not outlive
//! its process. Control thread.

use std::sync::Arc;

use ringdisk_disk::{Error, ErrorKind, Progress};

use crate::confine::HeldForDisk;
use crate::control::checkpoint::Accel;
use crate::control::disk::job_kinds::target::file_of;
use crate::control::protocol::Backup;

/// What a successor, and a process that goes on after a hand-over was given up, say of it.
pub(crate) const LOST: &str = "the point in time of the backup was lost with the process that kept \
                               it, and the target is incomplete; begin a new backup";

/// A backup.
pub(in crate::control::disk::job_kinds) struct BackupWork {
    /// As the client said it.
    pub(in crate::control::disk::job_kinds) wanted: Backup,
    /// `None`: it has run.
    pub(in crate::control::disk::job_kinds) running: Option<ringdisk_disk::Backup>,
    pub(in crate::control::disk::job_kinds) held: Arc<HeldForDisk>,
    /// What it says at its end.
    pub(in crate::control::disk::job_kinds) text: String,
    /// The host kernel serves the disk again afterwards.
    pub(in crate::control::disk::job_kinds) _accel: Option<Accel>,
}

impl BackupWork {
    /// The job is begun: what the helper process holds for it stays until its end.
    pub(super) fn is_begun(&self) {
        let file = self.running.as_ref().and_then(|backup| file_of(backup.target()));
        file.inspect(|id| self.held.begins_copy(*id));
    }

    /// Copies. Gives what it has done, for people.
    ///
    /// Errors: those of the disk.
    pub(super) async fn run(&mut self, progress: &Progress) -> Result<String, Error> {
        let lost = || Error::new(ErrorKind::Cancelled, LOST);
        let backup = self.running.take().ok_or_else(lost)?;
        let file = file_of(backup.target());
        file.inspect(|id| self.held.begins_copy(*id));
        let result = backup.run(progress).await;
        file.inspect(|id| self.held.ends_copy(*id));
        result.map(|()| self.text.clone())
    }
}
