//! What an export serves.
//!
//! Promises: a [`Disk`] is shared by all queue threads and has no lock of its own on the data path;
//! a request whose mapping is cached allocates nothing and touches no reference count.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::null::Null;
use crate::watch::{SizeWatch, Watchers};
use crate::{BlockStatus, Error, ErrorKind, ImageOptions, NullOptions, Source};

/// What a layer is made of.
#[derive(Debug)]
pub(crate) enum Node {
    /// Keeps nothing.
    Null(Null),
}

/// A disk: a top node and the backing chain below it.
#[derive(Debug)]
pub struct Disk {
    size: AtomicU64,
    node: Node,
    watchers: Arc<Watchers>,
}

impl Disk {
    /// Opens an image with its whole backing chain.
    ///
    /// Errors: see [`ErrorKind`].
    #[allow(clippy::unused_async)]
    pub async fn open(
        _ring: &Ring,
        _source: Source,
        _options: &ImageOptions,
    ) -> Result<Arc<Disk>, Error> {
        Err(Error::new(ErrorKind::Unsupported, "images are not opened yet"))
    }

    /// A disk that keeps nothing.
    pub fn null(options: &NullOptions) -> Arc<Disk> {
        Arc::new(Disk {
            size: AtomicU64::new(options.size),
            node: Node::Null(Null::new(options)),
            watchers: Arc::default(),
        })
    }

    /// Size, bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Whether writes are refused with EROFS.
    pub fn is_read_only(&self) -> bool {
        false
    }

    /// Whether [`Disk::resize`] can work.
    pub fn can_resize(&self) -> bool {
        false
    }

    /// Best request alignment, bytes; requests of any alignment work.
    pub fn request_align(&self) -> u32 {
        1
    }

    /// Bytes that the top image takes on its storage.
    pub fn allocated_bytes(&self) -> u64 {
        0
    }

    /// Transfer size that suits the storage, bytes; 0 when it does not matter.
    pub fn optimal_transfer(&self) -> u32 {
        0
    }

    /// Calls `callback` with each new size, on the thread that made the change.
    pub fn watch_size(&self, callback: impl Fn(u64) + Send + Sync + 'static) -> SizeWatch {
        self.watchers.add(Arc::new(callback))
    }

    /// Bytes of a request of `len` bytes at `offset` that lie inside the disk.
    fn clip(&self, offset: u64, len: usize) -> usize {
        let left = self.size().saturating_sub(offset);
        usize::try_from(left).map_or(len, |left| left.min(len))
    }

    /// Reads; short only at the end of the disk.
    ///
    /// Errors: those of the storage.
    pub async fn read(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let len = self.clip(offset, buf.len());
        match &self.node {
            Node::Null(null) => {
                null.delay(ring).await;
                null.fill(&buf.slice(0..len));
            }
        }
        Ok(len)
    }

    /// Writes; cut at the end of the disk, 0 at and past it; never grows the disk.
    ///
    /// Errors: those of the storage; EROFS.
    pub async fn write(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let len = self.clip(offset, buf.len());
        match &self.node {
            Node::Null(null) => null.delay(ring).await,
        }
        Ok(len)
    }

    /// Makes completed writes durable.
    ///
    /// Errors: those of the storage.
    pub async fn flush(&self, ring: &Ring) -> Result<(), Errno> {
        match &self.node {
            Node::Null(null) => null.delay(ring).await,
        }
        Ok(())
    }

    /// Gives space back; the bytes read as zeroes afterwards.
    ///
    /// Errors: EOPNOTSUPP where the storage cannot.
    #[allow(clippy::unused_async)]
    pub async fn discard(&self, _ring: &Ring, _offset: u64, _len: u64) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Makes a range read as zeroes.
    ///
    /// Errors: those of the storage.
    pub async fn write_zeroes(
        &self,
        ring: &Ring,
        _offset: u64,
        _len: u64,
        _may_unmap: bool,
    ) -> Result<(), Errno> {
        match &self.node {
            Node::Null(null) => null.delay(ring).await,
        }
        Ok(())
    }

    /// Changes the size.
    ///
    /// Errors: EOPNOTSUPP where the size is fixed.
    #[allow(clippy::unused_async)]
    pub async fn resize(&self, _ring: &Ring, _size: u64) -> Result<(), Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// What is known about the bytes from `offset` on.
    ///
    /// Errors: those of the storage.
    #[allow(clippy::unused_async)]
    pub async fn block_status(
        &self,
        _ring: &Ring,
        offset: u64,
        len: u64,
    ) -> Result<BlockStatus, Errno> {
        let len = len.min(self.size().saturating_sub(offset));
        match &self.node {
            Node::Null(null) => Ok(BlockStatus {
                len,
                data: !null.read_zeroes(),
                zero: null.read_zeroes(),
                present: true,
                depth: 0,
                offset: None,
                compressed: false,
                file: None,
            }),
        }
    }
}
