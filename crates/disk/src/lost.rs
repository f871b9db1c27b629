//! Layers whose files have lost their names.
//!
//! A file that was deleted while it is served works on, and everything in it is gone when it is
//! closed. So nothing may come to rely on such a file: no overlay over it, no data moved into it.
//! Control path: a few quick system calls for each layer.

use std::path::Path;
use std::sync::Arc;

use ringdisk_storage::{NameLost, Storage};

use crate::layer::Layer;
use crate::name::printable_path;
use crate::{CommitOptions, Disk, Error, ErrorKind};

impl Layer {
    /// What became of the name of the image file, or of its external data file, since it was
    /// opened: a sentence without its full stop. `None`: the names still lead to the files, or
    /// there are none (a descriptor that was passed on, a temporary overlay).
    pub fn lost_name(&self) -> Option<String> {
        self.directory.as_ref()?;
        let image = self.file().and_then(|file| sentence(file, &self.name));
        let data = || sentence(self.data_storage()?, self.data_name.as_deref()?);
        image.or_else(data)
    }
}

impl Disk {
    /// What [`Layer::lost_name`] says of each layer whose file has lost its name, from the top
    /// down.
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

/// Refuses a change after which something relies on the names of these layers.
///
/// Errors: `NotFound` with what became of a name and what helps.
pub(crate) fn check<'a>(
    doing: &str,
    layers: impl IntoIterator<Item = &'a Layer>,
) -> Result<(), Error> {
    let Some(lost) = layers.into_iter().find_map(Layer::lost_name) else { return Ok(()) };
    Err(Error::new(
        ErrorKind::NotFound,
        format!(
            "cannot {doing}: {lost}; give it its name back, or copy the disk from where it is served \
             before that ends"
        ),
    ))
}

/// Refuses a commit into an image that is gone at its end, and one after which an image names such
/// a base. The merged layers may have lost their names: a commit saves what is in them.
///
/// Errors: as [`check`].
pub(crate) fn check_commit(layers: &[Arc<Layer>], options: CommitOptions) -> Result<(), Error> {
    let above = options.top.checked_sub(1).and_then(|above| layers.get(above));
    let used = above.into_iter().chain(layers.get(options.base));
    check("commit", used.map(|layer| &**layer))
}
