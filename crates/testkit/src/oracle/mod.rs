//! What a disk may hold, given what its clients did: while it runs, and after it lost power.
//!
//! Promises: nothing that may be seen is called wrong, and nothing that is gone is accepted.
//!
//! Every 512-byte sector that is written carries a stamp of its own place and of the write, so a
//! sector that shows up somewhere else, an old one that comes back, and one that is half and half
//! are told apart. For each sector the oracle keeps every version that may still be seen. A version
//! `v` is certainly gone once a write `w` that began after `v` had ended
//! - has been acknowledged (for a read that began after that), or
//! - has been made durable by a flush that began after `w` was acknowledged (for a power cut at any
//!   time).
//!
//! Two writes that overlap in time may come in either order; one that failed may have happened or
//! not. Writes of parts of a sector are judged byte by byte, whole ones as a whole.
//!
//! Call [`Oracle::begin`] before an operation and [`Oracle::end`] after it.

mod judge;
mod stamp;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use judge::Mismatch;
pub use stamp::{SECTOR, Stamp, fill};

/// Points in time, in the order of the calls.
type Time = u64;

/// What a write puts into a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeroes.
    Zero,
    /// A [`Stamp`] with the number of the operation.
    Stamped,
}

/// An operation that was begun.
#[derive(Clone, Debug)]
pub struct Begun {
    /// Its number, part of the stamps.
    pub number: u64,
    begin: Time,
    range: Range<u64>,
}

/// A version of (a part of) a sector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    stamp: Option<Stamp>,
    number: u64,
    begin: Time,
    end: Option<Time>,
    acknowledged: bool,
    durable: bool,
    /// Bytes of the sector.
    part: Range<u16>,
}

impl Version {
    /// Whether `self` certainly hides `older` where both are.
    fn hides(&self, older: &Version) -> bool {
        older.end.is_some_and(|end| self.begin >= end)
    }

    fn covers(&self, older: &Version) -> bool {
        self.part.start <= older.part.start && self.part.end >= older.part.end
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// Stamps of this disk.
    disk: u16,
    size: u64,
    clock: Time,
    operations: u64,
    /// Versions of each sector that was touched, oldest first.
    sectors: BTreeMap<u64, Vec<Version>>,
    /// Sectors with versions that are not the only one or not durable.
    unsettled: BTreeSet<u64>,
    /// Reads that run: when they began.
    reads: BTreeMap<Time, usize>,
    below: Below,
}

/// What is there before the first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Below {
    /// Stamps of this disk with number 0 …
    pub disk: u16,
    /// … in this many bytes; zeroes behind.
    pub len: u64,
}

impl Below {
    /// Nothing: zeroes.
    pub const NOTHING: Below = Below { disk: 0, len: 0 };

    /// Fills `bytes`, which begin at `offset`.
    pub fn fill(&self, offset: u64, bytes: &mut [u8]) {
        let stamped = usize::try_from(self.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let (content, rest) = bytes.split_at_mut(stamped.min(bytes.len()));
        fill(content, offset, self.disk, 0);
        rest.fill(0);
    }
}

impl Oracle {
    /// A disk of `size` bytes that nothing was written to.
    ///
    /// * `disk`: marks its stamps; not the number of another one in the chain.
    #[must_use]
    pub fn new(disk: u16, size: u64, below: Below) -> Oracle {
        Oracle {
            disk,
            size,
            clock: 1,
            operations: 0,
            sectors: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            reads: BTreeMap::new(),
            below,
        }
    }

    /// What was there before the first write, from `offset` on.
    pub fn fill_below(&self, offset: u64, bytes: &mut [u8]) {
        self.below.fill(offset, bytes);
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    fn tick(&mut self) -> Time {
        self.clock += 1;
        self.clock
    }

    /// A write, discard or zeroing of `range` (bytes inside the disk) begins.
    pub fn begin(&mut self, range: Range<u64>, content: Content) -> Begun {
        self.operations += 1;
        let (number, begin) = (self.operations, self.tick());
        let stamp = (content == Content::Stamped).then_some(self.disk);
        for sector in range.start / SECTOR..range.end.div_ceil(SECTOR) {
            let start = sector * SECTOR;
            let inside = |at: u64| u16::try_from(at.clamp(start, start + SECTOR) - start);
            let part = inside(range.start).unwrap_or(0)..inside(range.end).unwrap_or(0);
            let stamp = stamp.map(|disk| Stamp { disk, sector, number });
            let version = Version {
                stamp,
                number,
                begin,
                end: None,
                acknowledged: false,
                durable: false,
                part,
            };
            self.versions(sector).push(version);
            self.unsettled.insert(sector);
        }
        Begun { number, begin, range }
    }

    /// The bytes that a stamped operation writes.
    #[must_use]
    pub fn bytes(&self, begun: &Begun) -> Vec<u8> {
        let len = usize::try_from(begun.range.end - begun.range.start).expect("a small write");
        let mut bytes = vec![0; len];
        fill(&mut bytes, begun.range.start, self.disk, begun.number);
        bytes
    }

    /// It ended; `acknowledged`: with success.
    pub fn end(&mut self, begun: &Begun, acknowledged: bool) {
        let now = self.tick();
        for sector in begun.range.start / SECTOR..begun.range.end.div_ceil(SECTOR) {
            let found = self.sectors.get_mut(&sector);
            let version = found.and_then(|all| all.iter_mut().find(|v| v.number == begun.number));
            if let Some(version) = version {
                version.end = Some(now);
                version.acknowledged = acknowledged;
            }
        }
    }

    /// A flush begins.
    pub fn begin_flush(&mut self) -> Begun {
        let begin = self.tick();
        Begun { number: 0, begin, range: 0..0 }
    }

    /// A flush succeeded: what was acknowledged before it began stays for ever. (One that failed
    /// promises nothing.)
    pub fn end_flush(&mut self, begun: &Begun) {
        let oldest_read = self.reads.keys().next().copied().unwrap_or(Time::MAX);
        let sectors = std::mem::take(&mut self.unsettled);
        for sector in sectors {
            let Some(versions) = self.sectors.get_mut(&sector) else { continue };
            for version in versions.iter_mut() {
                let before = version.end.is_some_and(|end| end <= begun.begin);
                version.durable |= before && version.acknowledged;
            }
            let all = versions.clone();
            versions.retain(|old| {
                !all.iter().any(|new| {
                    let seen = new.end.is_some_and(|end| end <= oldest_read);
                    new.durable
                        && seen
                        && new.hides(old)
                        && new.covers(old)
                        && new.number != old.number
                })
            });
            if versions.len() > 1 || versions.iter().any(|v| !v.durable) {
                self.unsettled.insert(sector);
            }
        }
    }

    /// A read begins.
    pub fn begin_read(&mut self, range: Range<u64>) -> Begun {
        let begin = self.tick();
        *self.reads.entry(begin).or_default() += 1;
        Begun { number: 0, begin, range }
    }

    /// Everything that was acknowledged is durable from now on, and nothing runs: an image that was
    /// closed.
    pub fn settle(&mut self) {
        let flush = self.begin_flush();
        self.end_flush(&flush);
    }

    /// The power failed and came back: what was not durable may be there or not, and no later flush
    /// makes it so.
    pub fn restart(&mut self) {
        let now = self.tick();
        self.reads.clear();
        for sector in &self.unsettled {
            for version in self.sectors.get_mut(sector).into_iter().flatten() {
                version.acknowledged &= version.durable;
                version.end = version.end.or(Some(now));
            }
        }
    }

    /// The size changes: what is past the end is forgotten, what is new reads as zeroes.
    pub fn resize(&mut self, size: u64) {
        let (old, begin) = (self.size, self.tick());
        self.size = size;
        self.below.len = self.below.len.min(size).min(old);
        if size < old {
            self.sectors.split_off(&size.div_ceil(SECTOR));
            self.unsettled.split_off(&size.div_ceil(SECTOR));
        }
        // The rest of the last sector.
        if size < old && !size.is_multiple_of(SECTOR) && self.sectors.contains_key(&(size / SECTOR))
        {
            let number = self.operations;
            let part = u16::try_from(size % SECTOR).unwrap_or(0)..512;
            let zero = Version {
                stamp: None,
                number,
                begin,
                end: Some(begin),
                acknowledged: true,
                durable: true,
                part,
            };
            self.versions(size / SECTOR).push(zero);
        }
    }

    /// Judges these bytes too, although nobody writes there.
    pub fn watch(&mut self, range: Range<u64>) {
        for sector in range.start / SECTOR..range.end.div_ceil(SECTOR) {
            self.versions(sector);
        }
    }

    /// The disk becomes what it was when `then`, a copy of this oracle, was made and settled.
    #[must_use]
    pub fn restored(&self, then: &Oracle) -> Oracle {
        Oracle {
            clock: self.clock,
            operations: self.operations,
            reads: self.reads.clone(),
            ..then.clone()
        }
    }

    /// As [`Oracle::restored`], while operations run: each of them comes before it, and is undone
    /// by it, or after it. So when one of them ends it was not acknowledged ([`Oracle::end`]), and
    /// what a read that runs finds cannot be judged ([`Oracle::forget_read`]).
    #[must_use]
    pub fn restored_beside(&self, then: &Oracle) -> Oracle {
        let mut next = self.restored(then);
        for sector in &self.unsettled {
            for version in self.sectors.get(sector).into_iter().flatten() {
                if version.end.is_none() && sector * SECTOR < next.size {
                    next.versions(*sector).push(version.clone());
                    next.unsettled.insert(*sector);
                }
            }
        }
        next
    }

    /// Byte ranges in which something was written, sectors joined.
    #[must_use]
    pub fn touched(&self) -> Vec<Range<u64>> {
        let mut out: Vec<Range<u64>> = Vec::new();
        for sector in self.sectors.keys() {
            let start = sector * SECTOR;
            match out.last_mut() {
                Some(last) if last.end == start => last.end += SECTOR,
                _ => out.push(start..start + SECTOR),
            }
        }
        let size = self.size;
        out.iter_mut().for_each(|range| range.end = range.end.min(size));
        out
    }

    /// The versions of a sector; what was there first is the first.
    fn versions(&mut self, sector: u64) -> &mut Vec<Version> {
        let below = self.below;
        self.sectors.entry(sector).or_insert_with(|| {
            let inside = below.len.saturating_sub(sector * SECTOR).min(SECTOR);
            let inside = u16::try_from(inside).unwrap_or(0);
            let first = |stamp, part| Version {
                stamp,
                number: 0,
                begin: 0,
                end: Some(0),
                acknowledged: true,
                durable: true,
                part,
            };
            let stamp = Some(Stamp { disk: below.disk, sector, number: 0 });
            let mut all = vec![first(stamp, 0..inside), first(None, inside..512)];
            all.retain(|version| !version.part.is_empty());
            all
        })
    }
}
