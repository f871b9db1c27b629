//! What clients see of a disk, as command lines say it: a process that takes the disk over must
//! show the same.
//!
//! Promises: plain values and a comparison; looks at one name in the file system, changes nothing.
//! Both processes make one from their own words; the old one compares, before anything stands still
//! or is handed over.

use std::collections::BTreeMap;
use std::path::Path;

use ringdisk_disk::{Disk, Format};
use ringdisk_storage::Storage;
use serde::{Deserialize, Serialize};

use crate::terminal::visible;

/// Device and inode number of a file, device number and 0 of a block device, as
/// [`ringdisk_storage::Storage::identity`].
type Identity = (u64, u64);

/// What the words of one disk say. Another version may know other options: those that only one of
/// the two knows are not compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientView {
    /// The image that is written to; `None` for a null disk.
    image: Option<Image>,
    /// Option and value as they are written; an empty value: the option is not there.
    options: BTreeMap<String, String>,
    /// The process that says this goes on with jobs; an older version does not.
    takes_jobs: bool,
    /// Further disks of the same export.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    more: Vec<ClientView>,
}

/// An image as it was named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Image {
    /// Absolute.
    name: String,
    /// What had this name when it was said; `None`: nothing.
    identity: Option<Identity>,
}

impl Image {
    fn named(path: &Path) -> Image {
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let identity = path.metadata().ok().map(|meta| Storage::identity_of(&meta));
        Image { name: whole.to_string_lossy().into_owned(), identity }
    }

    /// Whether both name one file, or did so when they were said.
    fn is(&self, other: &Image) -> bool {
        self.name == other.name || self.identity.is_some() && self.identity == other.identity
    }
}

impl ClientView {
    /// * `image`: the one that is written to; `None` for a null disk.
    /// * `options`: option and value as they are written; an empty value: the option is not there.
    pub fn new(image: Option<&Path>, options: BTreeMap<String, String>) -> ClientView {
        ClientView { image: image.map(Image::named), options, takes_jobs: true, more: Vec::new() }
    }

    /// With further disks of the same export.
    pub fn with(self, more: Vec<ClientView>) -> ClientView {
        ClientView { more, ..self }
    }

    /// What is said of each disk, by itself.
    pub fn split(self) -> impl Iterator<Item = ClientView> {
        let mut first = self;
        let more = std::mem::take(&mut first.more);
        std::iter::once(first).chain(more)
    }

    /// What is said of each disk.
    pub(super) fn each(&self) -> impl Iterator<Item = &ClientView> {
        std::iter::once(self).chain(&self.more)
    }

    /// Whether the process that says this goes on with jobs.
    pub(super) fn takes_jobs(&self) -> bool {
        self.takes_jobs
    }

    /// What a guest would see change if a process that was given `new` took over from the one that
    /// was given this.
    ///
    /// * `disk`: as it is served now: commands may have put another image on top of the one that
    ///   was named, which may have another format, and may have moved the disk to another one.
    ///
    /// Errors: each option with both values.
    pub fn check(&self, new: &ClientView, disk: &Disk) -> Result<(), String> {
        let layers = disk.layers();
        let images = layers.iter().map(|layer| {
            let image = Image {
                name: layer.name().to_string_lossy().into_owned(),
                identity: layer.file().and_then(|file| file.identity()),
            };
            (image, layer.format().map(Format::name))
        });
        self.compare(new, &images.collect::<Vec<_>>())
    }

    /// * `layers`: images and their formats, the one on top first.
    fn compare(
        &self,
        new: &ClientView,
        layers: &[(Image, Option<&'static str>)],
    ) -> Result<(), String> {
        let top = layers.first().map(|(image, _)| image);
        // Where a mirror has moved the disk, the image that it was moved to may have others on top.
        let has_moved = |old: &Image| !layers.iter().any(|(image, _)| old.is(image));
        let known = match &self.image {
            Some(old) if has_moved(old) => layers,
            _ => layers.get(..1).unwrap_or_default(),
        };
        let named =
            new.image.as_ref().and_then(|new| known.iter().find(|(image, _)| new.is(image)));
        let value = |text: &str| match text {
            "" => String::from("not given"),
            text => format!("'{}'", visible(text)),
        };
        let mut differences = Vec::new();
        if let (Some(old), Some(new)) = (&self.image, &new.image)
            && !new.is(old)
            && named.is_none()
        {
            // What is on top now is what one has to name from now on.
            let served = top.map_or(&old.name, |top| &top.name);
            differences.push(format!("the image is {}, not {}", value(served), value(&new.name)));
        }
        // The words for another image are about that one.
        let other = match (&self.image, &new.image) {
            (Some(old), Some(new)) if !new.is(old) => named.or(layers.first()),
            _ => None,
        };
        let format = other.and_then(|(_, format)| *format);
        for (option, old) in &self.options {
            let old = format.filter(|_| option == "--format").unwrap_or(old);
            if let Some(new) = new.options.get(option).filter(|new| *new != old) {
                differences.push(format!("{option} is {} there, {} here", value(old), value(new)));
            }
        }
        if differences.is_empty() { Ok(()) } else { Err(differences.join("; ")) }
    }
}

#[cfg(test)]
mod tests;
