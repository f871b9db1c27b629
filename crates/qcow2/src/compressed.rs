//! Compressed clusters: read, decompressed away from the queue thread, kept for a while.
//!
//! Promises: one cluster is read and decompressed once, however many requests wait for it;
//! sequential small reads decompress each cluster once; a cluster of rubbish is `EIO`; memory is
//! bounded by the cluster size whatever the compressed bytes say.

mod decode;
mod recent;

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::flight::{Flights, Join};
use crate::info::CompressionType;
use crate::limits::INLINE_DECOMPRESSION_BYTES;
use crate::sync::Arc;

pub(crate) use decode::decompress;
pub(crate) use recent::Recent;

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
}

/// A decompressed cluster.
pub(crate) type Cluster = Arc<Vec<u8>>;

/// All that one image needs to read its compressed clusters.
pub(crate) struct Decompressor {
    kind: CompressionType,
    cluster_size: usize,
    recent: Recent,
    flights: Flights<Compressed, Cluster>,
}

impl Decompressor {
    pub(crate) fn new(kind: CompressionType, cluster_size: usize) -> Decompressor {
        Decompressor {
            kind,
            cluster_size,
            recent: Recent::new(cluster_size),
            flights: Flights::new(),
        }
    }

    /// Reads a part of `cluster` into `buf`.
    ///
    /// Errors: `EINVAL` when the part does not lie in the cluster; `EIO` when the compressed data
    /// is rubbish; what the storage says.
    pub(crate) async fn read(
        &self,
        ring: &Ring,
        file: &Storage,
        cluster: Compressed,
        offset_in_cluster: u64,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        let start = usize::try_from(offset_in_cluster).map_err(|_| Errno::INVAL)?;
        let end = start.checked_add(buf.len()).filter(|end| *end <= self.cluster_size);
        let end = end.ok_or(Errno::INVAL)?;
        let data = self.cluster(ring, file, cluster).await?;
        let part = data.get(start..end).ok_or(Errno::IO)?;
        buf.copy_from_slice(0, part);
        Ok(())
    }

    /// The whole of `cluster`, decompressed.
    async fn cluster(
        &self,
        ring: &Ring,
        file: &Storage,
        cluster: Compressed,
    ) -> Result<Cluster, Errno> {
        loop {
            if let Some(data) = self.recent.get(cluster) {
                return Ok(data);
            }
            match self.flights.join(cluster, || self.recent.get(cluster)) {
                Join::Ready(data) => return Ok(data),
                Join::Follow(follower) => {
                    if let Some(result) = follower.await {
                        return result;
                    }
                }
                Join::Lead(leader) => {
                    let result = self.load(ring, file, cluster).await;
                    if let Ok(data) = &result {
                        self.recent.put(cluster, data.clone());
                    }
                    leader.finish(result.clone());
                    return result;
                }
            }
        }
    }

    async fn load(
        &self,
        ring: &Ring,
        file: &Storage,
        cluster: Compressed,
    ) -> Result<Cluster, Errno> {
        let len = cluster.host_len as usize;
        let align = file.limits().memory_align as usize;
        let buf = IoBuf::new(len.next_multiple_of(align.max(1)), align).slice(0..len);
        // Short when the file ends inside the last sector, which may be cut.
        let done = file.read(ring, cluster.host_offset, &buf).await?;
        let mut compressed = buf.to_vec();
        compressed.truncate(done);
        let (kind, cluster_size) = (self.kind, self.cluster_size);
        if cluster_size <= INLINE_DECOMPRESSION_BYTES {
            return decompress(kind, &compressed, cluster_size);
        }
        ring.offload(move || decompress(kind, &compressed, cluster_size)).await
    }
}

impl std::fmt::Debug for Decompressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decompressor").field("kind", &self.kind).finish_non_exhaustive()
    }
}
