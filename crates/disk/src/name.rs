//! Names of backing and data files, as an image spells them.
//!
//! Promises: pure. Understands plain paths, `file:PATH`, and `json:{…}` descriptions of plain
//! files, nested or dotted. Everything else is refused by name; nothing is guessed and nothing is
//! opened here. Source: QEMU's documentation of image file names ("json:" and "file:"
//! pseudo-protocols).

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::{Error, ErrorKind, Format};

/// Longest name that is looked at, bytes. The qcow2 header allows 1023; a data file name sits in an
/// extension of at most one cluster, and no path is longer than `PATH_MAX`.
pub const NAME_BYTES_MAX: usize = 4096;

/// A parsed name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileName {
    /// Path of the file, relative to the directory of the image that names it.
    pub path: PathBuf,
    /// Format, when the name states it (`json:` only).
    pub format: Option<Format>,
    /// First byte of a raw image, bytes (`json:` only).
    pub raw_offset: u64,
    /// Size of a raw image, bytes (`json:` only).
    pub raw_size: Option<u64>,
    /// The name says that the file is to be used without its own backing file
    /// (`"backing": null`).
    pub without_backing: bool,
}

impl FileName {
    /// A plain path.
    fn plain(path: &[u8]) -> FileName {
        FileName {
            path: PathBuf::from(OsString::from_vec(path.to_vec())),
            format: None,
            raw_offset: 0,
            raw_size: None,
            without_backing: false,
        }
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
            return parse_json(text);
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
                    "the protocol '{protocol}:' is not supported, only local files are; if it is \
                     a file whose name contains a colon, name it './…' in the image \
                     (`ringdisk rebase -u`)"
                ),
            ));
        }
        Ok(FileName::plain(path))
    }
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

/// `json:` names: an object that names a file, or a format over a file.
fn parse_json(text: &[u8]) -> Result<FileName, Error> {
    let value: Value = serde_json::from_slice(text)
        .map_err(|error| invalid("the `json:` name is not valid JSON").with_source(error))?;
    let Value::Object(object) = value else {
        return Err(invalid("the `json:` name is not a JSON object"));
    };
    let object = undotted(object)?;
    let driver = text_of(&object, "driver")?;
    match driver.as_deref() {
        Some("raw") => format_node(&object, Some(Format::Raw)),
        Some("qcow2") => format_node(&object, Some(Format::Qcow2)),
        Some("file" | "host_device") => file_node(&object),
        Some(other) => Err(unsupported_driver(other)),
        // Without a driver, an object with a file inside is a format to be found elsewhere.
        None if object.contains_key("file") => format_node(&object, None),
        None => file_node(&object),
    }
}

fn unsupported_driver(driver: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "the driver '{}' of the `json:` name is not supported; supported: raw, qcow2 over \
             file, host_device",
            driver.escape_debug()
        ),
    )
}

/// Options that change how QEMU does the work, not which bytes are read.
const HARMLESS: [&str; 15] = [
    "node-name",
    "read-only",
    "auto-read-only",
    "discard",
    "detect-zeroes",
    "cache",
    "force-share",
    "locking",
    "aio",
    "aio-max-batch",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-size",
    "cache-clean-interval",
];

/// Turns `"file.filename": "x"` into `"file": {"filename": "x"}`, as QEMU does.
fn undotted(object: Map<String, Value>) -> Result<Map<String, Value>, Error> {
    let mut result = Map::new();
    for (key, value) in object {
        let mut keys = key.splitn(2, '.');
        let (first, rest) = (keys.next().unwrap_or_default(), keys.next());
        let entry = match rest {
            None => {
                if result.insert(first.to_owned(), value).is_some() {
                    return Err(twice(first));
                }
                continue;
            }
            Some(rest) => (rest.to_owned(), value),
        };
        let inner = result.entry(first.to_owned()).or_insert_with(|| Value::Object(Map::new()));
        let Value::Object(inner) = inner else {
            return Err(twice(first));
        };
        if inner.insert(entry.0, entry.1).is_some() {
            return Err(twice(&key));
        }
    }
    Ok(result)
}

fn twice(key: &str) -> Error {
    invalid(format!("the key '{}' of the `json:` name is given twice", key.escape_debug()))
}

/// A node with driver raw or qcow2 (or none), whose "file" is a plain file.
fn format_node(object: &Map<String, Value>, format: Option<Format>) -> Result<FileName, Error> {
    let mut name = match object.get("file") {
        Some(Value::Object(file)) => {
            let file = undotted(file.clone())?;
            match text_of(&file, "driver")?.as_deref() {
                None | Some("file" | "host_device") => file_node(&file)?,
                Some(other) => return Err(unsupported_driver(other)),
            }
        }
        Some(Value::String(node)) => {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the `json:` name refers to the node '{}'; name the file itself",
                    node.escape_debug()
                ),
            ));
        }
        Some(_) => return Err(invalid("'file' of the `json:` name is not an object")),
        None => return Err(invalid("the `json:` name has no 'file'")),
    };
    name.format = format;
    for (key, value) in object {
        match (key.as_str(), format) {
            ("driver" | "file", _) => {}
            ("offset", Some(Format::Raw)) => name.raw_offset = number_of(key, value)?,
            ("size", Some(Format::Raw)) => name.raw_size = Some(number_of(key, value)?),
            ("backing", Some(Format::Qcow2)) if value.is_null() => name.without_backing = true,
            (key, _) if HARMLESS.contains(&key) => {}
            (key, _) => return Err(unknown_key(key)),
        }
    }
    Ok(name)
}

/// A node with driver file: `{"filename": "x"}`.
fn file_node(object: &Map<String, Value>) -> Result<FileName, Error> {
    for key in object.keys() {
        if key != "driver" && key != "filename" && !HARMLESS.contains(&key.as_str()) {
            return Err(unknown_key(key));
        }
    }
    let Some(path) = text_of(object, "filename")? else {
        return Err(invalid("the `json:` name has no 'filename'"));
    };
    if path.is_empty() || path.contains('\0') {
        return Err(invalid("'filename' of the `json:` name is empty or broken"));
    }
    // QEMU strips "file:" here too.
    let path = path.strip_prefix("file:").unwrap_or(&path);
    Ok(FileName::plain(path.as_bytes()))
}

fn unknown_key(key: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("the key '{}' of the `json:` name is not supported", key.escape_debug()),
    )
}

fn text_of(object: &Map<String, Value>, key: &str) -> Result<Option<String>, Error> {
    match object.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(invalid(format!("'{key}' of the `json:` name is not text"))),
    }
}

/// QEMU writes numbers as numbers or as decimal text.
fn number_of(key: &str, value: &Value) -> Result<u64, Error> {
    let number = match value {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    number.ok_or_else(|| invalid(format!("'{key}' of the `json:` name is not a size in bytes")))
}

/// The full name as QEMU shows it: `name` beside the image that names it.
///
/// * `of`: the name of that image, as it was opened.
/// * `name`: as the image spells it.
pub(crate) fn beside(of: &Path, name: &FileName) -> PathBuf {
    match of.parent() {
        Some(directory) => directory.join(&name.path),
        None => name.path.clone(),
    }
}
