//! Writes to a qcow2 top layer.
//!
//! Promises: a write ends as the cache mode requires, and dirty metadata is written back by a task.
//! The engine holds its own grace and orders its own writes; this module adds the layers below.

use ringdisk_qcow2::{Bytes, GuestOffset, Qcow2};
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::Disk;
use crate::graph::Graph;

impl Disk {
    /// As [`Disk::write`]; the range lies inside the disk.
    pub(super) async fn write_qcow2(
        &self,
        ring: &Ring,
        graph: &Graph,
        image: &Qcow2,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        let done = image.write(ring, offset, buf, &graph.below(0)).await?;
        self.after(ring, image).await?;
        Ok(done)
    }

    /// Zeroes a range that lies inside the disk.
    pub(super) async fn zero_qcow2(
        &self,
        ring: &Ring,
        graph: &Graph,
        image: &Qcow2,
        offset: GuestOffset,
        len: Bytes,
        may_unmap: bool,
    ) -> Result<(), Errno> {
        image.write_zeroes(ring, offset, len, may_unmap, &graph.below(0)).await?;
        self.after(ring, image).await
    }

    /// As [`Disk::discard`]; the range lies inside the disk.
    pub(super) async fn discard_qcow2(
        &self,
        ring: &Ring,
        graph: &Graph,
        image: &Qcow2,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<(), Errno> {
        image.discard(ring, offset, len, &graph.below(0)).await?;
        self.after(ring, image).await
    }

    /// Ends a change: flushes as the cache mode says, and starts the write-back.
    async fn after(&self, ring: &Ring, image: &Qcow2) -> Result<(), Errno> {
        if self.cache().sync() {
            return image.flush(ring).await;
        }
        self.look_after(ring, image);
        if self.policy().outlives_process { image.flush_mapping(ring).await } else { Ok(()) }
    }
}
