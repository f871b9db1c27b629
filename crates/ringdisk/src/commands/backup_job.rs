//! `ringdisk ctl TARGET backup`: a copy of the disk as it is at one instant.
//!
//! Promises: a target that was made goes again where the job does not begin.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_backup::jobs::{BackupRequest, CopyTo, backup};
use ringdisk_console::operation::Operation;
use ringdisk_daemon::control::client::Client;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_observe::job_texts;

use crate::cli::BackupJobArgs;

/// Begins a backup, and waits for its end unless it runs in the background.
///
/// Errors: as [`backup`]; those of the job.
pub(crate) fn run(
    client: &mut Client,
    limit: Duration,
    wanted: &BackupJobArgs,
) -> Result<(), Failure> {
    let request = BackupRequest {
        to: CopyTo {
            to: wanted.to.clone(),
            format: wanted.format,
            existing: wanted.existing,
            terms: wanted.job.terms(),
        },
        sync: wanted.sync.clone(),
        bitmap: wanted.bitmap.clone(),
        fleece: (&wanted.fleece).into(),
    };
    let operation = Operation::start("backup", wanted.progress)?;
    let progress = Arc::clone(operation.progress());
    let fresh = NewFiles::default();
    let result = backup(client, limit, &request, &fresh, &progress);
    if result.is_ok() {
        fresh.keep();
    }
    let left = "the server was asked to give it up; the disk is as it was, and the target is not \
                whole";
    let value = operation.end(result, left)?;
    match wanted.job.background {
        true => job_texts::begun(&value, wanted.progress.quiet),
        false if !wanted.progress.quiet => job_texts::ended("Disk backed up.", &value),
        false => {}
    }
    Ok(())
}
