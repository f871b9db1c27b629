//! The lock of a directory, for processes that change names in it one at a time.
//!
//! Promises: waiting for the lock has a limit. Every user who may read a directory may lock it and
//! keep the lock (in `/run` or `/tmp`), so the lock orders honest processes that start at the same
//! moment, and a process that does not get it goes on.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use ringdisk_export::retry_while;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::{Errno, retry_on_intr};

/// How long a start waits: many times what the start of another one takes.
pub const START: Duration = Duration::from_secs(5);
/// How long an end waits: the names are its own, and looked at before they go.
pub const END: Duration = Duration::from_millis(500);
/// How often one looks.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Locks a directory until the value is dropped. `None`: it cannot be read, or others have had its
/// lock for all of this time.
pub fn lock(directory: &Path, limit: Duration) -> Option<File> {
    let flags = (OFlags::DIRECTORY | OFlags::NONBLOCK).bits().cast_signed();
    let directory = File::options().read(true).custom_flags(flags).open(directory).ok()?;
    let is_locked = |locked: &Result<(), Errno>| *locked == Err(Errno::WOULDBLOCK);
    let locked = retry_while(limit, POLL_INTERVAL, is_locked, || {
        retry_on_intr(|| flock(&directory, FlockOperation::NonBlockingLockExclusive))
    });
    locked.ok().map(|()| directory)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_lock_that_others_keep_is_not_waited_for_without_end() {
        let directory = tempfile::tempdir().expect("a directory");
        assert!(lock(&directory.path().join("gone"), END).is_none());
        let first = lock(directory.path(), END).expect("free");
        let begun = Instant::now();
        assert!(lock(directory.path(), END).is_none());
        assert!(begun.elapsed() >= END);
        let path = directory.path().to_owned();
        let waits = thread::spawn(move || lock(&path, Duration::from_secs(60)).is_some());
        thread::sleep(POLL_INTERVAL * 4);
        assert!(!waits.is_finished());
        drop(first);
        assert!(waits.join().expect("no panic"));
    }
}
