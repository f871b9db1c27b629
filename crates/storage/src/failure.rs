//! The last storage operation that failed on this thread, for the message about the failed request.
//!
//! Promises: costs nothing while nothing fails; noting a failure allocates nothing, locks nothing
//! and makes no system call. Other requests of the thread go on between a failure and its message,
//! so what is named is the likely cause: the last failure with that errno. Ring threads.

use std::cell::Cell;
use std::fmt;

use ringdisk_ring::Errno;

/// Bytes of a name that are kept; of a longer one the end.
const NAME_BYTES_MAX: usize = 160;

/// One operation that failed.
#[derive(Clone, Copy)]
pub struct Failure {
    operation: &'static str,
    offset: u64,
    len: u64,
    errno: Errno,
    name: [u8; NAME_BYTES_MAX],
    name_len: usize,
}

thread_local! {
    static LAST: Cell<Option<Failure>> = const { Cell::new(None) };
}

/// An operation has failed on this thread.
///
/// * `name`: of the storage.
/// * `offset`, `len`: bytes; both 0 where they mean nothing.
#[cold]
pub(crate) fn note(name: &str, operation: &'static str, offset: u64, len: u64, errno: Errno) {
    let mut kept = [0; NAME_BYTES_MAX];
    let bytes = name.as_bytes();
    let end = &bytes[bytes.len().saturating_sub(NAME_BYTES_MAX)..];
    kept[..end.len()].copy_from_slice(end);
    let failure = Failure { operation, offset, len, errno, name: kept, name_len: end.len() };
    LAST.set(Some(failure));
}

impl Failure {
    /// The last one on this thread, if it had this errno; it is named once.
    #[must_use]
    pub fn take(errno: Errno) -> Option<Failure> {
        LAST.take().filter(|last| last.errno == errno)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = String::from_utf8_lossy(self.name.get(..self.name_len).unwrap_or_default());
        write!(f, "{} of '{name}'", self.operation)?;
        match (self.offset, self.len) {
            (0, 0) => Ok(()),
            (offset, len) => write!(f, ", {len} bytes at {offset}"),
        }
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Failure({self}: {})", self.errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_failure_is_named_once_and_only_for_its_errno() {
        assert!(Failure::take(Errno::IO).is_none());
        note("/srv/disk.img", "a read", 4096, 512, Errno::IO);
        assert!(Failure::take(Errno::NOSPC).is_none());
        assert!(Failure::take(Errno::IO).is_none(), "taken");
        note("/srv/disk.img", "a read", 4096, 512, Errno::IO);
        let text = Failure::take(Errno::IO).expect("noted").to_string();
        assert_eq!(text, "a read of '/srv/disk.img', 512 bytes at 4096");
        note(&"ü".repeat(200), "a flush", 0, 0, Errno::IO);
        let text = Failure::take(Errno::IO).expect("noted").to_string();
        assert!(text.starts_with("a flush of '") && text.ends_with("ü'"), "{text}");
    }
}
