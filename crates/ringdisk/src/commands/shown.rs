//! The words of a command line that say what clients see of a disk: a successor must show the same.
//!
//! Promises: looks at one name in the file system, changes nothing.

use std::collections::BTreeMap;
use std::path::Path;

use ringdisk_daemon::upgrade::Shown;

use crate::cli::{DISCARD, ImageArgs, word_of};

/// Options with their values.
#[derive(Debug, Default)]
pub(crate) struct ShownWords(BTreeMap<String, String>);

impl ShownWords {
    /// Those of the image.
    pub(crate) fn of_source(source: &ImageArgs) -> ShownWords {
        let mut words = ShownWords::default();
        words.switch("--read-only", source.read_only);
        words.say("--discard", Some(word_of(DISCARD, source.discard).to_owned()));
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

    /// * `value`: `None`: the option is not there.
    pub(crate) fn say(&mut self, name: &str, value: Option<String>) {
        self.0.insert(name.to_owned(), value.unwrap_or_default());
    }

    /// An option without a value.
    pub(crate) fn switch(&mut self, name: &str, is_on: bool) {
        self.say(name, Some(String::from(if is_on { "on" } else { "off" })));
    }

    /// * `number`: `None`: the option is not there.
    pub(crate) fn number(&mut self, name: &str, number: Option<u64>) {
        self.say(name, number.map(|number| number.to_string()));
    }

    /// What clients are shown.
    ///
    /// * `image`: `None`: a null disk.
    pub(crate) fn shown(self, source: &ImageArgs, image: Option<&Path>) -> Shown {
        Shown::new(source.overlay.as_deref().or(image), self.0)
    }
}
