//! Keys and values of an object that describes an image.
//!
//! Promises: pure; what is refused is named.

use serde_json::{Map, Value};

use super::invalid;
use crate::{Error, ErrorKind};

pub(super) fn unknown_key(key: &str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("the key '{}' of the `json:` name is not supported", key.escape_debug()),
    )
}

pub(super) fn text_of(object: &Map<String, Value>, key: &str) -> Result<Option<String>, Error> {
    match object.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(invalid(format!("'{key}' of the `json:` name is not text"))),
    }
}

pub(super) fn invalid_value(key: &str, what: &str) -> Error {
    invalid(format!("'{key}' of the `json:` name is not {what}"))
}
