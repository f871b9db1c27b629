//! Writing, flushing, giving space back, changing the size.
//!
//! Promises: a write takes no lock and allocates nothing (exception: the first sector of a probed
//! raw image); nothing here grows a disk but [`Disk::resize`] and [`Disk::grow`]; a flush reaches
//! the device unless the user asked for [`Cache::Unsafe`].

use std::sync::atomic::Ordering;

use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Kind as StorageKind;

use crate::guard::SectorGuard;
use crate::layer::{Node, Raw};
use crate::{Cache, Disk};

impl Disk {
    /// Writes `buf`; cut at the end of the disk, 0 at and past it. Less than asked means that an
    /// error came after some progress; write the rest again to see it.
    ///
    /// * `offset`: bytes; any alignment.
    ///
    /// Errors: EROFS for a read-only disk; EPERM for a write that would change the format of a
    /// probed raw image; those of the storage.
    pub async fn write(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let len = self.clip(offset, buf.len());
        let Some(raw) = self.writable()? else {
            self.null_delay(ring).await;
            return Ok(len);
        };
        if len == 0 {
            return Ok(0);
        }
        let buf = buf.slice(0..len);
        let done = match self.guard() {
            Some(guard) if SectorGuard::covers(offset) => {
                let _pass = guard.enter(ring, raw, offset, len as u64, Some(&buf)).await?;
                raw.storage.write(ring, raw.offset + offset, &buf).await?
            }
            _ => raw.storage.write(ring, raw.offset + offset, &buf).await?,
        };
        if self.cache() == Cache::Writethrough {
            raw.storage.flush(ring).await?;
        }
        Ok(done)
    }

    /// Makes completed writes durable. Does nothing on a read-only disk and with
    /// [`Cache::Unsafe`].
    ///
    /// Errors: those of the storage.
    pub async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        match &self.top().node {
            Node::Null(null) => null.delay(ring).await,
            Node::Raw(raw) if !self.is_read_only() && self.cache() != Cache::Unsafe => {
                raw.storage.flush(ring).await?;
            }
            Node::Raw(_) | Node::Qcow2(_) => {}
        }
        Ok(())
    }

    /// Gives space back to the storage. On a regular file the range reads as zeroes afterwards; on
    /// a block device it reads as anything. [`Disk::punch`] promises zeroes everywhere.
    ///
    /// * `offset`, `len`: bytes; what lies past the end of the disk is ignored.
    ///
    /// Errors: EOPNOTSUPP where the storage cannot (null: always); EROFS; EPERM as
    /// [`Disk::write`].
    pub async fn discard(&self, ring: &Ring, offset: u64, len: u64) -> Result<(), Errno> {
        let Some(raw) = self.writable()? else {
            return Err(Errno::OPNOTSUPP);
        };
        let len = self.clip_range(offset, len);
        if len == 0 {
            return Ok(());
        }
        let _pass = self.enter_guard(ring, raw, offset, len).await?;
        raw.storage.discard(ring, raw.offset + offset, len).await
    }

    /// Punches a hole: the range reads as zeroes and its space is given back. Never writes zeroes.
    ///
    /// * `offset`, `len`: bytes; what lies past the end of the disk is ignored.
    ///
    /// Errors: EOPNOTSUPP where the storage cannot (null: always); EROFS; EPERM as
    /// [`Disk::write`].
    pub async fn punch(&self, ring: &Ring, offset: u64, len: u64) -> Result<(), Errno> {
        let Some(raw) = self.writable()? else {
            return Err(Errno::OPNOTSUPP);
        };
        let len = self.clip_range(offset, len);
        self.zero(ring, raw, offset, len, true, false).await
    }

    /// Makes a range read as zeroes, by writing them where the storage has no better way.
    ///
    /// * `offset`, `len`: bytes; what lies past the end of the disk is ignored.
    /// * `may_unmap`: the space may be given back.
    ///
    /// Errors: EROFS; EPERM as [`Disk::write`]; those of the storage.
    pub async fn write_zeroes(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
        may_unmap: bool,
    ) -> Result<(), Errno> {
        let Some(raw) = self.writable()? else {
            self.null_delay(ring).await;
            return Ok(());
        };
        let len = self.clip_range(offset, len);
        self.zero(ring, raw, offset, len, may_unmap, true).await
    }

    /// Changes the size; a grown part reads as zeroes. Concurrent changes take turns.
    ///
    /// * `size`: bytes.
    ///
    /// Errors: EOPNOTSUPP where the size is fixed (null, qcow2, a block device, a window of given
    /// size); EROFS; those of the storage (EFBIG, ENOSPC).
    pub async fn resize(&self, ring: &Ring, size: u64) -> Result<(), Errno> {
        self.change_size(ring, size, false).await
    }

    /// Makes the disk at least `size` bytes long; never shrinks it. For writes past the end: those
    /// that come at once grow to the largest end, in any order.
    ///
    /// Errors: as [`Disk::resize`].
    pub async fn grow(&self, ring: &Ring, size: u64) -> Result<(), Errno> {
        if size <= self.size() {
            return Ok(());
        }
        self.change_size(ring, size, true).await
    }

    async fn change_size(&self, ring: &Ring, size: u64, grow_only: bool) -> Result<(), Errno> {
        let raw = self.writable()?.ok_or(Errno::OPNOTSUPP)?;
        if !self.can_resize() {
            return Err(Errno::OPNOTSUPP);
        }
        let end = raw.offset.checked_add(size).ok_or(Errno::FBIG)?;
        if i64::try_from(end).is_err() {
            return Err(Errno::FBIG);
        }
        let _pass = self.resizing().enter().await;
        let before = self.size();
        if grow_only && size <= before {
            return Ok(());
        }
        // Requests never see a size that the storage does not have: smaller first, larger last.
        let known = &self.top().size;
        known.store(size.min(before), Ordering::Release);
        if let Err(errno) = raw.storage.set_len(ring, end).await {
            known.store(before, Ordering::Release);
            return Err(errno);
        }
        known.store(size, Ordering::Release);
        if size != before {
            self.watchers().notify(size);
        }
        Ok(())
    }

    /// The raw top layer of a writable disk; `None` for null.
    fn writable(&self) -> Result<Option<&Raw>, Errno> {
        match &self.top().node {
            Node::Raw(raw) if !self.is_read_only() => Ok(Some(raw)),
            Node::Null(_) => Ok(None),
            Node::Raw(_) | Node::Qcow2(_) => Err(Errno::ROFS),
        }
    }

    async fn null_delay(&self, ring: &Ring) {
        if let Node::Null(null) = &self.top().node {
            null.delay(ring).await;
        }
    }

    /// Zeroes a range that lies inside the disk.
    async fn zero(
        &self,
        ring: &Ring,
        raw: &Raw,
        offset: u64,
        len: u64,
        may_unmap: bool,
        fallback: bool,
    ) -> Result<(), Errno> {
        if len == 0 {
            return Ok(());
        }
        let _pass = self.enter_guard(ring, raw, offset, len).await?;
        let at = raw.offset + offset;
        raw.storage.write_zeroes(ring, at, len, may_unmap, fallback).await?;
        if self.cache() == Cache::Writethrough {
            raw.storage.flush(ring).await?;
        }
        Ok(())
    }

    /// Passes the guard of the first sector with zeroes, where there is one.
    async fn enter_guard(
        &self,
        ring: &Ring,
        raw: &Raw,
        offset: u64,
        len: u64,
    ) -> Result<Option<crate::gate::Pass<'_>>, Errno> {
        match self.guard() {
            Some(guard) if SectorGuard::covers(offset) => {
                Ok(Some(guard.enter(ring, raw, offset, len, None).await?))
            }
            _ => Ok(None),
        }
    }
}

/// Whether a raw node can change its size.
pub(crate) fn resizable(raw: &Raw) -> bool {
    !raw.fixed_size && raw.storage.kind() != StorageKind::BlockDevice
}
