//! The note at an image of the files that its header names.
//!
//! A process that serves an image may write all of it, its header, too. One that was taken over
//! writes the name of a neighbour's image there, as backing file or as data file, and whoever opens
//! the image next, outside of a sandbox, would follow it. So the image keeps what its header named
//! when the user's word last counted, in the extended attribute [`NAME`]: no call of a process in
//! its sandbox changes attributes. A header that names something else is not followed, until the
//! user says so (`--allow-path`).
//!
//! Promises: who only reads changes nothing; nothing of the file's bytes is touched; an image
//! without a note, and one on a file system without such attributes, is as it was before there were
//! notes. The note holds names and no numbers, so it stays true when a file is replaced by another
//! of its name, and in copies of the image.
//!
//! The value: one line, or two while the header changes; in a line the backing file, its format and
//! the data file, each as in the header, with `%` and two hexadecimal digits for what is no plain
//! character: `base.qcow2:qcow2;data.raw`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ringdisk_qcow2::Info;
use ringdisk_ring::{Errno, Fd};
use ringdisk_storage::{Kind, OpenOptions, Storage};
use rustix::fs::{XattrFlags, getxattr, setxattr};

use crate::layer::Layer;

/// Name of the attribute.
pub const NAME: &str = "user.ringdisk.names";
/// Longest value, bytes: two lines with a backing file of 1023 bytes and a data file of 4095, three
/// characters each at most. What a file system does not take is not noted.
const VALUE_BYTES_MAX: usize = 2 * 3 * (1023 + 4095) + 64;

/// What a header names, as the note has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Backing file and format; empty: none.
    below: String,
    /// Data file; empty: none.
    data: String,
}

/// What a note says about names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// There is no note.
    pub is_absent: bool,
    /// The image named another backing file, or none.
    pub other_below: bool,
    /// The image named another data file, or none.
    pub other_data: bool,
    /// The note is these names and no others.
    is_exact: bool,
}

impl Names {
    /// Of a header.
    pub fn of(info: &Info) -> Names {
        let data = info.data_file.as_deref().filter(|_| info.external_data_file);
        Names::new(info.backing_file.as_deref(), info.backing_format.as_deref(), data)
    }

    /// Of an image that names this backing file.
    pub fn new(backing: Option<&[u8]>, format: Option<&str>, data: Option<&[u8]>) -> Names {
        let below = backing.map_or_else(String::new, |name| {
            format!("{}:{}", plain(name), plain(format.unwrap_or_default().as_bytes()))
        });
        Names { below, data: data.map(plain).unwrap_or_default() }
    }

    /// Of an open image; a raw one names nothing.
    pub fn of_layer(layer: &Layer) -> Names {
        layer.qcow2().map(|image| Names::of(image.info())).unwrap_or_default()
    }

    /// One line of a note.
    pub fn line(&self) -> String {
        format!("{};{}", self.below, self.data)
    }

    /// Reads one line.
    pub fn parse(line: &str) -> Option<Names> {
        let (below, data) = line.split_once(';')?;
        Some(Names { below: below.to_owned(), data: data.to_owned() })
    }

    /// What is noted at the file that a name leads to. `None`: nothing, or not one thing.
    pub fn noted_at(path: &Path) -> Option<Names> {
        let text = value_at(path).ok()??;
        let mut lines = text.lines();
        Names::parse(lines.next()?).filter(|_| lines.next().is_none())
    }

    /// The backing file by its plain name; `None`: there is none, or its name has other characters
    /// than that.
    pub fn backing_path(&self) -> Option<PathBuf> {
        let (name, _) = self.below.rsplit_once(':')?;
        (!name.contains('%')).then(|| PathBuf::from(name))
    }

    /// Whether a backing file is named.
    pub fn has_backing(&self) -> bool {
        !self.below.is_empty()
    }

    /// Whether a data file is named.
    pub fn has_data(&self) -> bool {
        !self.data.is_empty()
    }

    /// Whether the same data file is named.
    pub fn has_same_data(&self, other: &Names) -> bool {
        self.data == other.data
    }

    /// What the note of a file says about these names.
    pub fn ask(&self, file: &Storage) -> Said {
        self.said(value(file))
    }

    /// The same of the file that a name leads to.
    pub fn ask_at(&self, path: &Path) -> Said {
        self.said(value_at(path))
    }

    fn said(&self, value: Result<Option<String>, Errno>) -> Said {
        let said = match value {
            Ok(Some(text)) => text,
            // Inside of a sandbox nobody can look, and nothing opens there but what was followed
            // outside.
            Ok(None) | Err(Errno::NOSYS) => {
                let (other_below, other_data, is_exact) = (false, false, false);
                return Said { is_absent: true, other_below, other_data, is_exact };
            }
            // What cannot be read may say anything.
            Err(_) => String::new(),
        };
        let lines: Vec<Names> = said.lines().filter_map(Names::parse).collect();
        Said {
            is_absent: false,
            // What names nothing leads nowhere.
            other_below: self.has_backing() && !lines.iter().any(|it| it.below == self.below),
            other_data: self.has_data() && !lines.iter().any(|it| it.data == self.data),
            is_exact: lines.len() == 1 && lines[0] == *self,
        }
    }

    /// Notes these names at a file that is about to be served; the user's word counts.
    ///
    /// Errors: the file system has no such attributes, or no leave or no room for one.
    pub fn note(&self, file: &Storage) -> Result<(), Errno> {
        if self.ask(file).is_exact {
            return Ok(());
        }
        set(file, &self.line())
    }
}

/// An image was made anew in a file that was there: what is noted at that was another image's.
pub fn renew(file: &Storage, names: &Names) {
    if matches!(value(file), Ok(None)) {
        return;
    }
    if let Err(errno) = set(file, &names.line()) {
        tracing::warn!(
            "the note of the files that '{}' named is not changed ({errno}): the next start asks for --allow-path",
            file.name()
        );
    }
}

/// Changes the note of an image whose header is about to name other files, or does since. Where
/// this process may not, the opener does.
///
/// * `names`: of the header as it will be.
/// * `is_done`: the header has them; before that the note holds both.
pub(crate) fn follow(file: &Storage, names: &Names, is_done: bool, options: &OpenOptions) {
    let line = names.line();
    let result = match value(file) {
        // It was never served in a sandbox, or cannot have one.
        Ok(None) | Err(Errno::OPNOTSUPP) => return,
        Ok(Some(_)) if is_done => set(file, &line),
        Ok(Some(before)) => {
            let before = before.lines().next().unwrap_or_default();
            set(file, &format!("{before}\n{line}"))
        }
        // Inside of a sandbox there are no such calls.
        Err(Errno::NOSYS) => options.note_outside(file, line.as_bytes(), is_done),
        Err(errno) => Err(errno),
    };
    match result {
        Ok(()) => {}
        // It is none of those that have a note.
        Err(Errno::ACCESS) => tracing::debug!("'{}' has no note of its names", file.name()),
        Err(errno) => tracing::warn!(
            "the note of the files that '{}' names is not changed ({errno}): the next start asks for --allow-path",
            file.name()
        ),
    }
}

/// Notes what the header of a new overlay names. Where this process may not, the opener does, if it
/// has made the file.
///
/// * `is_wanted`: [`crate::ImageOptions::note_names`].
pub(crate) fn note_new(file: &Storage, names: &Names, is_wanted: bool, options: &OpenOptions) {
    let result = match value(file) {
        Err(Errno::NOSYS) => options.note_outside(file, names.line().as_bytes(), true),
        _ if is_wanted => set(file, &names.line()),
        _ => return,
    };
    if let Err(errno) = result {
        tracing::debug!("'{}' gets no note of its names ({errno})", file.name());
    }
}

/// Letters, digits and what names are made of otherwise; the rest in hexadecimal digits.
fn plain(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"/._-+,=@ ".contains(&byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02x}");
        }
    }
    text
}

/// The name by which attributes of an open file are reached.
fn path_of(file: &Storage) -> Option<PathBuf> {
    match file.raw_fd()? {
        Fd::Raw(fd) if file.kind() == Kind::Regular => {
            Some(Path::new("/proc/self/fd").join(fd.to_string()))
        }
        _ => None,
    }
}

/// The note of a file.
fn value(file: &Storage) -> Result<Option<String>, Errno> {
    path_of(file).map_or(Ok(None), |path| value_at(&path))
}

fn value_at(path: &Path) -> Result<Option<String>, Errno> {
    let mut value = vec![0; VALUE_BYTES_MAX];
    match getxattr(path, NAME, &mut value[..]) {
        Ok(len) => {
            value.truncate(len);
            Ok(Some(String::from_utf8(value).unwrap_or_default()))
        }
        // No note; a file system without such attributes.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn set(file: &Storage, text: &str) -> Result<(), Errno> {
    let Some(path) = path_of(file) else { return Err(Errno::OPNOTSUPP) };
    setxattr(&path, NAME, text.as_bytes(), XattrFlags::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(path: &Path) -> Storage {
        Storage::open(path, &OpenOptions::default()).expect("a file")
    }

    #[test]
    fn names_are_what_was_noted_or_nothing() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let file = storage(file.path());
        let base = Names::new(Some(b"base;\n%.qcow2"), Some("qcow2"), None);
        let other = Names::new(Some(b"base;\n%.qcow2"), Some("raw"), Some(b"data"));
        assert!(base.ask(&file).is_absent && !base.ask(&file).other_below);
        base.note(&file).expect("an attribute");
        let said = base.ask(&file);
        assert!(!said.is_absent && said.is_exact && !said.other_below && !said.other_data);
        let said = other.ask(&file);
        assert!(said.other_below && said.other_data, "another format is another file");
        assert!(!Names::default().ask(&file).other_below, "nothing leads nowhere");
        assert_eq!(Names::parse(&other.line()), Some(other));
        assert_eq!(base.backing_path(), None, "a name that is no plain one");
        let plain = Names::new(Some(b"./a-b/c:1"), Some("raw"), None);
        assert_eq!(plain.backing_path(), None);
        let plain = Names::new(Some(b"./a-b/c"), Some("raw"), None);
        assert_eq!(plain.backing_path(), Some(PathBuf::from("./a-b/c")));
    }

    #[test]
    fn a_note_has_both_names_while_the_header_changes() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let file = storage(file.path());
        let [a, b] = [&b"a"[..], b"b"].map(|name| Names::new(Some(name), Some("raw"), None));
        let options = OpenOptions::default();
        follow(&file, &a, true, &options);
        assert!(a.ask(&file).is_absent, "no note is begun");
        a.note(&file).expect("an attribute");
        let others = |names: &Names| names.ask(&file).other_below;
        follow(&file, &b, false, &options);
        assert_eq!([&a, &b].map(others), [false, false]);
        follow(&file, &b, true, &options);
        assert_eq!([&a, &b].map(others), [true, false]);
        assert!(b.ask(&file).is_exact);
    }
}
