//! `ringdisk umount`: ends a mount of any process, by its path.

use std::thread;
use std::time::{Duration, Instant};

use ringdisk_fuse::mount::{Unmount, mountpoint, unmount};
use ringdisk_fuse::{Error, ErrorKind};

use crate::alive;
use crate::cli::UmountArgs;
use crate::report::{Exit, Failure};
use crate::terminal;

/// Takes the mount away, and waits until its server has flushed, let go of the image and ended.
///
/// Errors: nothing of ours is mounted there, it is in use, or the system does not allow it.
pub(crate) fn run(args: &UmountArgs) -> Result<(), Failure> {
    let how = match (args.lazy, args.force) {
        (true, _) => Unmount::Lazy,
        (_, true) => Unmount::Force,
        _ => Unmount::Normal,
    };
    // Resolved before the mount goes: afterwards the name may lead elsewhere.
    let mountpoint = mountpoint::resolve(&args.mountpoint)?;
    patiently(|| unmount(&mountpoint, how)).map_err(|error| {
        let failure = Failure::from(error);
        if failure.exit == Exit::Locked && failure.hint_text().is_none() {
            failure.hint("close it there (`fuser -v` shows who uses it), or give --lazy or --force")
        } else {
            failure
        }
    })?;
    if how != Unmount::Lazy && !alive::wait(&mountpoint) {
        terminal::note("the mount is gone; its server has not ended yet");
    }
    Ok(())
}

/// How long a mount may be in use by somebody who is about to close it: a program that has just
/// ended, or the server's own look at a mount that has just begun.
const PATIENCE: Duration = Duration::from_millis(300);

/// How often that is tried again.
const AGAIN: Duration = Duration::from_millis(10);

/// Tries again for a moment while the mount is busy.
fn patiently(mut unmount: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    let end = Instant::now() + PATIENCE;
    loop {
        match unmount() {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < end => {
                thread::sleep(AGAIN);
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_mount_is_tried_again_and_other_errors_are_not() {
        let mut left = 3;
        let result = patiently(|| {
            left -= 1;
            if left > 0 { Err(Error::new(ErrorKind::Busy, "busy")) } else { Ok(()) }
        });
        assert!(result.is_ok());
        let mut calls = 0;
        let refused = patiently(|| {
            calls += 1;
            Err(Error::new(ErrorKind::PermissionDenied, "no"))
        });
        assert!(refused.is_err());
        assert_eq!(calls, 1);
    }
}
