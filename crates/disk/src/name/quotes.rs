//! JSON with single quotes, as QEMU takes it in `json:` names.
//!
//! Promises: pure. Text that has no single quote outside of a string stays as it is; every other
//! text becomes JSON that says the same, or stays as wrong as it was.

/// Turns strings in single quotes into strings in double quotes.
///
/// * `text`: of a `json:` name, behind the prefix.
pub(super) fn double_quoted(text: &[u8]) -> Vec<u8> {
    let mut result = Vec::with_capacity(text.len());
    // The quote of the string that `text` is in.
    let mut quote = None;
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (None, b'\'' | b'"') => {
                quote = Some(byte);
                result.push(b'"');
            }
            (Some(open), byte) if byte == open => {
                quote = None;
                result.push(b'"');
            }
            (Some(_), b'"') => result.extend(br#"\""#),
            // JSON in double quotes has no escape for the single quote.
            (Some(_), b'\\') => match bytes.next() {
                Some(b'\'') => result.push(b'\''),
                Some(escaped) => result.extend([b'\\', escaped]),
                None => result.push(b'\\'),
            },
            (_, byte) => result.push(byte),
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::double_quoted;

    #[test]
    fn quotes_become_double_and_their_escapes_stay() {
        for (text, json) in [
            ("{'a': 'b'}", r#"{"a": "b"}"#),
            (r#"{"a": "it's"}"#, r#"{"a": "it's"}"#),
            (r#"{'a': 'say "x"'}"#, r#"{"a": "say \"x\""}"#),
            (r"{'a': 'it\'s \\'}", r#"{"a": "it's \\"}"#),
            (r#"{"a": "\"'\""}"#, r#"{"a": "\"'\""}"#),
            (r"{'a\", r#"{"a\"#),
        ] {
            assert_eq!(String::from_utf8_lossy(&double_quoted(text.as_bytes())), json);
        }
    }
}
