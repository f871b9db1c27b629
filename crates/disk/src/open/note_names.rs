//! Notes, before a server is confined, the names in the headers of the files that it may write.
//!
//! Promises: nothing is noted that was not followed, or would not be followed by an open of that
//! file alone; a file system that keeps no notes is passed over, with a warning where that matters.
//!
//! Control path, before clients can make this process write other names.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_storage::{Kind, Lock, Storage};

use super::{Opening, of_storage, open_qcow2, storage_options};
use crate::name::printable_path;
use crate::names_note::Names;
use crate::probe::{PROBE_LEN, Probed, probe};
use crate::{Cache, Error, ImageOptions};

impl Opening<'_> {
    /// Notes the names in the headers of the image on top and its data file, which the process
    /// writes, and of the files that `--allow-path` names, which commands may have it write. All
    /// names of the chain were followed: they are in the note already, or the user allows them, or
    /// there was no note.
    pub(super) async fn note_names(&self) {
        let top = self.layers.first().filter(|top| self.options.note_names && top.is_writable);
        let Some(top) = top else { return };
        // A data file names nothing, also where its guest has made it look like an image.
        if let Some(data) = top.external_data() {
            note(data, &Names::default(), Path::new(data.name()), false);
        }
        if let Some(file) = top.file().filter(|_| !self.is_top_unconfirmed) {
            note(file, &Names::of_layer(top), top.name(), top.qcow2().is_some());
        }
        for path in &self.options.allow_paths {
            if let Err(error) = note_file(self.ring, path, self.options).await {
                tracing::debug!("'{}' gets no note of its names: {error}", printable_path(path));
            }
        }
    }
}

/// Notes the names in a file that may be of no chain, where it has no note: before a server may
/// write it.
///
/// * `options`: how it is opened.
///
/// Errors: it cannot be opened, or is no image. A file system that keeps no notes is none.
pub async fn note_file(ring: &Ring, path: &Path, options: &ImageOptions) -> Result<(), Error> {
    if !fs::metadata(path).is_ok_and(|meta| meta.is_file()) {
        return Ok(());
    }
    // Only the header is read, beside others who have it open.
    let options = ImageOptions { inactive: true, cache: Cache::Writeback, ..options.clone() };
    let opening =
        ringdisk_storage::OpenOptions { lock: Lock::ForceShare, ..storage_options(&options, true) };
    let storage = Storage::open(path, &opening).map_err(|error| of_storage(&error))?;
    if !Names::default().ask(&storage).is_absent {
        return Ok(());
    }
    let mut head = [0; PROBE_LEN];
    let read = File::open(path).and_then(|file| file.read_at(&mut head, 0));
    let is_qcow2 = read.is_ok_and(|len| probe(&head[..len]) == Probed::Qcow2);
    let storage = Arc::new(storage);
    let names = match is_qcow2 {
        true => Names::of(open_qcow2(ring, Arc::clone(&storage), &options, false).await?.info()),
        false => Names::default(),
    };
    note(&storage, &names, path, is_qcow2);
    Ok(())
}

/// * `can_name`: the file is an image of a format that names others.
fn note(file: &Storage, names: &Names, name: &Path, can_name: bool) {
    let Err(errno) = names.note(file) else { return };
    let name = printable_path(name);
    if !can_name || file.kind() != Kind::Regular {
        tracing::debug!("'{name}' gets no note of its names ({errno})");
        return;
    }
    tracing::warn!(
        "'{name}' can keep no note of the files that it names ({errno}): a server that is taken \
         over can write other names there, which the next start follows in the directory of the \
         image"
    );
}
