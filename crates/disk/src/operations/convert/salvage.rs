//! Reads the readable parts of a range whose read failed.
//!
//! Promises: unreadable sectors become zeroes and are reported.

use std::ops::Range;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::IoBuf;

use super::{Conversion, Doing, Failure};
use crate::limits::SECTOR_BYTES;

/// Unreadable ranges that a report lists; the bytes of further ones are only counted. 64 KiB of
/// memory.
pub const UNREADABLE_MAX: usize = 4096;

/// Ranges that could not be read.
#[derive(Debug, Default)]
pub(super) struct Unreadable {
    ranges: Vec<Range<GuestOffset>>,
    bytes: Bytes,
}

impl Unreadable {
    fn add(&mut self, range: Range<GuestOffset>) {
        self.bytes += range.end - range.start;
        // A piece finds its bad sectors in order; pieces of other tasks come in between.
        let is_full = self.ranges.len() >= UNREADABLE_MAX;
        match self.ranges.iter_mut().rev().find(|other| other.end == range.start) {
            Some(other) => other.end = range.end,
            None if is_full => {}
            None => self.ranges.push(range),
        }
    }

    /// The ranges in order, and their bytes.
    pub(super) fn finish(mut self) -> (Vec<Range<GuestOffset>>, Bytes) {
        self.ranges.sort_by_key(|range| range.start);
        let mut ranges: Vec<Range<GuestOffset>> = Vec::new();
        for range in self.ranges {
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        (ranges, self.bytes)
    }
}

impl Conversion<'_> {
    /// Reads a range by halves, down to sectors. A sector that cannot be read becomes zeroes.
    pub(super) async fn salvage(&self, offset: GuestOffset, buf: &IoBuf) -> Result<(), Failure> {
        let sector = usize::try_from(SECTOR_BYTES).unwrap_or(1);
        let (left, right) = halves(0..buf.len(), sector);
        // The part to be read next is the last.
        let mut parts = vec![right, left];
        while let Some(part) = parts.pop() {
            if part.is_empty() {
                continue;
            }
            let at = offset + Bytes::of(part.start);
            let cancelled = self.progress.check();
            cancelled.map_err(|errno| Failure::new(Doing::Reading, at, errno))?;
            let piece = buf.slice(part.clone());
            match self.source.read(self.ring, at, &piece).await {
                Ok(()) => {}
                Err(_) if part.len() > sector => {
                    let (left, right) = halves(part, sector);
                    parts.extend([right, left]);
                }
                Err(_) => {
                    piece.fill(0);
                    self.unreadable.borrow_mut().add(at..at + Bytes::of(part.len()));
                }
            }
        }
        Ok(())
    }
}

/// Two halves, cut between sectors; the second is empty when there is one sector only.
fn halves(part: Range<usize>, sector: usize) -> (Range<usize>, Range<usize>) {
    let half = (part.len() / 2).next_multiple_of(sector).min(part.len());
    let middle = part.start + half;
    (part.start..middle, middle..part.end)
}
