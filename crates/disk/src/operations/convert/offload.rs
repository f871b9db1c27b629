//! Copies of a conversion that the file system does (`-C`): by reference where it can.
//!
//! Promises: what is copied so holds the same bytes as a copy by reading and writing; where the
//! file system cannot do it, the caller does. Only bytes that are stored as they are, into a raw
//! target. Source: copy_file_range(2).

use ringdisk_qcow2::Bytes;
use std::os::fd::OwnedFd;

use rustix::fs::copy_file_range;

use super::Conversion;
use crate::Format;

/// The first bytes of a target are never copied so: the check of a raw image's first sector has to
/// see them.
const HEAD_BYTES: u64 = 4096;

impl Conversion<'_> {
    /// Lets the file system copy a range. Returns the number of bytes, from `offset` on, that are
    /// in the target; 0 where it cannot.
    pub(super) async fn copy_range(&self, offset: u64, len: u64) -> u64 {
        if !self.options.copy_range || self.packing.is_some() || offset < HEAD_BYTES {
            return 0;
        }
        if self.is_range_refused.get() {
            return 0;
        }
        let Some((from, from_at, len)) = self.place_of_source(offset, len).await else { return 0 };
        let Some((to, to_at)) = self.place_in_target(offset, len).await else { return 0 };
        let copied = self.ring.offload(move || copy((&from, from_at), (&to, to_at), len)).await;
        if copied == 0 {
            // The file system would refuse the rest too.
            self.is_range_refused.set(true);
        }
        self.report.borrow_mut().written_bytes += Bytes(copied);
        copied
    }

    /// The file and the offset where a range of the source begins, and how much of it is there.
    async fn place_of_source(&self, offset: u64, len: u64) -> Option<(OwnedFd, u64, u64)> {
        let (disk, at) = self.source.disk_of(offset, len)?;
        let status = disk.block_status(self.ring, at, Bytes(len)).await.ok()?;
        let host = status.offset.filter(|_| status.data && !status.zero && !status.compressed)?;
        let layers = disk.layers();
        let layer = layers.get(usize::try_from(status.depth).ok()?)?;
        let file = layer.data_storage()?.duplicate().ok()??;
        Some((file, host, status.len.min(Bytes(len)).0))
    }

    async fn place_in_target(&self, offset: u64, len: u64) -> Option<(OwnedFd, u64)> {
        let layers = self.target.layers();
        let top = layers.first().filter(|top| top.format() == Some(Format::Raw))?;
        let status = self.target.block_status(self.ring, offset, Bytes(len)).await.ok()?;
        let file = top.data_storage()?.duplicate().ok()??;
        // A raw image has its bytes in one piece.
        Some((file, status.offset?))
    }
}

/// Copies as much as it can.
fn copy((from, from_at): (&OwnedFd, u64), (to, to_at): (&OwnedFd, u64), len: u64) -> u64 {
    let (mut from_at, mut to_at) = (from_at, to_at);
    let mut done = 0;
    while done < len {
        let left = usize::try_from(len - done).unwrap_or(usize::MAX);
        match copy_file_range(from, Some(&mut from_at), to, Some(&mut to_at), left) {
            Ok(0) => break,
            Ok(count) => done += count as u64,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    done
}
