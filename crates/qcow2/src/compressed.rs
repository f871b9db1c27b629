//! Compressed clusters: read, decompressed away from the queue thread, kept for a while.
//!
//! Promises: one cluster is read and decompressed once, however many requests wait for it;
//! neighbours that a request or a sequential reader needs are read in one operation and
//! decompressed in parallel; sequential small reads decompress each cluster once, ahead of the
//! reader; a random read decompresses no more than it needs where the format allows that; a cluster
//! of rubbish is `EIO`; memory is bounded by the limits whatever the compressed bytes say.

mod clusters;
mod decode;
mod encode;
mod fetch;
mod streams;
#[cfg(test)]
mod tests;

use std::ops::Range;

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use crate::image::Qcow2;
use crate::info::CompressionType;
use crate::limits::{READ_AHEAD_BYTES, RECENT_CLUSTERS_BYTES};
use crate::limits::{RECENT_CLUSTERS_MAX, RECENT_CLUSTERS_MIN};
use crate::run::ExtentKind;
use crate::sync::{Arc, Mutex, lock};

use clusters::{Clusters, Look, Ticket};
use decode::stops_early;
use fetch::Method;
use streams::Streams;

pub(crate) use decode::decompress;
pub use encode::compress;

/// Where one compressed cluster lies, as its L2 entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Compressed {
    host_offset: u64,
    host_len: u32,
}

impl Compressed {
    pub(crate) fn new(host_offset: u64, host_len: u32) -> Compressed {
        Compressed { host_offset, host_len }
    }

    /// Byte offset in the image file of the first compressed byte; not aligned.
    pub fn host_offset(self) -> u64 {
        self.host_offset
    }

    /// Bytes in the image file that hold the compressed data, rounded up to the end of a sector.
    pub fn host_len(self) -> u32 {
        self.host_len
    }

    /// Byte offset in the image file behind the last compressed byte. The offset of a descriptor
    /// has less than 62 bits.
    pub(crate) fn host_end(self) -> u64 {
        self.host_offset.saturating_add(u64::from(self.host_len))
    }
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
    pub(crate) fn forget(&self, host: Range<u64>) {
        self.clusters.forget(&host);
    }

    /// Reads a part of `cluster` into `buf`.
    ///
    /// * `offset`: first byte on the disk.
    /// * `ahead`: bytes behind `buf` that the same request is going to read.
    ///
    /// Errors: `EINVAL` when the part does not lie in one cluster; `EIO` when the compressed data
    /// is rubbish; what the storage says.
    async fn read(
        &self,
        ring: &Ring,
        image: &Qcow2,
        cluster: Compressed,
        offset: u64,
        ahead: u64,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        let cluster_size = self.method.cluster_size;
        let start = usize::try_from(image.geometry.in_cluster(offset)).map_err(|_| Errno::INVAL)?;
        let end = start.checked_add(buf.len()).filter(|end| *end <= cluster_size);
        let end = end.ok_or(Errno::INVAL)?;
        if buf.is_empty() {
            return Ok(());
        }
        let bits = image.geometry.cluster_bits;
        let last = offset.saturating_add(buf.len() as u64 - 1).saturating_add(ahead);
        let advice = lock(&self.streams).access(offset >> bits, last >> bits);
        let part = advice.alone && stops_early(self.method.kind);
        let need = if part { end } else { cluster_size };
        let mut load = advice.load;
        loop {
            let (ticket, follower) = match self.clusters.look(cluster, need) {
                Look::Ready(data) => {
                    self.load(ring, image, None, std::mem::take(&mut load));
                    buf.copy_from_slice(0, data.get(start..end).ok_or(Errno::IO)?);
                    return Ok(());
                }
                Look::Wait(follower) => (None, Some(follower)),
                Look::Load(ticket) => {
                    let follower = ticket.follower();
                    (Some(ticket), follower)
                }
            };
            self.load(ring, image, ticket, std::mem::take(&mut load));
            let Some(follower) = follower else { return Err(Errno::IO) };
            let data = match follower.await {
                Some(Ok(data)) => data,
                Some(Err(errno)) => return Err(errno),
                None => continue,
            };
            // Else the load that was waited for was for a smaller part.
            if let Some(part) = data.get(start..end) {
                buf.copy_from_slice(0, part);
                return Ok(());
            }
        }
    }

    /// Starts the load of one cluster and of those in a range of clusters of the disk that are
    /// compressed and not there.
    ///
    /// The descriptors are looked up while the caller's request still keeps host clusters from
    /// being used again; from then on [`Decompressor::forget`] knows of the loads.
    fn load(&self, ring: &Ring, image: &Qcow2, first: Option<Ticket>, range: Range<u64>) {
        let mut tickets = Vec::new();
        tickets.extend(first);
        for cluster in range {
            let offset = cluster << image.geometry.cluster_bits;
            if offset >= image.geometry.virtual_size {
                break;
            }
            let Ok(Some(extent)) = image.map_cached(offset, 1) else { break };
            if let ExtentKind::Compressed(place) = extent.kind {
                tickets.extend(self.clusters.begin(place));
            }
        }
        if !tickets.is_empty() {
            fetch::start(ring, &image.file, self.method, tickets);
        }
    }
}

impl Qcow2 {
    /// Reads a part of one compressed cluster. Takes locks for a short look at the clusters that
    /// were decompressed last; decompression happens on helper threads.
    ///
    /// * `offset`: first byte on the disk.
    /// * `buf`: is filled; must end inside the cluster.
    ///
    /// Errors: `EINVAL` when the part does not lie in the cluster, `EIO` when the compressed data
    /// is rubbish, and what the storage reports.
    pub async fn read_compressed(
        &self,
        ring: &Ring,
        cluster: Compressed,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        self.read_compressed_of(ring, cluster, offset, buf, 0).await
    }

    /// As [`Qcow2::read_compressed`], for the first part of a longer request.
    ///
    /// * `ahead`: bytes behind `buf` that the same request is going to read; they are fetched
    ///   together with this part.
    pub async fn read_compressed_of(
        &self,
        ring: &Ring,
        cluster: Compressed,
        offset: u64,
        buf: &IoBuf,
        ahead: u64,
    ) -> Result<(), Errno> {
        self.decompressor.read(ring, self, cluster, offset, ahead, buf).await
    }
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decompressor").field("method", &self.method).finish_non_exhaustive()
    }
}
