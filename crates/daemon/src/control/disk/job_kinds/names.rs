//! Names of the images of a disk: for people, and to find one.
//!
//! Promises: nothing here opens a file by its name.

use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{Disk, Layer};
use ringdisk_storage::Storage;
use serde_json::{Value, json};

use crate::failure::{Exit, Failure};
use crate::terminal::{shell_word, visible};

/// The names of the images, the top one first.
pub(in crate::control::disk) fn chain(disk: &Disk) -> Value {
    let names: Vec<String> =
        disk.layers().iter().map(|layer| layer.name().display().to_string()).collect();
    json!({ "chain": names })
}

/// The name of an image, for people.
pub(super) fn quoted_name(layer: &Layer) -> String {
    shell_word(&layer.name().display().to_string())
}

/// The names of images, for people.
pub(super) fn quoted_names(layers: &[Arc<Layer>]) -> Vec<String> {
    layers.iter().map(|layer| quoted_name(layer)).collect()
}

/// The place of an image in the chain.
///
/// * `name`: an absolute path.
pub(super) fn find(layers: &[Arc<Layer>], name: &Path) -> Result<usize, Failure> {
    let id = name.metadata().map(|meta| Storage::identity_of(&meta)).ok();
    let is_it = |layer: &Arc<Layer>| {
        let file = layer.file().and_then(|file| file.identity());
        file.is_some() && file == id
    };
    layers.iter().position(is_it).ok_or_else(|| {
        let names: Vec<String> =
            layers.iter().map(|layer| format!("'{}'", layer.name().display())).collect();
        Failure::new(
            Exit::Usage,
            format!("'{}' is not in the chain of the disk", visible(&name.to_string_lossy())),
        )
        .hint(format!("the chain is {}", names.join(", ")))
    })
}
