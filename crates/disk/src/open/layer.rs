//! Makes layers from open storages, for opening and for live changes of a disk.
//!
//! Promises: nothing here looks up a name.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ringdisk_qcow2::{Bytes, HostOffset, Qcow2};
use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, Storage};

use crate::layer::{Layer, Node, Raw};
use crate::name::printable_path;
use crate::{Cache, Cause, Error, ErrorKind, ImageOptions, SnapshotChoice};

/// Options for opening the files of a disk.
pub(crate) fn storage_options(
    options: &ImageOptions,
    read_only: bool,
) -> ringdisk_storage::OpenOptions {
    ringdisk_storage::OpenOptions {
        read_only,
        direct: options.cache.direct(),
        no_flush: options.cache == Cache::Unsafe,
        lock: match options {
            ImageOptions { inactive: true, .. } => Lock::Inactive,
            ImageOptions { share_backing: true, read_only: false, .. } if read_only => {
                Lock::ForceShare
            }
            options => lock_of(options),
        },
        opener: options.opener.clone(),
        ..ringdisk_storage::OpenOptions::default()
    }
}

/// The lock of the files of a disk that is in use.
pub(crate) fn lock_of(options: &ImageOptions) -> Lock {
    if options.force_share { Lock::ForceShare } else { Lock::Auto }
}

/// Options for opening a qcow2 image.
fn qcow2_options(options: &ImageOptions, writable: bool) -> ringdisk_qcow2::OpenOptions {
    ringdisk_qcow2::OpenOptions {
        writable: writable && !options.inactive,
        discard: options.discard,
        discard_no_unref: options.discard_no_unref,
        lazy_refcounts: options.lazy_refcounts,
        metadata_cache_bytes: options.metadata_cache_bytes,
        header_only: options.inactive,
        snapshot: None,
    }
}

/// Opens a qcow2 image; its external data file is set by the caller.
///
/// Errors: those of [`Qcow2::open`].
pub(crate) async fn open_qcow2(
    ring: &Ring,
    storage: Arc<Storage>,
    options: &ImageOptions,
    writable: bool,
) -> Result<Qcow2, Error> {
    Qcow2::open(ring, storage, &qcow2_options(options, writable))
        .await
        .map_err(|error| of_qcow2(&error))
}

/// Opens a qcow2 image as one of its internal snapshots has it, for reading; its external data file
/// is set by the caller.
///
/// Errors: those of [`Qcow2::open`]; there is no such snapshot.
pub(crate) async fn open_snapshot(
    ring: &Ring,
    storage: Arc<Storage>,
    options: &ImageOptions,
    choice: &SnapshotChoice,
) -> Result<Qcow2, Error> {
    let snapshot = Some(choice.clone());
    let options = ringdisk_qcow2::OpenOptions { snapshot, ..qcow2_options(options, false) };
    Qcow2::open(ring, storage, &options).await.map_err(|error| of_qcow2(&error))
}

/// A layer of an open qcow2 image, without names.
pub(crate) fn qcow2_layer(image: Qcow2, writable: bool) -> Layer {
    let sparse = is_sparse(image.file(), image.info().cluster_size());
    let size = image.virtual_size();
    let mut layer = Layer::new(Node::Qcow2(Arc::new(image)), size);
    layer.sparse = sparse;
    layer.is_writable = writable;
    layer
}

/// A raw layer over a window of a storage.
pub(crate) fn raw_layer(
    storage: Arc<Storage>,
    name: &Path,
    offset: u64,
    size: Option<Bytes>,
) -> Result<Layer, Error> {
    let len = Bytes(storage.len());
    let left = len.checked_sub(Bytes(offset));
    let fits = left.is_some_and(|left| size.is_none_or(|size| size <= left));
    let Some(left) = left.filter(|_| fits) else {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "the window of '{}' (offset {offset}, size {}) goes past its end at {len} bytes",
                printable_path(name),
                size.map_or("to the end".to_owned(), |size| size.to_string()),
            ),
        ));
    };
    let raw = Raw { offset: HostOffset(offset), fixed_size: size.is_some(), ..Raw::new(storage) };
    let mut layer = Layer::new(Node::Raw(raw), Bytes::ZERO);
    layer.size = AtomicU64::new(size.unwrap_or(left).0);
    Ok(layer)
}

/// Whether an image file has so much less allocated than its length that its clusters must be
/// preallocated. A difference of a tenth, or of two clusters, may have other reasons.
fn is_sparse(file: &Storage, cluster_size: Bytes) -> bool {
    let held = Bytes(file.allocated_bytes()) / cluster_size;
    let clusters = Bytes(file.len()) / cluster_size;
    clusters >= (held.saturating_mul(10) / 9).max(held.saturating_add(2))
}

/// An error of the storage crate in this crate's terms.
pub(crate) fn of_storage(error: &ringdisk_storage::Error) -> Error {
    use ringdisk_storage::ErrorKind as StorageKind;
    let kind = match error.kind() {
        StorageKind::Locked => ErrorKind::Locked,
        StorageKind::NotFound => ErrorKind::NotFound,
        StorageKind::PermissionDenied | StorageKind::ReadOnly => ErrorKind::PermissionDenied,
        StorageKind::WrongType => ErrorKind::NotAnImage,
        StorageKind::DirectUnsupported => ErrorKind::Unsupported,
        StorageKind::InvalidInput => ErrorKind::Invalid,
        _ => ErrorKind::Io,
    };
    carry(kind, error).because(Cause::of_storage(error))
}

/// An error of the qcow2 crate in this crate's terms.
pub(crate) fn of_qcow2(error: &ringdisk_qcow2::Error) -> Error {
    use ringdisk_qcow2::ErrorKind as Qcow2Kind;
    let kind = match error.kind() {
        Qcow2Kind::NotQcow2 => ErrorKind::UnknownFormat,
        Qcow2Kind::Corrupt | Qcow2Kind::TooLarge => ErrorKind::Corrupt,
        Qcow2Kind::Unsupported | Qcow2Kind::Encrypted => ErrorKind::Unsupported,
        Qcow2Kind::InvalidRequest => ErrorKind::Invalid,
        _ => ErrorKind::Io,
    };
    let system = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    let errno = system.and_then(ringdisk_ring::Errno::from_io_error);
    carry(kind, error).with_errno(errno).because(Cause::of_qcow2(error))
}

/// Converts an error of a lower crate: its message, with its cause if it has one.
fn carry(kind: ErrorKind, error: &dyn std::error::Error) -> Error {
    match error.source() {
        Some(source) => Error::new(kind, format!("{error}: {source}")),
        None => Error::new(kind, error.to_string()),
    }
}
