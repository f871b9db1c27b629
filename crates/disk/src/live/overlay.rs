//! Puts a new overlay on top of a disk that is in use: an external snapshot.
//!
//! Promises: the former top keeps the content of that moment, and is open for reading only from
//! then on; the name of the overlay is on stable storage before the first write goes to it. If it
//! cannot be created, no file is left behind.

use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_qcow2::CreateOptions;
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use super::{again, check_lasting, close_layer, in_mode};
use crate::layer::Layer;
use crate::names_note::{self, Names};
use crate::open::{
    create_file, of_qcow2, open_qcow2, over, qcow2_layer, remove as remove_file, storage_options,
    sync_directory,
};
use crate::{Disk, Error, ErrorKind, ImageOptions, LAYERS_MAX, lost_names};

/// Options of a new overlay.
#[derive(Clone, Debug, Default)]
pub struct OverlayOptions {
    /// Cluster size, refcount width and such. Size and backing file are filled in.
    pub create: CreateOptions,
}

impl Disk {
    /// Puts a new overlay on top; clients write to it from then on.
    ///
    /// * `path`: of the new image; there must be no such file. It records the former top as its
    ///   backing file, by a relative name if both are in one directory.
    ///
    /// Errors: `Io` when the file is there already or cannot be made, `NotFound` when the name of
    /// an image of the chain does not lead to it any more, `TooDeep`, `Busy`, those of the storage.
    /// The disk is as it was.
    pub async fn add_overlay(
        &self,
        ring: &Ring,
        path: impl Into<PathBuf>,
        options: OverlayOptions,
    ) -> Result<(), Error> {
        self.add_overlay_in(ring, path.into(), options, create_file).await
    }

    /// As [`Disk::add_overlay`], in a file that the caller creates.
    ///
    /// * `create`: creates the new empty file, and gives its storage.
    ///
    /// Errors: those of [`Disk::add_overlay`], and those of `create`.
    pub async fn add_overlay_in(
        &self,
        ring: &Ring,
        path: PathBuf,
        options: OverlayOptions,
        create: impl FnOnce(&Path, &ImageOptions) -> Result<Arc<Storage>, Error> + 'static,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        let change = move |disk: Arc<Disk>, ring: Ring| async move {
            disk.add_overlay_now(&ring, &path, &options, create).await
        };
        self.detached(ring, change).await
    }

    async fn add_overlay_now(
        &self,
        ring: &Ring,
        path: &Path,
        options: &OverlayOptions,
        create: impl FnOnce(&Path, &ImageOptions) -> Result<Arc<Storage>, Error>,
    ) -> Result<(), Error> {
        let turn = self.changes().lock().await;
        self.check_free()?;
        if self.is_lent() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the kernel reads and writes the image itself (--passthrough), so nothing can be \
                 put above it",
            ));
        }
        let graph = self.graph();
        if graph.layers.len() >= LAYERS_MAX {
            return Err(Error::new(
                ErrorKind::TooDeep,
                format!("the chain has {LAYERS_MAX} layers already; commit some of them first"),
            ));
        }
        lost_names::check("put an overlay on top", graph.layers.iter().map(|layer| &**layer))?;
        // The lock of changes is held, so the size of the top cannot change.
        let made = make(ring, self.options(), path, graph.top(), options, create).await?;
        let mut drained = self.gateway().drain(ring, turn).await;
        let old = Arc::clone(drained.graph().top());
        let closed = async {
            drained.graph().check().map_err(|errno| Error::os("cannot add an overlay", errno))?;
            // Requests in flight may have kept the change waiting for long.
            let used = iter::once(&made).chain(drained.graph().layers.iter().map(|layer| &**layer));
            lost_names::check("put an overlay on top", used)?;
            close_layer(ring, &old).await
        };
        if let Err(error) = closed.await {
            // Data that could not be written is in the memory of this image only, so the image
            // stays in use.
            remove(&made, path, self.options());
            return Err(error);
        }
        let lower = match in_mode(ring, &old, self.options(), false).await {
            Ok(lower) => lower,
            Err(error) => {
                remove(&made, path, self.options());
                if old.qcow2().is_some() {
                    // It was closed, so it is opened again.
                    drained.begin();
                    let fresh = again(ring, &old, self.options(), true).await?;
                    let mut layers = drained.graph().layers.clone();
                    layers[0] = Arc::new(fresh);
                    let graph = drained.graph().with_layers(layers);
                    drained.replace(graph);
                }
                return Err(error);
            }
        };
        let graph = Arc::clone(drained.graph());
        let mut layers = Vec::with_capacity(graph.layers.len() + 1);
        layers.push(Arc::new(made));
        layers.push(Arc::new(lower));
        layers.extend(graph.layers.iter().skip(1).cloned());
        self.put(&mut drained, graph.with_layers(layers), false);
        warn_of_bitmaps(&old);
        Ok(())
    }
}

/// Removes an unused overlay. A file that has taken its name meanwhile stays.
fn remove(made: &Layer, path: &Path, options: &ImageOptions) {
    if let Some(file) = made.file().filter(|_| made.lost_name().is_none()) {
        remove_file(file, path, options);
    }
}

/// Logs which bitmaps no longer record writes: they stay valid for their image, which no longer
/// changes.
fn warn_of_bitmaps(old: &Layer) {
    let Some(image) = old.qcow2() else { return };
    for bitmap in image.bitmaps().iter().filter(|bitmap| bitmap.auto && !bitmap.in_use) {
        tracing::warn!(
            "the bitmap '{}' stays in '{}' and does not record what is written to the overlay; add \
             one to the overlay when it is not in use, or commit it, which records",
            bitmap.name.escape_debug(),
            crate::name::printable_path(old.name())
        );
    }
}

/// Makes the overlay and opens it.
async fn make(
    ring: &Ring,
    options: &ImageOptions,
    path: &Path,
    top: &Layer,
    overlay: &OverlayOptions,
    create: impl FnOnce(&Path, &ImageOptions) -> Result<Arc<Storage>, Error>,
) -> Result<Layer, Error> {
    let named = over(top, path)?;
    let wanted = CreateOptions {
        size: named.size,
        backing_file: named.backing_file,
        backing_format: named.backing_format,
        data_file: None,
        data_file_raw: false,
        ..overlay.create.clone()
    };
    let names = Names::new(wanted.backing_file.as_deref(), wanted.backing_format.as_deref(), None);
    let storage = create(path, options)?;
    let made = async {
        ringdisk_qcow2::create(ring, &storage, None, &wanted)
            .await
            .map_err(|error| of_qcow2(&error))?;
        let opener = storage_options(options, true);
        names_note::note_new(&storage, &names, options.note_names, &opener)?;
        sync_directory(ring, path, options).await?;
        open_qcow2(ring, Arc::clone(&storage), options, true).await
    };
    match made.await {
        Ok(image) => {
            let mut layer = qcow2_layer(image, true);
            layer.name = path.to_owned();
            layer.directory = crate::resolve::absolute(path)
                .ok()
                .and_then(|path| path.parent().map(Path::to_path_buf));
            layer.full_backing_name = Some(top.name().to_string_lossy().into_owned());
            Ok(layer)
        }
        Err(error) => {
            remove_file(&storage, path, options);
            Err(error)
        }
    }
}
