//! Which of the modes of rings a mount uses, and which opens of the file are zero-copy.
//!
//! Promises: each mode needs what the one before it needs, so a mount falls back one step at a
//! time. Control path.
//!
//! Zero-copy belongs to an open file and a queue, not to a request, and costs something for each
//! request: the kernel puts pages into a slot and takes them out again, what no extent holds as it
//! is goes through a pipe, and such a request cannot move to another thread. So `auto` looks at the
//! sizes that this mount has seen when a file is opened: from [`BREAK_EVEN_BYTES`] on average,
//! zero-copy wins clearly (docs/transports.md has the measurement; at 4 KiB it is a few percent,
//! less than a move can gain).

use std::sync::{Mutex, PoisonError};

/// How the data of requests travel in rings; each kind needs what the one before it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RingMode {
    /// Each entry has a payload of its own (Linux 6.14).
    Entries,
    /// Each queue has a pool of buffers (Linux 7.3).
    Pools,
    /// As that, and opens may be zero-copy: the client's own pages (Linux 7.3, `CAP_SYS_ADMIN`).
    ZeroCopy,
}

impl RingMode {
    /// The next lower one.
    #[must_use]
    pub fn below(self) -> Option<RingMode> {
        match self {
            RingMode::Entries => None,
            RingMode::Pools => Some(RingMode::Entries),
            RingMode::ZeroCopy => Some(RingMode::Pools),
        }
    }
}

/// Whether the client's own pages are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// Where the kernel and the image allow it, for opens that the mix of sizes promises something.
    #[default]
    Auto,
    /// For every open.
    On,
    /// Never.
    Off,
}

/// Average size from which a zero-copy open is cheaper, bytes.
const BREAK_EVEN_BYTES: u64 = 16 * 1024;
/// Requests that say something about the mix.
const REQUESTS_MIN: u64 = 64;

/// User id.
const ROOT: u32 = 0;

/// What was moved so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) requests: u64,
    pub(super) bytes: u64,
}

/// Decides at each OPEN.
#[derive(Debug)]
pub(super) struct Opens {
    wanted: ZeroCopy,
    /// What had been moved at the last decision, and what that was.
    last: Mutex<(Moved, bool)>,
}

impl Opens {
    pub(super) fn new(wanted: ZeroCopy) -> Opens {
        Opens { wanted, last: Mutex::new((Moved::default(), false)) }
    }

    /// Whether the file that is being opened uses client pages. Control path.
    ///
    /// `auto` leaves it to the kernel to copy where root opens the file, since root may hand it to
    /// a loop device with direct I/O. A file system on such a device writes from slab memory, too.
    /// Linux 7.3 takes a reference to each page of a zero-copy request and gives it back, but slab
    /// pages have no references: they are freed while they are in use (`fuse_zero_copy_release`;
    /// seen on 7.3.4 with ext4 and XFS).
    ///
    /// * `opener`: user id of the caller, as FUSE has it.
    pub(super) fn are_zero_copy(&self, now: Moved, opener: u32) -> bool {
        match self.wanted {
            ZeroCopy::On => true,
            ZeroCopy::Off => false,
            ZeroCopy::Auto if opener == ROOT => false,
            ZeroCopy::Auto => {
                let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
                let requests = now.requests.saturating_sub(last.0.requests);
                if requests >= REQUESTS_MIN {
                    let bytes = now.bytes.saturating_sub(last.0.bytes);
                    *last = (now, bytes / requests >= BREAK_EVEN_BYTES);
                }
                last.1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Moved, Opens, ROOT, RingMode, ZeroCopy};

    #[test]
    fn the_fallback_order_ends_with_plain_entries() {
        let order: Vec<_> =
            std::iter::successors(Some(RingMode::ZeroCopy), |mode| mode.below()).collect();
        assert_eq!(order, [RingMode::ZeroCopy, RingMode::Pools, RingMode::Entries]);
    }

    #[test]
    fn auto_follows_the_sizes_since_it_last_looked() {
        let opens = Opens::new(ZeroCopy::Auto);
        let moved = |requests, kib: u64| Moved { requests, bytes: kib * 1024 };
        let at = |requests, kib| opens.are_zero_copy(moved(requests, kib), 1000);
        assert!(!at(0, 0), "nothing is known");
        assert!(!at(1000, 4000), "4 KiB");
        assert!(!at(1010, 14_000), "too few to say anything");
        assert!(at(1100, 114_000), "1 MiB each");
        assert!(at(1101, 114_004), "too few to change it");
        assert!(!opens.are_zero_copy(moved(1102, 114_004), ROOT), "it may go to a loop device");
        assert!(at(1103, 114_004));
        assert!(!at(9000, 150_000));
    }

    #[test]
    fn on_and_off_do_not_look() {
        assert!(Opens::new(ZeroCopy::On).are_zero_copy(Moved::default(), ROOT));
        let large = Moved { requests: 1000, bytes: 1 << 40 };
        assert!(!Opens::new(ZeroCopy::Off).are_zero_copy(large, 1000));
    }
}
