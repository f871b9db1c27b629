//! Names of backing and data files, as an image spells them.
//!
//! Promises: pure. Understands plain paths, `file:PATH`, addresses of NBD exports, and `json:{…}`
//! descriptions of plain files and NBD exports, nested or dotted. Everything else is refused by
//! name; nothing is guessed and nothing is opened here. Source: QEMU's documentation of image file
//! names ("json:" and "file:" pseudo-protocols).

mod json;
mod keys;
mod node;
mod quotes;
mod words;

use ringdisk_qcow2::Bytes;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ringdisk_storage::NbdAddress;

use crate::{Cause, Error, ErrorKind, Format};

pub use node::NodeOptions;
pub use words::{image_options, option_words};

/// Longest name that is looked at, bytes. The qcow2 header allows 1023; a data file name sits in an
/// extension of at most one cluster, and no path is longer than `PATH_MAX`.
pub const NAME_BYTES_MAX: usize = 4096;

/// A parsed name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName {
    /// Path of the file, relative to the directory of the image that names it; the URI of an NBD
    /// export.
    pub path: PathBuf,
    /// The NBD export, if it is one.
    pub nbd: Option<NbdAddress>,
    /// Format, when the name states it (`json:` only).
    pub format: Option<Format>,
    /// First byte of a raw image, bytes (`json:` only).
    pub raw_offset: u64,
    /// Size of a raw image, bytes (`json:` only).
    pub raw_size: Option<Bytes>,
    /// The name says that the file is to be used without its own backing file
    /// (`"backing": null`).
    pub without_backing: bool,
    /// How the image is to be opened (`json:` only). Counts for an image of a command line
    /// ([`FileName::add_to`]), not for one that another image names.
    pub node: NodeOptions,
}

impl FileName {
    /// A plain path.
    fn plain(path: &[u8]) -> FileName {
        FileName {
            path: PathBuf::from(OsString::from_vec(path.to_vec())),
            nbd: None,
            format: None,
            raw_offset: 0,
            raw_size: None,
            without_backing: false,
            node: NodeOptions::default(),
        }
    }

    /// An NBD export.
    fn export(address: NbdAddress) -> FileName {
        let uri = address.to_string();
        FileName { nbd: Some(address), ..FileName::plain(uri.as_bytes()) }
    }

    /// The path in a form that every command takes for a path, also where it begins like something
    /// else; the URI of an NBD export.
    pub fn plain_path(&self) -> PathBuf {
        let name = self.path.as_os_str().as_bytes();
        match self.nbd {
            None if protocol_of(name).is_some() => Path::new(".").join(&self.path),
            _ => self.path.clone(),
        }
    }

    /// The path, seen from a directory; the URI of an NBD export is the same everywhere.
    pub fn seen_from(&self, directory: &Path) -> PathBuf {
        match self.nbd {
            None => directory.join(&self.path),
            Some(_) => self.path.clone(),
        }
    }

    /// The NBD export that a name of an image leads to. `None`: the name is a path.
    ///
    /// Errors: as [`FileName::parse`], of a name that begins as that of an export.
    pub fn export_of(path: &Path) -> Result<Option<FileName>, Error> {
        let name = path.as_os_str().as_bytes();
        if NbdAddress::is_meant(name) {
            return FileName::parse(name).map(Some);
        }
        // A `json:` name that is no export may be that of a file.
        let parsed = name.starts_with(b"json:").then(|| FileName::parse(name));
        Ok(parsed.and_then(Result::ok).filter(|parsed| parsed.nbd.is_some()))
    }

    /// The name of an image on a command line: as [`FileName::parse`], except that a word before a
    /// colon which is no protocol of ours belongs to the path, and that a path has no limit.
    ///
    /// Errors: as [`FileName::parse`], of a name that begins as `json:`, `file:` or that of an
    /// export.
    pub fn of_user(path: &Path) -> Result<FileName, Error> {
        let name = path.as_os_str().as_bytes();
        let is_special = [&b"json:"[..], b"file:"].iter().any(|prefix| name.starts_with(prefix));
        if is_special || NbdAddress::is_meant(name) {
            return FileName::parse(name);
        }
        Ok(FileName::plain(name))
    }

    /// The image that options (`--image-opts`) describe.
    ///
    /// Errors: as [`image_options`] and [`FileName::parse`].
    pub fn of_options(text: &str) -> Result<FileName, Error> {
        let json = image_options(text)
            .map_err(|why| invalid(why).because(Cause::NoNode { options: text.to_owned() }))?;
        json::parse(json.as_bytes())
    }

    /// Parses a name.
    ///
    /// * `name`: the bytes in the image, without a terminating zero.
    ///
    /// Errors: `Unsupported` for a protocol, driver or option that is not a plain file's;
    /// `Invalid` for an empty or too long name, a zero byte, broken JSON.
    pub fn parse(name: &[u8]) -> Result<FileName, Error> {
        if name.is_empty() {
            return Err(invalid("the name is empty"));
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(invalid(format!(
                "the name is {} bytes long, more than {NAME_BYTES_MAX}",
                name.len()
            )));
        }
        if name.contains(&0) {
            return Err(invalid("the name contains a zero byte"));
        }
        if let Some(text) = name.strip_prefix(b"json:") {
            return json::parse(text);
        }
        if NbdAddress::is_meant(name) {
            return NbdAddress::parse(name)
                .map(FileName::export)
                .map_err(|why| json::of_address(&why));
        }
        let path = name.strip_prefix(b"file:").unwrap_or(name);
        if path.is_empty() {
            return Err(invalid("`file:` without a path"));
        }
        if path.len() == name.len()
            && let Some(protocol) = protocol_of(name)
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the protocol '{protocol}:' is not supported, only local files and `nbd:` are; \
                     if it is a file whose name contains a colon, name it './…' in the image \
                     (`ringdisk rebase -u`)"
                ),
            ));
        }
        Ok(FileName::plain(path))
    }
}

/// Whether the name of an image is the address of an NBD export (perhaps a malformed one), and no
/// path.
pub fn is_export(image: &Path) -> bool {
    !matches!(FileName::export_of(image), Ok(None))
}

/// The word before a colon that comes before the first slash, as QEMU reads names.
fn protocol_of(name: &[u8]) -> Option<String> {
    let at = name.iter().position(|&byte| byte == b':' || byte == b'/')?;
    if name.get(at) != Some(&b':') {
        return None;
    }
    Some(printable(name.get(..at).unwrap_or_default()))
}

/// A word of a command line as a shell wants it, for lines that are to be copied.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+,:=@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// The same for a name that an image contains, whatever bytes it has: a line with it does nothing
/// but name that file.
pub(crate) fn shell_name(name: &[u8]) -> String {
    if let Ok(text) = std::str::from_utf8(name)
        && !text.contains(char::is_control)
    {
        return shell_word(text);
    }
    let escaped = |byte: &u8| match byte {
        b'\'' | b'\\' => format!("\\{}", char::from(*byte)),
        b' '..=b'~' => char::from(*byte).to_string(),
        byte => format!("\\x{byte:02x}"),
    };
    format!("$'{}'", name.iter().map(escaped).collect::<String>())
}

/// The same for a path.
pub(crate) fn shell_path(path: &Path) -> String {
    shell_name(path.as_os_str().as_bytes())
}

/// A name as it is shown in messages: no control characters, no broken UTF-8.
pub(crate) fn printable(name: &[u8]) -> String {
    String::from_utf8_lossy(name).escape_debug().to_string()
}

/// The path as it is shown in messages.
pub(crate) fn printable_path(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

/// The full name as QEMU shows it: `name` beside the image that names it.
///
/// * `of`: the name of that image, as it was opened.
/// * `name`: as the image spells it.
pub(crate) fn beside(of: &Path, name: &FileName) -> PathBuf {
    match of.parent() {
        Some(directory) => name.seen_from(directory),
        None => name.path.clone(),
    }
}
