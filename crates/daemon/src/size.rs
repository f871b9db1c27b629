//! Sizes and times as people write them.
//!
//! Promises: pure; a text is either understood exactly or refused with a message that says what to
//! write instead. Nothing is rounded in silence.

use std::time::Duration;

use ringdisk_disk::{Bytes, NewSize};
use serde::{Deserialize, Serialize};

use crate::failure::{Cause, Exit, Failure};

/// Powers of 1024 by their letter. Factors are bytes.
const UNITS: [(char, u128); 6] = [
    ('K', 1 << 10),
    ('M', 1 << 20),
    ('G', 1 << 30),
    ('T', 1 << 40),
    ('P', 1 << 50),
    ('E', 1 << 60),
];

/// Units of time by their name, in nanoseconds.
const TIMES: [(&str, u128); 5] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60 * 1_000_000_000),
];

/// Largest size: file offsets are signed 64-bit numbers.
pub const SIZE_MAX: u64 = i64::MAX as u64;

/// Digits after the point that are read; `0.000000001` of a unit is finer than a user means, and
/// the arithmetic stays far inside 128 bits.
const FRACTION_DIGITS_MAX: usize = 9;

/// Reads a size in bytes: `512`, `10G`, `1.5T`; a unit is a power of 1024, `iB` may follow it.
///
/// Errors: what is wrong with the text and what to write instead.
pub fn parse_size(text: &str) -> Result<u64, String> {
    const HOW: &str = "write a number of bytes, or a number with K, M, G, T, P or E \
                       (powers of 1024), such as 512, 64M or 1.5T";
    if text.starts_with('-') {
        return Err(format!("a size cannot be negative; {HOW}"));
    }
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return hexadecimal(digits);
    }
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let mut letters = unit.chars();
    let factor = match (letters.next(), letters.as_str()) {
        (None, _) => 1,
        (Some('B' | 'b'), "") => 1,
        (Some(letter), rest) => {
            let known = UNITS.iter().find(|(name, _)| letter.eq_ignore_ascii_case(name));
            match (known, rest) {
                (Some((_, factor)), "" | "iB") => *factor,
                (Some((name, _)), "B" | "b") => {
                    return Err(format!(
                        "'{unit}' could mean powers of 1000 or of 1024; write {number}{name}, \
                         which is a power of 1024"
                    ));
                }
                _ => return Err(format!("unknown unit '{}'; {HOW}", unit.escape_debug())),
            }
        }
    };
    let scaled = scaled(number, factor).ok_or_else(|| HOW.to_owned())?;
    match scaled {
        Scaled::Whole(bytes) => u64::try_from(bytes)
            .ok()
            .filter(|bytes| *bytes <= SIZE_MAX)
            .ok_or_else(|| String::from("too large; the largest size is 8E less one byte")),
        Scaled::Between(below) => Err(format!(
            "not a whole number of bytes; the next multiple of 512 is {}",
            (below / 512 + 1) * 512
        )),
    }
}

/// Bytes in hexadecimal digits; there is no unit, since some letters are both.
fn hexadecimal(digits: &str) -> Result<u64, String> {
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_number {
        return Err(String::from("after 0x come hexadecimal digits, and no unit"));
    }
    u64::from_str_radix(digits, 16)
        .ok()
        .filter(|bytes| *bytes <= SIZE_MAX)
        .ok_or_else(|| String::from("too large; the largest size is 8E less one byte"))
}

/// A new size, or how much a size grows or shrinks, bytes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SizeChange {
    /// This many bytes.
    To(u64),
    /// So many bytes more.
    Grow(u64),
    /// So many bytes less.
    Shrink(u64),
}

impl From<SizeChange> for NewSize {
    fn from(change: SizeChange) -> NewSize {
        match change {
            SizeChange::To(size) => NewSize::To(Bytes(size)),
            SizeChange::Grow(by) => NewSize::Grow(Bytes(by)),
            SizeChange::Shrink(by) => NewSize::Shrink(Bytes(by)),
        }
    }
}

impl SizeChange {
    /// The new size of a disk of `old` bytes.
    ///
    /// Errors: nothing or less would be left, or more than there can be.
    pub fn apply(self, old: u64) -> Result<u64, Failure> {
        let refuse = |text: String| Failure::new(Exit::Usage, text);
        let nothing_left = |text: String| refuse(text).because(Cause::NothingLeft);
        let size = match self {
            SizeChange::To(size) => size,
            SizeChange::Grow(by) => {
                old.checked_add(by).filter(|size| *size <= SIZE_MAX).ok_or_else(|| {
                    refuse(format!("{old} bytes and {by} more are too large for any disk"))
                })?
            }
            SizeChange::Shrink(by) => old.checked_sub(by).ok_or_else(|| {
                nothing_left(format!("the disk has {old} bytes, so it cannot lose {by}"))
            })?,
        };
        if size == 0 && old > 0 {
            return Err(nothing_left(String::from("nothing would be left of the disk")));
        }
        Ok(size)
    }
}

/// Reads a new size, or with `+` or `-` in front a change.
///
/// Errors: as [`parse_size`].
pub fn parse_size_change(text: &str) -> Result<SizeChange, String> {
    match text.split_at_checked(1) {
        Some(("+", by)) => parse_size(by).map(SizeChange::Grow),
        Some(("-", by)) => parse_size(by).map(SizeChange::Shrink),
        _ => parse_size(text).map(SizeChange::To),
    }
}

/// Reads a time with its unit: `250us`, `1.5ms`, `5s`.
///
/// Errors: what is wrong with the text and what to write instead.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    const HOW: &str = "write a number with ns, us, ms, s or min, such as 250us, 1ms or 5s";
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    if number.is_empty() {
        return Err(HOW.to_owned());
    }
    let factor = match unit {
        "" if number == "0" => 1,
        "" => return Err(format!("a unit is missing; {HOW}")),
        "µs" => 1_000,
        _ => match TIMES.iter().find(|(name, _)| *name == unit) {
            Some((_, factor)) => *factor,
            None => return Err(format!("unknown unit '{}'; {HOW}", unit.escape_debug())),
        },
    };
    match scaled(number, factor).ok_or_else(|| HOW.to_owned())? {
        Scaled::Whole(ns) => u64::try_from(ns)
            .map(Duration::from_nanos)
            .map_err(|_| String::from("too long; the longest time is 584 years")),
        Scaled::Between(_) => Err(String::from("finer than a nanosecond")),
    }
}

/// A decimal number times a factor.
enum Scaled {
    Whole(u128),
    /// Between this whole number and the next.
    Between(u128),
}

/// `number` (digits with at most one point) times `factor`; `None` when it is no number.
fn scaled(number: &str, factor: u128) -> Option<Scaled> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || (number.contains('.') && fraction.is_empty()) {
        return None;
    }
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > FRACTION_DIGITS_MAX || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    // 20 digits and more are above u64 in any unit; u128 holds 38.
    let whole: u128 = if whole.len() > 30 { return None } else { whole.parse().ok()? };
    let base = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let part: u128 = if fraction.is_empty() { 0 } else { fraction.parse().ok()? };
    let product = part * factor;
    let sum = whole.checked_mul(factor)?.checked_add(product / base)?;
    Some(if product.is_multiple_of(base) { Scaled::Whole(sum) } else { Scaled::Between(sum) })
}

/// A size for people, with three digits: `10 MiB`, `1.5 TiB`.
pub fn human_size(bytes: u64) -> String {
    const NAMES: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut unit = 0;
    // A unit is left at 1000, not 1024, so three digits are always enough.
    let mut limit = 1000_u128;
    while u128::from(bytes) >= limit && unit + 1 < NAMES.len() {
        unit += 1;
        limit *= 1024;
    }
    #[allow(clippy::cast_precision_loss)] // Three digits are shown.
    let value = bytes as f64 / f64::from(1 << 10).powi(i32::try_from(unit).unwrap_or(0));
    let digits = match value {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}", NAMES[unit])
}

/// A size for people with the exact number behind it.
pub fn human_size_exact(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", human_size(bytes))
}

/// A time for people, with three digits: `85 us`, `1.25 ms`.
pub fn human_time(time: Duration) -> String {
    let ns = time.as_nanos();
    #[allow(clippy::cast_precision_loss)] // Three digits are shown.
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns} ns"),
        1_000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    let digits = match value {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests;
