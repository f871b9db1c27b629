//! `--image-opts`: `driver=qcow2,file.filename=disk.qcow2`.
//!
//! Promises: pure; becomes the JSON object that a `json:` name has, so that one reader judges both.

/// The JSON object that says the same. Values are text, as `qemu-nbd` takes them.
///
/// * `text`: `KEY=VALUE` between commas; a comma inside a value is written twice.
///
/// Errors: a word without `=` or without a key.
pub fn image_options(text: &str) -> Result<String, String> {
    let mut members = Vec::new();
    for word in words(text) {
        let Some((key, value)) = word.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            return Err(format!("Cannot find device='{text}' nor node-name='{text}'"));
        };
        let value = match value.parse::<u64>() {
            // Offsets and sizes.
            Ok(number) if ["offset", "size"].contains(&key) => number.to_string(),
            _ => quoted(value),
        };
        members.push(format!("{}:{value}", quoted(key)));
    }
    Ok(format!("{{{}}}", members.join(",")))
}

/// Parts between commas.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut word) = (Vec::new(), String::new());
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.peek() == Some(&',') => {
                letters.next();
                word.push(',');
            }
            ',' => words.push(std::mem::take(&mut word)),
            letter => word.push(letter),
        }
    }
    words.push(word);
    words
}

/// A JSON string (RFC 8259, section 7).
fn quoted(text: &str) -> String {
    let escaped = |letter: char| match letter {
        '"' | '\\' => format!("\\{letter}"),
        letter if u32::from(letter) < 0x20 => format!("\\u{:04x}", u32::from(letter)),
        letter => letter.to_string(),
    };
    format!("\"{}\"", text.chars().map(escaped).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::image_options;

    #[test]
    fn words_become_members() {
        let json = image_options("driver=raw,offset=512,file.filename=a,,b\"c");
        assert_eq!(json.unwrap(), r#"{"driver":"raw","offset":512,"file.filename":"a,b\"c"}"#);
        for wrong in ["", "disk.raw", "driver=raw,", "=a"] {
            assert!(image_options(wrong).is_err(), "{wrong}");
        }
    }
}
