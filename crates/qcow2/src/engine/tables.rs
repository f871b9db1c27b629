//! The L2 tables that a write needs: made when there is none, copied when a snapshot shares one.
//!
//! Promises: a table is whole on the storage before the L1 entry names it in memory, so a slice
//! that is loaded from it is right; it takes its space at once; requests for other tables do not
//! wait.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use super::reclaim::is_full;
use super::space::ALIGN;
use crate::concurrent::slices::SliceIndex;
use crate::entry::{COPIED, OFFSET_MASK};
use crate::sync::{Ordering, lock};
use crate::units::{Bytes, HostOffset};

use super::action::Words;

impl Qcow2 {
    /// Makes sure that the L1 entry at `index` names a table that is this image's alone.
    ///
    /// Errors: `EIO` for an entry that cannot be right; those of [`allocate`](Qcow2::allocate) and
    /// of the storage.
    pub(super) async fn ensure_table(&self, ring: &Ring, index: usize) -> Result<(), Errno> {
        if self.own_table(index)? {
            return Ok(());
        }
        let engine = self.engine()?;
        let key = index as u64;
        let _claim = engine.tables.claim(key, key + 1).await;
        if self.own_table(index)? {
            return Ok(());
        }
        let old = self.table_offset(index)?;
        let content = IoBuf::new(self.cluster_bytes(), ALIGN);
        if let Some(old) = old
            && self.file.read(ring, old.0, &content).await? < content.len()
        {
            return Err(Errno::IO);
        }
        let offset = self.store_table(ring, &content).await?;
        {
            // Together: a checkpoint in between would answer a flush without this entry.
            let mut dirty = lock(&engine.l1_dirty);
            engine.changed.fetch_add(1, Ordering::SeqCst);
            self.l1.get(index).ok_or(Errno::INVAL)?.store(offset.0 | COPIED, Ordering::Release);
            dirty.insert(index);
        }
        if let Some(old) = old {
            engine.unlinked.unlink(old >> self.geometry.cluster_bits, 1);
        }
        Ok(())
    }

    /// Writes a table into a new cluster. Returns where that begins.
    async fn store_table(&self, ring: &Ring, content: &IoBuf) -> Result<HostOffset, Errno> {
        loop {
            let seen = self.times_freed();
            let run = self.allocate_metadata_or_reclaim(ring).await?;
            let offset = run.start << self.geometry.cluster_bits;
            let Err(errno) = self.file.write_all(ring, offset.0, content).await else {
                return Ok(offset);
            };
            {
                let mut space = self.space()?;
                space.unmark_metadata(run.start, 1);
                space.give_back(run.start, 1, false);
            }
            if !is_full(errno) || !self.reclaim(ring, seen).await {
                return Err(errno);
            }
        }
    }

    /// Host offset of the table of an L1 entry. Errors: `EIO` when it cannot be right.
    pub(super) fn table_offset(&self, index: usize) -> Result<Option<HostOffset>, Errno> {
        let entry = self.l1.get(index).ok_or(Errno::INVAL)?.load(Ordering::Acquire);
        self.rules.l2_table(entry, Bytes(self.file.len()))
    }

    fn own_table(&self, index: usize) -> Result<bool, Errno> {
        let entry = self.l1.get(index).ok_or(Errno::INVAL)?.load(Ordering::Acquire);
        self.rules.l2_table(entry, Bytes(self.file.len()))?;
        Ok(entry & COPIED != 0 && entry & OFFSET_MASK != 0)
    }

    /// The entries of `count` clusters of one slice, from `first` in it. No other request may be
    /// changing them: the caller has claimed the clusters. All zero where there is no table. They
    /// are not checked: [`leading_sound`](Qcow2::leading_sound) does that.
    ///
    /// Errors: those of the storage.
    pub(super) async fn entries(
        &self,
        ring: &Ring,
        slice: SliceIndex,
        first: usize,
        count: usize,
    ) -> Result<Vec<Words>, Errno> {
        let step = self.geometry.entry_words();
        loop {
            if let Some(found) = self.slices.find(slice) {
                let word = |index: usize| Words {
                    entry: found.word(index * step),
                    bitmap: if step > 1 { found.word(index * step + 1) } else { 0 },
                };
                let entries: Vec<Words> = (first..first + count).map(word).collect();
                if found.still_there() {
                    return Ok(entries);
                }
                continue;
            }
            if self
                .table_offset(self.geometry.l1_index(self.geometry.slice_start(slice)))?
                .is_none()
            {
                return Ok(vec![Words::default(); count]);
            }
            self.load(ring, slice).await?;
        }
    }

    /// Changes the entries of one slice, from `first` in it, to `entries`.
    ///
    /// * `links`: clusters are linked that were not linked before.
    ///
    /// Errors: those of loading the slice again, if it was evicted; nothing is changed then.
    pub(super) async fn set_entries(
        &self,
        ring: &Ring,
        slice: SliceIndex,
        first: usize,
        entries: &[Words],
        links: bool,
    ) -> Result<(), Errno> {
        let step = self.geometry.entry_words();
        let changed = &self.engine()?.changed;
        loop {
            let done = self.slices.update(slice, step > 1, links, |words| {
                changed.fetch_add(1, Ordering::SeqCst);
                for (index, entry) in entries.iter().enumerate() {
                    let at = (first + index) * step;
                    words.set(at, entry.entry);
                    if step > 1 {
                        words.set(at + 1, entry.bitmap);
                    }
                }
            });
            if done.is_some() {
                return Ok(());
            }
            self.load(ring, slice).await?;
        }
    }
}
