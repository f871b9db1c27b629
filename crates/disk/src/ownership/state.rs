//! The state of a disk as text, which a successor gets beside the descriptors.
//!
//! Promises: the text is read back exactly, also with any bytes in the names; a damaged text is
//! refused as a whole.

use ringdisk_qcow2::{Bytes, GuestOffset};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use ringdisk_messages::state::Versions;
use ringdisk_throttle::Changed;
use serde_json::{Map, Value, json};

use crate::graph::Window;
use crate::{Error, ErrorKind};

/// Version of the text.
const VERSION: u32 = 1;
/// The version with a window, which a program of version 1 would ignore.
const VERSION_WITH_WINDOW: u32 = 2;

/// State of a disk, without its descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskState {
    /// Requests are served: the descriptors hold the locks.
    pub(crate) active: bool,
    pub(crate) read_only: bool,
    pub(crate) read_only_reason: Option<String>,
    /// The first sector of the lowest layer is protected.
    pub(crate) guarded: bool,
    /// The part of the disk that clients see.
    pub(crate) window: Window,
    /// Limits that a command has set; an older version leaves them out.
    pub(crate) limits: Option<Changed>,
    /// Copy-on-read, if a command has switched it; an older version leaves it out.
    pub(crate) copy_on_read: Option<bool>,
    /// Top first.
    pub(crate) layers: Vec<LayerState>,
}

/// State of one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerState {
    pub(crate) kind: Kind,
    pub(crate) name: PathBuf,
    pub(crate) directory: Option<PathBuf>,
    pub(crate) data_name: Option<PathBuf>,
    pub(crate) full_backing_name: Option<String>,
    /// As [`crate::layer::Layer::without_backing`]; an older version leaves it out.
    pub(crate) without_backing: bool,
    pub(crate) writable: bool,
    /// The image file first, then the data file. Each: its [`ringdisk_storage::Storage::identity`],
    /// and whether it is open for reading only.
    pub(crate) files: Vec<((u64, u64), bool)>,
}

/// The image of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Null { size: u64, read_zeroes: bool, latency_ns: u64 },
    Raw { offset: u64, fixed_size: Option<u64> },
    Qcow2,
}

impl Default for Kind {
    fn default() -> Kind {
        Kind::Raw { offset: 0, fixed_size: None }
    }
}

impl DiskState {
    pub(crate) fn to_text(&self) -> String {
        // A program that knows no windows must not serve the whole disk.
        let window = self.window;
        let (version, window) = match window.is_part() {
            true => (VERSION_WITH_WINDOW, json!([window.start.0, window.len().map(|len| len.0)])),
            false => (VERSION, Value::Null),
        };
        json!({
            "version": version,
            "window": window,
            "active": self.active,
            "read-only": self.read_only,
            "read-only-reason": self.read_only_reason,
            "guarded": self.guarded,
            "limits": self.limits.map(|limits| limits.words()),
            "copy-on-read": self.copy_on_read,
            "layers": self.layers.iter().map(LayerState::to_json).collect::<Vec<_>>(),
        })
        .to_string()
    }

    /// Errors: `Invalid`.
    pub(crate) fn parse(text: &str) -> Result<DiskState, Error> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| damaged(&error.to_string()))?;
        let fields = Fields::of(&value)?;
        let known = Versions::new(VERSION, VERSION_WITH_WINDOW);
        known.check(&value["version"]).map_err(|why| damaged(&why.to_string()))?;
        let layers = fields.list("layers")?;
        if layers.is_empty() || layers.len() > crate::LAYERS_MAX {
            return Err(damaged("the number of layers makes no sense"));
        }
        Ok(DiskState {
            active: fields.flag("active")?,
            read_only: fields.flag("read-only")?,
            read_only_reason: fields.text("read-only-reason")?,
            guarded: fields.flag("guarded")?,
            window: window(fields.get("window"))?,
            limits: limits(fields.get("limits"))?,
            copy_on_read: switch(fields.get("copy-on-read"))?,
            layers: layers.iter().map(LayerState::parse).collect::<Result<_, _>>()?,
        })
    }
}

impl LayerState {
    fn to_json(&self) -> Value {
        let kind = match &self.kind {
            Kind::Null { size, read_zeroes, latency_ns } => {
                json!({"null": [size, u64::from(*read_zeroes), latency_ns]})
            }
            Kind::Raw { offset, fixed_size } => json!({"raw": [offset, fixed_size]}),
            Kind::Qcow2 => json!({"qcow2": []}),
        };
        let files: Vec<Value> = self
            .files
            .iter()
            .map(|((device, inode), read_only)| json!([device, inode, u64::from(*read_only)]))
            .collect();
        json!({
            "kind": kind,
            "name": path_to_json(&self.name),
            "directory": self.directory.as_deref().map(path_to_json),
            "data-name": self.data_name.as_deref().map(path_to_json),
            "full-backing-name": self.full_backing_name,
            "without-backing": self.without_backing,
            "writable": self.writable,
            "files": files,
        })
    }

    fn parse(value: &Value) -> Result<LayerState, Error> {
        let fields = Fields::of(value)?;
        let files = fields.list("files")?.iter().map(|file| match numbers(file)?.as_slice() {
            [Some(device), Some(inode), Some(read_only)] => {
                Ok(((*device, *inode), *read_only != 0))
            }
            _ => Err(damaged("a file has no identity")),
        });
        Ok(LayerState {
            kind: kind(fields.get("kind"))?,
            name: fields.path("name")?.ok_or_else(|| damaged("a layer has no name"))?,
            directory: fields.path("directory")?,
            data_name: fields.path("data-name")?,
            full_backing_name: fields.text("full-backing-name")?,
            without_backing: fields.get("without-backing") == &Value::Bool(true),
            writable: fields.flag("writable")?,
            files: files.collect::<Result<_, _>>()?,
        })
    }
}

fn window(value: &Value) -> Result<Window, Error> {
    if value.is_null() {
        return Ok(Window::default());
    }
    match numbers(value)?.as_slice() {
        [Some(start), len] => Ok(Window::new(GuestOffset(*start), len.map(Bytes))),
        _ => Err(damaged("the window is none")),
    }
}

fn limits(value: &Value) -> Result<Option<Changed>, Error> {
    if value.is_null() {
        return Ok(None);
    }
    let words: Result<[String; 2], _> = serde_json::from_value(value.clone());
    let limits = words.ok().and_then(|words| Changed::read(&words).ok());
    limits.map(Some).ok_or_else(|| damaged("the limits are none"))
}

fn switch(value: &Value) -> Result<Option<bool>, Error> {
    match value {
        Value::Null => Ok(None),
        Value::Bool(is_on) => Ok(Some(*is_on)),
        _ => Err(damaged("copy-on-read is neither on nor off")),
    }
}

fn kind(value: &Value) -> Result<Kind, Error> {
    let object = value.as_object().ok_or_else(|| damaged("a layer has no kind"))?;
    let (word, numbers) = match object.iter().next() {
        Some((word, list)) => (word.as_str(), numbers(list)?),
        None => ("", Vec::new()),
    };
    match (word, numbers.as_slice()) {
        ("null", [Some(size), Some(read_zeroes), Some(latency_ns)]) => {
            Ok(Kind::Null { size: *size, read_zeroes: *read_zeroes != 0, latency_ns: *latency_ns })
        }
        ("raw", [Some(offset), fixed_size]) => {
            Ok(Kind::Raw { offset: *offset, fixed_size: *fixed_size })
        }
        ("qcow2", []) => Ok(Kind::Qcow2),
        _ => Err(damaged("the kind of a layer is not known")),
    }
}

/// A list of numbers, some of which may be missing.
fn numbers(value: &Value) -> Result<Vec<Option<u64>>, Error> {
    let list = value.as_array().ok_or_else(|| damaged("numbers are missing"))?;
    let number = |value: &Value| match value {
        Value::Null => Ok(None),
        value => value.as_u64().map(Some).ok_or_else(|| damaged("a number is none")),
    };
    list.iter().map(number).collect()
}

/// A name as text where it is text, else as its bytes.
fn path_to_json(path: &Path) -> Value {
    match path.to_str() {
        Some(text) => text.into(),
        None => path.as_os_str().as_bytes().into(),
    }
}

/// The fields of an object.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn of(value: &'a Value) -> Result<Fields<'a>, Error> {
        value.as_object().map(Fields).ok_or_else(|| damaged("it is no object"))
    }

    fn get(&self, name: &str) -> &'a Value {
        self.0.get(name).unwrap_or(&Value::Null)
    }

    fn flag(&self, name: &str) -> Result<bool, Error> {
        self.get(name).as_bool().ok_or_else(|| damaged(&format!("'{name}' is missing")))
    }

    fn list(&self, name: &str) -> Result<&'a [Value], Error> {
        let list = self.get(name).as_array().map(Vec::as_slice);
        list.ok_or_else(|| damaged(&format!("'{name}' is missing")))
    }

    fn text(&self, name: &str) -> Result<Option<String>, Error> {
        match self.get(name) {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text.clone())),
            _ => Err(damaged(&format!("'{name}' is no text"))),
        }
    }

    fn path(&self, name: &str) -> Result<Option<PathBuf>, Error> {
        let bytes = match self.get(name) {
            Value::Null => return Ok(None),
            Value::String(text) => return Ok(Some(PathBuf::from(text))),
            Value::Array(bytes) => bytes,
            _ => return Err(damaged(&format!("'{name}' is no name"))),
        };
        let byte = |value: &Value| value.as_u64().and_then(|byte| u8::try_from(byte).ok());
        let bytes: Option<Vec<u8>> = bytes.iter().map(byte).collect();
        let bytes = bytes.ok_or_else(|| damaged(&format!("'{name}' is no name")))?;
        Ok(Some(PathBuf::from(OsString::from_vec(bytes))))
    }
}

fn damaged(what: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("the disk cannot be taken over, since its description is not understood: {what}"),
    )
}

#[cfg(test)]
mod tests {
    use ringdisk_throttle::Limits;

    use super::*;

    fn limits(text: &str) -> Limits {
        text.parse().expect("limits")
    }

    fn disk_state() -> DiskState {
        let raw = LayerState {
            kind: Kind::Raw { offset: 512, fixed_size: Some(u64::MAX) },
            name: PathBuf::from(OsString::from_vec(b"a\xff\"b".to_vec())),
            files: vec![((u64::MAX, 7), true)],
            ..LayerState::default()
        };
        let qcow2 = LayerState {
            kind: Kind::Qcow2,
            name: PathBuf::from("a"),
            directory: Some(PathBuf::from("/ä")),
            data_name: Some(PathBuf::from("d")),
            full_backing_name: Some("b".to_owned()),
            without_backing: true,
            writable: true,
            files: vec![((1, 2), false), ((1, 3), false)],
        };
        let kind = Kind::Null { size: 1, read_zeroes: true, latency_ns: 3 };
        let null = LayerState { kind, ..LayerState::default() };
        DiskState {
            active: true,
            read_only: true,
            read_only_reason: Some("why".to_owned()),
            guarded: true,
            window: Window::new(GuestOffset(512), Some(Bytes(4096))),
            limits: Some(Changed { begun: limits("none"), now: limits("iops=5") }),
            copy_on_read: Some(false),
            layers: vec![qcow2, raw, null],
        }
    }

    #[test]
    fn what_was_written_is_read_back() {
        assert_eq!(DiskState::parse(&disk_state().to_text()).expect("text"), disk_state());
        let plain = DiskState { layers: vec![LayerState::default()], ..DiskState::default() };
        assert_eq!(DiskState::parse(&plain.to_text()).expect("text"), plain);
        let open = DiskState { window: Window::new(GuestOffset(512), None), ..plain };
        assert_eq!(DiskState::parse(&open.to_text()).expect("text"), open);
    }

    #[test]
    fn only_a_window_needs_a_program_that_knows_windows() {
        let plain = DiskState { layers: vec![LayerState::default()], ..DiskState::default() };
        assert!(plain.to_text().contains("\"version\":1"));
        let window = DiskState { window: Window::new(GuestOffset(0), Some(Bytes(1))), ..plain };
        assert!(window.to_text().contains("\"version\":2"));
    }

    #[test]
    fn damaged_text_is_refused() {
        let text = disk_state().to_text();
        for (from, to) in [
            ("\"version\":2", "\"version\":3"),
            ("\"copy-on-read\":false", "\"copy-on-read\":0"),
            ("[512,4096]", "[null,4096]"),
            ("[512,4096]", "[512]"),
            ("\"active\":true", "\"active\":1"),
            ("\"raw\"", "\"rew\""),
            ("[512,", "[-512,"),
            ("\"name\":\"a\"", "\"nome\":\"a\""),
            ("[1,2,0]", "[1,2]"),
            ("\"iops=5\"", "5"),
            ("iops=5", "iops=x"),
            ("97", "970"),
        ] {
            assert!(text.contains(from), "{from} in {text}");
            let error = DiskState::parse(&text.replace(from, to)).expect_err(to);
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
        assert!(DiskState::parse("").is_err());
        assert!(DiskState::parse("[]").is_err());
        assert!(DiskState::parse(&DiskState::default().to_text()).is_err());
    }
}
