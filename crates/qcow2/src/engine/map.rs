//! The look-up: from a guest offset to the place of the bytes.
//!
//! Promises: [`Qcow2::map_cached`] takes no lock, allocates nothing, blocks on nothing. An extent
//! covers at least what is alike up to the end of its L2 slice, and goes on over further slices
//! while they are cached.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use crate::concurrent::loads_in_flight::Join;
use crate::concurrent::slices::{Slice, SliceIndex};
use crate::entry::Lengths;
use crate::limits::SLICE_BYTES_MAX;
use crate::run::{Extent, Run};
use crate::sync::Ordering;
use crate::units::{Bytes, GuestOffset};

/// What looking at one slice's worth of disk gave.
enum Step {
    /// All of it belongs to the extent; go on behind it.
    More,
    /// The extent ends inside.
    End,
    /// The slice is not in the cache.
    Missing,
}

impl Qcow2 {
    /// Where the bytes from `offset` on are, from the cache alone.
    ///
    /// * `offset`: byte offset on the disk; below its size.
    /// * `len`: bytes asked for, at least 1; cut at the end of the disk.
    ///
    /// `None`: the L2 slice of `offset` is not loaded, use [`map`](Qcow2::map).
    ///
    /// Errors: `EINVAL` when the range is empty or starts past the end of the disk; `EIO` when
    /// the table entry of `offset` cannot be right (unaligned, reserved bits set, past the end
    /// of the file, on top of metadata).
    pub fn map_cached(&self, offset: GuestOffset, len: Bytes) -> Result<Option<Extent>, Errno> {
        let left =
            self.geometry.virtual_size.checked_sub(offset.from_start()).ok_or(Errno::INVAL)?;
        let end = offset + len.min(left);
        if end == offset {
            return Err(Errno::INVAL);
        }
        let mut lengths = self.lengths();
        let mut run = Run::new();
        let mut at = offset;
        while at < end {
            match self.step(at, end, lengths, &mut run) {
                Ok(Step::More) => at = offset + run.len(),
                Ok(Step::End | Step::Missing) => break,
                // What was found before the bad entry is good.
                Err(errno) if run.len() == Bytes::ZERO => {
                    // The file may have grown for this very entry since its length was asked.
                    let now = self.lengths();
                    if now == lengths {
                        return Err(errno);
                    }
                    lengths = now;
                }
                Err(_) => break,
            }
        }
        Ok(run.extent())
    }

    /// As [`map_cached`](Qcow2::map_cached), and loads what is missing. A slice is loaded once,
    /// however many requests miss it; only they wait.
    ///
    /// Errors: those of `map_cached`, and those of the storage for the L2 table.
    pub async fn map(&self, ring: &Ring, offset: GuestOffset, len: Bytes) -> Result<Extent, Errno> {
        loop {
            if let Some(extent) = self.map_cached(offset, len)? {
                return Ok(extent);
            }
            self.load(ring, self.geometry.slice(offset)).await?;
        }
    }

    /// Adds to `run` what lies from `at` up to the end of its slice or `end`.
    fn step(
        &self,
        at: GuestOffset,
        end: GuestOffset,
        lengths: Lengths,
        run: &mut Run,
    ) -> Result<Step, Errno> {
        let index = self.geometry.slice(at);
        if let Some(slice) = self.slices.find(index) {
            let slice_end = self.geometry.slice_end(index).min(end);
            let mut grown = *run;
            let step = self.scan(&slice, at, slice_end, lengths, &mut grown);
            if !slice.still_there() {
                return Ok(Step::Missing);
            }
            // On an error too: what came before the bad entry counts.
            *run = grown;
            return step;
        }
        let l1_index = self.geometry.l1_index(at);
        let entry = self.l1.get(l1_index).ok_or(Errno::INVAL)?.load(Ordering::Acquire);
        if self.rules.l2_table(entry, lengths.file)?.is_some() {
            return Ok(Step::Missing);
        }
        let table_end = self.geometry.table_end(l1_index);
        let added = run.push(crate::ExtentKind::Unallocated, table_end.min(end) - at);
        Ok(if added { Step::More } else { Step::End })
    }

    /// Adds to `run` what the entries of one slice say about `at..end`.
    fn scan(
        &self,
        slice: &Slice<'_>,
        mut at: GuestOffset,
        end: GuestOffset,
        lengths: Lengths,
        run: &mut Run,
    ) -> Result<Step, Errno> {
        let words = self.geometry.entry_words();
        while at < end {
            let index = self.geometry.entry_in_slice(at) * words;
            let entry = slice.word(index);
            let bitmap = if self.geometry.extended { slice.word(index + 1) } else { 0 };
            let in_cluster = self.geometry.in_cluster(at);
            self.rules.check_place(entry, at)?;
            let (kind, len) = self.rules.piece(entry, bitmap, in_cluster, lengths)?;
            let len = len.min(end - at);
            if !run.push(kind, len) {
                return Ok(Step::End);
            }
            at += len;
        }
        Ok(Step::More)
    }

    /// Loads `slice` into the cache, or waits for the request that loads it.
    pub(crate) async fn load(&self, ring: &Ring, slice: SliceIndex) -> Result<(), Errno> {
        match self.loads.join(slice, || self.slices.find(slice).map(drop)) {
            Join::Ready(()) => Ok(()),
            // Abandoned: the caller looks again and maybe leads.
            Join::Follow(follower) => follower.await.unwrap_or(Ok(())),
            Join::Lead(leader) => {
                let result = self.load_alone(ring, slice).await;
                leader.finish(result);
                result
            }
        }
    }

    async fn load_alone(&self, ring: &Ring, slice: SliceIndex) -> Result<(), Errno> {
        // The table must not be freed and used otherwise while it is read.
        let grace = self.enter();
        let start = self.geometry.slice_start(slice);
        let l1_index = self.geometry.l1_index(start);
        let entry = self.l1.get(l1_index).ok_or(Errno::INVAL)?.load(Ordering::Acquire);
        // No table: the caller finds that out by itself.
        let Some(table) = self.rules.l2_table(entry, Bytes(self.file.len()))? else {
            return Ok(());
        };
        let bytes = self.geometry.slice_bytes();
        let buf = IoBuf::new(bytes, SLICE_BYTES_MAX);
        let offset = table + self.geometry.slice_in_table(slice);
        if self.file.read(ring, offset.0, &buf).await? < bytes {
            return Err(Errno::IO);
        }
        drop(grace);
        let words = &words_of(&buf)[..bytes / 8];
        self.check_loaded(ring, words).await;
        while !self.slices.publish(slice, words) {
            // Wherever it could go is dirty. Boxed: rare.
            Box::pin(self.checkpoint(ring)).await?;
        }
        Ok(())
    }
}

/// The words of a slice as they are on disk.
fn words_of(buf: &IoBuf) -> Box<[u64; SLICE_BYTES_MAX / 8]> {
    let mut raw = [0u8; SLICE_BYTES_MAX];
    buf.copy_to_slice(0, &mut raw[..buf.len()]);
    let mut words = Box::new([0u64; SLICE_BYTES_MAX / 8]);
    for (word, bytes) in words.iter_mut().zip(raw.as_chunks::<8>().0) {
        *word = u64::from_be_bytes(*bytes);
    }
    words
}
