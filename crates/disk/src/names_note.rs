//! The note at an image of the files that its header names.
//!
//! Promises: opening for reading changes nothing; no byte of the file is touched; an image without
//! a note, or on a file system without extended attributes, opens as if there were no notes. The
//! note holds names and no numbers, so it stays true in copies of the image, and when a named file
//! is replaced by another one of the same name.
//!
//! A process that serves an image may write all of it, including the header. An attacker who
//! controls that process can write the name of another user's image there, as backing file or data
//! file, and the next process that opens the image, outside of a sandbox, would follow it. So the
//! image keeps the names that the header had when the user last decided, in the extended attribute
//! [`NAME`]: a process in its sandbox has no call that changes attributes. A header with other
//! names is not followed until the user allows it (`--allow-path`).
//!
//! The value has one line, or two while the header changes. A line holds the backing file, its
//! format and the data file, each as in the header, with `%` and two hexadecimal digits for each
//! character that is not plain: `base.qcow2:qcow2;data.raw`.

mod open;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

pub use open::{change_note, note_of, set_note};
use ringdisk_qcow2::Info;
use ringdisk_ring::{Errno, Fd};
use ringdisk_storage::{Kind, OpenOptions, Storage};

use crate::layer::Layer;
use crate::name::FileName;
use crate::xattr::{Attribute, link};
use crate::{Error, Format};

/// Name of the attribute.
pub const NAME: &str = "user.ringdisk.names";
/// Lines at most: what the header named, what it shall name, and the same of changes that ended in
/// a crash.
const LINES_MAX: usize = 4;
/// Longest value, bytes: lines with a backing file of 1023 bytes and a data file of 4095, three
/// characters each at most. What a file system does not take is not noted.
const VALUE_BYTES_MAX: usize = LINES_MAX * (3 * (1023 + 4095) + 32);
/// The attribute.
const ATTRIBUTE: Attribute = Attribute::new(NAME, VALUE_BYTES_MAX);

/// The names of a header, in the form of the note.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Backing file and format; empty: none.
    below: String,
    /// Data file; empty: none.
    data: String,
}

/// Comparison of a note with the names of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoteCheck {
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

    /// The names in the note of the file that a path leads to. `None`: no note, or one with two
    /// lines.
    pub fn noted_at(path: &Path) -> Option<Names> {
        let text = value_at(path).ok()??;
        let mut lines = text.lines();
        Names::parse(lines.next()?).filter(|_| lines.next().is_none())
    }

    /// The path of the backing file, as an open of the image reads the name; `None`: no backing
    /// file, or a name that no open follows.
    pub fn backing_path(&self) -> Option<PathBuf> {
        self.backing().map(|(path, _)| path)
    }

    /// Path and format of the backing file, as an open of the image reads them.
    pub fn backing(&self) -> Option<(PathBuf, Format)> {
        let (name, format) = self.below.rsplit_once(':')?;
        let name = FileName::parse(&decoded(name)?).ok()?;
        let stated = match format {
            "" => None,
            "file" | "host_device" => Some(Format::Raw),
            format => Some(format.parse().ok()?),
        };
        let is_contradiction =
            stated.is_some_and(|stated| name.format.is_some_and(|named| named != stated));
        let format = stated.or(name.format).filter(|_| !is_contradiction)?;
        Some((name.path, format))
    }

    /// The path of the data file, as an open of the image reads the name.
    pub fn data_path(&self) -> Option<PathBuf> {
        Some(FileName::parse(&decoded(&self.data)?).ok()?.path)
    }

    /// The names of a header as far as the note of the file has them; where the note has others,
    /// those of the note.
    pub fn as_noted(&self, file: &Storage) -> Names {
        let text = match value(file) {
            Ok(None) | Err(Errno::NOSYS) => return self.clone(),
            Ok(Some(text)) => text,
            // A note that cannot be read may hold any names.
            Err(_) => String::new(),
        };
        let mut lines = text.lines().filter_map(Names::parse);
        let first = lines.next().unwrap_or_default();
        if lines.any(|line| line == *self) { self.clone() } else { first }
    }

    /// These names, with the data file of others.
    #[must_use]
    pub fn with_data_of(self, others: &Names) -> Names {
        Names { data: others.data.clone(), ..self }
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

    /// Compares these names with the note of a file.
    pub fn ask(&self, file: &Storage) -> NoteCheck {
        self.compare(value(file))
    }

    /// As [`Names::ask`], for the file that a path leads to.
    pub fn ask_at(&self, path: &Path) -> NoteCheck {
        self.compare(value_at(path))
    }

    fn compare(&self, value: Result<Option<String>, Errno>) -> NoteCheck {
        let text = match &value {
            Ok(Some(text)) => text.as_str(),
            // A process in a sandbox cannot read attributes, and opens only files that the process
            // outside has checked.
            Ok(None) | Err(Errno::NOSYS) => {
                let is_absent = value == Ok(None);
                let (other_below, other_data, is_exact) = (false, false, false);
                return NoteCheck { is_absent, other_below, other_data, is_exact };
            }
            // A note that cannot be read may hold any names.
            Err(_) => "",
        };
        let lines: Vec<Names> = text.lines().filter_map(Names::parse).collect();
        NoteCheck {
            is_absent: false,
            // A header without names leads to no file.
            other_below: self.has_backing() && !lines.iter().any(|it| it.below == self.below),
            other_data: self.has_data() && !lines.iter().any(|it| it.data == self.data),
            is_exact: lines.len() == 1 && lines[0] == *self,
        }
    }

    /// Notes these names at a file that is about to be served; the user has allowed them.
    ///
    /// Errors: the file system has no such attributes, or refuses this one, or has no space for it.
    pub fn note(&self, file: &Storage) -> Result<(), Errno> {
        if self.ask(file).is_exact {
            return Ok(());
        }
        set(file, &self.line())
    }
}

/// Replaces the note of a file in which a new image was created: the note was the former image's.
pub fn renew(file: &Storage, names: &Names) {
    if matches!(value(file), Ok(None)) {
        return;
    }
    if let Err(errno) = set(file, &names.line()) {
        tracing::warn!(
            "the note of the files that '{}' named is not changed ({errno}): the next start asks \
             for --allow-path",
            file.name()
        );
    }
}

/// Changes the note of an image before and after its header changes. Where this process has no
/// call for that (a sandbox), the opener does it.
///
/// * `names`: of the new header.
/// * `is_done`: the header has the new names; before that the note holds the old and the new ones.
///
/// Errors: before the header changes, those of the file system and of the opener, so that the
/// header keeps its names. After that a failure is a warning, since the note holds both names.
pub(crate) fn follow(
    file: &Storage,
    names: &Names,
    is_done: bool,
    options: &OpenOptions,
) -> Result<(), Error> {
    let value = value(file);
    let before = value.as_ref().ok().and_then(Option::as_deref).unwrap_or_default();
    let before = before.lines().next().unwrap_or_default().to_owned();
    // Only the backing file changes: what the header says of a data file counts as little as ever.
    let line = match Names::parse(&before) {
        Some(before) => names.clone().with_data_of(&before).line(),
        None => names.line(),
    };
    let result = match value {
        // It was never served in a sandbox, or its file system keeps no notes.
        Ok(None) | Err(Errno::OPNOTSUPP) => Ok(()),
        Ok(Some(_)) => match file.raw_fd() {
            Some(Fd::Raw(fd)) => change_note(&fd, &line, is_done),
            _ => set(file, &line),
        },
        // Inside of a sandbox there are no such calls.
        Err(Errno::NOSYS) => outside(file, &line, is_done, options),
        Err(errno) => Err(errno),
    };
    match result {
        Err(errno) if is_done => {
            tracing::warn!(
                "the note of the files that '{}' names still has the former ones, too ({errno})",
                file.name()
            );
            Ok(())
        }
        result => result.map_err(|errno| cannot_note(file, errno)),
    }
}

/// A note that has one more line. It keeps the lines that it had: which of them the header names is
/// not known after a crash in the middle of a change.
fn with_line(note: &str, line: &str) -> String {
    let had = note.lines().take(LINES_MAX - 1).filter(|had| *had != line);
    had.chain([line]).collect::<Vec<_>>().join("\n")
}

/// Has the opener change the note of a file.
///
/// Errors: those of setxattr(2); EPERM for a name of a file that the opener does not know; EIO: it
/// does not answer. A file that has no note there, and a command that is not known to be a user's,
/// are none: with `--allow-path` the next start follows the name.
fn outside(file: &Storage, line: &str, is_done: bool, options: &OpenOptions) -> Result<(), Errno> {
    match options.note_outside(file, line.as_bytes(), is_done) {
        // It is none of those that have a note there, or there is no opener.
        Err(errno @ (Errno::ACCESS | Errno::NOSYS)) => {
            tracing::debug!("'{}' has no note of its names ({errno})", file.name());
            Ok(())
        }
        // No user is known to ask for it: the command did not come from `ringdisk ctl`.
        Err(errno @ Errno::KEYREJECTED) => {
            tracing::warn!(
                "the note of the files that '{}' names is not changed ({errno}): the next start \
                 asks for --allow-path",
                file.name()
            );
            Ok(())
        }
        // A file system without such attributes.
        Err(Errno::OPNOTSUPP) => Ok(()),
        result => result,
    }
}

fn cannot_note(file: &Storage, errno: Errno) -> Error {
    Error::os(format!("cannot note the files that '{}' names", file.name()), errno)
}

/// Notes the names of the header of a new overlay. Where this process has no call for that, the
/// opener does it, if it has created the file.
///
/// * `is_wanted`: [`crate::ImageOptions::note_names`].
///
/// Errors: those of the file system and of the opener; none where the file system has no such
/// attributes.
pub(crate) fn note_new(
    file: &Storage,
    names: &Names,
    is_wanted: bool,
    options: &OpenOptions,
) -> Result<(), Error> {
    let line = names.line();
    let result = match value(file) {
        Err(Errno::NOSYS) => outside(file, &line, true, options),
        _ if is_wanted => match set(file, &line) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            result => result,
        },
        _ => Ok(()),
    };
    result.map_err(|errno| cannot_note(file, errno))
}

/// Letters, digits and the usual punctuation of names; other bytes in hexadecimal digits.
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

/// The bytes that [`plain`] has made a text of. `None`: it is no such text.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        // A sign is none of the digits.
        let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        bytes.push(u8::from_str_radix(digits, 16).ok().filter(|_| is_hex)?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    Some(bytes)
}

/// The path by which attributes of an open file are reached.
fn path_of(file: &Storage) -> Option<PathBuf> {
    match file.raw_fd()? {
        Fd::Raw(fd) if file.kind() == Kind::Regular => Some(link(fd)),
        _ => None,
    }
}

/// The note of a file.
fn value(file: &Storage) -> Result<Option<String>, Errno> {
    path_of(file).map_or(Ok(None), |path| value_at(&path))
}

fn value_at(path: &Path) -> Result<Option<String>, Errno> {
    match ATTRIBUTE.get_at(path) {
        Ok(value) => Ok(value.map(|value| String::from_utf8(value).unwrap_or_default())),
        // A file system without such attributes.
        Err(Errno::OPNOTSUPP) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn set(file: &Storage, text: &str) -> Result<(), Errno> {
    let Some(path) = path_of(file) else { return Err(Errno::OPNOTSUPP) };
    ATTRIBUTE.set_at(&path, text.as_bytes())
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
    }

    #[test]
    fn a_noted_name_leads_where_the_header_leads() {
        let path = |name: &[u8], format| {
            Names::new(Some(name), Some(format), None)
                .backing()
                .map(|(path, format)| (path.into_os_string().into_encoded_bytes(), format))
        };
        let (raw, qcow2) = (Format::Raw, Format::Qcow2);
        for name in
            [&b"./a-b/c"[..], b"base;\n%41.qcow2", b"./c:1", b"\xff(1)~#", "Büro".as_bytes()]
        {
            assert_eq!(
                path(name, "qcow2"),
                Some((name.to_vec(), qcow2)),
                "{}",
                name.escape_ascii()
            );
        }
        assert_eq!(path(b"file:a", "file"), Some((b"a".to_vec(), raw)), "not a file of this name");
        assert_eq!(path(b"nbd:a", "raw"), None);
        let json = br#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a"}}"#;
        assert_eq!(path(json, ""), Some((b"a".to_vec(), qcow2)));
        assert_eq!(path(json, "raw"), None, "no open follows it");
        assert_eq!(path(b"a", ""), None);
        for line in ["a%4:raw;", "a%zz:raw;", "a%+1:raw;", "a%00b:raw;"] {
            assert_eq!(Names::parse(line).and_then(|names| names.backing_path()), None, "{line}");
        }
    }

    #[test]
    fn a_change_of_the_backing_file_keeps_the_noted_data_file() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let file = storage(file.path());
        let names = |base: &str, data: &str| {
            Names::new(Some(base.as_bytes()), Some("raw"), Some(data.as_bytes()))
        };
        let (noted, forged) = (names("a", "data"), names("b", "secret"));
        assert_eq!(forged.as_noted(&file), forged, "there is no note");
        noted.note(&file).expect("an attribute");
        assert_eq!(forged.as_noted(&file), noted);
        let options = OpenOptions::default();
        follow(&file, &forged, false, &options).expect("done");
        assert!(forged.ask(&file).other_data && !forged.ask(&file).other_below);
        follow(&file, &forged, true, &options).expect("done");
        assert!(forged.ask(&file).other_data && names("b", "data").ask(&file).is_exact);
        assert_eq!(forged.data_path(), Some(PathBuf::from("secret")));
    }

    #[test]
    fn what_a_header_names_stays_noted_after_crashes_in_the_middle_of_changes() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let file = storage(file.path());
        let of = |name: &str| Names::new(Some(name.as_bytes()), Some("raw"), None);
        let options = OpenOptions::default();
        of("a").note(&file).expect("an attribute");
        // The header has the new name, and the process dies before the note has it alone.
        for name in ["b", "c", "c"] {
            follow(&file, &of(name), false, &options).expect("begun");
        }
        let others = ["a", "b", "c", "d"].map(|name| of(name).ask(&file).other_below);
        assert_eq!(others, [false, false, false, true]);
        assert_eq!(with_line("a\nb\nc\nd", "e"), "a\nb\nc\ne");
        let longest = "n".repeat(VALUE_BYTES_MAX / LINES_MAX - 1);
        let note = with_line(&[longest.as_str(); LINES_MAX].join("\n"), "e");
        assert!(note.len() <= VALUE_BYTES_MAX && VALUE_BYTES_MAX < 64 << 10);
    }

    #[test]
    fn a_note_has_both_names_while_the_header_changes() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let file = storage(file.path());
        let [a, b] = [&b"a"[..], b"b"].map(|name| Names::new(Some(name), Some("raw"), None));
        let options = OpenOptions::default();
        follow(&file, &a, true, &options).expect("done");
        assert!(a.ask(&file).is_absent, "no note is begun");
        a.note(&file).expect("an attribute");
        let others = |names: &Names| names.ask(&file).other_below;
        follow(&file, &b, false, &options).expect("done");
        assert_eq!([&a, &b].map(others), [false, false]);
        follow(&file, &b, true, &options).expect("done");
        assert_eq!([&a, &b].map(others), [true, false]);
        assert!(b.ask(&file).is_exact);
    }
}
