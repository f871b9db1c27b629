//! Writes to a raw top layer.
//!
//! Promises: a write to the protected first sector is judged and written from one copy, which no
//! client can change meanwhile.

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::Disk;
use crate::layer::Raw;
use crate::layer::guard::{SECTOR_ALIGN, SectorGuard};

impl Disk {
    /// As [`Disk::write`]; the range lies inside the disk.
    pub(super) async fn write_raw(
        &self,
        ring: &Ring,
        raw: &Raw,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        let done = match raw.guard_of(offset) {
            Some(guard) => write_guarded(ring, raw, guard, offset, buf).await?,
            None => raw.storage.write(ring, raw.host(offset).0, buf).await?,
        };
        if self.cache().sync() {
            raw.storage.flush(ring).await?;
        }
        Ok(done)
    }

    /// As [`Disk::discard`]; the range lies inside the disk.
    pub(super) async fn discard_raw(
        &self,
        ring: &Ring,
        raw: &Raw,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<(), Errno> {
        let _turn = raw.pass_guard(ring, offset, len, None).await?;
        raw.storage.discard(ring, raw.host(offset).0, len.0).await
    }

    /// Zeroes a range that lies inside the disk.
    ///
    /// * `fallback`: by writing them if there is no better way.
    pub(super) async fn zero_raw(
        &self,
        ring: &Ring,
        raw: &Raw,
        offset: GuestOffset,
        len: Bytes,
        may_unmap: bool,
        fallback: bool,
    ) -> Result<(), Errno> {
        let _turn = raw.pass_guard(ring, offset, len, None).await?;
        let at = raw.host(offset);
        raw.storage.write_zeroes(ring, at.0, len.0, may_unmap, fallback).await?;
        if self.cache().sync() {
            raw.storage.flush(ring).await?;
        }
        Ok(())
    }
}

/// Bytes at the beginning of a write through the guard that are copied: the first sector, and as
/// much as a device that writes whole blocks takes at once.
const COPIED: usize = 64 << 10;

/// Writes what touches the protected sector.
///
/// `buf` may be memory of a guest or of a client, who can change it while it is judged and again
/// before the kernel reads it. So what the guard judges is a copy, and the copy is what is written.
async fn write_guarded(
    ring: &Ring,
    raw: &Raw,
    guard: &SectorGuard,
    offset: GuestOffset,
    buf: &IoBuf,
) -> Result<usize, Errno> {
    let copied = buf.len().min(COPIED);
    let copy = IoBuf::new(copied, SECTOR_ALIGN);
    copy.copy_from_buf(0, &buf.slice(0..copied));
    let at = raw.host(offset);
    let _turn = guard.admit(ring, &raw.storage, at, Bytes::of(copied), Some(&copy)).await?;
    let done = raw.storage.write(ring, at.0, &copy).await?;
    if done < copied || copied == buf.len() {
        return Ok(done);
    }
    // An error after some progress: the caller asks for the rest again, and sees it then.
    let rest =
        raw.storage.write(ring, (at + Bytes::of(copied)).0, &buf.slice(copied..buf.len())).await;
    Ok(done + rest.unwrap_or(0))
}
