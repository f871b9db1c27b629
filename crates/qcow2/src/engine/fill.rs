//! Brings content of the backing chain up into the image, where the image has nothing of its own.
//!
//! Promises: a write of a client is never overwritten, whenever it came: what is unallocated is
//! looked for under the claim that every write to a new cluster needs, and is written under it. The
//! disk shows the same bytes before and after, so no bitmap records anything.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use super::below::Below;
use super::space::ALIGN;
use super::write::Chunk;
use super::zero::{PIECE_BYTES, Space};
use crate::run::ExtentKind;
use crate::units::{Bytes, GuestOffset};

/// A backing chain of which nothing is taken to be zeroes: part of it is about to go away, and may
/// hide data of the rest.
struct Uncertain<'a, B>(&'a B);

impl<B: Below> Below for Uncertain<'_, B> {
    async fn read(&self, ring: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        self.0.read(ring, offset, buf).await
    }

    fn has_data(&self, _offset: GuestOffset, _len: Bytes) -> bool {
        true
    }
}

impl Qcow2 {
    /// Writes those parts of `buf` for which the image has nothing of its own. Returns how many
    /// bytes that were.
    ///
    /// * `offset`: byte offset on the disk, any alignment; cut at the end of the disk.
    /// * `buf`: what the backing chain has there; memory of this process.
    /// * `below`: the backing chain, for the rest of clusters that are covered in part.
    ///
    /// Errors: as [`write`](Qcow2::write); a part may have been written.
    pub async fn write_unallocated<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
        below: &B,
    ) -> Result<Bytes, Errno> {
        let left = self.geometry.end().saturating_sub(offset);
        let len = left.min(Bytes::of(buf.len()));
        self.begin_write(ring).await?;
        self.check_sound()?;
        let (mut at, mut written) = (offset, Bytes::ZERO);
        while at < offset + len {
            let chunk = self.chunk_at(at, offset + len);
            let _claim = self.claim_chunk(chunk).await?;
            while let Some((start, end)) = self.next_unallocated(ring, at, chunk.end).await? {
                let part = Chunk { start, end, ..chunk };
                let inside = |at: GuestOffset| usize::try_from(at - offset).unwrap_or(usize::MAX);
                let data = buf.slice(inside(start)..inside(end));
                // Less than asked: an error came after some progress, and shows now.
                let done = Bytes::of(self.write_claimed(ring, part, &data, below).await?);
                written += done;
                at = start + done;
            }
            at = chunk.end;
        }
        Ok(written)
    }

    /// Makes those parts of a range read as zeroes for which the image has nothing of its own,
    /// whatever is below it later.
    ///
    /// * `offset`, `len`: bytes, any alignment; cut at the end of the disk.
    /// * `below`: the backing chain, for the rest of clusters that are covered in part.
    ///
    /// Errors: as [`write`](Qcow2::write); a part may have been zeroed.
    pub async fn zero_unallocated<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
        below: &B,
    ) -> Result<(), Errno> {
        let end = offset + len.min(self.geometry.end().saturating_sub(offset));
        self.begin_write(ring).await?;
        self.check_sound()?;
        let below = Uncertain(below);
        let mut at = offset;
        while at < end {
            let chunk = self.chunk_at(at, end);
            let _claim = self.claim_chunk(chunk).await?;
            while let Some((start, end)) = self.next_unallocated(ring, at, chunk.end).await? {
                at = self.zero_free(ring, Chunk { start, end, ..chunk }, &below).await?;
            }
            at = chunk.end;
        }
        Ok(())
    }

    /// Zeroes the beginning of a claimed, unallocated range. Returns where it stopped.
    async fn zero_free<B: Below>(
        &self,
        ring: &Ring,
        chunk: Chunk,
        below: &B,
    ) -> Result<GuestOffset, Errno> {
        let Chunk { start, end, .. } = chunk;
        let unit = self.geometry.zero_unit();
        let last = if end == self.geometry.end() { end } else { end.align_down(unit) };
        let first = start.next_multiple_of(unit);
        if first > start || last <= start {
            let end = end.min(if first > start { first } else { end });
            return self.write_zeroes_claimed(ring, Chunk { end, ..chunk }, below).await;
        }
        let whole = Chunk { end: last, ..chunk };
        let (stop, by_hand) = self.clear_claimed(ring, whole, Space::Free, below).await?;
        for (start, end) in by_hand {
            let mut rest = Chunk { start, end, ..chunk };
            while rest.start < end {
                rest.start = self.write_zeroes_claimed(ring, rest, below).await?;
            }
        }
        Ok(stop)
    }

    /// Writes zeroes to the beginning of a claimed range. Returns where it stopped.
    async fn write_zeroes_claimed<B: Below>(
        &self,
        ring: &Ring,
        chunk: Chunk,
        below: &B,
    ) -> Result<GuestOffset, Errno> {
        let end = chunk.end.min(chunk.start + PIECE_BYTES);
        // At most PIECE_BYTES.
        let len = usize::try_from(end - chunk.start).map_err(|_| Errno::NOMEM)?;
        let zeroes = IoBuf::new(len, ALIGN);
        let done = self.write_claimed(ring, Chunk { end, ..chunk }, &zeroes, below).await?;
        Ok(chunk.start + Bytes::of(done))
    }

    /// The beginning of a range, up to the end of its slice.
    fn chunk_at(&self, start: GuestOffset, end: GuestOffset) -> Chunk {
        let slice = self.geometry.slice(start);
        Chunk { slice, start, end: end.min(self.geometry.slice_end(slice)) }
    }

    async fn claim_chunk(
        &self,
        chunk: Chunk,
    ) -> Result<crate::concurrent::registry::Claim<'_>, Errno> {
        let bits = self.geometry.cluster_bits;
        let (first, last) = (chunk.start >> bits, (chunk.end - Bytes(1)) >> bits);
        Ok(self.engine()?.clusters.claim(first.0, last.0 + 1).await)
    }

    /// The next range from `at` on of which the image has nothing. The caller has claimed it.
    async fn next_unallocated(
        &self,
        ring: &Ring,
        mut at: GuestOffset,
        end: GuestOffset,
    ) -> Result<Option<(GuestOffset, GuestOffset)>, Errno> {
        while at < end {
            let extent = self.map(ring, at, end - at).await?;
            let stop = end.min(at + extent.len);
            if matches!(extent.kind, ExtentKind::Unallocated) {
                return Ok(Some((at, stop)));
            }
            at = stop;
        }
        Ok(None)
    }
}
