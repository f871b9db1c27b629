//! Compressed clusters: read, decompressed on helper threads, and cached.
//!
//! Promises: one cluster is read and decompressed once, however many requests wait for it;
//! neighbours that a request or a sequential reader needs are read in one operation and
//! decompressed in parallel; sequential small reads decompress each cluster once, ahead of the
//! reader; a random read decompresses no more than it needs where the format allows that; a damaged
//! cluster is `EIO`; memory is bounded by the limits whatever the compressed bytes say.

mod clusters;
mod decode;
mod encode;
mod fetch;
mod streams;
#[cfg(test)]
mod tests;

use std::mem::take;
use std::ops::Range;

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::info::CompressionType;
use crate::limits::{READ_AHEAD_BYTES, RECENT_CLUSTERS_BYTES};
use crate::limits::{RECENT_CLUSTERS_MAX, RECENT_CLUSTERS_MIN};
use crate::sync::{Arc, Mutex, lock};
use crate::units::{Bytes, GuestCluster, HostOffset};

use clusters::{Clusters, Look, Ticket};
use decode::stops_early;
use fetch::Method;
use streams::Streams;

pub(crate) use decode::decompress;
pub use encode::compress;

/// Where one compressed cluster lies, as its L2 entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compressed {
    host_offset: HostOffset,
    host_len: u32,
}

impl Compressed {
    pub(crate) fn new(host_offset: HostOffset, host_len: u32) -> Compressed {
        Compressed { host_offset, host_len }
    }

    /// The first compressed byte in the image file; not aligned.
    pub fn host_offset(self) -> HostOffset {
        self.host_offset
    }

    /// Bytes in the image file that hold the compressed data, rounded up to the end of a sector.
    pub fn host_len(self) -> u32 {
        self.host_len
    }

    /// The first byte in the image file past the compressed data. The offset of a descriptor has
    /// less than 62 bits.
    pub(crate) fn host_end(self) -> HostOffset {
        self.host_offset.saturating_add(Bytes(u64::from(self.host_len)))
    }
}

/// A part of one compressed cluster, as a request reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Where the compressed data lies.
    pub(crate) place: Compressed,
    /// The guest cluster.
    pub(crate) first: GuestCluster,
    /// The last guest cluster that the same request is going to read.
    pub(crate) last: GuestCluster,
    /// First byte inside the cluster.
    pub(crate) start: Bytes,
}

/// All that one image needs to read its compressed clusters.
pub(crate) struct Decompressor {
    method: Method,
    clusters: Arc<Clusters>,
    streams: Mutex<Streams>,
}

impl Decompressor {
    pub(crate) fn new(kind: CompressionType, cluster_size: usize) -> Decompressor {
        let capacity = RECENT_CLUSTERS_BYTES / cluster_size;
        let capacity = capacity.clamp(RECENT_CLUSTERS_MIN, RECENT_CLUSTERS_MAX);
        // What is loaded for one reader must not push itself out.
        let ahead = (READ_AHEAD_BYTES / cluster_size).clamp(1, capacity / 4);
        let request = capacity / 2;
        Decompressor {
            method: Method { kind, cluster_size },
            clusters: Arc::new(Clusters::new(cluster_size, capacity)),
            streams: Mutex::new(Streams::new(ahead as u64, request as u64)),
        }
    }

    /// Forgets what lies in a range of bytes of the image file.
    ///
    /// To be called when host clusters that held compressed data are given up: after the grace
    /// period (no request that could still use the old mapping is in flight) and before anything
    /// else can be put there.
    pub(crate) fn forget(&self, host: Range<HostOffset>) {
        self.clusters.forget(&host);
    }

    /// Reads a part of a cluster into `buf`.
    ///
    /// * `compressed_at`: the compressed cluster that a guest cluster is mapped to (`None`: it is
    ///   not compressed), from what is cached. The outer `None` ends the loading ahead.
    ///
    /// Errors: `EINVAL` when the part does not lie in one cluster; `EIO` when the compressed data
    /// is damaged; those of the storage.
    pub(crate) async fn read(
        &self,
        ring: &Ring,
        file: &Arc<Storage>,
        part: Part,
        buf: &IoBuf,
        compressed_at: impl Fn(GuestCluster) -> Option<Option<Compressed>>,
    ) -> Result<(), Errno> {
        let cluster_size = self.method.cluster_size;
        let start = usize::try_from(part.start).map_err(|_| Errno::INVAL)?;
        let end = start.checked_add(buf.len()).filter(|end| *end <= cluster_size);
        let end = end.ok_or(Errno::INVAL)?;
        if buf.is_empty() {
            return Ok(());
        }
        let advice = lock(&self.streams).access(part.first, part.last);
        let is_part = advice.alone && stops_early(self.method.kind);
        let need = if is_part { end } else { cluster_size };
        // Once: a second round looks for this cluster only.
        let mut ahead = advice.load;
        loop {
            let (ticket, follower) = match self.clusters.look(part.place, need) {
                Look::Ready(data) => {
                    self.load(ring, file, None, take(&mut ahead), &compressed_at);
                    buf.copy_from_slice(0, data.get(start..end).ok_or(Errno::IO)?);
                    return Ok(());
                }
                Look::Wait(follower) => (None, Some(follower)),
                Look::Load(ticket) => {
                    let follower = ticket.follower();
                    (Some(ticket), follower)
                }
            };
            self.load(ring, file, ticket, take(&mut ahead), &compressed_at);
            let Some(follower) = follower else { return Err(Errno::IO) };
            let data = match follower.await {
                Some(Ok(data)) => data,
                Some(Err(errno)) => return Err(errno),
                None => continue,
            };
            // Otherwise the load that was waited for was for a smaller part.
            if let Some(part) = data.get(start..end) {
                buf.copy_from_slice(0, part);
                return Ok(());
            }
        }
    }

    /// Starts the load of one cluster, and of those in a range of guest clusters that are
    /// compressed and not loaded yet.
    ///
    /// The descriptors are looked up while the caller's request still keeps host clusters from
    /// being used again; from then on [`Decompressor::forget`] knows of the loads.
    fn load(
        &self,
        ring: &Ring,
        file: &Arc<Storage>,
        first: Option<Ticket>,
        range: Range<GuestCluster>,
        compressed_at: &impl Fn(GuestCluster) -> Option<Option<Compressed>>,
    ) {
        let mut tickets = Vec::new();
        tickets.extend(first);
        for cluster in range.start.up_to(range.end) {
            let Some(found) = compressed_at(cluster) else { break };
            tickets.extend(found.and_then(|place| self.clusters.begin(place)));
        }
        if !tickets.is_empty() {
            fetch::start(ring, file, self.method, tickets);
        }
    }
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decompressor").field("method", &self.method).finish_non_exhaustive()
    }
}
