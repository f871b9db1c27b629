//! Names of backing and data files, as an image spells them.
//!
//! Promises: pure. Understands plain paths, `file:PATH`, addresses of NBD exports, and `json:{…}`
//! descriptions of plain files and NBD exports, nested or dotted. Everything else is refused by
//! name; nothing is guessed and nothing is opened here. Source: QEMU's documentation of image file
//! names ("json:" and "file:" pseudo-protocols).

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ringdisk_storage::{NBD_PORT, NbdAddress, NbdServer};
use serde_json::{Map, Value};

use crate::{Error, ErrorKind, Format};

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
            nbd: None,
            format: None,
            raw_offset: 0,
            raw_size: None,
            without_backing: false,
        }
    }

    /// An NBD export.
    fn export(address: NbdAddress) -> FileName {
        let uri = address.to_string();
        FileName { nbd: Some(address), ..FileName::plain(uri.as_bytes()) }
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
        if NbdAddress::is_meant(name) {
            return NbdAddress::parse(name).map(FileName::export).map_err(|why| of_address(&why));
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
        Some("nbd") => nbd_node(&object),
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
             file, host_device, nbd",
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
                Some("nbd") => nbd_node(&file)?,
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

/// A node with driver nbd: `{"server": {"type": "unix", "path": "x"}, "export": "y"}`, or `host`,
/// `port` and `path` without a server.
fn nbd_node(object: &Map<String, Value>) -> Result<FileName, Error> {
    let own = ["driver", "server", "export", "host", "port", "path"];
    // How long requests wait is said on the command line.
    let harmless = ["reconnect-delay", "open-timeout"];
    for key in object.keys().map(String::as_str) {
        match key {
            "tls-creds" | "tls-hostname" => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "'{key}' of the `json:` name leads to an object of QEMU: write \
                         `nbds://HOST/NAME?tls-certificates=DIR` instead"
                    ),
                ));
            }
            key if own.contains(&key) || harmless.contains(&key) || HARMLESS.contains(&key) => {}
            key => return Err(unknown_key(key)),
        }
    }
    let server = match object.get("server") {
        None => object.clone(),
        Some(Value::Object(server)) => undotted(server.clone())?,
        Some(_) => return Err(invalid("'server' of the `json:` name is not an object")),
    };
    let kind = text_of(&server, "type")?;
    let (path, host) = (text_of(&server, "path")?, text_of(&server, "host")?);
    let export = text_of(object, "export")?.unwrap_or_default().into_bytes();
    let address = match (kind.as_deref(), path, host) {
        (None | Some("unix"), Some(path), None) => NbdAddress::unix(path.into_bytes(), export),
        (None | Some("inet"), None, Some(host)) => {
            let port = match server.get("port") {
                None => u64::from(NBD_PORT),
                Some(port) => number_of("port", port)?,
            };
            let port = u16::try_from(port).ok().filter(|port| *port != 0);
            let port = port.ok_or_else(|| invalid("'port' of the `json:` name is no port"))?;
            NbdAddress::new(NbdServer::Tcp(host, port), export)
        }
        _ => {
            return Err(invalid(
                "the server of the `json:` name is neither type unix with a path nor type inet \
                 with a host",
            ));
        }
    };
    address.map(FileName::export).map_err(|why| of_address(&why))
}

fn of_address(why: &ringdisk_storage::BadAddress) -> Error {
    Error::new(ErrorKind::Invalid, format!("the address of the NBD export: {why}"))
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
        Some(directory) => name.seen_from(directory),
        None => name.path.clone(),
    }
}
