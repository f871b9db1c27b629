//! The target of a mirror or a backup.
//!
//! Promises: it is opened as an image of the disk would be, and is none of them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use ringdisk_disk::name::is_export;
use ringdisk_disk::{Disk, Error, Format, Layer};
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use super::names::quoted_name;
use crate::control::protocol::Mirror;
use crate::failure::{Exit, Failure};

/// Name, format, and whether it is protected as a raw one without a note, of a target.
pub(super) type Place<'a> = (&'a str, Option<&'a str>, bool);

/// That of a mirror.
pub(super) fn place_of(wanted: &Mirror) -> Place<'_> {
    (&wanted.target, wanted.format.as_deref(), wanted.protect_raw)
}

/// Opens a target as the disk would be.
///
/// Errors: no such format; those of opening it.
pub(super) async fn open(
    disk: &Arc<Disk>,
    ring: &Ring,
    (target, format, protect_raw): Place<'_>,
) -> Result<Arc<Disk>, Error> {
    let format = format.map(str::parse::<Format>).transpose()?;
    // On the heap: with all that it waits for it is large.
    let opening: Pin<Box<dyn Future<Output = Result<Arc<Disk>, Error>> + '_>> =
        Box::pin(disk.open_mirror(ring, Path::new(target), format, protect_raw));
    opening.await
}

/// Errors: the target is an image of the disk.
pub(super) fn check_is_other(layers: &[Arc<Layer>], path: &Path) -> Result<(), Failure> {
    let id = match is_export(path) {
        true => None,
        false => path.metadata().ok().map(|meta| Storage::identity_of(&meta)),
    };
    let is_it = |layer: &Arc<Layer>| {
        let files = [layer.file(), layer.data_storage()].into_iter().flatten();
        let mut ids = files.filter_map(|file| file.identity());
        layer.name() == path || ids.any(|file| Some(file) == id)
    };
    match layers.iter().position(is_it) {
        None => Ok(()),
        Some(0) => Err(Failure::new(
            Exit::Usage,
            format!("{} is the image of the disk itself", quoted_name(&layers[0])),
        )
        .hint("name another file, device or export")),
        Some(at) => Err(Failure::new(
            Exit::Usage,
            format!("{} is an image of the chain of the disk", quoted_name(&layers[at])),
        )
        .hint(
            "`ringdisk ctl DISK commit` writes into images of the chain; a mirror and a backup do \
             not",
        )),
    }
}

/// Device and inode of the file of the target, as the helper process knows it.
pub(super) fn file_of(target: &Disk) -> Option<(u64, u64)> {
    let layers = target.layers();
    let meta = crate::confine::by_descriptor(layers[0].file()?)?.metadata().ok()?;
    Some((meta.dev(), meta.ino()))
}
