//! A shared mapping of a part of a file.
//!
//! Promises: it stays mapped as long as a reference lives. Made and dropped by control threads;
//! unmapped with the last reference, on any thread.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::Error;

use super::fault::Guard;

/// Size of a page on every platform that has the kernels we need.
const PAGE_BYTES: u64 = 4096;
/// `HUGETLBFS_MAGIC` of linux/magic.h.
const HUGETLBFS: i64 = 0x958458f6;

/// A mapping, for as long as it is referenced.
pub(crate) struct Mapping {
    /// Of whole pages; the bytes asked for begin somewhere in the first.
    base: *mut u8,
    mapped: usize,
    /// First byte asked for.
    start: *mut u8,
    len: usize,
    /// Taken out of the table before the pages go.
    guard: Option<Guard>,
}

// SAFETY: the struct gives out addresses only, and bytes are reached by raw pointers and atomics;
// any thread may unmap.
unsafe impl Send for Mapping {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Mapping {}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping").field("len", &self.len).field("lost", &self.is_lost()).finish()
    }
}

impl Mapping {
    /// Maps bytes of a file. Neither end needs to be a page's.
    ///
    /// Errors: the file is none or ends before; no memory, no place in the table.
    pub(crate) fn new(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Arc<Mapping>, Error> {
        let failed = |errno| Error::System { doing: "map memory of the guest", errno };
        let bad = Error::BadRange { guest_addr: offset, size: len };
        let stat = fstat(fd).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Error::NotMemory);
        }
        let end_bytes = offset.checked_add(len).ok_or(bad)?;
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if len == 0 || end_bytes > file_bytes {
            return Err(if len == 0 { bad } else { Error::FileTooShort { file_bytes, end_bytes } });
        }
        let page = page_bytes(fd).map_err(failed)?;
        let first = offset / page * page;
        let end = end_bytes.checked_next_multiple_of(page).ok_or(bad)?;
        let mapped = usize::try_from(end - first).map_err(|_| bad)?;
        let (inside, len) = (usize::try_from(offset - first), usize::try_from(len));
        let (inside, len) = (inside.map_err(|_| bad)?, len.map_err(|_| bad)?);
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                first,
            )
        }
        .map_err(failed)?
        .cast::<u8>();
        let mut mapping =
            Mapping { base, mapped, start: base.wrapping_add(inside), len, guard: None };
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: the range is the mapping just made; neither advice changes a byte. A refusal
            // costs copies on fork, or a guest's memory in a core file.
            let _ = unsafe { madvise(base.cast(), mapped, advice) };
        }
        let page = usize::try_from(page).map_err(|_| bad)?;
        mapping.guard = Some(Guard::enter(base.addr(), base.addr() + mapped, page)?);
        Ok(Arc::new(mapping))
    }

    /// First byte; `len` bytes follow that are mapped for as long as this lives.
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether a part of it was found gone and reads as zeroes.
    pub(crate) fn is_lost(&self) -> bool {
        self.guard.as_ref().is_some_and(Guard::is_lost)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.guard.take());
        // SAFETY: made by `new` with this length, and no reference is left, so no
        // pointer into it is used again.
        let _ = unsafe { munmap(self.base.cast(), self.mapped) };
    }
}

/// Bytes of a page of a file: larger on hugetlbfs, where parts of pages can be neither mapped nor
/// replaced.
fn page_bytes(fd: BorrowedFd<'_>) -> rustix::io::Result<u64> {
    let system = fstatfs(fd)?;
    let size = u64::try_from(system.f_bsize).unwrap_or(0);
    #[allow(clippy::unnecessary_cast, reason = "the field's type is the platform's")]
    let huge = system.f_type as i64 == HUGETLBFS && size.is_power_of_two();
    Ok(if huge { size.max(PAGE_BYTES) } else { PAGE_BYTES })
}
