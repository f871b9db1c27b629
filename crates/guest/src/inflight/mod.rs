//! The inflight area: the chains that the device has taken and not returned, in memory that
//! outlives the process (vhost-user specification, "Inflight I/O tracking").
//!
//! Promises: wherever a kill falls, a chain that the driver has seen as used is not in flight any
//! more, and every other taken chain is taken again. So each write to the area, and to the rings,
//! is one step of a protocol; all stores are atomic and in program order.
//!
//! The front end keeps the area after the process has ended and gives it to the successor. It is
//! not trusted: data that is read from the area is checked like a guest's.

mod packed;
mod split;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::Error;
use crate::layout::{Layout, SIZE_MAX};
use crate::memory::{Mapping, RingMemory};

pub(crate) use packed::{PackedArea, Taken};
pub(crate) use split::SplitArea;

/// Version of the layout in an area that is in use.
const VERSION: u16 = 1;
/// Most queues: those of a device (64), and room for front ends that ask for more than they use.
pub const QUEUES_MAX: u16 = 256;
/// Bytes that the device adds at the end: a mark and its own word. Front ends keep an area
/// unchanged, with its length.
const NOTE_BYTES: u64 = 64;
/// The mark, so that the word in an area of another back end is not used.
const NOTE_MARK: u64 = u64::from_le_bytes(*b"ringdisk");
/// Each queue's part begins at a cache line, as other back ends have it.
const PART_ALIGN: u64 = 64;

/// The area of all queues of a device.
#[derive(Debug)]
pub struct InflightArea {
    memory: RingMemory,
    /// Offset of the device's word; areas of other back ends have none.
    note: Option<usize>,
    fd: OwnedFd,
    offset: u64,
    queues: u16,
    size: u16,
    layout: Layout,
}

/// Bytes of the part of one queue.
fn part_bytes(size: u16, layout: Layout) -> u64 {
    let bytes = match layout {
        Layout::Split => split::bytes(size),
        Layout::Packed => packed::bytes(size),
    };
    (bytes as u64).next_multiple_of(PART_ALIGN)
}

impl InflightArea {
    /// A new area in memory of its own (GET_INFLIGHT_FD).
    ///
    /// * `queues`, `size`: queues, and descriptors of each.
    ///
    /// Errors: more than any device has; no memory.
    pub fn create(queues: u16, size: u16, layout: Layout) -> Result<InflightArea, Error> {
        check(queues, size)?;
        let failed = |errno| Error::System { doing: "make an inflight area", errno };
        let name = c"ringdisk-inflight";
        let fd = memfd_create(name, MemfdFlags::CLOEXEC).map_err(failed)?;
        let bytes = part_bytes(size, layout) * u64::from(queues) + NOTE_BYTES;
        ftruncate(&fd, bytes).map_err(failed)?;
        InflightArea::from_fd(fd, bytes, 0, queues, size, layout)
    }

    /// An area that the front end has kept (SET_INFLIGHT_FD).
    ///
    /// * `mmap_size`, `mmap_offset`: of the area in its file, bytes.
    ///
    /// Errors: it is too small for the queues; as for a region of memory.
    pub fn from_fd(
        fd: OwnedFd,
        mmap_size: u64,
        mmap_offset: u64,
        queues: u16,
        size: u16,
        layout: Layout,
    ) -> Result<InflightArea, Error> {
        check(queues, size)?;
        let bytes = part_bytes(size, layout) * u64::from(queues);
        if mmap_size < bytes {
            return Err(Error::BadInflight { why: "it is too small for the queues" });
        }
        if !mmap_offset.is_multiple_of(8) {
            return Err(Error::BadInflight { why: "it does not begin at a multiple of 8 bytes" });
        }
        let noted = bytes + NOTE_BYTES;
        let note = (mmap_size >= noted).then(|| usize::try_from(bytes).ok()).flatten();
        let mapped = if note.is_some() { noted } else { bytes };
        let memory = RingMemory::new(&Mapping::new(fd.as_fd(), mmap_offset, mapped)?, 0);
        Ok(InflightArea { memory, note, fd, offset: mmap_offset, queues, size, layout })
    }

    /// Stores the device's word for the successor.
    pub fn set_note(&self, word: u32) {
        if let Some(at) = self.note {
            self.memory.store_u32(at + 8, word, Ordering::Relaxed);
            self.memory.store_u64(at, NOTE_MARK, Ordering::Release);
        }
    }

    /// The word that a predecessor has stored, if any.
    pub fn note(&self) -> Option<u32> {
        let at = self.note?;
        let is_ours = self.memory.load_u64(at, Ordering::Acquire) == NOTE_MARK;
        is_ours.then(|| self.memory.load_u32(at + 8, Ordering::Relaxed))
    }

    /// The part of one queue. It is for one [`crate::Queue`] at a time.
    pub fn queue(&self, number: u16) -> Option<InflightQueue> {
        let part = usize::try_from(part_bytes(self.size, self.layout)).ok()?;
        (number < self.queues).then(|| InflightQueue {
            memory: self.memory.part(usize::from(number) * part, part),
            size: self.size,
            layout: self.layout,
        })
    }

    /// Marks the part of a queue as unused: the front end knows the base of the stopped queue, or
    /// begins it anew, or another process serves it without this area. From now on its base counts,
    /// or for a split queue the used index in memory of the guest.
    ///
    /// Not before: after a kill only the area knows the position of a packed queue, and which
    /// chains of a split one are in flight.
    pub fn retire(&self, number: u16) {
        let Some(queue) = self.queue(number) else { return };
        match self.layout {
            Layout::Split => split::retire(&queue.memory),
            Layout::Packed => packed::retire(&queue.memory),
        }
    }

    /// Whether a chain of any queue is in flight in it.
    pub fn is_busy(&self) -> bool {
        (0..self.queues).filter_map(|number| self.queue(number)).any(|queue| queue.is_busy())
    }

    /// Bytes, for the front end.
    pub fn mmap_size(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Where it begins in its file, bytes.
    pub fn mmap_offset(&self) -> u64 {
        self.offset
    }

    /// Queues that it has room for.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Descriptors of each.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Layout of the queues.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Its file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn check(queues: u16, size: u16) -> Result<(), Error> {
    if queues == 0 || queues > QUEUES_MAX || size == 0 || size > SIZE_MAX {
        return Err(Error::BadInflight { why: "no device has so many queues or descriptors" });
    }
    Ok(())
}

/// The part of one queue.
#[derive(Clone, Debug)]
pub struct InflightQueue {
    memory: RingMemory,
    /// Descriptors that it has room for.
    size: u16,
    layout: Layout,
}

impl InflightQueue {
    /// For a split queue of this size, if it is made for one.
    pub(crate) fn split(self, size: u16) -> Option<SplitArea> {
        let fits = self.layout == Layout::Split && size <= self.size;
        fits.then(|| SplitArea::new(self.memory, size))
    }

    /// For a packed queue of this size, if it is made for one.
    pub(crate) fn packed(self, size: u16) -> Option<PackedArea> {
        let fits = self.layout == Layout::Packed && size <= self.size;
        fits.then(|| PackedArea::new(self.memory, size))
    }

    /// Whether a chain is marked as in flight. For reports: a half-finished step of a killed
    /// process counts too.
    pub fn is_busy(&self) -> bool {
        match self.layout {
            Layout::Split => split::is_busy(&self.memory, self.size),
            Layout::Packed => packed::is_busy(&self.memory, self.size),
        }
    }
}
