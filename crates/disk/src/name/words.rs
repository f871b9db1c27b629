//! `--image-opts`: `driver=qcow2,file.filename=disk.qcow2`.
//!
//! Promises: pure; becomes the JSON object that a `json:` name has, so that one reader judges both.

use serde_json::{Map, Value};

/// The JSON object that says the same. Values are text, as QEMU's programs take them; a `backing`
/// without a value is `null`.
///
/// * `text`: `KEY=VALUE` between commas; a comma inside a value is written twice.
///
/// Errors: a word without `=` or without a key; in the words of QEMU, since scripts look for them.
pub fn image_options(text: &str) -> Result<String, String> {
    let mut members = Map::new();
    for word in option_words(text) {
        let Some((key, value)) = word.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            return Err(format!("Cannot find device='{text}' nor node-name='{text}'"));
        };
        let value = match value.parse::<u64>() {
            Ok(number) if ["offset", "size"].contains(&key) => Value::from(number),
            _ if key == "backing" && value.is_empty() => Value::Null,
            _ => Value::from(value),
        };
        // The last one counts, as with options of a command line.
        members.insert(key.to_owned(), value);
    }
    Ok(Value::Object(members).to_string())
}

/// The parts between commas of a list of options; a comma inside a part is written twice.
pub fn option_words(text: &str) -> Vec<String> {
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

#[cfg(test)]
mod tests {
    use super::image_options;

    #[test]
    fn words_become_members() {
        let json = image_options("driver=raw,offset=512,file.filename=a,,b\"c");
        assert_eq!(json.unwrap(), r#"{"driver":"raw","offset":512,"file.filename":"a,b\"c"}"#);
        assert_eq!(image_options("backing=,a=1,a=2").unwrap(), r#"{"backing":null,"a":"2"}"#);
        for wrong in ["", "disk.raw", "driver=raw,", "=a"] {
            assert!(image_options(wrong).is_err(), "{wrong}");
        }
    }
}
