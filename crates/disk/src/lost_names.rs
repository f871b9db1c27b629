//! Detects layers whose files were deleted, renamed or replaced while they are open.
//!
//! Promises: no change makes the disk depend on such a file: no overlay is put over it and no data
//! is moved into it. (A file that was deleted while it is served still works, and its data is lost
//! when it is closed.) Control path: a few quick system calls for each layer.

use std::path::Path;

use ringdisk_storage::{NameLost, Storage};

use crate::layer::Layer;
use crate::name::printable_path;
use crate::{Disk, Error, ErrorKind};

/// Target of the log events that say, when a disk is closed, that a file has lost its name.
pub const LOST_NAMES_TARGET: &str = "ringdisk_disk::lost_names";

impl Layer {
    /// Says, in a sentence without full stop, that the image file or its external data file has
    /// lost its name since it was opened. `None`: the names still lead to the files, or there are
    /// no names (a descriptor that was passed on, a temporary overlay).
    pub fn lost_name(&self) -> Option<String> {
        self.directory.as_ref()?;
        let image = self.file().and_then(|file| sentence(file, &self.name));
        let data = || sentence(self.data_storage()?, self.data_name.as_deref()?);
        image.or_else(data)
    }
}

impl Disk {
    /// The sentence of [`Layer::lost_name`] for each layer whose file has lost its name, from the
    /// top down.
    pub fn lost_names(&self) -> Vec<String> {
        self.layers().iter().filter_map(|layer| layer.lost_name()).collect()
    }
}

fn sentence(storage: &Storage, name: &Path) -> Option<String> {
    let path = crate::resolve::absolute(name).ok()?;
    let shown = printable_path(name);
    Some(match storage.name_lost(&path)? {
        NameLost::Deleted => format!("'{shown}' was deleted, so what it holds is gone at its end"),
        NameLost::Renamed => format!("the image that was '{shown}' has another name now"),
        NameLost::Replaced => format!("'{shown}' is another file now than the image in use"),
    })
}

/// Refuses a change that makes the disk depend on the names of these layers.
///
/// Errors: `NotFound` with the name that was lost and the remedy.
pub(crate) fn check<'a>(
    doing: &str,
    layers: impl IntoIterator<Item = &'a Layer>,
) -> Result<(), Error> {
    let Some(lost) = layers.into_iter().find_map(Layer::lost_name) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::NotFound,
        format!(
            "cannot {doing}: {lost}; give it its name back, or copy the disk from where it is \
             served before that ends"
        ),
    ))
}
