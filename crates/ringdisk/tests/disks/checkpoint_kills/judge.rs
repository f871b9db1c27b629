//! What a kill has left, against what the client knows.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use ringdisk_testkit::images::reference;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{command, run};

use crate::common::tools::{qemu_img, ringdisk};

/// Bytes of each write: one byte, so many times.
pub(super) const BLOCK: usize = 4096;

/// What a client knows of a disk.
#[derive(Clone)]
pub(super) struct Known {
    pub(super) bytes: Vec<u8>,
    /// Blocks with a write that was not answered, and its byte.
    pub(super) in_flight: BTreeMap<usize, u8>,
}

impl Known {
    pub(super) fn new(bytes: Vec<u8>) -> Known {
        Known { bytes, in_flight: BTreeMap::new() }
    }

    /// The write of a block was answered.
    pub(super) fn answered(&mut self, block: usize, byte: u8) {
        self.in_flight.remove(&block);
        self.bytes[block * BLOCK..(block + 1) * BLOCK].fill(byte);
    }

    fn assert_holds(&self, bytes: &[u8], at: &str) {
        let is_wrong = |place: &usize| {
            let (byte, new) = (bytes[*place], self.in_flight.get(&(place / BLOCK)));
            byte != self.bytes[*place] && Some(&byte) != new
        };
        assert_eq!((0..self.bytes.len()).find(is_wrong), None, "{at}: first byte that is wrong");
    }
}

/// A backup of the disk as it was when a bitmap began.
pub(super) struct Base {
    pub(super) bitmap: &'static str,
    pub(super) backup: PathBuf,
}

/// The bitmaps of an image as QEMU lists them: valid, or not.
fn bitmaps(image: &Path) -> BTreeMap<String, bool> {
    let info = qemu_img(Path::new("/"), &["info", "--output=json", text(image)]).ok().json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
    let all = bitmaps.unwrap_or_default();
    let one = |bitmap: &serde_json::Value| {
        let flags = bitmap["flags"].as_array().expect("flags");
        let name = bitmap["name"].as_str().expect("a name").to_owned();
        (name, !flags.iter().any(|flag| flag == "in-use"))
    };
    all.iter().map(one).collect()
}

/// Judges `disk.qcow2` in a directory. Gives its bitmaps: valid, or not.
///
/// * `at`: where the kill was.
pub(super) fn judge(d: &Path, known: &Known, bases: &[Base], at: &str) -> BTreeMap<String, bool> {
    let image = d.join("disk.qcow2");
    // Nothing worse than leaks.
    let check = run(command(&["qemu-img", "check", "-f", "qcow2", text(&image)]));
    assert!(matches!(check.code(), Some(0 | 3)), "{at}: {}", check.output());
    let content = fs::read(reference(&image, "qcow2")).expect("the disk");
    known.assert_holds(&content, at);
    let bitmaps = bitmaps(&image);
    for Base { bitmap, backup } in bases {
        let words = ["backup", "disk.qcow2", "part.qcow2", "--since", bitmap, "--backing"];
        let made = ringdisk(d, &[&words[..], &[text(backup)]].concat());
        match bitmaps.get(*bitmap) {
            Some(true) => {
                made.ok();
                ringdisk(d, &["restore", "part.qcow2", "restored.img", "--force"]).ok();
                let restored = fs::read(d.join("restored.img")).expect("the restored disk");
                let differs = (0..content.len()).find(|place| restored[*place] != content[*place]);
                assert_eq!(differs, None, "{at}: '{bitmap}' is valid and has no bit there");
                fs::remove_file(d.join("part.qcow2")).expect("it was made");
            }
            Some(false) => {
                made.ends(3).says(&format!("'{bitmap}' is inconsistent"));
            }
            None => {
                made.ends(3).says(bitmap);
            }
        }
        assert!(!d.join("part.qcow2").exists(), "{at}: a backup that was refused is there");
    }
    // Beside bitmaps that are inconsistent, too.
    ringdisk(d, &["backup", "disk.qcow2", "again.qcow2", "--bitmap", "again"]).ok();
    let same = ["compare", "-f", "qcow2", "-F", "raw", "again.qcow2", "disk.reference"];
    qemu_img(d, &same).ok();
    bitmaps
}
