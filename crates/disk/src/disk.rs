//! What an export serves.
//!
//! Promises: a [`Disk`] is shared by all queue threads and has no lock of its own on the data path;
//! a request whose mapping is cached allocates nothing and touches no reference count that another
//! thread touches.

use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_storage::Storage;

use crate::gate::Gate;
use crate::guard::SectorGuard;
use crate::layer::{Layer, Node, Raw};
use crate::watch::{SizeWatch, Watchers};
use crate::write::resizable;
use crate::{Cache, ImageOptions, NullOptions};

/// Transfer size that a null disk reports, bytes.
const NULL_TRANSFER: u32 = 4096;

/// A disk: a top layer and the backing chain below it.
#[derive(Debug)]
pub struct Disk {
    /// Top first; never empty.
    layers: Vec<Layer>,
    read_only: bool,
    cache: Cache,
    guard: Option<SectorGuard>,
    read_only_reason: Option<String>,
    resizing: Gate,
    watchers: Arc<Watchers>,
}

/// What [`Disk::build`] needs beside the layers.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) read_only: bool,
    pub(crate) cache: Cache,
    pub(crate) guard: Option<SectorGuard>,
    pub(crate) read_only_reason: Option<String>,
}

impl Disk {
    /// A disk that keeps nothing; writable, of fixed size.
    pub fn null(options: &NullOptions) -> Arc<Disk> {
        Disk::build(vec![Layer::null(options)], Parts::default())
    }

    /// A raw disk over any storage. The format counts as given, so no sector is protected.
    ///
    /// * `options`: `read_only`, `cache` (flushes only), `raw_offset` and `raw_size` (cut to what
    ///   the storage has).
    pub fn from_storage(storage: Arc<Storage>, options: &ImageOptions) -> Arc<Disk> {
        let left = storage.len().saturating_sub(options.raw_offset);
        let size = options.raw_size.map_or(left, |size| size.min(left));
        let read_only = options.read_only || storage.is_read_only();
        let name = PathBuf::from(storage.name());
        let raw =
            Raw { storage, offset: options.raw_offset, fixed_size: options.raw_size.is_some() };
        let mut layer = Layer::new(Node::Raw(raw), size);
        layer.name = name;
        let parts = Parts { read_only, cache: options.cache, ..Parts::default() };
        Disk::build(vec![layer], parts)
    }

    /// * `layers`: top first, at least one.
    pub(crate) fn build(layers: Vec<Layer>, parts: Parts) -> Arc<Disk> {
        assert!(!layers.is_empty(), "a disk has at least one layer");
        Arc::new(Disk {
            layers,
            read_only: parts.read_only,
            cache: parts.cache,
            guard: parts.guard,
            read_only_reason: parts.read_only_reason,
            resizing: Gate::default(),
            watchers: Arc::default(),
        })
    }

    /// Size, bytes; any number, also 0.
    pub fn size(&self) -> u64 {
        self.top().size()
    }

    /// Whether writes are refused with EROFS.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Why the disk is read-only although that was not asked for
    /// ([`ImageOptions::auto_read_only`]); to be logged once.
    pub fn read_only_reason(&self) -> Option<&str> {
        self.read_only_reason.as_deref()
    }

    /// Why some writes to the first sector are refused with EPERM, when the image is a probed raw
    /// one; to be logged once.
    pub fn protection_reason(&self) -> Option<String> {
        self.guard.as_ref().map(SectorGuard::reason)
    }

    /// Whether [`Disk::resize`] can work.
    pub fn can_resize(&self) -> bool {
        match &self.top().node {
            Node::Raw(raw) => !self.read_only && resizable(raw),
            Node::Null(_) | Node::Qcow2(_) => false,
        }
    }

    /// Alignment that requests need, bytes. Always 1: storage copies where it has to.
    pub fn request_align(&self) -> u32 {
        1
    }

    /// Bytes that the top image takes on its storage, external data file included; 0 for null.
    pub fn allocated_bytes(&self) -> u64 {
        let layer = self.top();
        let (Some(file), Some(data)) = (layer.file(), layer.data_storage()) else {
            return 0;
        };
        let file_bytes = file.allocated_bytes();
        if Arc::ptr_eq(file, data) {
            return file_bytes;
        }
        file_bytes.saturating_add(data.allocated_bytes())
    }

    /// Transfer size that suits the storage, bytes.
    pub fn optimal_transfer(&self) -> u32 {
        self.top().data_storage().map_or(NULL_TRANSFER, |storage| storage.limits().optimal_transfer)
    }

    /// Use of page cache and flushes.
    pub fn cache(&self) -> Cache {
        self.cache
    }

    /// The chain, top first; never empty.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Calls `callback` with each new size in bytes, on the thread that made the change.
    pub fn watch_size(&self, callback: impl Fn(u64) + Send + Sync + 'static) -> SizeWatch {
        self.watchers.add(Arc::new(callback))
    }

    /// The top layer.
    pub(crate) fn top(&self) -> &Layer {
        &self.layers[0]
    }

    /// Guard of the first sector.
    pub(crate) fn guard(&self) -> Option<&SectorGuard> {
        self.guard.as_ref()
    }

    /// Held while the size changes.
    pub(crate) fn resizing(&self) -> &Gate {
        &self.resizing
    }

    pub(crate) fn watchers(&self) -> &Watchers {
        &self.watchers
    }

    /// Bytes of a request of `len` bytes at `offset` that lie inside the disk.
    pub(crate) fn clip(&self, offset: u64, len: usize) -> usize {
        let left = self.size().saturating_sub(offset);
        usize::try_from(left).map_or(len, |left| left.min(len))
    }

    /// As [`Disk::clip`], for requests without a buffer.
    pub(crate) fn clip_range(&self, offset: u64, len: u64) -> u64 {
        len.min(self.size().saturating_sub(offset))
    }
}
