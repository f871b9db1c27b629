//! JSON as qemu-img prints it.
//!
//! Promises: names and texts of others cannot control a terminal, whatever bytes they have. An
//! error of writing is the caller's to report.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::PrettyFormatter;

/// Writes JSON with the indentation of qemu-img, and a line break.
///
/// Errors: those of writing.
pub fn json(out: &mut impl Write, value: &Value) -> io::Result<()> {
    let formatter = PrettyFormatter::with_indent(b"    ");
    let mut text = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, formatter);
    value.serialize(&mut serializer).map_err(io::Error::from)?;
    // JSON leaves DEL and the control characters above it as they are, which terminals obey; names
    // come from images and other processes.
    let mut shown = String::with_capacity(text.len() + 1);
    for c in String::from_utf8_lossy(&text).chars() {
        match c {
            '\n' => shown.push(c),
            c if c.is_control() => shown.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => shown.push(c),
        }
    }
    writeln!(out, "{shown}")
}

/// A value in one line, without its end; nothing in it controls a terminal.
pub fn json_line(value: &Value) -> String {
    let mut line = String::new();
    for c in value.to_string().chars() {
        match c {
            c if c.is_control() => line.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => line.push(c),
        }
    }
    line
}

/// The same as text, without the line break.
pub fn json_text(value: &Value) -> String {
    let mut text = Vec::new();
    // Memory takes everything.
    let _ = json(&mut text, value);
    String::from_utf8_lossy(&text).trim_end().to_owned()
}

/// What a server says, without the text that is for people only.
pub fn without_text(mut value: Value) -> Value {
    if let Value::Object(object) = &mut value {
        object.remove("text");
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_as_json_is_the_value_and_holds_nothing_that_a_terminal_obeys() {
        let value = serde_json::json!({ "name": "a\u{1b}[2J\u{7f}\u{9b}2J\n\tß" });
        let text = json_text(&value);
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON"), value);
        let line = json_line(&value);
        assert!(line.chars().all(|c| !c.is_control()), "{line:?}");
        assert_eq!(serde_json::from_str::<Value>(&line).expect("JSON"), value);
    }
}
