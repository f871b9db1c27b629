//! Stores data together with the old content around it (copy-on-write).
//!
//! Promises: only what the data does not cover is read; what is before and behind is read at the
//! same time; small pieces are written in one operation together with the data, large ones beside
//! it; when one part fails the others are waited for.

use futures_util::future::{join, join3};
use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use super::below::Below;
use super::group::Piece;
use super::scratch::Scratch;
use crate::run::ExtentKind;
use crate::units::{Bytes, GuestOffset};

/// Up to this many bytes, old content and data are put together in memory and written at once:
/// copying them costs less than another operation.
const MERGE_BYTES: Bytes = Bytes(256 << 10);
/// Longer pieces of zeroes are left to the storage, which may know a quicker way.
const ZEROES_BYTES: Bytes = Bytes(64 << 10);

impl Qcow2 {
    /// Writes `data` and what surrounds it.
    ///
    /// * `from`: where the data begins, in bytes from `piece.base`.
    pub(super) async fn store<B: Below>(
        &self,
        ring: &Ring,
        piece: &Piece,
        from: Bytes,
        data: &IoBuf,
        below: &B,
    ) -> Result<(), Errno> {
        let storage = self.data_storage();
        let len = Bytes::of(data.len());
        let (head, tail) = (piece.head.end - piece.head.start, piece.tail.end - piece.tail.start);
        if head + tail == Bytes::ZERO {
            return storage.write_all(ring, (piece.host + from).0, data).await;
        }
        let total = head + len + tail;
        // Two whole cow parts of a cluster at most; a length of memory.
        let size = |bytes: Bytes| usize::try_from(bytes).map_err(|_| Errno::NOMEM);
        if total <= MERGE_BYTES {
            let scratch = Scratch::take(size(total)?);
            let buf = scratch.buf();
            let before = buf.slice(0..size(head)?);
            let behind = buf.slice(size(head + len)?..size(total)?);
            let (first, second) = join(
                self.read_old(ring, piece.base + piece.head.start, &before, below),
                self.read_old(ring, piece.base + piece.tail.start, &behind, below),
            )
            .await;
            first.and(second)?;
            buf.copy_from_buf(size(head)?, data);
            return storage.write_all(ring, (piece.host + from - head).0, &buf).await;
        }
        let (first, second, third) = join3(
            storage.write_all(ring, (piece.host + from).0, data),
            self.copy_old(ring, piece, piece.head.clone(), below),
            self.copy_old(ring, piece, piece.tail.clone(), below),
        )
        .await;
        first.and(second).and(third)
    }

    /// Copies old content to the new place.
    async fn copy_old<B: Below>(
        &self,
        ring: &Ring,
        piece: &Piece,
        range: std::ops::Range<Bytes>,
        below: &B,
    ) -> Result<(), Errno> {
        let len = range.end - range.start;
        if len == Bytes::ZERO {
            return Ok(());
        }
        let (start, host) = (piece.base + range.start, piece.host + range.start);
        if len > ZEROES_BYTES && self.reads_zero(start, len, below) {
            return self.data_storage().write_zeroes(ring, host.0, len.0, false, true).await;
        }
        // At most a cluster.
        let scratch = Scratch::take(usize::try_from(len).map_err(|_| Errno::NOMEM)?);
        let buf = scratch.buf();
        self.read_old(ring, start, &buf, below).await?;
        self.data_storage().write_all(ring, host.0, &buf).await
    }

    /// Reads what the disk has at `offset`, as the tables say now; past its end are zeroes. The
    /// caller has claimed the clusters.
    pub(super) async fn read_old<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
        below: &B,
    ) -> Result<(), Errno> {
        let left = self.geometry.end().saturating_sub(offset);
        let len = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        if len < buf.len() {
            buf.slice(len..buf.len()).fill(0);
        }
        let mut done = 0;
        while done < len {
            let at = offset + Bytes::of(done);
            let extent = self.map(ring, at, Bytes::of(len - done)).await?;
            // At most what was asked for.
            let end = len.min(done + usize::try_from(extent.len).unwrap_or(len));
            let part = buf.slice(done..end);
            match extent.kind {
                ExtentKind::Data { offset } => {
                    let read = self.data_storage().read(ring, offset.0, &part).await?;
                    part.slice(read..part.len()).fill(0);
                }
                ExtentKind::Zero { .. } => part.fill(0),
                ExtentKind::Compressed(cluster) => {
                    self.read_compressed(ring, cluster, at, &part).await?;
                }
                ExtentKind::Unallocated if below.has_data(at, Bytes::of(part.len())) => {
                    below.read(ring, at, &part).await?;
                }
                ExtentKind::Unallocated => part.fill(0),
            }
            done = end;
        }
        Ok(())
    }

    /// Whether what is not allocated in a range may read as anything but zeroes, now or when the
    /// image is opened with the backing file that it names.
    pub(super) fn may_show<B: Below>(&self, offset: GuestOffset, len: Bytes, below: &B) -> bool {
        let is_hidden = self.info.backing_file.is_some() && !below.is_there();
        is_hidden || below.has_data(offset, len)
    }

    /// Whether a range certainly reads as zeroes, as far as the cache knows, also with the backing
    /// file that the image names.
    pub(super) fn reads_zero<B: Below>(&self, offset: GuestOffset, len: Bytes, below: &B) -> bool {
        let end = offset.saturating_add(len).min(self.geometry.end());
        let mut at = offset;
        while at < end {
            let Ok(Some(extent)) = self.map_cached(at, end - at) else { return false };
            let zero = match extent.kind {
                ExtentKind::Zero { .. } => true,
                ExtentKind::Unallocated => !self.may_show(at, extent.len, below),
                ExtentKind::Data { .. } | ExtentKind::Compressed(_) => false,
            };
            if !zero {
                return false;
            }
            at += extent.len;
        }
        true
    }

    /// Shortens a piece whose place reads as zeroes by what is zeroes anyway.
    pub(super) fn leave_out_zeroes<B: Below>(&self, piece: &mut Piece, below: &B) {
        let (head, tail) = (piece.head.clone(), piece.tail.clone());
        if self.reads_zero(piece.base + head.start, head.end - head.start, below) {
            piece.head = head.end..head.end;
        }
        if self.reads_zero(piece.base + tail.start, tail.end - tail.start, below) {
            piece.tail = tail.start..tail.start;
        }
    }
}
