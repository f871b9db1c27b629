//! The disks that a conversion reads, one behind the other.
//!
//! Promises: a disk begins at a sector of the whole; what is between the end of one and the next
//! sector reads as zeroes.

use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::name;
use crate::limits::SECTOR_BYTES;
use crate::{BlockStatus, Disk};

/// One disk of several, and where it begins.
struct Part<'a> {
    disk: &'a Disk,
    start: GuestOffset,
    /// Up to the start of the next one.
    len: Bytes,
}

impl Part<'_> {
    /// The place on this disk of a byte of the whole.
    fn place(&self, offset: GuestOffset) -> GuestOffset {
        GuestOffset::after(offset - self.start)
    }

    /// The end of this disk.
    fn end(&self) -> GuestOffset {
        GuestOffset::after(self.disk.size())
    }
}

/// What is read.
pub(super) struct Sources<'a>(Vec<Part<'a>>);

impl<'a> Sources<'a> {
    pub(super) fn new(disks: &'a [Arc<Disk>]) -> Sources<'a> {
        let mut start = GuestOffset::ZERO;
        let last = disks.len().saturating_sub(1);
        let parts = disks.iter().enumerate().map(|(number, disk)| {
            let size = disk.size();
            let len = if number == last { size } else { size.next_multiple_of(SECTOR_BYTES) };
            let part = Part { disk, start, len };
            start = start.saturating_add(len);
            part
        });
        Sources(parts.collect())
    }

    /// Bytes of all.
    pub(super) fn size(&self) -> Bytes {
        self.0.last().map_or(Bytes::ZERO, |part| part.start.saturating_add(part.len).from_start())
    }

    /// The names, for messages.
    pub(super) fn names(&self) -> String {
        self.0.iter().map(|part| name(part.disk)).collect::<Vec<_>>().join("', '")
    }

    /// The name of the disk at an offset of the whole, and the offset in it.
    pub(super) fn place(&self, offset: GuestOffset) -> (String, GuestOffset) {
        match self.part(offset) {
            None => (String::new(), offset),
            Some(part) => (name(part.disk), part.place(offset)),
        }
    }

    fn part(&self, offset: GuestOffset) -> Option<&Part<'a>> {
        let after = self.0.partition_point(|part| part.start <= offset);
        // Of several empty ones that begin here the last.
        self.0.get(after.checked_sub(1)?)
    }

    /// The disk at an offset of the whole, and the offset in it, when it holds the whole range.
    pub(super) fn disk_of(
        &self,
        offset: GuestOffset,
        len: Bytes,
    ) -> Option<(&'a Disk, GuestOffset)> {
        let part = self.part(offset)?;
        let at = part.place(offset);
        (at.checked_add(len)? <= part.end()).then_some((part.disk, at))
    }

    /// As [`Disk::block_status`].
    pub(super) async fn block_status(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<BlockStatus, Errno> {
        let Some(part) = self.part(offset) else { return Err(Errno::INVAL) };
        let at = part.place(offset);
        if at >= part.end() {
            // Up to the next sector.
            let len = len.min(GuestOffset::after(part.len).saturating_sub(at));
            return Ok(BlockStatus { len, ..BlockStatus::EMPTY });
        }
        part.disk.block_status(ring, at.0, len.min(part.end() - at)).await
    }

    /// Fills `buf`; what no disk has is zero.
    pub(super) async fn read(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + Bytes::of(done);
            let Some(part) = self.part(at) else { return Err(Errno::INVAL) };
            let at = part.place(at);
            let left = GuestOffset::after(part.len).saturating_sub(at);
            let left = usize::try_from(left).unwrap_or(usize::MAX);
            let end = done + left.min(buf.len() - done);
            if end == done {
                // Past the end of the last one.
                buf.slice(done..buf.len()).fill(0);
                return Ok(());
            }
            let piece = buf.slice(done..end);
            let held = usize::try_from(part.end().saturating_sub(at)).unwrap_or(usize::MAX);
            let held = piece.slice(0..held.min(piece.len()));
            let count = if held.is_empty() { 0 } else { part.disk.read(ring, at.0, &held).await? };
            // The size of the disk is unchanged, so the read is not short.
            piece.slice(count.min(piece.len())..piece.len()).fill(0);
            done = end;
        }
        Ok(())
    }
}
