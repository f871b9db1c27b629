//! Reads of clients.
//!
//! Promises: those of `chain/read.rs`; what the window of the disk does not show is never read.

use ringdisk_qcow2::Bytes;
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_throttle::Kind;

use crate::Disk;
use crate::graph::Graph;
use crate::layer::Node;

impl Disk {
    /// Reads into `buf`; short only at the end of the disk, 0 at and past it.
    ///
    /// Bytes that the storage has lost since the open (it was cut from outside) read as zeroes.
    ///
    /// * `offset`: bytes; any alignment.
    ///
    /// Errors: those of the storage; EIO for a damaged image.
    pub async fn read(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        self.pass_limits(ring, Kind::Read, Bytes::of(buf.len())).await;
        self.read_part(ring, offset, buf).await
    }

    /// As [`Disk::read`], for a part of a request that has passed the limits
    /// ([`Disk::pass_limits`]).
    ///
    /// Errors: as there.
    pub async fn read_part(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let graph = self.enter().await;
        graph.check()?;
        if self.copies_on_read() {
            let kept = self.keep_what_is_read(ring, &graph, offset, Bytes::of(buf.len()));
            Box::pin(kept).await;
        }
        graph.read(ring, offset, buf).await
    }
}

impl Graph {
    /// As [`Disk::read`].
    pub(crate) async fn read(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let (offset, len) = self.place(offset, Bytes::of(buf.len()));
        // Not longer than the buffer.
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(buf.len());
        match &self.top().node {
            Node::Null(null) => {
                null.delay(ring).await;
                if null.read_zeroes() {
                    ring.zero(&buf.slice(0..len)).await?;
                }
                return Ok(len);
            }
            Node::Frozen(frozen) => {
                if len > 0 {
                    frozen.read(ring, offset, &buf.slice(0..len)).await?;
                }
                return Ok(len);
            }
            Node::Raw(_) | Node::Qcow2(_) => {}
        }
        if len == 0 {
            return Ok(0);
        }
        let _graces = self.graces();
        self.chain().fill(ring, offset, &buf.slice(0..len)).await?;
        Ok(len)
    }
}
