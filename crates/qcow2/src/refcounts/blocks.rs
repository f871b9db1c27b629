//! Refcount blocks in memory: loaded, changed, written, dropped.
//!
//! Promises: a block with changes that are not written, or that is being written, stays in memory.
//! A block that the present call asked for stays until a call has finished, so loading and calling
//! again always ends.

use std::cell::Cell;
use std::ops::Range;

use super::{Blocked, Refcounts, Run};
use crate::limits::REFCOUNT_CACHE_BYTES;
use crate::units::{Bytes, HostOffset};

/// Unit in which a changed block is written: a page suits O_DIRECT everywhere.
const PIECE_BYTES: usize = 4096;

/// A block in memory.
pub(super) struct Block {
    /// As on disk.
    pub(super) bytes: Box<[u8]>,
    /// Bytes that were changed since they were last given out for writing; empty: clean.
    changed: Range<usize>,
    /// Writes in flight.
    writing: u32,
    /// Not on disk yet: it is written as a whole.
    is_new: bool,
    /// When it was last used.
    used: Cell<u64>,
}

/// What to write, in this order: the blocks, a barrier, the table.
#[derive(Debug)]
pub(crate) struct DirtyRefcounts {
    /// Changed parts of blocks.
    pub(crate) blocks: Vec<DirtyBlock>,
    /// What to write of the table.
    pub(crate) table: DirtyTable,
}

/// The changed part of a refcount block, in units of 4 KiB (or a cluster where that is less).
#[derive(Debug)]
pub(crate) struct DirtyBlock {
    /// Index in the refcount table.
    pub(crate) index: u32,
    /// Where the first byte of `bytes` goes.
    pub(crate) offset: HostOffset,
    /// As they are on disk.
    pub(crate) bytes: Vec<u8>,
}

/// What to write of the refcount table.
#[derive(Debug)]
pub(crate) enum DirtyTable {
    /// Nothing.
    None,
    /// Entries: index and host offset.
    Entries(Vec<(u32, HostOffset)>),
    /// All of it at a new place, which the header must name before `old` is decremented.
    Whole {
        /// The new place.
        offset: HostOffset,
        /// `clusters` clusters.
        bytes: Vec<u8>,
        /// For the header.
        clusters: u64,
        /// Where the table was.
        old: Run,
    },
}

impl Refcounts {
    /// The block with this index, marked as used; `None` when the table has none.
    pub(super) fn cached_block(&self, index: u64) -> Result<Option<&Block>, Blocked> {
        // Below the length of the table where it matters.
        let slot = usize::try_from(index).unwrap_or(usize::MAX);
        match self.blocks.get(slot) {
            Some(Some(block)) => {
                block.used.set(self.now.get());
                Ok(Some(block))
            }
            Some(None) if self.table[slot] != HostOffset(0) => {
                // The table has at most 2^20 entries.
                Err(Blocked::Load(u32::try_from(index).unwrap_or(u32::MAX)))
            }
            _ => Ok(None),
        }
    }

    /// How to go on where the table has no block.
    pub(super) fn missing(&self, index: u64) -> Blocked {
        match u32::try_from(index) {
            Ok(index) if u64::from(index) < Refcounts::table_entries_max() => {
                Blocked::Create(index)
            }
            _ => Blocked::Full,
        }
    }

    /// Host offset of a block.
    pub(crate) fn block_offset(&self, index: u32) -> Option<HostOffset> {
        self.table.get(index as usize).copied().filter(|offset| *offset != HostOffset(0))
    }

    /// Entries of the table, in memory.
    pub(crate) fn table_len(&self) -> u32 {
        // At most 2^20.
        u32::try_from(self.table.len()).unwrap_or(u32::MAX)
    }

    /// Whether the block with this index is in memory.
    pub(crate) fn has_block(&self, index: u32) -> bool {
        self.blocks.get(index as usize).is_some_and(Option::is_some)
    }

    /// A block that was read from [`block_offset`](Refcounts::block_offset). Ignored when it is
    /// there by now.
    ///
    /// * `bytes`: one cluster.
    pub(crate) fn put_block(&mut self, index: u32, bytes: &[u8]) {
        if bytes.len() != 1 << self.cluster_bits || self.block_offset(index).is_none() {
            return;
        }
        if self.blocks.get(index as usize).is_some_and(Option::is_none) {
            self.keep(index, bytes.into(), false);
            self.evict();
        }
    }

    /// Puts a block into the cache.
    pub(super) fn keep(&mut self, index: u32, bytes: Box<[u8]>, is_new: bool) {
        let used = Cell::new(self.now.get());
        let block = Block { bytes, changed: 0..0, writing: 0, is_new, used };
        if let Some(slot) = self.blocks.get_mut(index as usize) {
            self.cached += usize::from(slot.is_none());
            *slot = Some(Box::new(block));
        }
    }

    /// Changes the counts `entries` of a block; nothing happens when it is not in memory.
    pub(super) fn edit(
        &mut self,
        index: u64,
        entries: Range<usize>,
        change: impl FnOnce(&mut [u8]),
    ) {
        let slot = usize::try_from(index).unwrap_or(usize::MAX);
        let Some(Some(block)) = self.blocks.get_mut(slot) else { return };
        change(&mut block.bytes);
        block.used.set(self.now.get());
        let (start, end) = self.width.bytes_of(entries.start, entries.end);
        if block.changed.is_empty() {
            block.changed = start..end;
            // At most 2^20.
            self.dirty.push(u32::try_from(index).unwrap_or(u32::MAX));
        } else {
            block.changed = block.changed.start.min(start)..block.changed.end.max(end);
        }
    }

    /// Drops clean blocks down to 7/8 of the cap when it is exceeded, oldest use first.
    fn evict(&mut self) {
        let cap = (REFCOUNT_CACHE_BYTES >> self.cluster_bits).max(2);
        if self.cached <= cap {
            return;
        }
        let now = self.now.get();
        let mut clean: Vec<(u64, usize)> = Vec::new();
        for (index, slot) in self.blocks.iter().enumerate() {
            if let Some(block) = slot
                && block.changed.is_empty()
                && block.writing == 0
                && block.used.get() != now
            {
                clean.push((block.used.get(), index));
            }
        }
        let surplus = (self.cached - (cap - cap / 8)).min(clean.len());
        if surplus < clean.len() {
            clean.select_nth_unstable(surplus);
        }
        for (_, index) in &clean[..surplus] {
            self.blocks[*index] = None;
            self.cached -= 1;
        }
    }

    /// Whether [`take_dirty`](Refcounts::take_dirty) would give anything.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.dirty_entries.is_empty() || self.moved_from.is_some()
    }

    /// Blocks to write.
    pub(crate) fn dirty_blocks(&self) -> &[u32] {
        &self.dirty
    }

    /// Makes a block dirty that has not changed.
    ///
    /// Errors: `Load`.
    pub(crate) fn touch_block(&mut self, index: u32) -> Result<(), Blocked> {
        if self.cached_block(u64::from(index))?.is_some() {
            self.write_whole(index);
        }
        Ok(())
    }

    /// The next write of a block is one of all of it.
    pub(super) fn write_whole(&mut self, index: u32) {
        if let Some(Some(block)) = self.blocks.get_mut(index as usize) {
            block.is_new = true;
        }
        self.edit(u64::from(index), 0..1, |_| ());
    }

    /// Everything that is to be written. It counts as being written until
    /// [`written`](Refcounts::written). Entries for which the table on disk is too short are left
    /// out: [`table_wants`](Refcounts::table_wants) comes first.
    pub(crate) fn take_dirty(&mut self) -> DirtyRefcounts {
        let mut dirty = self.take_dirty_blocks();
        dirty.table = self.take_table();
        dirty
    }

    /// As [`take_dirty`](Refcounts::take_dirty), but what changed of the table stays to be written:
    /// for a caller that writes blocks on the way, and the table as a whole in the end.
    pub(crate) fn take_dirty_blocks(&mut self) -> DirtyRefcounts {
        let cluster_size = 1usize << self.cluster_bits;
        let piece = PIECE_BYTES.min(cluster_size);
        let mut blocks = Vec::with_capacity(self.dirty.len());
        for index in std::mem::take(&mut self.dirty) {
            let Some(offset) = self.block_offset(index) else { continue };
            let Some(Some(block)) = self.blocks.get_mut(index as usize) else { continue };
            let changed = std::mem::replace(&mut block.changed, 0..0);
            let range = if block.is_new {
                0..cluster_size
            } else {
                changed.start / piece * piece..changed.end.next_multiple_of(piece)
            };
            block.writing += 1;
            blocks.push(DirtyBlock {
                index,
                offset: offset + Bytes::of(range.start),
                bytes: block.bytes[range].to_vec(),
            });
        }
        DirtyRefcounts { blocks, table: DirtyTable::None }
    }

    fn take_table(&mut self) -> DirtyTable {
        if let Some(old) = self.moved_from.take() {
            self.dirty_entries.clear();
            let mut bytes = Vec::with_capacity(self.table_capacity() * 8);
            for offset in self.table.iter().take(self.table_capacity()) {
                bytes.extend_from_slice(&offset.0.to_be_bytes());
            }
            bytes.resize(self.table_capacity() * 8, 0);
            return DirtyTable::Whole {
                offset: self.table_run.start << self.cluster_bits,
                bytes,
                clusters: self.table_run.count,
                old,
            };
        }
        let capacity = self.table_capacity();
        let table = &self.table;
        let mut entries = Vec::new();
        self.dirty_entries.retain(|index| {
            let fits = (*index as usize) < capacity;
            if fits {
                entries.push((*index, table[*index as usize]));
            }
            !fits
        });
        if entries.is_empty() { DirtyTable::None } else { DirtyTable::Entries(entries) }
    }

    /// Entries that the table has room for on disk.
    pub(super) fn table_capacity(&self) -> usize {
        // At most 2^20.
        usize::try_from((self.table_run.count << self.cluster_bits) / 8).unwrap_or(0)
    }

    /// What [`take_dirty`](Refcounts::take_dirty) gave was written, or not.
    ///
    /// * `ok`: false makes it dirty again.
    pub(crate) fn written(&mut self, dirty: &DirtyRefcounts, ok: bool) {
        for written in &dirty.blocks {
            let Some(Some(block)) = self.blocks.get_mut(written.index as usize) else { continue };
            block.writing = block.writing.saturating_sub(1);
            if ok {
                block.is_new = false;
                continue;
            }
            let offset = self.table.get(written.index as usize).copied().unwrap_or_default();
            let start = usize::try_from(written.offset.saturating_sub(offset)).unwrap_or(0);
            let range = start..(start + written.bytes.len()).min(block.bytes.len());
            if block.changed.is_empty() {
                self.dirty.push(written.index);
                block.changed = range;
            } else {
                block.changed =
                    block.changed.start.min(range.start)..block.changed.end.max(range.end);
            }
        }
        match &dirty.table {
            DirtyTable::None => {}
            DirtyTable::Entries(entries) if !ok => {
                self.dirty_entries.extend(entries.iter().map(|(index, _)| *index));
            }
            DirtyTable::Entries(_) => {}
            DirtyTable::Whole { old, .. } if !ok => {
                // Unless it moved once more in the meantime.
                self.moved_from.get_or_insert(*old);
            }
            DirtyTable::Whole { old, .. } => self.unmark_metadata(old.start, old.count),
        }
    }
}
