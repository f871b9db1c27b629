//! Stores compressed clusters, packed one after another.
//!
//! Promises: a host cluster that holds the end of one and the beginning of another is counted for
//! each; one compressed cluster lies in one piece. As everywhere, data and counts are on stable
//! storage before the link.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use super::action::Words;
use super::space::ALIGN;
use crate::concurrent::registry::Registry;
use crate::refcounts::{Blocked, Run};
use crate::sync::{Mutex, lock};
use crate::units::{Bytes, GuestOffset, HostOffset};

/// Where the next compressed cluster goes.
pub(super) struct Packer {
    gate: Registry,
    /// The first free byte, and the end of its cluster; equal: there is none.
    free: Mutex<(HostOffset, HostOffset)>,
}

impl Packer {
    pub(super) fn new() -> Packer {
        Packer { gate: Registry::new(), free: Mutex::default() }
    }
}

impl Packer {
    /// The clusters of `run` are free now and may become something else.
    pub(super) fn forget(&self, run: Run, cluster_bits: u32) {
        let mut free = lock(&self.free);
        if (run.start..run.end()).contains(&(free.0 >> cluster_bits)) {
            *free = Default::default();
        }
    }
}

impl Qcow2 {
    /// Stores one whole cluster of the disk compressed.
    ///
    /// * `offset`: its first byte on the disk; a multiple of the cluster size.
    /// * `compressed`: raw deflate or zstd, as the header says; shorter than a cluster.
    ///
    /// Errors: `EEXIST` when the cluster is allocated (write it plain then); `EINVAL` for an offset
    /// or length that does not fit, or an external data file; as [`write`](Qcow2::write).
    pub async fn write_compressed(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        compressed: &[u8],
    ) -> Result<(), Errno> {
        let size = self.geometry.cluster_size();
        let fits = !compressed.is_empty() && Bytes::of(compressed.len()) < size;
        let inside = offset.is_multiple_of(size) && offset < self.geometry.end();
        if !fits || !inside || self.info.external_data_file {
            return Err(Errno::INVAL);
        }
        self.begin_change(ring, offset, size).await?;
        self.check_sound()?;
        let bits = self.geometry.cluster_bits;
        let cluster = offset >> bits;
        let _claim = self.engine()?.clusters.claim(cluster.0, cluster.0 + 1).await;
        self.ensure_table(ring, self.geometry.l1_index(offset)).await?;
        let slice = self.geometry.slice(offset);
        let index = self.geometry.entry_in_slice(offset);
        let old = self.entries(ring, slice, index, 1).await?;
        self.leading_sound(ring, offset, &old).await?;
        if self.rules.reference(old[0]).is_some() {
            return Err(Errno::EXIST);
        }
        let len = Bytes::of(compressed.len());
        let host = self.place(ring, len).await?;
        let buf = IoBuf::new(compressed.len(), ALIGN);
        buf.copy_from_slice(0, compressed);
        let (first, last) = (host >> bits, (host + len - Bytes(1)) >> bits);
        let entry = Words { entry: self.rules.compressed_entry(host, len), bitmap: 0 };
        let result = match self.write_or_reclaim(ring, host, &buf).await {
            Ok(()) => self.set_entries(ring, slice, index, &[entry], true).await,
            Err(errno) => Err(errno),
        };
        if result.is_err() {
            // Others may have bytes in the same clusters: only the counts go down.
            lock(&self.engine()?.abandoned).push((first, last - first + 1));
        }
        result
    }

    /// Takes `len` bytes, less than a cluster.
    async fn place(&self, ring: &Ring, len: Bytes) -> Result<HostOffset, Errno> {
        let packer = &self.engine()?.packer;
        let bits = self.geometry.cluster_bits;
        let _gate = packer.gate.claim(0, 1).await;
        // Into the rest of the cluster, when its count can go up. Under the lock of the counts, so
        // that it has not been given to another request meanwhile.
        let counted = self.with_space(ring, |space| {
            let (start, end) = *lock(&packer.free);
            if start == end || space.get(start >> bits)? == 0 {
                return Ok(None);
            }
            match space.increment(start >> bits, 1) {
                Ok(()) => Ok(Some((start, end))),
                Err(Blocked::Overflow) => Ok(None),
                Err(blocked) => Err(blocked),
            }
        });
        let counted_rest = counted.await?;
        let (start, end) = counted_rest.unwrap_or_default();
        let (counted, rest) = (counted_rest.is_some(), end - start);
        if counted && len <= rest {
            *lock(&packer.free) = (start + len, end);
            return Ok(start);
        }
        let goal = if counted { Some(end >> bits) } else { None };
        let run = match self.allocate_or_reclaim(ring, 1, goal).await {
            Ok(run) => run,
            Err(errno) => {
                if counted {
                    lock(&self.engine()?.abandoned).push((start >> bits, 1));
                }
                return Err(errno);
            }
        };
        let new = run.start << bits;
        let at = if counted && new == end {
            start
        } else {
            if counted {
                // It does not go on there: the count goes back.
                let mut freed = Vec::new();
                self.change_refcount(ring, start >> bits, 1, false, &mut freed).await?;
                self.release(ring, freed).await;
            }
            new
        };
        *lock(&packer.free) = (at + len, new + Bytes::of_clusters(1, bits));
        Ok(at)
    }
}
