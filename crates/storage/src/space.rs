//! Length, holes, zeroes and space of a file.
//!
//! Promises: no ring thread blocks; system calls that can block and are no io_uring operations
//! (lseek for holes, BLKDISCARD) run on a helper thread. Ring threads.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_ring::{Errno, IoBuf, Ring};
use rustix::fs::{FallocateFlags, SeekFrom};

use crate::block_locks::Pass;
use crate::ffi;
use crate::file::{File, end_of};
use crate::kinds::{Allocation, Kind, Preallocation, Zeroing};
use crate::read::BOUNCE_MAX;
use crate::retry::{Retry, once};

impl File {
    /// Frees space. On a regular file the bytes read as zeroes afterwards; on a block device they
    /// are undefined, and parts of a sector at either end stay.
    ///
    /// Beyond the end of the file nothing happens. Errors: `EOPNOTSUPP` when file system or device
    /// cannot, `EROFS`.
    pub(crate) async fn discard(&self, ring: &Ring, offset: u64, len: u64) -> Result<(), Errno> {
        self.check_writable()?;
        let mut end = end_of(offset, len)?;
        if end > self.len() {
            // Another process may have made it longer.
            end = end.min(self.ask_len(ring).await?);
        }
        match self.kind {
            _ if offset >= end => Ok(()),
            Kind::BlockDevice => {
                let align = u64::from(self.limits.discard_align);
                let (start, end) = (offset.next_multiple_of(align), end / align * align);
                if start >= end {
                    return Ok(());
                }
                let _pass = self.pass(start, end).await;
                let owner = Arc::clone(&self.owner);
                let work = ring.offload(move || ffi::discard(owner.as_fd(), start, end - start));
                self.change(work).await
            }
            _ => {
                let _pass = self.pass(offset, end).await;
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                self.fallocate(ring, mode, offset, end - offset).await
            }
        }
    }

    /// Makes bytes read as zeroes; a regular file grows when it must.
    ///
    /// Errors: the kernel's, `EROFS`, `ENOSPC` past the end of a block device.
    pub(crate) async fn write_zeroes(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
        Zeroing { may_unmap, fallback }: Zeroing,
    ) -> Result<(), Errno> {
        self.check_writable()?;
        let end = end_of(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        if self.kind == Kind::BlockDevice && end > self.len() && end > self.ask_len(ring).await? {
            return Err(Errno::NOSPC);
        }
        let must_punch = self.kind == Kind::BlockDevice && !fallback;
        if must_punch && !(may_unmap && self.may_punch()) {
            return Err(Errno::OPNOTSUPP);
        }
        // Devices zero whole sectors only; the parts at either end are written.
        let align = if must_punch { self.hole_align() } else { self.limits.discard_align.into() };
        let (start, stop) = (offset.next_multiple_of(align), end / align * align);
        if start >= stop {
            return self.write_zero_bytes(ring, offset, end).await;
        }
        if must_punch && !self.limits.direct {
            // The kernel drops the cached pages of the range before it asks the device: what only
            // they hold would be lost with a hole that the device refuses.
            self.write_back(ring).await?;
        }
        let quick = {
            let _pass = self.pass(start, stop).await;
            self.zero_quickly(ring, start, stop, may_unmap, fallback).await
        };
        match quick {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP) if fallback => {
                return self.write_zero_bytes(ring, offset, end).await;
            }
            Err(errno) => return Err(errno),
        }
        if self.kind == Kind::Regular && stop > self.len() && stop > self.ask_len(ring).await? {
            // Punched, and only a write makes this file longer without the risk of cutting off
            // bytes that others have written past the end: so the last block of this request is
            // written. After the pass has ended, since the write takes one of its own.
            let last = start.max(stop - align);
            self.write_zero_bytes(ring, last, stop).await?;
        }
        self.write_zero_bytes(ring, offset, start).await?;
        self.write_zero_bytes(ring, stop, end).await
    }

    /// Whether a hole may be asked for: not of a block device that is known to refuse it.
    fn may_punch(&self) -> bool {
        !self.refuses_holes.load(Ordering::Relaxed)
    }

    /// Alignment of holes in a block device, bytes. Where a hole covers a part of a cached page,
    /// the kernel zeroes that part before it asks the device, and leaves it zeroed when the device
    /// refuses.
    fn hole_align(&self) -> u64 {
        let sector = u64::from(self.limits.discard_align);
        if self.limits.direct { sector } else { sector.max(rustix::param::page_size() as u64) }
    }

    /// Tries what the file system or device does without a transfer. Errors: `EOPNOTSUPP`.
    async fn zero_quickly(
        &self,
        ring: &Ring,
        start: u64,
        stop: u64,
        may_unmap: bool,
        fallback: bool,
    ) -> Result<(), Errno> {
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // On a device KEEP_SIZE is part of the mode; a file shall grow.
        let zero = match self.kind {
            Kind::BlockDevice => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            _ => FallocateFlags::ZERO_RANGE,
        };
        if may_unmap && self.may_punch() {
            match self.fallocate(ring, punch, start, stop - start).await {
                Ok(()) => return self.grow_beside_writers(ring, stop).await,
                Err(Errno::OPNOTSUPP) if self.kind == Kind::BlockDevice => {
                    self.refuses_holes.store(true, Ordering::Relaxed);
                }
                Err(Errno::OPNOTSUPP) => {}
                Err(errno) => return Err(errno),
            }
        }
        // A device that has no command for it makes the kernel write the zeroes, which is no quick
        // way.
        if self.kind == Kind::BlockDevice && !fallback {
            return Err(Errno::OPNOTSUPP);
        }
        match self.fallocate(ring, zero, start, stop - start).await {
            Err(Errno::OPNOTSUPP) if !may_unmap && self.kind == Kind::Regular => {
                // Zeroes by a hole that is filled with reserved space again.
                self.fallocate(ring, punch, start, stop - start).await?;
                self.fallocate(ring, FallocateFlags::empty(), start, stop - start).await?;
            }
            other => other?,
        }
        if self.kind == Kind::Regular {
            self.has_grown_to(stop);
        }
        Ok(())
    }

    /// Makes the file reach to `end` while others write: setting the length could cut off bytes
    /// that one of them has just written past the end. Where the file system has no operation for
    /// that, the length stays, which the caller sees. The caller has a pass.
    async fn grow_beside_writers(&self, ring: &Ring, end: u64) -> Result<(), Errno> {
        if self.kind != Kind::Regular || end <= self.len() || end <= self.ask_len(ring).await? {
            return Ok(());
        }
        match self.reach(ring, end).await {
            Err(Errno::OPNOTSUPP) => Ok(()),
            other => other,
        }
    }

    /// Sets the length if the file is shorter. No other writer may write past its end meanwhile.
    async fn grow_to(&self, ring: &Ring, end: u64) -> Result<(), Errno> {
        if self.kind == Kind::Regular && end > self.len() && end > self.ask_len(ring).await? {
            self.truncate(ring, end).await?;
        }
        Ok(())
    }

    /// Writes zeroes as data. Errors: as `write`.
    async fn write_zero_bytes(&self, ring: &Ring, mut from: u64, to: u64) -> Result<(), Errno> {
        if from >= to {
            return Ok(());
        }
        let zeroes_len = usize::try_from(to - from).unwrap_or(BOUNCE_MAX).min(BOUNCE_MAX);
        let zeroes = IoBuf::new(zeroes_len, self.limits.memory_align.max(512) as usize);
        while from < to {
            let len = usize::try_from(to - from).unwrap_or(zeroes_len).min(zeroes_len);
            let done = self.write(ring, from, &zeroes.slice(0..len)).await?;
            if done == 0 {
                return Err(Errno::IO);
            }
            from += done as u64;
        }
        Ok(())
    }

    /// Sets the length of a regular file. Errors: `EOPNOTSUPP` on a block device unless it has that
    /// length, `EROFS`, `EFBIG`, `ENOSPC`, …
    pub(crate) async fn set_len(&self, ring: &Ring, len: u64) -> Result<(), Errno> {
        self.check_writable()?;
        end_of(len, 0).map_err(|_| Errno::FBIG)?;
        if self.kind == Kind::BlockDevice {
            return if self.ask_len(ring).await? == len { Ok(()) } else { Err(Errno::OPNOTSUPP) };
        }
        let _pass = self.pass(len.min(self.len()), u64::MAX).await;
        self.truncate(ring, len).await
    }

    /// Prepares space. The file reaches at least to `offset + len` afterwards. With `Off` and
    /// `Full` no other writer may write past its end meanwhile. Errors: `EOPNOTSUPP` where the file
    /// system cannot reserve; `EINVAL` for `Full` below the end of the file, since it would
    /// overwrite; `ENOSPC`, `EROFS`, …
    pub(crate) async fn preallocate(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
        mode: Preallocation,
    ) -> Result<(), Errno> {
        self.check_writable()?;
        let end = end_of(offset, len)?;
        if self.kind == Kind::BlockDevice {
            // All its bytes exist.
            return if end <= self.ask_len(ring).await? { Ok(()) } else { Err(Errno::NOSPC) };
        }
        if mode == Preallocation::Full && offset < self.ask_len(ring).await? {
            return Err(Errno::INVAL);
        }
        let pass = self.pass(offset, u64::MAX).await;
        if mode != Preallocation::Off && len > 0 {
            match self.fallocate(ring, FallocateFlags::empty(), offset, len).await {
                Err(Errno::OPNOTSUPP) if mode == Preallocation::Full => {}
                other => other?,
            }
            self.ask_len(ring).await?;
        }
        // The other modes make it longer without setting its length: others may have written past
        // it.
        if mode == Preallocation::Off {
            self.grow_to(ring, end).await?;
        }
        // The writes below take passes of their own; waiting for one while holding another can
        // deadlock.
        drop(pass);
        if mode == Preallocation::Full {
            self.write_zero_bytes(ring, offset, end).await?;
        }
        Ok(())
    }

    /// Whether bytes at `offset` are data or a hole, and for how many bytes (at most `len`). At or
    /// past the end: a hole of 0 bytes. Storage that cannot tell holes (block devices, some file
    /// systems) counts as data.
    pub(crate) async fn allocation(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
    ) -> Result<(Allocation, u64), Errno> {
        let mut end = offset.saturating_add(len).min(self.len());
        if offset.saturating_add(len) > end {
            end = offset.saturating_add(len).min(self.ask_len(ring).await?);
        }
        if offset >= end {
            return Ok((Allocation::Hole, 0));
        }
        if self.kind == Kind::BlockDevice {
            return Ok((Allocation::Data, end - offset));
        }
        let owner = Arc::clone(&self.owner);
        let (allocation, stop) = ring.offload(move || extent(&owner, offset, end)).await?;
        Ok((allocation, stop.clamp(offset + 1, end) - offset))
    }

    pub(crate) async fn pass(&self, start: u64, end: u64) -> Option<Pass<'_>> {
        match &self.gate {
            None => None,
            Some(gate) => Some(gate.shared(start, end).await),
        }
    }

    pub(crate) async fn fallocate(
        &self,
        ring: &Ring,
        mode: FallocateFlags,
        offset: u64,
        len: u64,
    ) -> Result<(), Errno> {
        let mode = mode.bits().cast_signed();
        let mut retry = Retry::default();
        loop {
            match self.change(once(ring.fallocate(self.fd, mode, offset, len))).await {
                Ok(_) => return Ok(()),
                Err(errno) if retry.after(ring, errno).await => {}
                // ENODEV: a file system without fallocate on this kind of file; ENOSYS: none.
                Err(Errno::NODEV | Errno::NOSYS) => return Err(Errno::OPNOTSUPP),
                Err(errno) => return Err(errno),
            }
        }
    }
}

/// The run at `offset`, which is inside the file, and where it ends. Blocks.
fn extent(file: &OwnedFd, offset: u64, end: u64) -> Result<(Allocation, u64), Errno> {
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) if data > offset => Ok((Allocation::Hole, data)),
        Ok(_) => match rustix::fs::seek(file, SeekFrom::Hole(offset)) {
            // Another process punched a hole between the two calls: the next call reports it.
            Ok(hole) => Ok((Allocation::Data, hole.max(offset + 1))),
            Err(_) => Ok((Allocation::Data, end)),
        },
        // No data up to the end, or the file was cut.
        Err(Errno::NXIO) => Ok((Allocation::Hole, end)),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok((Allocation::Data, end)),
        Err(errno) => Err(errno),
    }
}
