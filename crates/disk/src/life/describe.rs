//! A disk in words, beside its descriptors: what a new process must know to go on with it.
//!
//! Promises: what was written is read back as it was, whatever bytes are in the names; a text that
//! is damaged is refused, never believed in part.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::window::Window;
use crate::{Error, ErrorKind};

/// Form of the text; a program that does not know it refuses.
const VERSION: u64 = 1;
/// The same with a window, which a program that does not know it would leave out.
const VERSION_WITH_WINDOW: u64 = 2;

/// A disk, without its descriptors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct About {
    /// Its images are in use: the descriptors have the locks of a user.
    pub(crate) active: bool,
    pub(crate) read_only: bool,
    pub(crate) read_only_reason: Option<String>,
    /// The first sector of the lowest layer is protected.
    pub(crate) guarded: bool,
    /// What of the disk clients see.
    pub(crate) window: Window,
    /// Top first.
    pub(crate) layers: Vec<AboutLayer>,
}

/// One layer, with the descriptors that follow for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AboutLayer {
    pub(crate) kind: Kind,
    pub(crate) name: PathBuf,
    pub(crate) directory: Option<PathBuf>,
    pub(crate) data_name: Option<PathBuf>,
    pub(crate) full_backing_name: Option<String>,
    /// As [`crate::layer::Layer::without_backing`]; a process that knows nothing of it says
    /// nothing.
    pub(crate) without_backing: bool,
    pub(crate) writable: bool,
    /// The image file first, then the data file. Each: what [`ringdisk_storage::Storage::identity`]
    /// says, and whether it is open for reading only.
    pub(crate) files: Vec<((u64, u64), bool)>,
}

/// What a layer is made of.
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

impl About {
    pub(crate) fn to_text(&self) -> String {
        // A program that knows no windows must not serve the whole disk as one.
        let window = self.window;
        let (version, window) = match window.is_part() {
            true => (VERSION_WITH_WINDOW, json!([window.start, window.len()])),
            false => (VERSION, Value::Null),
        };
        json!({
            "version": version,
            "window": window,
            "active": self.active,
            "read-only": self.read_only,
            "read-only-reason": self.read_only_reason,
            "guarded": self.guarded,
            "layers": self.layers.iter().map(AboutLayer::to_json).collect::<Vec<_>>(),
        })
        .to_string()
    }

    /// Errors: `Invalid`.
    pub(crate) fn parse(text: &str) -> Result<About, Error> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| damaged(&error.to_string()))?;
        let fields = Fields::of(&value)?;
        let version = fields.number("version")?;
        if ![VERSION, VERSION_WITH_WINDOW].contains(&version) {
            return Err(damaged(&format!(
                "its version is {version}, and this program knows {VERSION} and {VERSION_WITH_WINDOW}"
            )));
        }
        let layers = fields.list("layers")?;
        if layers.is_empty() || layers.len() > crate::LAYERS_MAX {
            return Err(damaged("the number of layers makes no sense"));
        }
        Ok(About {
            active: fields.flag("active")?,
            read_only: fields.flag("read-only")?,
            read_only_reason: fields.text("read-only-reason")?,
            guarded: fields.flag("guarded")?,
            window: window(fields.get("window"))?,
            layers: layers.iter().map(AboutLayer::parse).collect::<Result<_, _>>()?,
        })
    }
}

impl AboutLayer {
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

    fn parse(value: &Value) -> Result<AboutLayer, Error> {
        let fields = Fields::of(value)?;
        let files = fields.list("files")?.iter().map(|file| match numbers(file)?.as_slice() {
            [Some(device), Some(inode), Some(read_only)] => {
                Ok(((*device, *inode), *read_only != 0))
            }
            _ => Err(damaged("a file has no identity")),
        });
        Ok(AboutLayer {
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
        [Some(start), len] => Ok(Window::new(*start, *len)),
        _ => Err(damaged("the window is none")),
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

    fn number(&self, name: &str) -> Result<u64, Error> {
        self.get(name).as_u64().ok_or_else(|| damaged(&format!("'{name}' is missing")))
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
    use super::*;

    fn about() -> About {
        let raw = AboutLayer {
            kind: Kind::Raw { offset: 512, fixed_size: Some(u64::MAX) },
            name: PathBuf::from(OsString::from_vec(b"a\xff\"b".to_vec())),
            files: vec![((u64::MAX, 7), true)],
            ..AboutLayer::default()
        };
        let qcow2 = AboutLayer {
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
        let null = AboutLayer { kind, ..AboutLayer::default() };
        About {
            active: true,
            read_only: true,
            read_only_reason: Some("why".to_owned()),
            guarded: true,
            window: Window::new(512, Some(4096)),
            layers: vec![qcow2, raw, null],
        }
    }

    #[test]
    fn what_was_written_is_read_back() {
        assert_eq!(About::parse(&about().to_text()).expect("text"), about());
        let plain = About { layers: vec![AboutLayer::default()], ..About::default() };
        assert_eq!(About::parse(&plain.to_text()).expect("text"), plain);
        let open = About { window: Window::new(512, None), ..plain };
        assert_eq!(About::parse(&open.to_text()).expect("text"), open);
    }

    #[test]
    fn only_a_window_needs_a_program_that_knows_windows() {
        let plain = About { layers: vec![AboutLayer::default()], ..About::default() };
        assert!(plain.to_text().contains("\"version\":1"));
        let window = About { window: Window::new(0, Some(1)), ..plain };
        assert!(window.to_text().contains("\"version\":2"));
    }

    #[test]
    fn damaged_text_is_refused() {
        let text = about().to_text();
        for (from, to) in [
            ("\"version\":2", "\"version\":3"),
            ("[512,4096]", "[null,4096]"),
            ("[512,4096]", "[512]"),
            ("\"active\":true", "\"active\":1"),
            ("\"raw\"", "\"rew\""),
            ("[512,", "[-512,"),
            ("\"name\":\"a\"", "\"nome\":\"a\""),
            ("[1,2,0]", "[1,2]"),
            ("97", "970"),
        ] {
            assert!(text.contains(from), "{from} in {text}");
            let error = About::parse(&text.replace(from, to)).expect_err(to);
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
        assert!(About::parse("").is_err());
        assert!(About::parse("[]").is_err());
        assert!(About::parse(&About::default().to_text()).is_err());
    }
}
