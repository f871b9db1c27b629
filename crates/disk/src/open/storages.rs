//! Makes a disk of images whose storages the caller has opened.
//!
//! Promises: no file is opened by its name, so no name that an image states is followed; changes of
//! the chain, later, follow names as for every disk.
//!
//! Control path; runs on the thread that owns `ring`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use super::{open_qcow2, qcow2_layer, raw_layer};
use crate::disk::Parts;
use crate::name::printable_path;
use crate::{Disk, Error, ErrorKind, Format, ImageOptions, LAYERS_MAX};

/// An image of a chain, on storage that is open.
#[derive(Clone, Debug)]
pub struct StoredImage {
    /// Where its bytes are; open for writing if it is the top of a disk that is written.
    pub storage: Arc<Storage>,
    /// The caller states it; nothing is guessed.
    pub format: Format,
    /// Its name, absolute: in messages, and in the headers of images above it.
    pub name: PathBuf,
}

impl Disk {
    /// Opens a chain of images that the caller has found, such as in memory.
    ///
    /// * `images`: top first, at least one. Only the top is written.
    /// * `options`: as for [`Disk::open`], without what says how files are found.
    ///
    /// Errors: `Invalid` without an image, `TooDeep`, `Unsupported` for an image with an external
    /// data file, those of the formats.
    pub async fn from_storages(
        ring: &Ring,
        images: Vec<StoredImage>,
        options: &ImageOptions,
    ) -> Result<Arc<Disk>, Error> {
        if images.is_empty() || images.len() > LAYERS_MAX {
            let kind = if images.is_empty() { ErrorKind::Invalid } else { ErrorKind::TooDeep };
            let text = format!("a disk has 1 to {LAYERS_MAX} images, not {}", images.len());
            return Err(Error::new(kind, text));
        }
        let mut layers = Vec::with_capacity(images.len());
        for image in images {
            let is_writable = layers.is_empty() && !options.read_only;
            let mut layer = match image.format {
                Format::Raw => raw_layer(image.storage, &image.name, 0, None)?,
                Format::Qcow2 => {
                    let opened = open_qcow2(ring, image.storage, options, is_writable).await?;
                    if opened.info().external_data_file {
                        let shown = printable_path(&image.name);
                        let text = format!("'{shown}' has a data file, which was not given");
                        return Err(Error::new(ErrorKind::Unsupported, text));
                    }
                    qcow2_layer(opened, is_writable)
                }
            };
            layer.is_writable = is_writable;
            layer.directory = image.name.parent().map(Path::to_path_buf);
            layer.name = image.name;
            layers.push(layer);
        }
        Ok(Disk::build(layers, Parts::new(options)))
    }
}
