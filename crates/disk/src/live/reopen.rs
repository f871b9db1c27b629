//! Opens the image of a layer again: on the same storage, or on the same file in another mode.
//!
//! Promises: locks move to the new descriptors; on an error the former layer keeps them.

use std::sync::Arc;

use ringdisk_qcow2::Qcow2;
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::layer::{Layer, Node};
use crate::open::{of_qcow2, of_storage, open_qcow2, qcow2_layer, storage_options};
use crate::{Error, ErrorKind, ImageOptions};

/// The qcow2 image of a layer, on the layer's storage. The former one was closed.
///
/// Errors: those of [`Qcow2::open`]; `Unsupported` for another format.
pub(super) async fn image(
    ring: &Ring,
    layer: &Layer,
    options: &ImageOptions,
    writable: bool,
) -> Result<Qcow2, Error> {
    let Some(old) = layer.qcow2() else { return Err(not_qcow2(layer)) };
    let image = image_on(ring, Arc::clone(old.file()), data_file(old), options, writable).await?;
    image.take_over_names(old);
    Ok(image)
}

/// Errors: `Unsupported` when the layer is no qcow2 image.
pub(super) fn check(layer: &Layer) -> Result<(), Error> {
    if layer.qcow2().is_some() { Ok(()) } else { Err(not_qcow2(layer)) }
}

async fn image_on(
    ring: &Ring,
    file: Arc<Storage>,
    data: Option<Arc<Storage>>,
    options: &ImageOptions,
    writable: bool,
) -> Result<Qcow2, Error> {
    let mut image = open_qcow2(ring, file, options, writable).await?;
    if let Some(data) = data {
        image.set_data_file(data).map_err(|error| of_qcow2(&error))?;
    }
    Ok(image)
}

fn data_file(image: &Qcow2) -> Option<Arc<Storage>> {
    image.info().external_data_file.then(|| Arc::clone(image.data_storage()))
}

/// A layer as `layer`, over the same storage opened once more. Tried twice, since a disk in use
/// depends on it.
pub(crate) async fn again(
    ring: &Ring,
    layer: &Layer,
    options: &ImageOptions,
    writable: bool,
) -> Result<Layer, Error> {
    let image = match image(ring, layer, options, writable).await {
        Ok(image) => image,
        Err(error) => {
            tracing::warn!("{error}; trying again");
            image(ring, layer, options, writable).await?
        }
    };
    Ok(named_as(qcow2_layer(image, writable), layer))
}

/// A written layer, for reading only from now on. The former one was closed. Where its files cannot
/// be opened again in that mode the old descriptors are used, with their locks.
pub(crate) async fn for_reading(
    ring: &Ring,
    layer: &Layer,
    options: &ImageOptions,
) -> Result<Layer, Error> {
    match in_mode(ring, layer, options, false).await {
        Ok(layer) => Ok(layer),
        Err(error) => {
            tracing::warn!("'{}' stays locked for writing: {error}", layer.name().display());
            match &layer.node {
                Node::Raw(raw) => {
                    let raw = raw.over(Arc::clone(&raw.storage));
                    Ok(named_as(Layer::new(Node::Raw(raw), layer.size()), layer))
                }
                Node::Qcow2(_) | Node::Null(_) | Node::Frozen(_) => {
                    again(ring, layer, options, false).await
                }
            }
        }
    }
}

/// A layer as `layer` whose files are opened again, for writing or for reading only. The former one
/// was closed; its locks move to the new descriptors.
///
/// Errors: `Locked` when another process reads the file that is to be written; `PermissionDenied`.
/// The former layer is as it was then.
pub(crate) async fn in_mode(
    ring: &Ring,
    layer: &Layer,
    options: &ImageOptions,
    writable: bool,
) -> Result<Layer, Error> {
    match &layer.node {
        Node::Null(_) | Node::Frozen(_) => Err(not_qcow2(layer)),
        Node::Raw(raw) => {
            let storage = storage_in_mode(&raw.storage, options, writable)?;
            let mut fresh = Layer::new(Node::Raw(raw.over(storage)), layer.size());
            fresh.is_writable = writable;
            Ok(named_as(fresh, layer))
        }
        Node::Qcow2(old) => qcow2_in_modes(ring, layer, old, options, (writable, writable)).await,
    }
}

/// A qcow2 layer as `layer`, for reading as before, whose files are open for writing: the locks
/// exclude other processes from now on, and a later change is not refused.
///
/// Errors: as [`in_mode`]; `Unsupported` for another format.
pub(super) async fn kept_for_writing(
    ring: &Ring,
    layer: &Layer,
    options: &ImageOptions,
) -> Result<Layer, Error> {
    let Some(old) = layer.qcow2() else { return Err(not_qcow2(layer)) };
    qcow2_in_modes(ring, layer, old, options, (true, false)).await
}

/// * `writable`: the files; the image.
async fn qcow2_in_modes(
    ring: &Ring,
    layer: &Layer,
    old: &Qcow2,
    options: &ImageOptions,
    writable: (bool, bool),
) -> Result<Layer, Error> {
    let (files, image) = writable;
    let old_data = data_file(old);
    let file = storage_in_mode(old.file(), options, files)?;
    let mut moved = vec![(old.file(), Arc::clone(&file))];
    let opened = async {
        let data = match &old_data {
            Some(old) => {
                let data = storage_in_mode(old, options, files)?;
                moved.push((old, Arc::clone(&data)));
                Some(data)
            }
            None => None,
        };
        image_on(ring, Arc::clone(&file), data, options, image).await
    };
    match opened.await {
        Ok(fresh) => {
            fresh.take_over_names(old);
            Ok(named_as(qcow2_layer(fresh, image), layer))
        }
        Err(error) => {
            // The locks of both files move back to the former descriptors. A file that was in the
            // right mode has kept its descriptor.
            let mut result = Err(error);
            for (old, fresh) in moved.into_iter().filter(|(old, fresh)| !Arc::ptr_eq(old, fresh)) {
                if let Err(lost) = old.reclaim(&fresh) {
                    result = Err(of_storage(&lost));
                }
            }
            result
        }
    }
}

/// The same file in another mode. Storage of other kinds has one mode only and stays as it is.
fn storage_in_mode(
    storage: &Arc<Storage>,
    options: &ImageOptions,
    writable: bool,
) -> Result<Arc<Storage>, Error> {
    if storage.is_read_only() != writable {
        return Ok(Arc::clone(storage));
    }
    match storage.reopen(&storage_options(options, !writable)) {
        None => Ok(Arc::clone(storage)),
        Some(result) => result.map(Arc::new).map_err(|error| of_storage(&error)),
    }
}

/// A writable layer as `layer`, with another image of the same storage.
pub(super) fn layer_of(image: Qcow2, layer: &Layer) -> Layer {
    named_as(qcow2_layer(image, true), layer)
}

/// Copies the names of another layer.
pub(crate) fn named_as(mut fresh: Layer, layer: &Layer) -> Layer {
    fresh.name.clone_from(&layer.name);
    fresh.directory.clone_from(&layer.directory);
    fresh.data_name.clone_from(&layer.data_name);
    fresh.full_backing_name.clone_from(&layer.full_backing_name);
    fresh.without_backing = layer.without_backing;
    fresh
}

fn not_qcow2(layer: &Layer) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("'{}' is not a qcow2 image", crate::name::printable_path(layer.name())),
    )
}
