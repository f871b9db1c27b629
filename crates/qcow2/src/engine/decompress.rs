//! Reading compressed clusters of an open image: looks up what the decompressor asks for.
//!
//! Promises: takes locks for a short search among the clusters that were decompressed last, and no
//! others; decompression runs on helper threads.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use crate::compressed::{Compressed, Part};
use crate::run::ExtentKind;
use crate::units::{Bytes, GuestCluster, GuestOffset};

impl Qcow2 {
    /// Reads a part of one compressed cluster. Takes locks for a short search among the clusters
    /// that were decompressed last; decompression runs on helper threads.
    ///
    /// * `offset`: first byte on the disk.
    /// * `buf`: is filled; must end inside the cluster.
    ///
    /// Errors: `EINVAL` when the part does not lie in the cluster, `EIO` when the compressed data
    /// is damaged, and those of the storage.
    pub async fn read_compressed(
        &self,
        ring: &Ring,
        cluster: Compressed,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        self.read_compressed_of(ring, cluster, offset, buf, Bytes::ZERO).await
    }

    /// As [`Qcow2::read_compressed`], for the first part of a longer request.
    ///
    /// * `ahead`: bytes past `buf` that the same request is going to read; they are fetched
    ///   together with this part.
    pub async fn read_compressed_of(
        &self,
        ring: &Ring,
        cluster: Compressed,
        offset: GuestOffset,
        buf: &IoBuf,
        ahead: Bytes,
    ) -> Result<(), Errno> {
        let bits = self.geometry.cluster_bits;
        let last = offset.saturating_add(Bytes((buf.len() as u64).saturating_sub(1)));
        let part = Part {
            place: cluster,
            first: offset >> bits,
            last: last.saturating_add(ahead) >> bits,
            start: self.geometry.in_cluster(offset),
        };
        let compressed_at = |cluster| self.compressed_at(cluster);
        self.decompressor.read(ring, &self.file, part, buf, compressed_at).await
    }

    /// What the cache says of a guest cluster: the compressed cluster, or that it is not
    /// compressed. `None`: past the end of the disk, not cached, or damaged.
    fn compressed_at(&self, cluster: GuestCluster) -> Option<Option<Compressed>> {
        let offset = cluster << self.geometry.cluster_bits;
        if offset >= self.geometry.end() {
            return None;
        }
        match self.map_cached(offset, Bytes(1)).ok()??.kind {
            ExtentKind::Compressed(place) => Some(Some(place)),
            _ => Some(None),
        }
    }
}
