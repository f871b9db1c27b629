//! One layer of a backing chain: an image (raw, qcow2 or null), its names, and the look-up of a
//! range in it; or the frozen state of another disk.
//!
//! Promises: a look-up whose table is in memory takes no lock, allocates nothing and never blocks.

mod frozen;
pub(crate) mod guard;
mod null;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ringdisk_qcow2::{Bytes, Compressed, Extent, ExtentKind, GuestOffset, HostOffset, Qcow2};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::{Kind as StorageKind, NbdAddress, Storage};

use crate::task_mutex::TaskGuard;
use crate::{Format, NullOptions};

pub(crate) use frozen::{Frozen, Pending, Piece};
pub(crate) use guard::SectorGuard;
pub(crate) use null::Null;

/// The image of a layer.
#[derive(Debug)]
pub(crate) enum Node {
    /// Stores nothing.
    Null(Null),
    /// Bytes of a storage as they are.
    Raw(Raw),
    /// A qcow2 image; shared with the task that writes its metadata back.
    Qcow2(Arc<Qcow2>),
    /// The state of another disk at one instant; always the only layer.
    Frozen(Arc<dyn Frozen>),
}

/// A window of a storage.
#[derive(Debug)]
pub(crate) struct Raw {
    pub(crate) storage: Arc<Storage>,
    /// First byte of the window in the storage.
    pub(crate) offset: HostOffset,
    /// The user fixed the size of the window.
    pub(crate) fixed_size: bool,
    /// Guard of the first sector, where the user did not state that the image is raw. It stays with
    /// the image when an overlay is put above it, and when the image is the top again.
    pub(crate) guard: Option<Arc<SectorGuard>>,
}

impl Raw {
    /// All of a storage.
    pub(crate) fn new(storage: Arc<Storage>) -> Raw {
        Raw { storage, offset: HostOffset(0), fixed_size: false, guard: None }
    }

    /// The same window of the same bytes, by another storage.
    pub(crate) fn over(&self, storage: Arc<Storage>) -> Raw {
        Raw { storage, guard: self.guard.clone(), ..*self }
    }

    /// The byte of the storage that holds a byte of the layer.
    #[inline]
    pub(crate) fn host(&self, offset: GuestOffset) -> HostOffset {
        self.offset + offset.from_start()
    }

    /// Whether the size can be changed.
    pub(crate) fn can_resize(&self) -> bool {
        !self.fixed_size && self.storage.kind() != StorageKind::BlockDevice
    }

    /// The guard that a request at `offset` must pass.
    pub(crate) fn guard_of(&self, offset: GuestOffset) -> Option<&SectorGuard> {
        self.guard.as_deref().filter(|_| SectorGuard::covers(self.host(offset)))
    }

    /// Passes the guard of the first sector, where there is one; the request holds what this
    /// returns.
    ///
    /// * `data`: the bytes to write; `None` for zeroes.
    ///
    /// Errors: as [`SectorGuard::admit`].
    pub(crate) async fn pass_guard(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
        data: Option<&IoBuf>,
    ) -> Result<Option<TaskGuard<'_>>, Errno> {
        match self.guard_of(offset) {
            Some(guard) => {
                let admitted = guard.admit(ring, &self.storage, self.host(offset), len, data);
                Ok(Some(admitted.await?))
            }
            None => Ok(None),
        }
    }
}

/// One layer of a backing chain. Only the size of a raw layer changes in place; every other change
/// of the disk replaces the layer.
#[derive(Debug)]
pub struct Layer {
    pub(crate) node: Node,
    /// Size of the layer, bytes. Changed by a resize of a raw top layer only.
    pub(crate) size: AtomicU64,
    /// Its storage is open for writing, and the layer may be written.
    pub(crate) is_writable: bool,
    pub(crate) name: PathBuf,
    /// Where relative names inside the image start; `None` for an inherited descriptor.
    pub(crate) directory: Option<PathBuf>,
    pub(crate) data_name: Option<PathBuf>,
    pub(crate) full_backing_name: Option<String>,
    /// The image names a backing file that was not opened (`"backing": null` of a `json:` name).
    pub(crate) without_backing: bool,
    /// The image file holds much less than its length: preallocated, so what the image calls data
    /// may be a hole of the file.
    pub(crate) sparse: bool,
}

/// The answer of a layer, or of a chain, for the start of a range.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Bytes of the layer's data storage.
    Data { offset: HostOffset },
    /// Zeroes, with the host offset that is allocated for them, if there is one.
    Zero { offset: Option<HostOffset> },
    /// Part of a compressed cluster.
    Compressed(Compressed),
    /// Nothing here; the layer below decides, and below the last one are zeroes.
    Unallocated,
    /// A null node: reads leave the buffer alone.
    Untouched,
}

impl Layer {
    /// A layer without names.
    pub(crate) fn new(node: Node, size: Bytes) -> Layer {
        Layer {
            node,
            size: AtomicU64::new(size.0),
            is_writable: false,
            name: PathBuf::new(),
            directory: None,
            data_name: None,
            full_backing_name: None,
            without_backing: false,
            sparse: false,
        }
    }

    /// Protects the first sector, if the layer is raw. The layer's name must be set already.
    pub(crate) fn protect(&mut self) {
        if let Node::Raw(raw) = &mut self.node {
            raw.guard = Some(Arc::new(SectorGuard::new(self.name.clone())));
        }
    }

    /// A null layer.
    pub(crate) fn null(options: &NullOptions) -> Layer {
        let mut layer = Layer::new(Node::Null(Null::new(options)), options.size);
        layer.name = PathBuf::from("null");
        layer
    }

    /// Size of the layer, bytes.
    pub fn size(&self) -> Bytes {
        Bytes(self.size.load(Ordering::Acquire))
    }

    /// End of the layer: the byte after its last one.
    pub(crate) fn end(&self) -> GuestOffset {
        GuestOffset::after(self.size())
    }

    /// Format; `None` for a null disk and for the frozen state of another disk.
    pub fn format(&self) -> Option<Format> {
        match &self.node {
            Node::Null(_) | Node::Frozen(_) => None,
            Node::Raw(_) => Some(Format::Raw),
            Node::Qcow2(_) => Some(Format::Qcow2),
        }
    }

    /// Name of the image as it was opened: the user's path, or the backing file name seen from
    /// there.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Name of the external data file, seen from where the user is.
    pub fn data_name(&self) -> Option<&Path> {
        self.data_name.as_deref()
    }

    /// Why opening the image by its name and format alone would give other content than it has
    /// here. `None`: the content would be the same.
    pub(crate) fn differs_by_its_name(&self) -> Option<&'static str> {
        match &self.node {
            Node::Raw(raw) if raw.offset != HostOffset(0) || raw.fixed_size => {
                Some("it is a part of a file, and its name means the whole file")
            }
            Node::Qcow2(_) if self.without_backing => {
                Some("it was opened without the backing file that it names")
            }
            Node::Null(_) | Node::Raw(_) | Node::Qcow2(_) | Node::Frozen(_) => None,
        }
    }

    /// Name of the file that [`BlockStatus::offset`](crate::BlockStatus::offset) belongs to.
    pub fn host_name(&self) -> &Path {
        self.data_name.as_deref().unwrap_or(&self.name)
    }

    /// Full name of the backing file as `qemu-img` shows it.
    pub fn full_backing_name(&self) -> Option<&str> {
        self.full_backing_name.as_deref()
    }

    /// The qcow2 image.
    pub fn qcow2(&self) -> Option<&Arc<Qcow2>> {
        match &self.node {
            Node::Qcow2(image) => Some(image),
            Node::Null(_) | Node::Raw(_) | Node::Frozen(_) => None,
        }
    }

    /// Whether the layer is open for writing: the top one, and one that a commit writes to.
    pub fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// The image file.
    pub fn file(&self) -> Option<&Arc<Storage>> {
        match &self.node {
            Node::Null(_) | Node::Frozen(_) => None,
            Node::Raw(raw) => Some(&raw.storage),
            Node::Qcow2(image) => Some(image.file()),
        }
    }

    /// Address of the image, if it is an export of an NBD server.
    pub fn export(&self) -> Option<&NbdAddress> {
        self.file().and_then(|file| file.nbd_address())
    }

    /// The image file and, where there is one, the external data file.
    pub(crate) fn storages(&self) -> impl Iterator<Item = &Arc<Storage>> {
        self.file().into_iter().chain(self.external_data())
    }

    /// The external data file.
    pub fn external_data(&self) -> Option<&Arc<Storage>> {
        let file = self.file();
        self.data_storage().filter(|data| file.is_none_or(|file| !Arc::ptr_eq(file, data)))
    }

    /// The storage of the layer's plain bytes: the image file, or its external data file.
    pub fn data_storage(&self) -> Option<&Arc<Storage>> {
        match &self.node {
            Node::Null(_) | Node::Frozen(_) => None,
            Node::Raw(raw) => Some(&raw.storage),
            Node::Qcow2(image) => Some(image.data_storage()),
        }
    }

    /// Looks a range up; `None` when a table has to be loaded first.
    ///
    /// * `len`: bytes wanted; the range lies inside the layer. The answer may be shorter.
    ///
    /// Errors: those of the image (EIO for a damaged table).
    pub(crate) fn look(
        &self,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Option<(Bytes, Kind)>, Errno> {
        match &self.node {
            Node::Qcow2(image) => Ok(image.map_cached(offset, len)?.map(of_extent)),
            Node::Raw(raw) => {
                let offset = raw.host(offset);
                Ok(Some((len, Kind::Data { offset })))
            }
            Node::Null(null) if null.read_zeroes() => Ok(Some((len, Kind::Zero { offset: None }))),
            Node::Null(_) => Ok(Some((len, Kind::Untouched))),
            // Requests do not get here: they ask the frozen state itself.
            Node::Frozen(_) => Err(Errno::IO),
        }
    }
}

/// An extent in this crate's terms.
pub(crate) fn of_extent(extent: Extent) -> (Bytes, Kind) {
    let kind = match extent.kind {
        ExtentKind::Data { offset } => Kind::Data { offset },
        ExtentKind::Zero { offset } => Kind::Zero { offset },
        ExtentKind::Compressed(cluster) => Kind::Compressed(cluster),
        ExtentKind::Unallocated => Kind::Unallocated,
    };
    (extent.len, kind)
}
