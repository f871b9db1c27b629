//! Lets `ringdisk umount` wait for the server of a mount.
//!
//! Promises: never fails and never waits for long; where it cannot tell, it says "ended".
//!
//! The server holds a lock (flock) on the file below its mount as long as it lives. When the mount
//! is gone, that file can be seen again, and a process that gets its lock knows that the server has
//! let go of the image too.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use ringdisk_export::wait_until;
use ringdisk_fuse::mount::table;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

/// How often one looks.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Holds the lock of the file at `mountpoint`, before it is mounted on, until the value is dropped.
pub fn hold(mountpoint: &Path) -> Option<File> {
    let file = open(mountpoint).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(file)
}

/// Releases the lock, also where other processes have the same open file.
pub fn release(alive: &File) {
    let _ = flock(alive, FlockOperation::Unlock);
}

/// Waits until the server has ended, after the mount has gone. Returns whether it has.
///
/// * `limit`: it flushes the image first.
pub fn wait(mountpoint: &Path, limit: Duration) -> bool {
    wait_until(limit, POLL_INTERVAL, || {
        // A new mount there is another server's, and a look at it may wait for that server.
        if table::at(mountpoint).is_ok_and(|mount| mount.is_some()) {
            return true;
        }
        match open(mountpoint) {
            Ok(file) => {
                let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
                locked != Err(Errno::WOULDBLOCK)
            }
            // The server made the file and has removed it, or it is not ours to look at.
            Err(_) => true,
        }
    })
}

/// Another user's mountpoint may be anything by now: a FIFO is not waited for, and a link, which
/// may lead to a device, not followed.
fn open(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_end_of_the_holder_ends_the_wait() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("disk");
        assert!(hold(&path).is_none() && wait(&path, POLL_INTERVAL), "a file that is not there");
        std::fs::write(&path, "").expect("write");
        let held = hold(&path).expect("free");
        assert!(hold(&path).is_none());
        assert!(!wait(&path, POLL_INTERVAL), "it is held");
        let waiting = thread::spawn(move || wait(&path, Duration::from_secs(60)));
        thread::sleep(POLL_INTERVAL * 4);
        assert!(!waiting.is_finished());
        drop(held);
        assert!(waiting.join().expect("no panic"));
    }

    #[test]
    fn a_link_in_the_place_of_a_mountpoint_is_not_followed() {
        let directory = tempfile::tempdir().expect("directory");
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("other"), "").expect("write");
        let _held = hold(&path("other")).expect("free");
        std::os::unix::fs::symlink("other", path("disk")).expect("a link");
        assert!(hold(&path("disk")).is_none());
        assert!(wait(&path("disk"), POLL_INTERVAL), "the file that it leads to is held");
    }
}
