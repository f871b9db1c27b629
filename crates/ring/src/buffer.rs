//! I/O memory.
//!
//! Promises: no Rust reference to the bytes of an [`IoBuf`] ever exists, since the kernel may write
//! them at any time while an operation is in flight; they are copied in and out through raw
//! pointers. References are counted locally (no atomics): a buffer belongs to one thread.
//!
//! A buffer may be **scattered**: several pieces that act as one ([`Scatter`]). Operations take it
//! like any other, and bytes are copied in and out as usual, but it has no address. Code that needs
//! an address checks [`IoBuf::is_contiguous`].
//!
//! A buffer may also stand for pages of a client that the kernel has put into a slot of the ring's
//! table ([`IoBuf::client_pages`]): operations reach them, this process cannot. Code that may get
//! such a buffer checks [`IoBuf::is_ours`], and moves bytes with [`crate::Ring::copy`] and
//! [`crate::Ring::zero`], which handle all kinds.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use crate::numa;

pub use scatter::Scatter;
pub(crate) use scatter::Vectors;

mod scatter;
#[cfg(test)]
mod tests;

/// From this size on a region is its own mapping: zeroed lazily, so untouched pages cost nothing.
const MAP_FROM_BYTES: usize = 64 * 1024;
/// Size of a page on every platform that has the kernels we need.
const PAGE_BYTES: usize = 4096;
/// The usual size of huge pages (x86-64, and arm64 with pages of 4 KiB); another one costs time,
/// nothing else.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory that is freed when the last buffer on it goes.
struct Region {
    /// Null for pages of a client (the kernel counts their bytes from 0) and for scattered pieces.
    start: *mut u8,
    len: usize,
    origin: Origin,
    /// Slot in the ring's table of registered buffers.
    fixed: Option<u16>,
}

/// Origin of the memory of a region, which decides how it is freed.
enum Origin {
    /// A mapping of its own.
    Mapped,
    /// The allocator.
    Allocated(Layout),
    /// Memory that several threads use; it lives at least as long as this reference.
    Shared(Arc<SharedMemory>),
    /// A mapping that its owner made; it lives at least as long as this value.
    Foreign(#[allow(dead_code)] Box<dyn std::any::Any + Send + Sync>),
    /// Pages of a client, in a slot of the ring.
    Client,
    /// Pieces of other regions, one behind the other.
    Scattered(Box<scatter::Pieces>),
}

impl Region {
    fn new(len: usize, align: usize) -> Region {
        assert!(align.is_power_of_two(), "alignment {align} is not a power of two");
        if len >= MAP_FROM_BYTES
            && align <= PAGE_BYTES
            && let Some(region) = Region::map(len)
        {
            return region;
        }
        let layout = Layout::from_size_align(len.max(1), align.max(16)).expect("buffer size");
        // SAFETY: the layout's size is not zero (`max(1)`).
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        Region { start: start.as_ptr(), len, origin: Origin::Allocated(layout), fixed: None }
    }

    fn map(len: usize) -> Option<Region> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        // SAFETY: a fresh anonymous mapping at an address that the kernel chooses aliases nothing.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .ok()?;
        // SAFETY: the range is the mapping just made. A failure only costs copies on fork.
        let _ = unsafe { madvise(start, len, Advice::LinuxDontFork) };
        Some(Region { start: start.cast(), len, origin: Origin::Mapped, fixed: None })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.origin {
            // SAFETY: `start` came from `alloc_zeroed` with this very layout, and the last
            // reference is gone (Rc). Operations in flight hold references, so none is running.
            Origin::Allocated(layout) => unsafe { dealloc(self.start, layout) },
            // SAFETY: as above, for a mapping of `len` bytes made by `map`.
            Origin::Mapped => unsafe {
                let _ = rustix::mm::munmap(self.start.cast(), self.len);
            },
            Origin::Shared(_) | Origin::Foreign(_) | Origin::Client | Origin::Scattered(_) => {}
        }
    }
}

/// Memory of which several threads make buffers ([`SharedMemory::buffer`]), each for itself. The
/// threads must agree on its use: accesses are not ordered, as with any buffer that the kernel
/// writes.
pub struct SharedMemory {
    region: Region,
}

// SAFETY: the struct gives out addresses only; bytes are copied through raw pointers by `IoBuf`,
// never borrowed. The region is a mapping or an allocation, which any thread may free.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for SharedMemory {}

impl std::fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.region.len).finish()
    }
}

impl SharedMemory {
    /// As [`IoBuf::new`]. Pages are taken where they are first touched.
    pub fn new(len: usize, align: usize) -> Arc<SharedMemory> {
        Arc::new(SharedMemory { region: Region::new(len, align) })
    }

    /// Zeroed memory with pages of its own, also for a small length; no page is touched yet.
    ///
    /// * `len`: bytes; whole pages are taken.
    pub fn mapped(len: usize) -> Arc<SharedMemory> {
        let len = len.max(1).next_multiple_of(PAGE_BYTES);
        let region = Region::map(len).unwrap_or_else(|| Region::new(len, PAGE_BYTES));
        Arc::new(SharedMemory { region })
    }

    /// A mapping that its owner made (memory of a guest), as memory to make buffers of. It is not
    /// zeroed, advised or unmapped here.
    ///
    /// * `keep`: dropped with the last buffer and operation on the memory: its `Drop` may unmap it.
    ///
    /// # Safety
    ///
    /// `start..start + len` is mapped for reading and writing for as long as `keep` lives, and no
    /// Rust reference to these bytes exists meanwhile. Others (a guest) may write them at any time;
    /// a fault in them is the owner's to survive.
    pub unsafe fn foreign(
        start: *mut u8,
        len: usize,
        keep: Box<dyn std::any::Any + Send + Sync>,
    ) -> Arc<SharedMemory> {
        Arc::new(SharedMemory {
            region: Region { start, len, origin: Origin::Foreign(keep), fixed: None },
        })
    }

    /// Prefers a NUMA node for pages that are not touched yet (mbind(2), `MPOL_PREFERRED`).
    ///
    /// * `range`: bytes of this memory, whole pages. Panics when it leaves the memory (a
    ///   programming error).
    ///
    /// Errors: `EINVAL` when the node has no memory for this process, or the memory is no private
    /// mapping; `EPERM`, `ENOSYS` where it is forbidden or unknown.
    pub fn prefer_node(&self, range: Range<usize>, node: usize) -> Result<(), crate::Errno> {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {}", self.len());
        match self.region.origin {
            Origin::Mapped => {
                let len = range.len().next_multiple_of(PAGE_BYTES);
                numa::prefer(self.address() + range.start, len, node)
            }
            _ => Err(crate::Errno::INVAL),
        }
    }

    /// All of it as a buffer of the calling thread.
    pub fn buffer(self: &Arc<Self>) -> IoBuf {
        self.buffer_with(None)
    }

    /// As [`SharedMemory::buffer`]; operations name it by its slot in the ring's table of
    /// registered buffers, so the kernel does not look its pages up each time. In a ring where it
    /// is not registered in that slot they fail with `EFAULT`.
    pub fn fixed_buffer(self: &Arc<Self>, slot: u16) -> IoBuf {
        self.buffer_with(Some(slot))
    }

    fn buffer_with(self: &Arc<Self>, fixed: Option<u16>) -> IoBuf {
        let (start, len) = (self.region.start, self.region.len);
        let region = Region { start, len, origin: Origin::Shared(Arc::clone(self)), fixed };
        IoBuf { region: Rc::new(region), offset: 0, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.region.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Start address, for the kernel.
    pub fn address(&self) -> usize {
        self.region.start as usize
    }

    /// Asks for small pages until [`IoBuf::populate`]: memory that is used in part takes little.
    pub fn advise_small_pages(&self) {
        if matches!(self.region.origin, Origin::Mapped) {
            let advice = rustix::mm::Advice::LinuxNoHugepage;
            // SAFETY: the range is the mapping of this region; the advice changes no byte.
            let _ =
                unsafe { rustix::mm::madvise(self.region.start.cast(), self.region.len, advice) };
        }
    }

    /// Asks for huge pages. A refusal costs time, nothing else.
    pub fn advise_huge_pages(&self) {
        if matches!(self.region.origin, Origin::Mapped) {
            let advice = rustix::mm::Advice::LinuxHugepage;
            // SAFETY: the range is the mapping of this region; the advice changes no byte.
            let _ =
                unsafe { rustix::mm::madvise(self.region.start.cast(), self.region.len, advice) };
        }
    }
}

/// A piece of I/O memory; clones and slices share the bytes. Not `Send`.
#[derive(Clone)]
pub struct IoBuf {
    region: Rc<Region>,
    offset: usize,
    len: usize,
}

impl std::fmt::Debug for IoBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IoBuf").field("offset", &self.offset).field("len", &self.len).finish()
    }
}

impl IoBuf {
    /// Zeroed memory of `len` bytes, aligned to `align` (a power of two). Large buffers take
    /// memory only when they are touched. Panics when `align` is no power of two; aborts when
    /// there is no memory, as every allocation does.
    pub fn new(len: usize, align: usize) -> IoBuf {
        IoBuf { region: Rc::new(Region::new(len, align)), offset: 0, len }
    }

    /// Pages of a client that the kernel puts into `slot` of the ring's table while a request
    /// lasts. Only operations on that ring reach them, and fail with `EFAULT` past their end or
    /// while there are none.
    ///
    /// * `len`: bytes at most.
    pub fn client_pages(slot: u16, len: usize) -> IoBuf {
        let start = std::ptr::null_mut();
        let region = Region { start, len, origin: Origin::Client, fixed: Some(slot) };
        IoBuf { region: Rc::new(region), offset: 0, len }
    }

    /// Whether the bytes are in memory of this process: they can be copied and set.
    pub fn is_ours(&self) -> bool {
        !matches!(self.region.origin, Origin::Client)
    }

    /// Whether the bytes are in memory of this process in one piece: they have an address.
    pub fn is_contiguous(&self) -> bool {
        !matches!(self.region.origin, Origin::Client | Origin::Scattered(_))
    }

    /// Whether this is several pieces ([`Scatter`]): in memory of this process, without one
    /// address.
    pub fn is_scattered(&self) -> bool {
        matches!(self.region.origin, Origin::Scattered(_))
    }

    /// Slot in the ring's table of registered buffers.
    pub(crate) fn fixed(&self) -> Option<u16> {
        self.region.fixed
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Start address, for operations. The bytes may change under the reader at any time. `offset +
    /// len <= region.len` holds from construction (`new`, `slice`), so the result stays inside the
    /// region or one past its end.
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.region.start.wrapping_add(self.offset)
    }

    /// Start address as a number, to compare with an alignment or to give to the kernel. For pages
    /// of a client: the offset in them. For a scattered buffer: undefined.
    pub fn address(&self) -> usize {
        self.as_mut_ptr() as usize
    }

    /// Whether it has a start address that is a multiple of `align` bytes. False for pages of a
    /// client, whose address is not known.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.is_contiguous() && self.address().is_multiple_of(align)
    }

    /// A part of this buffer; of a scattered one perhaps just a part of one piece. Panics when the
    /// range leaves it (a programming error).
    pub fn slice(&self, range: Range<usize>) -> IoBuf {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "slice {range:?} of {}",
            self.len
        );
        let (offset, len) = (self.offset + range.start, range.end - range.start);
        if self.is_scattered() {
            return self.slice_scattered(offset, len);
        }
        IoBuf { region: Rc::clone(&self.region), offset, len }
    }

    /// Copies `src` to byte `at`. Panics when it does not fit.
    pub fn copy_from_slice(&self, at: usize, src: &[u8]) {
        self.each(at, src.len(), |done, part, len| {
            // SAFETY: `each` gives parts of this buffer that have `len` bytes, and all of them
            // together as many as `src`; that is a Rust slice, and no Rust reference to region
            // memory exists, so the two cannot overlap.
            unsafe { std::ptr::copy_nonoverlapping(src.as_ptr().add(done), part, len) }
        });
    }

    /// Copies from byte `at` into `dst`. Panics when `dst` asks for more than there is.
    pub fn copy_to_slice(&self, at: usize, dst: &mut [u8]) {
        self.each(at, dst.len(), |done, part, len| {
            // SAFETY: as in `copy_from_slice`, the other way.
            unsafe { std::ptr::copy_nonoverlapping(part, dst.as_mut_ptr().add(done), len) }
        });
    }

    /// Copies all of `src` to byte `at`; the two may be parts of one region, if neither is
    /// scattered. Panics when it does not fit.
    pub fn copy_from_buf(&self, at: usize, src: &IoBuf) {
        self.each(at, src.len, |done, to, len| {
            src.each(done, len, |done, from, len| {
                // SAFETY: `each` gives `len` bytes of either buffer, of this one from `done` on;
                // `copy` allows overlap.
                unsafe { std::ptr::copy(from, to.add(done), len) }
            });
        });
    }

    /// Sets all bytes.
    pub fn fill(&self, byte: u8) {
        self.each(0, self.len, |_, part, len| {
            // SAFETY: the range is in this buffer, in our memory.
            unsafe { std::ptr::write_bytes(part, byte, len) }
        });
    }

    /// Whether all bytes are 0.
    pub fn is_zero(&self) -> bool {
        if self.is_scattered() {
            return self.pieces().all(|piece| piece.is_zero());
        }
        let mut chunk = [0u8; 512];
        let mut at = 0;
        while at < self.len {
            let n = chunk.len().min(self.len - at);
            self.copy_to_slice(at, &mut chunk[..n]);
            if chunk[..n].iter().any(|&b| b != 0) {
                return false;
            }
            at += n;
        }
        true
    }

    /// A copy of the bytes. Allocates: for control paths and tests.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len];
        self.copy_to_slice(0, &mut out);
        out
    }

    /// Frees the memory of whole pages inside this buffer; they read as zeroes afterwards. For
    /// buffers that are not in use. Does nothing for small buffers.
    pub fn release_pages(&self) {
        if self.mapping().is_none() {
            return;
        }
        let start = self.address().next_multiple_of(PAGE_BYTES);
        let end = (self.address() + self.len) / PAGE_BYTES * PAGE_BYTES;
        if start < end {
            let from = self.as_mut_ptr().wrapping_add(start - self.address());
            // SAFETY: the range lies inside a private anonymous mapping that this buffer keeps
            // alive; discarding pages changes their content to zeroes, which raw memory allows.
            // Without it, small requests after a populate would take huge pages that are never
            // freed.
            unsafe {
                let (from, len) = (from.cast::<std::ffi::c_void>(), end - start);
                let _ = rustix::mm::madvise(from, len, rustix::mm::Advice::LinuxDontNeed);
                let _ = rustix::mm::madvise(from, len, rustix::mm::Advice::LinuxNoHugepage);
            }
        }
    }

    /// Takes the pages of the first `len` bytes from the system, huge ones where it has them: one
    /// call in place of many faults, and the kernel finds them faster when it copies. The
    /// content does not change. Does nothing for small buffers.
    pub fn populate(&self, len: usize) {
        let Some((start, whole)) = self.mapping() else { return };
        // The huge pages that the bytes lie in, as far as they are inside the mapping: those that
        // are cut off come as small ones.
        let from = self.address() / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        let to = (self.address() + len.min(self.len)).next_multiple_of(HUGE_PAGE_BYTES);
        let (from, to) = (from.max(start), to.min(start + whole));
        let first = self.address() / PAGE_BYTES * PAGE_BYTES;
        let last = (self.address() + len.min(self.len)).next_multiple_of(PAGE_BYTES);
        let at = |address: usize| self.as_mut_ptr().with_addr(address).cast::<std::ffi::c_void>();
        // SAFETY: both ranges lie inside a private anonymous mapping that this buffer keeps alive
        // (`mapping`), since it begins and ends at page bounds; neither advice changes a byte. A
        // refusal costs time only.
        unsafe {
            let _ = rustix::mm::madvise(at(from), to - from, rustix::mm::Advice::LinuxHugepage);
            let populate = rustix::mm::Advice::LinuxPopulateWrite;
            let _ = rustix::mm::madvise(at(first), last - first, populate);
        }
    }

    /// Address and length of the private anonymous mapping that the buffer lies in, if it does.
    fn mapping(&self) -> Option<(usize, usize)> {
        let is_mapped = match &self.region.origin {
            Origin::Mapped => true,
            Origin::Allocated(_) | Origin::Foreign(_) => false,
            Origin::Client | Origin::Scattered(_) => false,
            Origin::Shared(memory) => matches!(memory.region.origin, Origin::Mapped),
        };
        let len = self.region.len.next_multiple_of(PAGE_BYTES);
        is_mapped.then(|| (self.region.start as usize, len))
    }

    /// Whether another buffer, or an operation in flight, shares the memory (of a scattered buffer:
    /// its list of pieces).
    pub fn is_shared(&self) -> bool {
        Rc::strong_count(&self.region) > 1
    }

    /// Calls `f` for each part of a range that lies in one place: bytes of the range before it,
    /// address, length. Panics when the range leaves the buffer or is not in our memory
    /// (programming errors).
    #[inline]
    fn each(&self, at: usize, len: usize, mut f: impl FnMut(usize, *mut u8, usize)) {
        assert!(at <= self.len && len <= self.len - at, "{len} bytes at {at} of {}", self.len);
        if self.is_contiguous() {
            f(0, self.as_mut_ptr().wrapping_add(at), len);
        } else {
            self.each_part(at, len, &mut f);
        }
    }
}
