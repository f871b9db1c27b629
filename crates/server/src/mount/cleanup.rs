//! A kept mount that ended while no process served it.
//!
//! Promises: what was answered before is brought to stable storage; what the mount left is removed.

use std::sync::Arc;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::keep::{Kept, State};
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;
use ringdisk_fuse::kept::{Ended, Parked, remove};
use ringdisk_ring::{Config, Runtime};

use super::created_files::Made;

/// Cleans up after a kept mount that ended while no process served it. Returns the exit code of a
/// clean end.
///
/// * `disk`: the disk that was served.
///
/// Errors: its connection was aborted, so clients got errors; what was answered cannot be brought
/// to stable storage.
pub(super) fn ended_meanwhile(
    kept: Option<&mut Kept>,
    made: &Made,
    state: &State,
    parked: &Parked,
    disk: Result<Arc<Disk>, Failure>,
) -> Result<u8, Failure> {
    let ended = kept.as_ref().and_then(|kept| kept.ended());
    if ended == Some(Ended::Aborted)
        && let Err(error) = remove(parked)
    {
        terminal::warn(error);
    }
    made.adopt(&state.terms().mountpoint, state.made);
    let flushed = match disk {
        Ok(disk) => flush(&disk),
        // Another process may have the image by now, and then flushes it.
        Err(failure) => {
            let why = failure.message();
            terminal::warn(format_args!(
                "what was answered before may not be on stable storage: {why}"
            ));
            Ok(())
        }
    };
    let what = match ended {
        Some(Ended::Aborted) => {
            "the connection was aborted (`umount -f`, or fusectl) while no process served the \
             mount: requests that waited ended with errors, \
             and what the users had not written yet is lost"
        }
        _ => "the mount was removed while no process served it",
    };
    if let Some(kept) = kept {
        kept.notify.stopping(what);
        let alive = kept.take_alive();
        kept.forget(alive.as_ref());
    }
    flushed?;
    if ended == Some(Ended::Aborted) {
        return Err(Failure::new(Exit::Forced, what));
    }
    terminal::note(what);
    Ok(Exit::Clean.code())
}

/// Flushes the disk, with the writes that the process before has answered, and closes the images.
///
/// Errors: those of the storage.
fn flush(disk: &Disk) -> Result<(), Failure> {
    let failed = |what: String| {
        Failure::new(
            Exit::Storage,
            format!("the last flush failed ({what}): recent writes may be lost"),
        )
    };
    let mut runtime = Runtime::new(Config::default()).map_err(|error| failed(error.to_string()))?;
    let ring = runtime.ring().clone();
    runtime.block_on(disk.close(&ring)).map_err(|errno| failed(errno.to_string()))
}
