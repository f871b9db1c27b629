//! The memory in which a process leaves words to the next one: two places for a state, which take
//! turns, and what an attacker writes there.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::mount::text;
use serde_json::{Value, json};

/// Bytes before the text: number, checksum and length.
pub(crate) const HEAD: usize = 24;

/// Where the two places are.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub(crate) first: u64,
    pub(crate) bytes: u64,
}

/// Those of the images, behind the record of the file.
pub(crate) const IMAGES: Places = Places { first: 4096, bytes: 64 << 10 };
/// Those of the export of a kept disk.
pub(crate) const EXPORT: Places = Places { first: 0, bytes: 512 << 10 };

/// FNV-1a of a state's number and text.
fn checksum(number: u64, text: &[u8]) -> u64 {
    let number = number.to_ne_bytes();
    number.iter().chain(text).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

impl Places {
    /// Number and text of a state, if there is one in this place.
    fn read(self, memory: &File, place: u64) -> Option<(u64, Vec<u8>)> {
        let at = self.first + place * self.bytes;
        let mut head = [0; HEAD];
        memory.read_exact_at(&mut head, at).ok()?;
        let word = |at: usize| u64::from_ne_bytes(head[at..at + 8].try_into().expect("eight"));
        let mut text = vec![0; usize::try_from(word(16)).ok()?];
        memory.read_exact_at(&mut text, at + HEAD as u64).ok()?;
        (word(0) > 0).then_some((word(0), text))
    }

    /// The newest state.
    pub(crate) fn newest(self, memory: &File) -> (u64, Value) {
        let newest = (0..2).filter_map(|place| self.read(memory, place)).max_by_key(|one| one.0);
        let (number, text) = newest.expect("a state");
        (number, serde_json::from_slice(&text).expect("JSON"))
    }

    /// Writes a state, or any other text, as a whole one.
    pub(crate) fn write(self, memory: &File, place: u64, number: u64, text: &[u8]) {
        let sum = checksum(number, text);
        let head = [number, sum, text.len() as u64].map(u64::to_ne_bytes).concat();
        let whole = [&head, text].concat();
        memory.write_all_at(&whole, self.first + place * self.bytes).expect("written");
    }

    /// The process's last word, as an attacker wants it.
    pub(crate) fn forge(self, memory: &File, change: impl FnOnce(&mut Value)) {
        let (number, mut state) = self.newest(memory);
        change(&mut state);
        self.write(memory, (number + 1) % 2, number + 1, state.to_string().as_bytes());
    }
}

/// The image on top.
pub(crate) fn with_top(state: &mut Value, path: &Path, format: &str) {
    state["top"] = json!([text(path), format]);
    state["files"] = json!([]);
}
