//! One descriptor chain: checked segments of guest memory, first those to read, then those to
//! write.
//!
//! Promises: addresses and lengths were copied from the guest and checked; the bytes themselves may
//! change at any time. A chain is a buffer that a task keeps and fills again: it allocates when it
//! is made, and when it needs more room than before.

use std::ops::Range;

use ringdisk_ring::IoBuf;

use crate::memory::{Log, REGIONS_MAX, View};

use super::broken::Broken;

/// Most segments of a chain: 1024 of data, a header and a status.
pub const SEGMENTS_MAX: usize = SEGMENTS_LIMIT as usize;
/// The same, in the type of the guest's numbers.
pub(super) const SEGMENTS_LIMIT: u32 = 1026;
/// Most pieces of a chain, each inside one region of memory. Buffers of a driver lie apart, so
/// no end of a region is inside two of them, and there are fewer such ends than regions. Without
/// this limit 1024 segments over 509 small regions would be half a million pieces, which cost 48
/// bytes each for each request in flight.
pub(super) const PIECES_MAX: usize = SEGMENTS_MAX + REGIONS_MAX;

/// Bytes of the guest. Never empty; inside its memory when the chain was popped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address of the guest.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}

/// The chain that [`crate::Queue::pop`] fills.
#[derive(Debug)]
pub struct Chain {
    segments: Vec<Segment>,
    /// So many of them are to be read.
    readable: usize,
    readable_len: u64,
    writable_len: u64,
    /// As many as there are regions in each segment.
    pieces: usize,
}

impl Default for Chain {
    fn default() -> Self {
        Chain::new()
    }
}

impl Chain {
    /// An empty chain, with room for the longest.
    pub fn new() -> Chain {
        Chain::with_capacity(SEGMENTS_MAX)
    }

    /// An empty chain, with room for so many segments. It allocates when it is filled with more
    /// than ever before.
    pub fn with_capacity(segments: usize) -> Chain {
        let segments = Vec::with_capacity(segments);
        Chain { segments, readable: 0, readable_len: 0, writable_len: 0, pieces: 0 }
    }

    /// Start address and bytes of the memory for segments.
    pub fn own_memory(&self) -> (usize, usize) {
        (self.segments.as_ptr().addr(), self.segments.capacity() * size_of::<Segment>())
    }

    /// Segments to read: the guest wrote them.
    pub fn readable(&self) -> &[Segment] {
        &self.segments[..self.readable]
    }

    /// Segments to write for the guest.
    pub fn writable(&self) -> &[Segment] {
        &self.segments[self.readable..]
    }

    /// Bytes to read.
    pub fn readable_len(&self) -> u64 {
        self.readable_len
    }

    /// Bytes to write.
    pub fn writable_len(&self) -> u64 {
        self.writable_len
    }

    /// Copies bytes out, from byte `at` of those to read; each is read once. `false` when there are
    /// fewer, or they have left memory.
    pub fn read(&self, view: &View, at: u64, dst: &mut [u8]) -> bool {
        let mut done = 0;
        walk(self.readable(), at..at.saturating_add(dst.len() as u64), |addr, part| {
            let read = view.read(addr, &mut dst[done..done + part]);
            done += part;
            read
        })
    }

    /// Copies bytes in, to byte `at` of those to write. `false` when there are fewer, or they have
    /// left memory.
    pub fn write(&self, view: &View, at: u64, src: &[u8]) -> bool {
        let mut done = 0;
        walk(self.writable(), at..at.saturating_add(src.len() as u64), |addr, part| {
            let written = view.write(addr, &src[done..done + part]);
            done += part;
            written
        })
    }

    /// A range of the bytes to read, as buffers. `false` when they are not all there; some may have
    /// been given.
    pub fn readable_pieces(&self, view: &View, range: Range<u64>, each: impl FnMut(IoBuf)) -> bool {
        pieces(self.readable(), view, range, each)
    }

    /// A range of the bytes to write, as buffers. `false` as above.
    pub fn writable_pieces(&self, view: &View, range: Range<u64>, each: impl FnMut(IoBuf)) -> bool {
        pieces(self.writable(), view, range, each)
    }

    /// Marks the first `len` bytes to write in the log of a migration. After they were written,
    /// before the chain is completed.
    pub fn mark_written(&self, log: &Log, len: u64) {
        self.mark_range(log, 0..len.min(self.writable_len));
    }

    /// The same for a range of the bytes to write, as the status at their end.
    pub fn mark_range(&self, log: &Log, range: Range<u64>) {
        walk(self.writable(), range, |addr, part| {
            log.mark(addr, part as u64);
            true
        });
    }

    pub(super) fn clear(&mut self) {
        self.segments.clear();
        (self.readable, self.readable_len, self.writable_len, self.pieces) = (0, 0, 0, 0);
    }

    /// Adds a segment. Empty ones are legal and carry nothing.
    pub(super) fn push(
        &mut self,
        view: &View,
        addr: u64,
        len: u32,
        writable: bool,
    ) -> Result<(), Broken> {
        if !writable && self.segments.len() > self.readable {
            return Err(Broken::Order);
        }
        if len == 0 {
            return Ok(());
        }
        if self.segments.len() == SEGMENTS_MAX {
            return Err(Broken::Loop { descriptors: SEGMENTS_LIMIT });
        }
        if self.readable_len + self.writable_len + u64::from(len) > u64::from(u32::MAX) {
            return Err(Broken::TooLong);
        }
        let regions = view.regions_of(addr, len as usize);
        self.pieces += regions.ok_or(Broken::Address { addr, len })?;
        if self.pieces > PIECES_MAX {
            return Err(Broken::Pieces { limit: PIECES_MAX });
        }
        self.segments.push(Segment { addr, len });
        if writable {
            self.writable_len += u64::from(len);
        } else {
            self.readable += 1;
            self.readable_len += u64::from(len);
        }
        Ok(())
    }
}

fn pieces(
    segments: &[Segment],
    view: &View,
    range: Range<u64>,
    mut each: impl FnMut(IoBuf),
) -> bool {
    walk(segments, range, |addr, part| view.pieces(addr, part, &mut each))
}

/// The parts of segments that a range of their bytes covers. `false` when the segments end before,
/// or `each` says so.
fn walk(segments: &[Segment], range: Range<u64>, mut each: impl FnMut(u64, usize) -> bool) -> bool {
    let mut begin = 0;
    for segment in segments {
        let end = begin + u64::from(segment.len);
        let (from, to) = (range.start.max(begin), range.end.min(end));
        if from < to {
            // A part of a segment, whose length is 32 bits.
            let part = usize::try_from(to - from).unwrap_or(0);
            if !each(segment.addr + (from - begin), part) {
                return false;
            }
        }
        begin = end;
        if begin >= range.end {
            return true;
        }
    }
    range.start >= range.end
}
