//! Writes, flushes, discards and zeroes of clients.
//!
//! Promises: a write takes no lock that it could wait for, and allocates nothing once its clusters
//! are allocated (exception: the first sector of a probed raw image); nothing here grows a disk; a
//! flush reaches the device unless the user asked for [`Cache::Unsafe`]. The range of a write is
//! recorded for a commit, a stream or a mirror that is under way, after the write, also when it
//! failed; or it goes to the target of the mirror before the write is answered. Before it, what
//! it overwrites is kept for a checkpoint that is running.

mod qcow2;
mod raw;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_throttle::Kind;

use crate::graph::{BOTH_MAX, Graph, Mark};
use crate::layer::Node;
use crate::options::{DetectZeroes, Discard};
use crate::{Cache, Disk};

impl Disk {
    /// Writes `buf`; cut at the end of the disk, 0 at and past it. Less than asked means that an
    /// error came after some progress; write the rest again to see it.
    ///
    /// * `offset`: bytes; any alignment.
    ///
    /// Errors: EROFS for a read-only disk; EPERM for a write that would change the format of a
    /// probed raw image; those of the storage.
    pub async fn write(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        self.pass_limits(ring, Kind::Write, Bytes::of(buf.len())).await;
        let graph = self.enter().await;
        let (offset, len) = self.admit(&graph, offset, Bytes::of(buf.len()))?;
        // Not longer than the buffer.
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(buf.len());
        if let Node::Null(null) = &graph.top().node {
            null.delay(ring).await;
            return Ok(len);
        }
        if len == 0 {
            return Ok(0);
        }
        let mut buf = buf.slice(0..len);
        let looks_at_data = self.policy().detect_zeroes != DetectZeroes::Off
            || matches!(&graph.top().node, Node::Raw(raw) if raw.guard_of(offset).is_some());
        if looks_at_data && !buf.is_ours() {
            buf = ring.in_memory(&buf).await?;
        }
        graph.keep(ring, offset, Bytes::of(len)).await;
        let is_zero = self.policy().detect_zeroes != DetectZeroes::Off && buf.is_zero();
        if let Some(mirror) = &graph.mirror
            && mirror.is_in_step()
            && !is_zero
            && may_go_to_both(&graph, offset, len)
        {
            let write = async |data: &IoBuf| self.write_top(ring, &graph, offset, data).await;
            // Boxed: the future of a plain write stays small.
            if let Some(done) = Box::pin(mirror.write_both(ring, &graph, offset, &buf, write)).await
            {
                return done;
            }
        }
        let mark = Mark::new(&graph, offset, Bytes::of(len));
        if is_zero {
            let may_unmap = self.policy().detect_zeroes == DetectZeroes::Unmap
                && self.policy().discard == Discard::Unmap;
            self.zero(ring, &graph, offset, Bytes::of(len), may_unmap).await?;
            mark.written(ring).await;
            return Ok(len);
        }
        let done = self.write_top(ring, &graph, offset, &buf).await;
        if done.is_ok() {
            mark.written(ring).await;
        }
        done
    }

    /// Writes a range that lies inside the disk to the layer on top.
    async fn write_top(
        &self,
        ring: &Ring,
        graph: &Graph,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        let mut was_made = false;
        loop {
            let done = match &graph.top().node {
                Node::Qcow2(image) => self.write_qcow2(ring, graph, image, offset, buf).await,
                Node::Raw(raw) => self.write_raw(ring, raw, offset, buf).await,
                Node::Null(_) | Node::Frozen(_) => Ok(buf.len()),
            };
            if done != Err(Errno::NOSPC) || !graph.make_room(ring, &mut was_made).await {
                return done;
            }
        }
    }

    /// Writes all of `buf`, as [`Disk::write`] does.
    ///
    /// Errors: as there, also after some progress; EIO past the end of the disk.
    pub(crate) async fn write_all(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        let mut done = 0;
        while done < buf.len() {
            match self.write(ring, offset + done as u64, &buf.slice(done..buf.len())).await? {
                0 => return Err(Errno::IO),
                written => done += written,
            }
        }
        Ok(())
    }

    /// Makes completed writes durable. Does nothing on a read-only disk and with
    /// [`Cache::Unsafe`].
    ///
    /// Errors: those of the storage.
    pub async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        let graph = self.enter().await;
        graph.check()?;
        if let Node::Null(null) = &graph.top().node {
            null.delay(ring).await;
            return Ok(());
        }
        if self.is_read_only() || self.cache() == Cache::Unsafe {
            return Ok(());
        }
        if let Some(mirror) = &graph.mirror {
            mirror.note_flush();
        }
        graph.flush(ring).await
    }

    /// Frees space of the storage. On a regular file and in a qcow2 image the range reads as
    /// zeroes afterwards; on a block device it reads as anything. [`Disk::punch`] promises zeroes
    /// everywhere. With [`Discard::Ignore`] nothing happens.
    ///
    /// * `offset`, `len`: bytes; the part past the end of the disk is ignored.
    ///
    /// Errors: EOPNOTSUPP where the storage cannot (null: always); EROFS; EPERM as
    /// [`Disk::write`].
    pub async fn discard(&self, ring: &Ring, offset: u64, len: Bytes) -> Result<(), Errno> {
        self.pass_limits(ring, Kind::Write, len).await;
        let graph = self.enter().await;
        let (offset, len) = self.admit(&graph, offset, len)?;
        if let Node::Null(_) = &graph.top().node {
            return Err(Errno::OPNOTSUPP);
        }
        if len.is_zero() || self.policy().discard == Discard::Ignore {
            return Ok(());
        }
        graph.keep(ring, offset, len).await;
        let mark = Mark::new(&graph, offset, len);
        match &graph.top().node {
            Node::Qcow2(image) => self.discard_qcow2(ring, &graph, image, offset, len).await?,
            Node::Raw(raw) => self.discard_raw(ring, raw, offset, len).await?,
            Node::Null(_) | Node::Frozen(_) => return Err(Errno::OPNOTSUPP),
        }
        mark.written(ring).await;
        Ok(())
    }

    /// Punches a hole, in every discard mode: the range reads as zeroes and its space is freed (in
    /// a qcow2 image with [`Discard::Ignore`] for use by the image, not by the file system). In a
    /// raw image zeroes are written only at either end, where a block is zeroed in part.
    ///
    /// * `offset`, `len`: bytes; the part past the end of the disk is ignored.
    ///
    /// Errors: EOPNOTSUPP where the storage cannot (null: always), and nothing has changed then;
    /// EROFS; EPERM as [`Disk::write`].
    pub async fn punch(&self, ring: &Ring, offset: u64, len: Bytes) -> Result<(), Errno> {
        self.pass_limits(ring, Kind::Write, len).await;
        let graph = self.enter().await;
        let (offset, len) = self.admit(&graph, offset, len)?;
        if let Node::Null(_) = &graph.top().node {
            return Err(Errno::OPNOTSUPP);
        }
        if len.is_zero() {
            return Ok(());
        }
        graph.keep(ring, offset, len).await;
        let mark = Mark::new(&graph, offset, len);
        match &graph.top().node {
            Node::Qcow2(image) => self.zero_qcow2(ring, &graph, image, offset, len, true).await?,
            Node::Raw(raw) => self.zero_raw(ring, raw, offset, len, true, false).await?,
            Node::Null(_) | Node::Frozen(_) => return Err(Errno::OPNOTSUPP),
        }
        mark.written(ring).await;
        Ok(())
    }

    /// Makes a range read as zeroes, by writing them where the storage has no better way.
    ///
    /// * `offset`, `len`: bytes; the part past the end of the disk is ignored.
    /// * `may_unmap`: the space may be freed.
    ///
    /// Errors: EROFS; EPERM as [`Disk::write`]; those of the storage.
    pub async fn write_zeroes(
        &self,
        ring: &Ring,
        offset: u64,
        len: Bytes,
        may_unmap: bool,
    ) -> Result<(), Errno> {
        self.pass_limits(ring, Kind::Write, len).await;
        let graph = self.enter().await;
        let (offset, len) = self.admit(&graph, offset, len)?;
        if let Node::Null(null) = &graph.top().node {
            null.delay(ring).await;
            return Ok(());
        }
        if len.is_zero() {
            return Ok(());
        }
        graph.keep(ring, offset, len).await;
        let mark = Mark::new(&graph, offset, len);
        self.zero(ring, &graph, offset, len, may_unmap).await?;
        mark.written(ring).await;
        Ok(())
    }

    /// Writes one whole guest cluster of a qcow2 image in compressed form. For tools: the cluster
    /// must not be allocated yet.
    ///
    /// * `offset`: bytes; a multiple of the cluster size.
    /// * `compressed`: in the image's own compression type, shorter than a cluster.
    ///
    /// Errors: EOPNOTSUPP for other formats and for a window of an image; EROFS; those of the
    /// image.
    pub async fn write_compressed(
        &self,
        ring: &Ring,
        offset: u64,
        compressed: &[u8],
    ) -> Result<(), Errno> {
        let graph = self.enter().await;
        let (offset, _) = self.admit(&graph, offset, Bytes(1))?;
        // A whole cluster may reach past a window.
        let image = graph.top_image().filter(|_| !graph.window.is_part());
        let Some(image) = image else { return Err(Errno::OPNOTSUPP) };
        graph.keep(ring, offset, image.info().cluster_size()).await;
        let mark = Mark::new(&graph, offset, image.info().cluster_size());
        image.write_compressed(ring, offset, compressed).await?;
        mark.written(ring).await;
        self.look_after(ring, image);
        Ok(())
    }

    /// Checks that a change is allowed, and gives its offset in the layers and its length inside
    /// the disk, bytes.
    ///
    /// Errors: EIO, EROFS.
    fn admit(&self, graph: &Graph, offset: u64, len: Bytes) -> Result<(GuestOffset, Bytes), Errno> {
        graph.check()?;
        if self.is_read_only() {
            return Err(Errno::ROFS);
        }
        Ok(graph.place(offset, len))
    }

    /// Zeroes a range that lies inside a raw or qcow2 disk.
    async fn zero(
        &self,
        ring: &Ring,
        graph: &Graph,
        offset: GuestOffset,
        len: Bytes,
        may_unmap: bool,
    ) -> Result<(), Errno> {
        let mut was_made = false;
        loop {
            let done = match &graph.top().node {
                Node::Qcow2(image) => {
                    self.zero_qcow2(ring, graph, image, offset, len, may_unmap).await
                }
                Node::Raw(raw) => self.zero_raw(ring, raw, offset, len, may_unmap, true).await,
                Node::Null(_) | Node::Frozen(_) => Ok(()),
            };
            if done != Err(Errno::NOSPC) || !graph.make_room(ring, &mut was_made).await {
                return done;
            }
        }
    }
}

/// Whether a write may go to the target of a mirror before the disk has it: not where the disk may
/// refuse it.
fn may_go_to_both(graph: &Graph, offset: GuestOffset, len: usize) -> bool {
    let is_guarded = matches!(&graph.top().node, Node::Raw(raw) if raw.guard_of(offset).is_some());
    len <= BOTH_MAX && !is_guarded
}

impl Graph {
    /// Makes writes to the top layer durable.
    pub(crate) async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        match &self.top().node {
            Node::Raw(raw) => raw.storage.flush(ring).await,
            Node::Qcow2(image) => image.flush(ring).await,
            Node::Null(_) | Node::Frozen(_) => Ok(()),
        }
    }
}
