//! A thread's view of the memory of a guest: gives buffers for guest addresses.
//!
//! Promises: never allocates after it was made, never locks.

use std::cell::Cell;
use std::sync::Arc;

use ringdisk_ring::IoBuf;

use super::access::RingMemory;
use super::region::Region;
use super::table::Memory;

/// Regions as buffers of one thread. Not `Send`. Its buffers keep their memory after the
/// view is dropped.
#[derive(Debug)]
pub struct View {
    memory: Arc<Memory>,
    /// One for each region, in the same order.
    buffers: Vec<Buffers>,
    /// The same, for small numbers.
    areas: Vec<RingMemory>,
    /// Bytes of a piece of a region that is registered, as a power of two.
    piece_shift: u32,
    /// Region of the last look-up: guests mostly use one or two.
    last: Cell<usize>,
}

/// A region as buffers of one thread.
#[derive(Debug)]
struct Buffers {
    plain: IoBuf,
    /// The same, for each piece of the region with the slot that it is registered in; the last ones
    /// may be missing.
    pieces: Vec<IoBuf>,
}

impl View {
    /// A view of this memory for the calling thread.
    pub fn new(memory: Arc<Memory>) -> View {
        View::fixed(memory, usize::BITS - 1, |_| &[])
    }

    /// As [`View::new`], with pieces of regions that the thread's ring has in its table of
    /// registered buffers. A range inside one of them is given as a registered buffer, every other
    /// one as an ordinary one.
    ///
    /// * `piece_shift`: a piece has 2 to that power bytes; the first begins with its region.
    /// * `slots`: of the pieces of a region, from the first on; fewer where the last ones are not
    ///   registered.
    pub fn fixed<'a>(
        memory: Arc<Memory>,
        piece_shift: u32,
        slots: impl Fn(&Arc<Region>) -> &'a [u16],
    ) -> View {
        let buffers = memory.regions().iter().map(|region| Buffers {
            plain: region.buffer(),
            pieces: slots(region).iter().map(|slot| region.shared().fixed_buffer(*slot)).collect(),
        });
        let buffers = buffers.collect();
        let areas =
            memory.regions().iter().map(|r| RingMemory::new(r.mapping(), r.guest_addr())).collect();
        View { memory, buffers, areas, piece_shift, last: Cell::new(0) }
    }

    /// The memory of the view.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Number of the region with an address of the guest, where in it that is, and how many bytes
    /// follow in the region.
    #[inline]
    fn find(&self, guest_addr: u64) -> Option<(usize, usize, usize)> {
        let inside = |number: usize| {
            let area = self.areas.get(number)?;
            let at = guest_addr.checked_sub(area.guest_addr())?;
            let at = usize::try_from(at).ok().filter(|at| *at < area.len())?;
            Some((number, at, area.len() - at))
        };
        inside(self.last.get()).or_else(|| {
            let number = self.memory.find(guest_addr)?;
            self.last.set(number);
            inside(number)
        })
    }

    /// Bytes of the guest inside one region.
    #[inline]
    pub fn piece(&self, guest_addr: u64, len: usize) -> Option<IoBuf> {
        let (number, at, rest) = self.find(guest_addr)?;
        (len <= rest).then(|| self.part(number, at, len))
    }

    /// Bytes of the guest, as one buffer for each region that they lie in. Regions that follow one
    /// another without a gap are one memory to the guest.
    ///
    /// Gives `false` when a byte is not in memory; some pieces may have been given by then.
    pub fn pieces(&self, guest_addr: u64, len: usize, mut each: impl FnMut(IoBuf)) -> bool {
        self.walk(guest_addr, len, |number, at, part| {
            each(self.part(number, at, part));
        })
    }

    /// Bytes of a region, which has them.
    #[inline]
    fn part(&self, number: usize, at: usize, len: usize) -> IoBuf {
        let Buffers { plain, pieces } = &self.buffers[number];
        let (first, last) = (at >> self.piece_shift, (at + len.max(1) - 1) >> self.piece_shift);
        match pieces.get(first) {
            Some(piece) if first == last => piece.slice(at..at + len),
            _ => plain.slice(at..at + len),
        }
    }

    /// Whether all of these bytes are in memory.
    #[inline]
    pub fn contains(&self, guest_addr: u64, len: usize) -> bool {
        match self.find(guest_addr) {
            Some((_, _, rest)) if len <= rest => true,
            Some(_) => self.walk(guest_addr, len, |_, _, _| ()),
            None => len == 0,
        }
    }

    /// The number of regions that hold these bytes, at least one; `None` when not all bytes are in
    /// memory.
    #[inline]
    pub fn regions_of(&self, guest_addr: u64, len: usize) -> Option<usize> {
        match self.find(guest_addr) {
            Some((_, _, rest)) if len <= rest => Some(1),
            Some(_) => {
                let mut regions = 0;
                self.walk(guest_addr, len, |_, _, _| regions += 1).then_some(regions)
            }
            None => None,
        }
    }

    /// Copies bytes of the guest out, each read once. `false` when they are not all in memory.
    pub fn read(&self, guest_addr: u64, dst: &mut [u8]) -> bool {
        let mut done = 0;
        self.walk(guest_addr, dst.len(), |number, at, part| {
            self.areas[number].read_bytes(at, &mut dst[done..done + part]);
            done += part;
        })
    }

    /// Copies bytes to the guest. `false` when they are not all in memory; some may have been
    /// written.
    pub fn write(&self, guest_addr: u64, src: &[u8]) -> bool {
        let mut done = 0;
        self.walk(guest_addr, src.len(), |number, at, part| {
            self.areas[number].write_bytes(at, &src[done..done + part]);
            done += part;
        })
    }

    /// The region of these bytes and where in it they begin, for several reads.
    #[inline]
    pub(crate) fn window(&self, guest_addr: u64, len: usize) -> Option<(&RingMemory, usize)> {
        let (number, at, rest) = self.find(guest_addr)?;
        (len <= rest).then(|| (&self.areas[number], at))
    }

    fn walk(&self, guest_addr: u64, len: usize, mut each: impl FnMut(usize, usize, usize)) -> bool {
        let (mut from, mut left) = (guest_addr, len);
        while left > 0 {
            let Some((number, at, rest)) = self.find(from) else { return false };
            let part = left.min(rest);
            each(number, at, part);
            left -= part;
            match from.checked_add(part as u64) {
                Some(next) => from = next,
                None => return left == 0,
            }
        }
        true
    }
}
