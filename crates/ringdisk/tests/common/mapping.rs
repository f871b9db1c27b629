//! A shared mapping of a file. The only `unsafe` of the end-to-end tests.

use std::ffi::c_void;
use std::fs::File;
use std::ptr;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

/// The first `len` bytes of a file, mapped shared for reading and writing.
pub(crate) struct Mapping {
    start: *mut c_void,
    len: usize,
}

// SAFETY: the memory belongs to this value alone; other writers of the file are why bytes are only
// copied in and out.
unsafe impl Send for Mapping {}
// SAFETY: as above; threads that share it copy bytes and never hold references into it.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn new(file: &File, len: usize) -> Mapping {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses; nothing else is there.
        let start = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) };
        Mapping { start: start.expect("mmap"), len }
    }

    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut out = vec![0; len];
        // SAFETY: the range was checked; `out` is memory of its own.
        unsafe { ptr::copy_nonoverlapping(self.at(offset), out.as_mut_ptr(), len) };
        out
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        // SAFETY: the range was checked; `bytes` is not in the mapping, of which nobody has
        // references.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset), bytes.len()) };
    }

    pub(crate) fn sync(&self) {
        // SAFETY: the whole mapping, which lives as long as `self`.
        unsafe { msync(self.start, self.len, MsyncFlags::SYNC) }.expect("msync");
    }

    fn at(&self, offset: usize) -> *mut u8 {
        self.start.cast::<u8>().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`, unmapped once, not used after.
        let _ = unsafe { munmap(self.start, self.len) };
    }
}
