//! The words of a command line that say what clients see of a disk: a successor must show the same.
//!
//! Promises: looks at one name in the file system, changes nothing.

use std::collections::BTreeMap;
use std::path::Path;

use ringdisk_daemon::upgrade::ClientView;
use ringdisk_disk::Discard;

use crate::request::ImageRequest;

/// Options with their values.
#[derive(Debug, Default)]
pub struct ClientViewWords(BTreeMap<String, String>);

impl ClientViewWords {
    /// Those of the image.
    pub fn of_source(source: &ImageRequest) -> ClientViewWords {
        let mut words = ClientViewWords::default();
        let discard = match source.discard {
            Discard::Ignore => "ignore",
            Discard::Unmap => "unmap",
        };
        words.switch("--read-only", source.read_only);
        words.say("--discard", Some(String::from(discard)));
        words.switch("--snapshot", source.snapshot);
        words.say("--load-snapshot", source.load_snapshot.as_ref().map(ToString::to_string));
        words.number("--offset", source.offset);
        words.number("--size", source.size);
        words.number("--partition", source.partition.map(u64::from));
        words.number("--null", source.null);
        if let Some(format) = source.format {
            // A command line that does not say it leaves it to the image.
            words.say("--format", Some(format.name().to_owned()));
        }
        words
    }

    /// An option with a value.
    ///
    /// * `value`: `None`: the option is not there.
    pub fn say(&mut self, name: &str, value: Option<String>) {
        self.0.insert(name.to_owned(), value.unwrap_or_default());
    }

    /// An option without a value.
    pub fn switch(&mut self, name: &str, is_on: bool) {
        self.say(name, Some(String::from(if is_on { "on" } else { "off" })));
    }

    /// An option with a number.
    ///
    /// * `number`: `None`: the option is not there.
    pub fn number(&mut self, name: &str, number: Option<u64>) {
        self.say(name, number.map(|number| number.to_string()));
    }

    /// What clients see.
    ///
    /// * `image`: `None`: a null disk.
    pub fn view(self, source: &ImageRequest, image: Option<&Path>) -> ClientView {
        ClientView::new(source.overlay.as_deref().or(image), self.0)
    }
}
