//! Commit of an image that is not served.
//!
//! Promises: the data of the image is in its base, on stable storage, before the image itself is
//! changed; a commit that is cancelled, or crashes, leaves a chain that reads the same. This is the
//! commit of a disk in use (`live/commit.rs`) without clients.

use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_ring::Ring;

use crate::name::printable_path;
use crate::{Cause, CommitOptions, Disk, Error, ErrorKind, Format, Progress};

/// Options of `qemu-img commit`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Commit {
    /// The base, an image of the chain (`-b`); `None`: the one right below.
    pub base: Option<PathBuf>,
    /// The format of that image as the user states it; the caller sets
    /// [`ImageOptions::trust_base_format`](crate::ImageOptions::trust_base_format).
    pub base_format: Option<Format>,
    /// The merged images are not emptied afterwards (`-d`). The ones between top and base must not
    /// be used alone any more, and none of them once the base was written to.
    pub keep: bool,
}

/// Writes the data of an image, and of the images between, into its base, and empties them: they
/// all read as the base then. The base gets the size of the image.
///
/// * `disk`: open for writing; closed when the commit returns.
///
/// Errors: `Invalid` when there is no such base, or it has another format; `Cancelled`; `Locked`,
/// `PermissionDenied` when the base or an image between cannot be written; `Unsupported` as
/// [`Disk::commit`]; those of the storage.
pub async fn commit(
    ring: &Ring,
    disk: &Disk,
    commit: &Commit,
    progress: &Arc<Progress>,
) -> Result<(), Error> {
    let layers = disk.layers();
    if layers.len() < 2 {
        let name = layers.first().map(|top| printable_path(top.name())).unwrap_or_default();
        return Err(Error::new(
            ErrorKind::Invalid,
            format!("'{name}' has no backing file that it could be committed to"),
        )
        .because(Cause::NoBase));
    }
    let base = match &commit.base {
        None => 1,
        Some(path) => match disk.layer_named(path) {
            Some(index) if index > 0 => index,
            _ => {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!("'{}' is not in the backing chain", printable_path(path)),
                ));
            }
        },
    };
    let found = layers.get(base).and_then(|layer| layer.format());
    if let (Some(said), Some(found)) = (commit.base_format, found)
        && said != found
    {
        let name = printable_path(layers[base].name());
        let text = format!("'{name}' is {found} by the word of the image above it, not {said}");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let options = CommitOptions { top: 0, base, keep_top: commit.keep };
    let result = disk.commit(ring, options, progress).await;
    let closed = disk.close(ring).await;
    result?;
    closed.map_err(|errno| Error::os("cannot write the base to stable storage", errno))
}
