//! The tables of registered files and buffers of a ring.
//!
//! Promises: registered memory stays mapped as long as its registration.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use super::Ring;
use super::op::Fd;
use crate::{Errno, SharedMemory};

impl Ring {
    /// Puts a descriptor into the ring's table. `None` when the table is full or the kernel
    /// refuses: use the raw descriptor then.
    pub fn register_file(&self, fd: &impl AsFd) -> Option<Fd> {
        let index = self.0.files.borrow_mut().pop()?;
        let raw = fd.as_fd().as_raw_fd();
        match self.0.uring.submitter().register_files_update(index, &[raw]) {
            Ok(_) => Some(Fd::Fixed(index)),
            Err(error) => {
                tracing::debug!("file not registered: {error}");
                self.0.files.borrow_mut().push(index);
                None
            }
        }
    }

    /// Frees a place in the table; the kernel drops its reference on the file.
    pub fn unregister_file(&self, fd: Fd) {
        if let Fd::Fixed(index) = fd {
            if let Err(error) = self.0.uring.submitter().register_files_update(index, &[-1]) {
                tracing::warn!("registered file {index} not released: {error}");
                return;
            }
            self.0.files.borrow_mut().push(index);
        }
    }

    /// Makes the ring's table of registered buffers: `memory` in slot 0, if any, then `slots` empty
    /// ones, which the kernel fills with pages of clients. Once for each ring. Pins the memory.
    ///
    /// Errors: `ENOMEM` above RLIMIT_MEMLOCK, `EBUSY` the second time.
    pub fn register_buffers(
        &self,
        memory: Option<&Arc<SharedMemory>>,
        slots: u16,
    ) -> Result<(), Errno> {
        let errno = |error: std::io::Error| {
            Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO))
        };
        let submitter = self.0.uring.submitter();
        submitter.register_buffers_sparse(u32::from(slots) + 1).map_err(errno)?;
        let Some(memory) = memory else { return Ok(()) };
        let buf = memory.buffer();
        let vector = [libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() }];
        // SAFETY: the memory stays mapped as long as the registration: the ring keeps a reference
        // on it and is closed before it drops that.
        let updated = unsafe { submitter.register_buffers_update(0, &vector, None) };
        if let Err(error) = updated {
            // The table goes again, so that it can be made without this memory.
            let _ = submitter.unregister_buffers();
            return Err(errno(error));
        }
        self.0.registered_buffers.borrow_mut().push(buf);
        Ok(())
    }

    /// Puts memory into a slot of the table of registered buffers ([`Ring::register_buffers`]), or
    /// empties it. Pins the memory for as long as it is there.
    ///
    /// * `memory`: which bytes of which memory, at most 1 GiB, the kernel's limit; kept alive by
    ///   its user until the slot is empty or the ring is gone. Panics when the range leaves the
    ///   memory (a programming error).
    ///
    /// Errors: `ENOMEM` above RLIMIT_MEMLOCK, `EFAULT` for too much, `ENXIO` without a table,
    /// `EOPNOTSUPP` for pages that cannot be pinned.
    pub fn update_buffer(
        &self,
        slot: u16,
        memory: Option<(&Arc<SharedMemory>, Range<usize>)>,
    ) -> Result<(), Errno> {
        let buf = memory.map(|(memory, range)| memory.buffer().slice(range));
        let vector = match &buf {
            Some(buf) => libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() },
            None => libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
        };
        // SAFETY: the kernel pins the pages, so they stay whatever becomes of the mapping;
        // operations reach them through buffers that keep the mapping alive.
        let updated = unsafe {
            self.0.uring.submitter().register_buffers_update(u32::from(slot), &[vector], None)
        };
        updated.map_err(|error| Errno::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)))
    }
}
