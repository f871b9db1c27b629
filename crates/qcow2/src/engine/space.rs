//! Allocates and frees host clusters: reads and makes the refcount blocks that [`Refcounts`] asks
//! for.
//!
//! Promises: the lock of the reference counts is never held while anything waits; a refcount block
//! that has to be loaded delays only requests that need it; a block that is made takes its space at
//! once, so a full disk shows here and not at a flush.

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use super::reclaim::is_full;
use crate::refcounts::{Blocked, Refcounts, Run};
use crate::sync::{MutexGuard, Ordering, lock};
use crate::units::HostCluster;

/// Alignment of buffers: a page suits O_DIRECT everywhere.
pub(super) const ALIGN: usize = 4096;

impl Qcow2 {
    /// The reference counts. Never held across an await.
    ///
    /// Errors: `EROFS` when the image is open for reading only.
    pub(crate) fn space(&self) -> Result<MutexGuard<'_, Refcounts>, Errno> {
        Ok(lock(&self.engine()?.refcounts))
    }

    /// Takes up to `count` free host clusters (exactly so many if `contiguous`), whose reference
    /// counts become 1.
    ///
    /// * `goal`: host cluster that would be best.
    ///
    /// Errors: `ENOSPC`; `EIO` when the image is corrupt (it is marked so then); those of the
    /// storage.
    pub(crate) async fn allocate(
        &self,
        ring: &Ring,
        count: u64,
        goal: Option<HostCluster>,
        contiguous: bool,
    ) -> Result<Run, Errno> {
        self.engine()?.allocations.fetch_add(1, Ordering::Relaxed);
        self.with_space(ring, |space| space.allocate(count, goal, contiguous)).await
    }

    /// As [`allocate`](Qcow2::allocate) for requests: when there is no space, clusters that are on
    /// their way to being free are waited for. The caller holds no grace.
    pub(super) async fn allocate_or_reclaim(
        &self,
        ring: &Ring,
        count: u64,
        goal: Option<HostCluster>,
    ) -> Result<Run, Errno> {
        loop {
            let seen = self.times_freed();
            match self.allocate(ring, count, goal, false).await {
                Err(errno) if is_full(errno) && self.reclaim(ring, seen).await => {}
                result => return result,
            }
        }
    }

    /// As [`allocate_or_reclaim`](Qcow2::allocate_or_reclaim), one cluster for metadata: a write of
    /// data that looks once this has returned does not go there.
    pub(super) async fn allocate_metadata_or_reclaim(&self, ring: &Ring) -> Result<Run, Errno> {
        loop {
            let seen = self.times_freed();
            self.engine()?.allocations.fetch_add(1, Ordering::Relaxed);
            let taken = self.with_space(ring, |space| space.allocate_metadata(1, None, false));
            match taken.await {
                Err(errno) if is_full(errno) && self.reclaim(ring, seen).await => {}
                result => return result,
            }
        }
    }

    /// The reference count of a host cluster.
    pub(crate) async fn refcount(&self, ring: &Ring, cluster: HostCluster) -> Result<u64, Errno> {
        self.with_space(ring, |space| space.get(cluster)).await
    }

    /// Changes the reference counts of `count` clusters by one.
    ///
    /// * `up`: one more; otherwise one less.
    /// * `freed`: gets those that nothing refers to any more; they are not allocatable yet.
    ///
    /// Errors: as [`allocate`](Qcow2::allocate); `EOVERFLOW` when a count is at the largest number
    /// that the image can hold.
    pub(crate) async fn change_refcount(
        &self,
        ring: &Ring,
        start: HostCluster,
        count: u64,
        up: bool,
        freed: &mut Vec<Run>,
    ) -> Result<(), Errno> {
        if up {
            self.with_space(ring, |space| space.increment(start, count)).await
        } else {
            self.with_space(ring, |space| space.decrement(start, count, freed)).await
        }
    }

    /// Asks `question`, and does what it needs, until it has an answer.
    pub(crate) async fn with_space<T>(
        &self,
        ring: &Ring,
        mut question: impl FnMut(&mut Refcounts) -> Result<T, Blocked>,
    ) -> Result<T, Errno> {
        loop {
            let blocked = match question(&mut *self.space()?) {
                Ok(answer) => return Ok(answer),
                Err(blocked) => blocked,
            };
            match blocked {
                Blocked::Load(block) => self.load_block(ring, block).await?,
                Blocked::Create(block) => self.create_block(ring, block).await?,
                Blocked::Full => return Err(Errno::NOSPC),
                Blocked::Overflow => return Err(Errno::OVERFLOW),
                Blocked::Corrupt(reason) => return Err(self.mark_corrupt(ring, &reason).await),
            }
        }
    }

    async fn load_block(&self, ring: &Ring, block: u32) -> Result<(), Errno> {
        let index = u64::from(block);
        let _claim = self.engine()?.blocks.claim(index, index + 1).await;
        let offset = {
            let space = self.space()?;
            if space.has_block(block) {
                return Ok(());
            }
            space.block_offset(block).ok_or(Errno::IO)?
        };
        let mut bytes = vec![0; self.cluster_bytes()];
        let buf = IoBuf::new(bytes.len(), ALIGN);
        if self.file.read(ring, offset.0, &buf).await? < bytes.len() {
            // Short: the file ends inside the block. What is not there counts nothing.
            let len = self.file.len().saturating_sub(offset.0);
            if len == 0 {
                return Err(Errno::IO);
            }
        }
        buf.copy_to_slice(0, &mut bytes);
        self.space()?.put_block(block, &bytes);
        Ok(())
    }

    async fn create_block(&self, ring: &Ring, block: u32) -> Result<(), Errno> {
        let _claim = self.engine()?.growth.claim(0, 1).await;
        let begun = {
            let mut space = self.space()?;
            if space.block_offset(block).is_some() {
                return Ok(());
            }
            space.begin_block(block)
        };
        let cluster = match begun {
            Ok(cluster) => cluster,
            Err(Blocked::Corrupt(reason)) => return Err(self.mark_corrupt(ring, &reason).await),
            Err(_) => return Err(Errno::NOSPC),
        };
        let zeroes = IoBuf::new(self.cluster_bytes(), ALIGN);
        let result = self.file.write_all(ring, (cluster << self.geometry.cluster_bits).0, &zeroes);
        match result.await {
            Ok(()) => self.space()?.finish_block(block, cluster),
            Err(errno) => {
                self.space()?.abort_block(block, cluster);
                return Err(errno);
            }
        }
        Ok(())
    }

    /// Cluster size in bytes, as a length of memory.
    pub(crate) fn cluster_bytes(&self) -> usize {
        1 << self.geometry.cluster_bits
    }
}
