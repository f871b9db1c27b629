//! Options that a description of an image has beside its name: how QEMU would open it.
//!
//! Promises: pure. What has an effect on what a command does is understood or refused; for an image
//! that another image names, only its name counts.

use ringdisk_qcow2::Bytes;
use serde_json::{Map, Value};

use super::keys::{invalid_value, text_of, unknown_key};
use crate::{Cache, DetectZeroes, Discard, Error, ErrorKind, Format, ImageOptions};

/// How an image is opened, as far as its description says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeOptions {
    /// The driver is that of a file, a device or an export, without a format: the bytes as they
    /// are.
    pub is_bare: bool,
    /// `read-only`.
    pub read_only: Option<bool>,
    /// `auto-read-only`.
    pub auto_read_only: Option<bool>,
    /// `force-share`.
    pub force_share: Option<bool>,
    /// `cache.direct`.
    pub direct: Option<bool>,
    /// `cache.no-flush`.
    pub no_flush: Option<bool>,
    /// `cache.writeback`.
    pub writeback: Option<bool>,
    /// `discard`.
    pub discard: Option<Discard>,
    /// `detect-zeroes`.
    pub detect_zeroes: Option<DetectZeroes>,
    /// `lazy-refcounts` of a qcow2.
    pub lazy_refcounts: Option<bool>,
    /// `discard-no-unref` of a qcow2.
    pub discard_no_unref: Option<bool>,
}

impl NodeOptions {
    /// Options of any node; those of a child hold where its parent says nothing.
    pub(super) fn of(object: &Map<String, Value>, below: NodeOptions) -> Result<Self, Error> {
        let switch = |key: &str| object.get(key).map(|value| switch_of(key, value)).transpose();
        let cache = match object.get("cache") {
            None => Map::new(),
            Some(Value::Object(cache)) => cache.clone(),
            Some(_) => return Err(invalid_value("cache", "an object")),
        };
        if let Some(key) = cache.keys().find(|key| !CACHE.contains(&key.as_str())) {
            return Err(unknown_key(&format!("cache.{key}")));
        }
        let cache_switch =
            |key: &str| cache.get(key).map(|value| switch_of(key, value)).transpose();
        let discard = match text_of(object, "discard")?.as_deref() {
            None => None,
            Some("ignore" | "off") => Some(Discard::Ignore),
            Some("unmap" | "on") => Some(Discard::Unmap),
            Some(_) => return Err(invalid_value("discard", "ignore or unmap")),
        };
        let detect_zeroes = text_of(object, "detect-zeroes")?;
        let detect_zeroes = detect_zeroes.map(|text| text.parse::<DetectZeroes>()).transpose()?;
        Ok(NodeOptions {
            is_bare: false,
            read_only: switch("read-only")?.or(below.read_only),
            auto_read_only: switch("auto-read-only")?.or(below.auto_read_only),
            force_share: switch("force-share")?.or(below.force_share),
            direct: cache_switch("direct")?.or(below.direct),
            no_flush: cache_switch("no-flush")?.or(below.no_flush),
            writeback: cache_switch("writeback")?.or(below.writeback),
            discard: discard.or(below.discard),
            detect_zeroes: detect_zeroes.or(below.detect_zeroes),
            lazy_refcounts: switch("lazy-refcounts")?.or(below.lazy_refcounts),
            discard_no_unref: switch("discard-no-unref")?.or(below.discard_no_unref),
        })
    }

    /// The cache mode, where `stated` is that of the command line.
    ///
    /// `cache.direct` with `cache.no-flush` is the mode `none`, which is the safer one.
    pub fn cache(&self, stated: Cache) -> Cache {
        let direct = self.direct.unwrap_or(stated.direct());
        let sync = self.writeback.map_or(stated.sync(), |writeback| !writeback);
        let no_flush = self.no_flush.unwrap_or(stated == Cache::Unsafe);
        match (direct, sync, no_flush) {
            (false, false, true) => Cache::Unsafe,
            (false, false, false) => Cache::Writeback,
            (false, true, _) => Cache::Writethrough,
            (true, false, _) => Cache::None,
            (true, true, _) => Cache::DirectSync,
        }
    }
}

/// Keys of `cache`.
const CACHE: [&str; 3] = ["direct", "no-flush", "writeback"];

impl super::FileName {
    /// Adds what the description of an image on a command line says to options.
    ///
    /// * `options`: of the command line. Its `format` is one that the user stated beside the name.
    ///
    /// Errors: `Invalid` where both state different formats, for a part of something else than a
    /// raw image, and where the image is to be written and the description says that it is only
    /// read.
    pub fn add_to(&self, options: &mut ImageOptions) -> Result<(), Error> {
        let node = &self.node;
        let named = self.format.or(node.is_bare.then_some(Format::Raw));
        if let (Some(stated), Some(named)) = (options.format, named)
            && stated != named
        {
            let text = format!("the format is given as {stated} and named as {named}");
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        options.format = options.format.or(named);
        let has_window = self.raw_offset != 0 || self.raw_size.is_some();
        if has_window {
            if options.format != Some(Format::Raw) {
                let text = "an offset or a size can be named for raw images only";
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            if options.window_size.is_some() || options.partition.is_some() {
                let text = "a part of the image is named, and another one is given";
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            options.window_size = match self.raw_size {
                None => None,
                Some(size) => {
                    Some(size.checked_sub(Bytes(options.window_offset)).ok_or_else(|| {
                        Error::new(
                            ErrorKind::Invalid,
                            "the offset is past the end of the named part",
                        )
                    })?)
                }
            };
            options.window_offset = options.window_offset.saturating_add(self.raw_offset);
        }
        options.without_backing |= self.without_backing;
        if node.read_only == Some(true) && !options.read_only {
            if node.auto_read_only != Some(true) {
                let text = "Block node is read-only";
                return Err(Error::new(ErrorKind::PermissionDenied, text));
            }
            options.read_only = true;
        }
        options.force_share |= node.force_share == Some(true);
        options.cache = node.cache(options.cache);
        options.discard = node.discard.unwrap_or(options.discard);
        options.detect_zeroes = node.detect_zeroes.unwrap_or(options.detect_zeroes);
        options.lazy_refcounts = node.lazy_refcounts.or(options.lazy_refcounts);
        options.discard_no_unref |= node.discard_no_unref == Some(true);
        Ok(())
    }
}

/// QEMU writes switches as JSON booleans or as text.
fn switch_of(key: &str, value: &Value) -> Result<bool, Error> {
    match value {
        Value::Bool(is_on) => Ok(*is_on),
        Value::String(text) if ["on", "yes", "true", "y"].contains(&text.as_str()) => Ok(true),
        Value::String(text) if ["off", "no", "false", "n"].contains(&text.as_str()) => Ok(false),
        _ => Err(invalid_value(key, "on or off")),
    }
}
