//! JSON as qemu-img prints it.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::PrettyFormatter;

/// Writes JSON with the indentation of qemu-img, and a line break.
pub(crate) fn json(out: &mut impl Write, value: &Value) -> io::Result<()> {
    let formatter = PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, formatter);
    value.serialize(&mut serializer).map_err(io::Error::from)?;
    writeln!(out)
}

/// The same as text, without the line break.
pub(crate) fn json_text(value: &Value) -> String {
    let mut text = Vec::new();
    // Memory takes everything.
    let _ = json(&mut text, value);
    String::from_utf8_lossy(&text).trim_end().to_owned()
}
