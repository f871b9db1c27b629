//! Access to numbers in memory that a guest, or another process, reads and writes concurrently.
//!
//! Promises: each access is one atomic access, or one copy by volatile reads, so the value that is
//! checked is the value that is used. All numbers are little-endian. Bounds are checked at every
//! access, against a length that was checked when the area was made; leaving it is a programming
//! error and panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::mapping::Mapping;

/// A part of a mapping, which it keeps mapped.
#[derive(Clone)]
pub struct RingMemory {
    start: *mut u8,
    len: usize,
    guest_addr: u64,
    mapping: Arc<Mapping>,
}

// SAFETY: `start` is used for atomic and volatile accesses inside the mapping only, which lives as
// long as the reference.
unsafe impl Send for RingMemory {}
// SAFETY: as above.
unsafe impl Sync for RingMemory {}

impl std::fmt::Debug for RingMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RingMemory")
            .field("guest_addr", &self.guest_addr)
            .field("len", &self.len)
            .finish()
    }
}

/// An access to a number, for each width.
macro_rules! number {
    ($load:ident, $store:ident, $int:ty, $atomic:ty) => {
        /// Reads a number at a byte of this area, which must be aligned for it.
        #[inline]
        pub fn $load(&self, at: usize, ordering: Ordering) -> $int {
            let place = self.place::<$int>(at);
            self.note(at, size_of::<$int>());
            // SAFETY: inside the mapping, which `self` keeps, and aligned (`place`). Other
            // processes may write it: an atomic.
            let number = unsafe { <$atomic>::from_ptr(place) };
            <$int>::from_le(number.load(ordering))
        }

        /// Writes a number at a byte of this area, which must be aligned for it.
        #[inline]
        pub fn $store(&self, at: usize, value: $int, ordering: Ordering) {
            step();
            let place = self.place::<$int>(at);
            // SAFETY: as above.
            let number = unsafe { <$atomic>::from_ptr(place) };
            number.store(value.to_le(), ordering);
        }
    };
}

impl RingMemory {
    /// All of a mapping.
    ///
    /// * `guest_addr`: address of the guest of its first byte, for the log of a migration; 0 when
    ///   the guest has none.
    pub(crate) fn new(mapping: &Arc<Mapping>, guest_addr: u64) -> RingMemory {
        let (start, len) = (mapping.start(), mapping.len());
        RingMemory { start, len, guest_addr, mapping: Arc::clone(mapping) }
    }

    /// A part of it. Panics when it leaves this area.
    pub fn part(&self, at: usize, len: usize) -> RingMemory {
        assert!(at <= self.len && len <= self.len - at, "{len} bytes at {at} of {}", self.len);
        RingMemory {
            start: self.start.wrapping_add(at),
            len,
            guest_addr: self.guest_addr + at as u64,
            mapping: Arc::clone(&self.mapping),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the guest of its first byte.
    pub fn guest_addr(&self) -> u64 {
        self.guest_addr
    }

    /// Address of its first byte in this process: to ask the system about its pages, never to
    /// follow.
    pub fn address(&self) -> usize {
        self.start.addr()
    }

    /// Whether its first byte is at a multiple of `align` bytes.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.start.addr().is_multiple_of(align)
    }

    /// Whether a part of the mapping that it lies in was found gone.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    number!(load_u8, store_u8, u8, AtomicU8);
    number!(load_u16, store_u16, u16, AtomicU16);
    number!(load_u32, store_u32, u32, AtomicU32);
    number!(load_u64, store_u64, u64, AtomicU64);

    /// Sets bits of a byte atomically, after all earlier writes.
    #[inline]
    pub fn set_bits(&self, at: usize, bits: u8) {
        let place = self.place::<u8>(at);
        // SAFETY: inside the mapping (`place`).
        let byte = unsafe { AtomicU8::from_ptr(place) };
        byte.fetch_or(bits, Ordering::SeqCst);
    }

    /// Copies `N` bytes out, each read once.
    #[inline]
    pub fn read_array<const N: usize>(&self, at: usize) -> [u8; N] {
        let place = self.place::<[u8; N]>(at);
        self.note(at, N);
        // SAFETY: inside the mapping (`place`); bytes need no alignment, and any value of them is
        // valid.
        unsafe { place.read_volatile() }
    }

    /// Copies bytes out, each read once.
    pub fn read_bytes(&self, at: usize, dst: &mut [u8]) {
        let (chunks, rest) = dst.as_chunks_mut::<16>();
        let mut from = at;
        for chunk in chunks {
            *chunk = self.read_array(from);
            from += 16;
        }
        for byte in rest {
            *byte = self.load_u8(from, Ordering::Relaxed);
            from += 1;
        }
    }

    /// Copies bytes in.
    pub fn write_bytes(&self, at: usize, src: &[u8]) {
        step();
        assert!(
            at <= self.len && src.len() <= self.len - at,
            "{} bytes at {at} of {}",
            src.len(),
            self.len
        );
        // SAFETY: the range was checked to lie inside the mapping; no Rust reference to its bytes
        // exists, so they do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(src.as_ptr(), self.start.wrapping_add(at), src.len());
        }
    }

    /// Records a read, for tests that count them.
    #[inline]
    fn note(&self, at: usize, len: usize) {
        #[cfg(any(test, feature = "note-reads"))]
        super::reads::note(self.guest_addr + at as u64, len);
        // Nothing in every other build.
        let _ = (at, len);
    }

    /// Address of a `T` that lies inside this area and is aligned.
    #[inline]
    fn place<T>(&self, at: usize) -> *mut T {
        let fits = at <= self.len && size_of::<T>() <= self.len - at;
        let place = self.start.wrapping_add(at).cast::<T>();
        assert!(fits && place.is_aligned(), "{} bytes at {at} of {}", size_of::<T>(), self.len);
        place
    }
}

/// Before each write: tests end a device there, as a kill would.
#[inline]
fn step() {
    #[cfg(test)]
    kill::step();
}

/// Simulated death of a device before its n-th write to memory that others see.
#[cfg(test)]
pub(crate) mod kill {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// What a killed device unwinds with.
    #[derive(Debug)]
    pub(crate) struct Killed;

    /// Lets `writes` more writes of this thread happen.
    pub(crate) fn after(writes: u64) {
        LEFT.set(Some(writes));
    }

    /// No death any more.
    pub(crate) fn never() {
        LEFT.set(None);
    }

    /// Pauses the count until `resume` with the returned value.
    pub(crate) fn pause() -> Option<u64> {
        LEFT.take()
    }

    pub(crate) fn resume(left: Option<u64>) {
        LEFT.set(left);
    }

    pub(super) fn step() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                std::panic::resume_unwind(Box::new(Killed));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}
