//! Copies of a conversion that the file system does (`-C`): by reference where it can.
//!
//! Promises: what is copied so holds the same bytes as a copy by reading and writing; where the
//! file system cannot do it, the caller does. Only bytes that are stored as they are, into a raw
//! target. Source: copy_file_range(2).

use std::os::fd::OwnedFd;

use ringdisk_qcow2::{Bytes, GuestOffset, HostOffset};
use rustix::fs::copy_file_range;

use super::Conversion;
use crate::Format;

/// The bytes of a target before this one are never copied so: the check of a raw image's first
/// sector has to see them.
const HEAD: GuestOffset = GuestOffset(4096);

impl Conversion<'_> {
    /// Lets the file system copy a range. Returns the number of bytes, from `offset` on, that are
    /// in the target; 0 where it cannot.
    pub(super) async fn copy_range(&self, offset: GuestOffset, len: Bytes) -> Bytes {
        if !self.options.copy_range || self.packing.is_some() || offset < HEAD {
            return Bytes::ZERO;
        }
        if self.is_range_refused.get() {
            return Bytes::ZERO;
        }
        let Some((from, len)) = self.place_of_source(offset, len).await else {
            return Bytes::ZERO;
        };
        let Some(to) = self.place_in_target(offset, len).await else { return Bytes::ZERO };
        let copied = self.ring.offload(move || copy(from, to, len)).await;
        if copied.is_zero() {
            // The file system would refuse the rest too.
            self.is_range_refused.set(true);
        }
        self.report.borrow_mut().written_bytes += copied;
        copied
    }

    /// Where a range of the source begins, and how much of it is there.
    async fn place_of_source(&self, offset: GuestOffset, len: Bytes) -> Option<(Place, Bytes)> {
        let (disk, at) = self.source.disk_of(offset, len)?;
        let status = disk.block_status(self.ring, at.0, len).await.ok()?;
        let host = status.offset.filter(|_| status.data && !status.zero && !status.compressed)?;
        let layers = disk.layers();
        let layer = layers.get(usize::try_from(status.depth).ok()?)?;
        let file = layer.data_storage()?.duplicate().ok()??;
        Some((Place { file, at: HostOffset(host) }, status.len.min(len)))
    }

    async fn place_in_target(&self, offset: GuestOffset, len: Bytes) -> Option<Place> {
        let layers = self.target.layers();
        let top = layers.first().filter(|top| top.format() == Some(Format::Raw))?;
        let status = self.target.block_status(self.ring, offset.0, len).await.ok()?;
        let file = top.data_storage()?.duplicate().ok()??;
        // A raw image has its bytes in one piece.
        Some(Place { file, at: HostOffset(status.offset?) })
    }
}

/// A file, and an offset in it.
struct Place {
    file: OwnedFd,
    at: HostOffset,
}

/// Copies as much as it can.
fn copy(from: Place, to: Place, len: Bytes) -> Bytes {
    let (HostOffset(mut from_at), HostOffset(mut to_at)) = (from.at, to.at);
    let mut done = Bytes::ZERO;
    while done < len {
        let left = usize::try_from(len - done).unwrap_or(usize::MAX);
        match copy_file_range(&from.file, Some(&mut from_at), &to.file, Some(&mut to_at), left) {
            Ok(0) => break,
            Ok(count) => done += Bytes::of(count),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => break,
        }
    }
    done
}
