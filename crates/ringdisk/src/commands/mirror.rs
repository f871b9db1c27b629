//! `ringdisk ctl TARGET mirror`: a copy of the disk that stays in step with it.
//!
//! Promises: a target that was made goes again where the job does not begin.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_backup::jobs::{CopyTo, MirrorRequest, mirror};
use ringdisk_console::operation::Operation;
use ringdisk_daemon::control::client::Client;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_observe::job_texts;
use ringdisk_observe::jobs::wait;

use crate::cli::{CtlArgs, MirrorArgs};

/// Begins a mirror, and waits as the user asks.
///
/// Errors: as [`mirror`]; those of the job.
pub(crate) fn run(
    args: &CtlArgs,
    client: &mut Client,
    limit: Duration,
    wanted: &MirrorArgs,
) -> Result<(), Failure> {
    let request = MirrorRequest {
        to: CopyTo {
            to: wanted.to.clone(),
            format: wanted.format,
            existing: wanted.existing,
            terms: wanted.job.terms(),
        },
        sync: wanted.sync.clone(),
        bitmap: wanted.bitmap.clone(),
        write_blocking: wanted.write_blocking,
        complete: wanted.complete,
    };
    let operation = Operation::start("mirror", wanted.progress)?;
    let progress = Arc::clone(operation.progress());
    let fresh = NewFiles::default();
    let begun = mirror(client, limit, &request, &fresh, &progress);
    if begun.is_ok() {
        fresh.keep();
    }
    let waits = !wanted.job.background && !wanted.complete;
    let id = begun.as_ref().ok().and_then(|value| value["id"].as_str()).map(str::to_owned);
    let result = match (begun, &id) {
        (Ok(_), Some(id)) if waits => wait(client, id, &progress),
        (begun, _) => begun,
    };
    let left = match (&id, wanted.complete) {
        (Some(_), _) => "the job goes on",
        (None, _) => "the server was asked to give it up; the disk is as it was",
    };
    let value = operation.end(result, left)?;
    let target = args.target.display().to_string();
    match &id {
        Some(_) if wanted.job.background => job_texts::begun(&value, wanted.progress.quiet),
        Some(id) => {
            terminal::say(visible(id));
            if !wanted.progress.quiet {
                job_texts::ready(&value, Some(&target));
            }
        }
        None if !wanted.progress.quiet => job_texts::ended("The disk has switched over.", &value),
        None => {}
    }
    Ok(())
}
