//! The place of a table in the image file, which can move while requests read it.
//!
//! Promises: a reader takes no lock. A reader may see no region while it moves, but never one that
//! did not exist (the old end with the new start): a range that touches neither place is never
//! reported to overlap.

use super::sync::{AtomicU64, Ordering, spin};
use crate::units::{Bytes, HostOffset};

/// A range of bytes of the image file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Region {
    pub(crate) start: HostOffset,
    pub(crate) end: HostOffset,
}

/// A [`Region`] that can move while requests read it.
#[derive(Debug, Default)]
pub(crate) struct MovingRegion {
    start: AtomicU64,
    end: AtomicU64,
    /// Beginnings and ends of moves so far: odd in the middle of one.
    moves: AtomicU64,
}

impl Region {
    /// Bytes.
    pub(crate) fn len(&self) -> Bytes {
        self.end - self.start
    }
}

impl MovingRegion {
    pub(crate) fn new(region: Region) -> MovingRegion {
        MovingRegion {
            start: AtomicU64::new(region.start.0),
            end: AtomicU64::new(region.end.0),
            moves: AtomicU64::new(0),
        }
    }

    /// Moves it. One at a time.
    pub(crate) fn set(&self, region: Region) {
        let moves = self.moves.load(Ordering::Relaxed);
        self.moves.store(moves + 1, Ordering::Relaxed);
        // Each of these with Release: a reader that sees one of them sees that a move has begun.
        self.end.store(0, Ordering::Release);
        self.start.store(region.start.0, Ordering::Release);
        self.end.store(region.end.0, Ordering::Release);
        self.moves.store(moves + 2, Ordering::Release);
    }

    /// Whether `start..end` touches it.
    #[inline]
    pub(crate) fn overlaps(&self, start: HostOffset, end: HostOffset) -> bool {
        // Nearly always false, which needs no second read.
        self.touches(start.0, end.0) && self.surely_overlaps(start.0, end.0)
    }

    fn touches(&self, start: u64, end: u64) -> bool {
        start < self.end.load(Ordering::Acquire) && end > self.start.load(Ordering::Acquire)
    }

    /// Reads until both ends are of the same place.
    #[cold]
    fn surely_overlaps(&self, start: u64, end: u64) -> bool {
        loop {
            let moves = self.moves.load(Ordering::Acquire);
            if !self.touches(start, end) {
                return false;
            }
            if moves.is_multiple_of(2) && self.moves.load(Ordering::Acquire) == moves {
                return true;
            }
            spin();
        }
    }
}
