//! Writes of data.
//!
//! Promises: a write to clusters that are the image's own takes no lock, allocates nothing and is
//! one storage operation for each run. Anything else is claimed, gets its clusters in one go, is
//! written together with what the write does not cover, and is linked in memory when all of that is
//! written.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use super::action::{Action, Words};
use super::below::Below;
use super::reclaim::is_full;
use crate::concurrent::slices::SliceIndex;
use crate::units::{Bytes, GuestOffset, HostCluster, HostOffset};

/// One range of a request, inside one slice.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    pub(super) slice: SliceIndex,
    /// First byte.
    pub(super) start: GuestOffset,
    /// First byte past it.
    pub(super) end: GuestOffset,
}

/// Where in a chunk a group of clusters begins.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) chunk: Chunk,
    /// Index of the first cluster in the slice.
    pub(super) index: usize,
    /// Clusters of the chunk before it.
    pub(super) skipped: usize,
}

/// Clusters that were written.
#[derive(Clone, Copy)]
pub(super) struct Written {
    /// Where the first begins.
    pub(super) host: HostOffset,
    /// How many; at least 1.
    pub(super) clusters: usize,
}

impl Qcow2 {
    /// Writes `buf`. Less than asked means that an error came after some progress.
    ///
    /// * `offset`: byte offset on the disk, any alignment; the write is cut at the end of the disk.
    /// * `below`: the backing chain.
    ///
    /// Errors: `EROFS` for an image that is open for reading or was marked corrupt; `ENOSPC`; `EIO`
    /// for a damaged image and after a failed flush; those of the storage.
    pub async fn write<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
        below: &B,
    ) -> Result<usize, Errno> {
        let left = self.geometry.end().saturating_sub(offset);
        let len = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        self.begin_change(ring, offset, Bytes::of(len)).await?;
        let mut done = 0;
        while done < len {
            let rest = buf.slice(done..len);
            match self.write_some(ring, offset + Bytes::of(done), &rest, below).await {
                Ok(written) => done += written,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Writes the beginning of `buf`; at least a byte.
    pub(super) async fn write_some<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
        below: &B,
    ) -> Result<usize, Errno> {
        {
            let grace = self.enter();
            if let Some((host, len)) = self.own_run(offset, Bytes::of(buf.len()))? {
                // Not longer than the buffer.
                let len = usize::try_from(len).unwrap_or(buf.len()).min(buf.len());
                let write = self.begin_data_write(grace);
                let written = self.data_storage().write(ring, host.0, &buf.slice(0..len)).await;
                write.end();
                match written {
                    Ok(0) => return Err(Errno::IO),
                    // A hole of a full file system: perhaps space is on its way, and nothing is
                    // held there.
                    Err(errno) if is_full(errno) => {}
                    result => return result,
                }
            }
        }
        // Rare and large: in memory of its own, so that the future of a plain write stays small.
        Box::pin(async {
            // What is stored beside the data, and with it, is put together in our memory.
            let buf = ring.in_memory(buf).await?;
            self.write_new(ring, offset, &buf, below).await
        })
        .await
    }

    /// The storage offset and length of the bytes from `offset` on that can be written in place, as
    /// far as the cache knows; nothing that might be metadata. No lock, no allocation.
    ///
    /// Errors: `EIO` when the entry of `offset` cannot be right.
    fn own_run(
        &self,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Option<(HostOffset, Bytes)>, Errno> {
        let index = self.geometry.slice(offset);
        let Some(slice) = self.slices.find(index) else { return Ok(None) };
        let end = self.geometry.slice_end(index).min(offset + len);
        let step = self.geometry.entry_words();
        let cluster_size = self.geometry.cluster_size();
        let bits = self.geometry.cluster_bits;
        // Metadata is in another file than data otherwise.
        let engine = self.engine.as_deref().filter(|_| !self.info.external_data_file);
        let mut run: Option<(HostOffset, Bytes)> = None;
        let mut at = offset;
        while at < end {
            let word = self.geometry.entry_in_slice(at) * step;
            let words = Words {
                entry: slice.word(word),
                bitmap: if step > 1 { slice.word(word + 1) } else { 0 },
            };
            let from = self.geometry.in_cluster(at);
            let to = cluster_size.min(from + (end - at));
            let checked = self.check_entry(words, at);
            if !slice.still_there() {
                break;
            }
            match checked {
                // What comes before a damaged entry is written.
                Err(_) if run.is_some() => break,
                other => other?,
            }
            let Action::InPlace { host } = self.rules.action(words, from, to) else { break };
            if engine.is_some_and(|engine| engine.may_be_metadata(host >> bits)) {
                break;
            }
            match &mut run {
                None => run = Some((host + from, to - from)),
                Some((start, length)) if *start + *length == host => *length += to - from,
                Some(_) => break,
            }
            at += to - from;
        }
        Ok(run)
    }

    /// Writes to clusters that may be new, up to the end of their slice.
    async fn write_new<B: Below>(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
        below: &B,
    ) -> Result<usize, Errno> {
        self.check_sound()?;
        let bits = self.geometry.cluster_bits;
        let slice = self.geometry.slice(offset);
        let end = (offset + Bytes::of(buf.len())).min(self.geometry.slice_end(slice));
        let chunk = Chunk { slice, start: offset, end };
        let engine = self.engine()?;
        let (first, last) = (offset >> bits, (end - Bytes(1)) >> bits);
        let _claim = engine.clusters.claim(first.0, last.0 + 1).await;
        self.write_claimed(ring, chunk, buf, below).await
    }

    /// Writes to clusters that may be new; the caller has claimed those of the chunk.
    ///
    /// * `buf`: the data of the chunk, or more.
    pub(super) async fn write_claimed<B: Below>(
        &self,
        ring: &Ring,
        chunk: Chunk,
        buf: &IoBuf,
        below: &B,
    ) -> Result<usize, Errno> {
        let bits = self.geometry.cluster_bits;
        let Chunk { slice, start: offset, end } = chunk;
        self.ensure_table(ring, self.geometry.l1_index(offset)).await?;
        let first = self.geometry.entry_in_slice(offset);
        let count = self.geometry.entry_in_slice(end - Bytes(1)) - first + 1;
        // One more at the front: new clusters go after the place of that neighbour.
        let before = usize::from(first > 0);
        let entries = self.entries(ring, slice, first - before, count + before).await?;
        let is_hint = before == 1 && self.rules.check_words(entries[0]).is_ok();
        let mut neighbour = if is_hint { self.next_host(entries[0]) } else { None };
        let entries = &entries[before..];
        // Clusters that are written, and that were checked.
        let (mut at, mut sound) = (0, 0);
        let mut done = 0;
        // The last attempt found no space.
        let mut is_retry = false;
        while at < count {
            let place = Place { chunk, index: first + at, skipped: at };
            let seen = self.times_freed();
            if at == sound {
                let guest = offset + Bytes::of_clusters(at as u64, self.geometry.cluster_bits);
                match self.leading_sound(ring, guest, &entries[at..]).await {
                    Ok(more) => sound += more,
                    Err(errno) if done == 0 => return Err(errno),
                    Err(_) => break,
                }
            }
            let some = &entries[at..if is_retry { at + 1 } else { sound }];
            match self.write_group(ring, place, some, neighbour, buf, below).await {
                // One cluster, wherever one is free: perhaps it has its place in the file already.
                Err(errno) if is_full(errno) && (self.reclaim(ring, seen).await || !is_retry) => {
                    (is_retry, neighbour) = (true, None);
                    continue;
                }
                Ok(written) => {
                    is_retry = false;
                    neighbour = Some((written.host >> bits) + written.clusters as u64);
                    at += written.clusters;
                }
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
            let cluster = (offset >> bits) + at as u64;
            // At most the length of the buffer.
            done = usize::try_from(end.min(cluster << bits) - offset).unwrap_or(0);
        }
        Ok(done)
    }

    /// The host cluster behind the one of an entry.
    fn next_host(&self, words: Words) -> Option<HostCluster> {
        self.rules.host(words).map(|host| (host >> self.geometry.cluster_bits) + 1)
    }
}
