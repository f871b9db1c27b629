//! `json:` names: an object that names a file or an export, or a format over one.
//!
//! Promises: pure; a key that is not known, and a driver that is not ours, is refused by its name.
//! Source: QEMU's documentation of image file names ("json:" pseudo-protocol).

use ringdisk_qcow2::Bytes;
use serde_json::{Map, Value};

use ringdisk_storage::{NBD_PORT, NbdAddress, NbdServer};

use super::keys::{text_of, unknown_key};
use super::node::NodeOptions;
use super::quotes::double_quoted;
use super::{FileName, invalid};
use crate::{Error, ErrorKind, Format};

/// `json:` names: an object that names a file, or a format over a file.
///
/// * `text`: without the prefix.
pub(super) fn parse(text: &[u8]) -> Result<FileName, Error> {
    let value: Value = serde_json::from_slice(&double_quoted(text))
        .map_err(|error| invalid("the `json:` name is not valid JSON").with_source(error))?;
    let Value::Object(object) = value else {
        return Err(invalid("the `json:` name is not a JSON object"));
    };
    let object = undotted(object)?;
    let driver = text_of(&object, "driver")?;
    let bare = |mut name: FileName| {
        name.node.is_bare = true;
        name
    };
    match driver.as_deref() {
        Some("raw") => format_node(&object, Some(Format::Raw)),
        Some("qcow2") => format_node(&object, Some(Format::Qcow2)),
        Some("file" | "host_device") => file_node(&object).map(bare),
        Some("nbd") => nbd_node(&object),
        Some(other) => Err(unsupported_driver(other)),
        // Without a driver, an object with a file inside is a format to be found elsewhere.
        None if object.contains_key("file") => format_node(&object, None),
        None => file_node(&object),
    }
}

fn unsupported_driver(driver: &str) -> Error {
    let instead = match driver {
        "compress" => "; what is written is stored as it is: `convert -c` compresses it afterwards",
        "luks" => "; encrypted images are not supported",
        "throttle" => "; `--limit` slows a disk down",
        "copy-on-read" => "; `--copy-on-read` keeps what is read",
        _ => "",
    };
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "the driver '{}' is not supported; supported: raw, qcow2 over file, host_device, \
             nbd{instead}",
            driver.escape_debug()
        ),
    )
}

/// Options that change how QEMU does the work, not which bytes are read or written.
const HARMLESS: [&str; 10] = [
    "node-name",
    "locking",
    "aio",
    "aio-max-batch",
    "drop-cache",
    "l2-cache-size",
    "l2-cache-entry-size",
    "refcount-cache-size",
    "cache-size",
    "cache-clean-interval",
];

/// Options of every node, read by [`NodeOptions`].
const GENERAL: [&str; 6] =
    ["read-only", "auto-read-only", "discard", "detect-zeroes", "cache", "force-share"];

fn is_general(key: &str) -> bool {
    HARMLESS.contains(&key) || GENERAL.contains(&key)
}

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
            ("size", Some(Format::Raw)) => name.raw_size = Some(Bytes(number_of(key, value)?)),
            ("backing", Some(Format::Qcow2)) if value.is_null() => name.without_backing = true,
            ("lazy-refcounts" | "discard-no-unref", Some(Format::Qcow2)) => {}
            (key, _) if is_general(key) => {}
            (key, _) => return Err(unknown_key(key)),
        }
    }
    name.node = NodeOptions::of(object, name.node)?;
    Ok(name)
}

/// A node with driver file: `{"filename": "x"}`.
fn file_node(object: &Map<String, Value>) -> Result<FileName, Error> {
    for key in object.keys() {
        if key != "driver" && key != "filename" && !is_general(key) {
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
    let node = NodeOptions::of(object, NodeOptions::default())?;
    Ok(FileName { node, ..FileName::plain(path.as_bytes()) })
}

/// A node with driver nbd: `{"server": {"type": "unix", "path": "x"}, "export": "y"}`, or `host`,
/// `port` and `path` without a server.
fn nbd_node(object: &Map<String, Value>) -> Result<FileName, Error> {
    let own = ["driver", "server", "export", "host", "port", "path", "x-dirty-bitmap"];
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
            key if own.contains(&key) || harmless.contains(&key) || is_general(key) => {}
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
    let bitmap = text_of(object, "x-dirty-bitmap")?;
    let address = address.and_then(|address| match &bitmap {
        Some(bitmap) => address.with_dirty_bitmap(bitmap),
        None => Ok(address),
    });
    let name = address.map(FileName::export).map_err(|why| of_address(&why))?;
    Ok(FileName { node: NodeOptions::of(object, NodeOptions::default())?, ..name })
}

pub(super) fn of_address(why: &ringdisk_storage::BadAddress) -> Error {
    Error::new(ErrorKind::Invalid, format!("the address of the NBD export: {why}"))
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
