//! The distinguished name of a certificate, as text.
//!
//! Promises: pure; bytes that are no certificate give `None`. The text is that which QEMU compares
//! with the identities of its `authz` objects: the parts in the order of the certificate, escaped
//! as RFC 4514 has it.
//! Source: X.690 (DER), RFC 5280 section 4.1 (the fields), RFC 4514 section 2.4 (the escapes).

/// Tags of DER.
const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT: u8 = 0x06;
const VERSION: u8 = 0xa0;
/// Strings whose bytes are UTF-8 or ASCII: UTF8String, NumericString, PrintableString, IA5String,
/// VisibleString.
const TEXTS: [u8; 5] = [0x0c, 0x12, 0x13, 0x16, 0x1a];
const TELETEX: u8 = 0x14;
const BMP: u8 = 0x1e;

/// Attributes by their identifiers.
const ATTRIBUTES: [(&[u8], &str); 12] = [
    (&[0x55, 4, 3], "CN"),
    (&[0x55, 4, 5], "serialNumber"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 9], "STREET"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
    (&[0x55, 4, 12], "title"),
    // 0.9.2342.19200300.100.1.1 and .25
    (&[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 1], "UID"),
    (&[0x09, 0x92, 0x26, 0x89, 0x93, 0xf2, 0x2c, 0x64, 1, 25], "DC"),
    // 1.2.840.113549.1.9.1
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 1], "EMAIL"),
];

/// One value of DER, and what is behind it.
struct Value<'a> {
    tag: u8,
    contents: &'a [u8],
    rest: &'a [u8],
}

fn value(bytes: &[u8]) -> Option<Value<'_>> {
    let (tag, bytes) = bytes.split_first()?;
    let (first, mut bytes) = bytes.split_first()?;
    let mut len = usize::from(*first);
    if len >= 0x80 {
        let count = len & 0x7f;
        if count == 0 || count > 4 {
            return None;
        }
        let digits = bytes.get(..count)?;
        bytes = &bytes[count..];
        len = digits.iter().fold(0, |len, digit| len << 8 | usize::from(*digit));
    }
    Some(Value { tag: *tag, contents: bytes.get(..len)?, rest: bytes.get(len..)? })
}

fn tagged(bytes: &[u8], tag: u8) -> Option<Value<'_>> {
    value(bytes).filter(|value| value.tag == tag)
}

/// The subject of a certificate. `None`: this is no certificate.
pub(crate) fn of_certificate(der: &[u8]) -> Option<String> {
    let certificate = tagged(der, SEQUENCE)?;
    let mut bytes = tagged(certificate.contents, SEQUENCE)?.contents;
    if bytes.first() == Some(&VERSION) {
        bytes = value(bytes)?.rest;
    }
    // Serial number, algorithm, issuer, validity.
    for _ in 0..4 {
        bytes = value(bytes)?.rest;
    }
    let mut bytes = tagged(bytes, SEQUENCE)?.contents;
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let set = tagged(bytes, SET)?;
        let mut bytes_of_set = set.contents;
        let mut together = Vec::new();
        while !bytes_of_set.is_empty() {
            let pair = tagged(bytes_of_set, SEQUENCE)?;
            let kind = tagged(pair.contents, OBJECT)?;
            let words = value(kind.rest)?;
            let whole = kind.rest.get(..kind.rest.len() - words.rest.len())?;
            together.push(format!("{}={}", attribute(kind.contents), text(&words, whole)));
            bytes_of_set = pair.rest;
        }
        parts.push(together.join("+"));
        bytes = set.rest;
    }
    Some(parts.join(","))
}

fn attribute(identifier: &[u8]) -> String {
    let known = ATTRIBUTES.iter().find(|(known, _)| *known == identifier);
    known.map_or_else(|| dotted(identifier), |(_, name)| String::from(*name))
}

/// An identifier as numbers with dots.
fn dotted(identifier: &[u8]) -> String {
    let mut numbers: Vec<u128> = Vec::new();
    let mut number = 0u128;
    for byte in identifier {
        number = number << 7 | u128::from(byte & 0x7f);
        if byte & 0x80 == 0 {
            if numbers.is_empty() {
                let first = (number / 40).min(2);
                numbers.push(first);
                number -= first * 40;
            }
            numbers.push(number);
            number = 0;
        }
    }
    let words: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    words.join(".")
}

/// * `whole`: the value with its tag and its length, for those that are no text.
fn text(value: &Value<'_>, whole: &[u8]) -> String {
    let bytes = value.contents;
    let decoded = match value.tag {
        tag if TEXTS.contains(&tag) => std::str::from_utf8(bytes).ok().map(String::from),
        TELETEX => Some(bytes.iter().map(|byte| char::from(*byte)).collect()),
        BMP if bytes.len().is_multiple_of(2) => {
            let units = bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
            char::decode_utf16(units).collect::<Result<String, _>>().ok()
        }
        _ => None,
    };
    match decoded {
        Some(text) => escaped(&text),
        None => whole.iter().fold(String::from("#"), |text, byte| format!("{text}{byte:02x}")),
    }
}

fn escaped(text: &str) -> String {
    let last = text.chars().count().saturating_sub(1);
    let mut out = String::with_capacity(text.len());
    for (at, one) in text.chars().enumerate() {
        match one {
            '\0' => out.push_str("\\00"),
            ',' | '+' | '"' | '\\' | '<' | '>' | ';' => out.extend(['\\', one]),
            '#' if at == 0 => out.push_str("\\#"),
            ' ' if at == 0 || at == last => out.push_str("\\ "),
            one => out.push(one),
        }
    }
    out
}

#[cfg(test)]
mod tests;
