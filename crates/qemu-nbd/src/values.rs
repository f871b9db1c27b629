//! Values of options: each is read as `qemu-nbd` reads it, and refused with its text.
//!
//! Promises: pure; a value that is not UTF-8 is refused or shown with its bytes replaced, never a
//! panic.

use std::ffi::{OsStr, OsString};

use ringdisk_disk::{Cache, DetectZeroes, Discard};

/// Who carries out reads and writes (`--aio`). All three are our ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aio {
    /// `threads`.
    #[default]
    Threads,
    /// `native`: needs O_DIRECT.
    Native,
    /// `io_uring`.
    IoUring,
}

/// Which internal snapshot is exported (`-l`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotName {
    /// Has this id or, if none has, this name.
    IdOrName(String),
    /// Has this id and this name, as far as they are given.
    Both {
        /// The id.
        id: Option<String>,
        /// The name.
        name: Option<String>,
    },
}

/// As text; bytes that are none are replaced, so that the message shows them.
pub(crate) fn text(value: &OsStr) -> String {
    value.to_string_lossy().into_owned()
}

/// `-e`: clients at once; 0 is any number.
pub(crate) fn shared(value: &OsStr) -> Result<u32, String> {
    let given = text(value);
    let read = number(&given).and_then(|n| u32::try_from(n).ok()).filter(|n| *n <= MAX_SHARED);
    read.ok_or_else(|| format!("Invalid shared device number '{given}'"))
}

/// The largest `int`.
const MAX_SHARED: u32 = 0x7fff_ffff;

/// `--handshake-limit`: seconds; 0 is no limit.
pub(crate) fn handshake_limit(value: &OsStr) -> Result<u32, String> {
    let given = text(value);
    let read = number(&given).and_then(|n| u32::try_from(n).ok());
    read.ok_or_else(|| format!("Invalid handshake limit '{given}'"))
}

/// `-o`: bytes, without a unit. As strtoul(3) reads it: a minus sign gives the number below 2^64,
/// and what is no `int64_t` then is shown as one.
pub(crate) fn offset(value: &OsStr) -> Result<u64, String> {
    let given = text(value);
    let read = match given.trim_start().strip_prefix('-') {
        Some(rest) if rest.starts_with(|first: char| first.is_ascii_digit()) => {
            number(rest).map(u64::wrapping_neg)
        }
        _ => number(&given),
    };
    let read = read.ok_or_else(|| format!("Invalid offset '{given}'"))?;
    match read.cast_signed() {
        signed @ ..0 => Err(format!("Value '{signed}' is out of range for parameter 'offset'")),
        _ => Ok(read),
    }
}

/// Blanks and a plus sign may come first, as for strtol(3); nothing may follow.
fn number(text: &str) -> Option<u64> {
    let digits = text.trim_start().strip_prefix('+').unwrap_or(text.trim_start());
    if !digits.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    match digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok(),
        None if digits.len() > 1 && digits.starts_with('0') => u64::from_str_radix(digits, 8).ok(),
        None => digits.parse().ok(),
    }
}

/// `--cache`.
pub(crate) fn cache(value: &OsStr) -> Result<Cache, String> {
    match text(value).as_str() {
        "off" => Ok(Cache::None),
        other => other.parse().map_err(|_| format!("Invalid cache mode `{other}'")),
    }
}

/// `--aio`.
pub(crate) fn aio(value: &OsStr) -> Result<Aio, String> {
    match text(value).as_str() {
        "threads" => Ok(Aio::Threads),
        "native" => Ok(Aio::Native),
        "io_uring" => Ok(Aio::IoUring),
        other => Err(format!("Invalid aio mode '{other}'")),
    }
}

/// `--discard`.
pub(crate) fn discard(value: &OsStr) -> Result<Discard, String> {
    match text(value).as_str() {
        "ignore" | "off" => Ok(Discard::Ignore),
        "unmap" | "on" => Ok(Discard::Unmap),
        other => Err(format!("Invalid discard mode `{other}'")),
    }
}

/// `--detect-zeroes`.
pub(crate) fn zeroes(value: &OsStr) -> Result<DetectZeroes, String> {
    let given = text(value);
    let wrong = |_| format!("Failed to parse detect_zeroes mode: invalid parameter value: {given}");
    given.parse().map_err(wrong)
}

/// `-l`: `snapshot.id=ID,snapshot.name=NAME`, or an id or a name.
///
/// Errors: two lines.
pub(crate) fn snapshot(value: &OsStr, program: &str) -> Result<SnapshotName, String> {
    let given = text(value);
    if !given.starts_with("snapshot.") {
        return Ok(SnapshotName::IdOrName(given));
    }
    let (mut id, mut name) = (None, None);
    for part in given.split(',') {
        match part.split_once('=') {
            Some(("snapshot.id", value)) => id = Some(value.to_owned()),
            Some(("snapshot.name", value)) => name = Some(value.to_owned()),
            _ => {
                let key = part.split('=').next().unwrap_or(part);
                return Err(format!(
                    "Invalid parameter '{key}'\n\
                     {program}: Failed in parsing snapshot param `{given}'"
                ));
            }
        }
    }
    Ok(SnapshotName::Both { id, name })
}

/// `-x` and `-D`.
///
/// * `what`: which of the two.
///
/// Errors: it is longer than the protocol allows.
pub(crate) fn name(value: OsString, what: &str) -> Result<String, String> {
    let given = text(&value);
    if given.len() > NAME_BYTES_MAX {
        return Err(format!("{what} '{given}' too long"));
    }
    Ok(given)
}

/// Longest name and description (NBD protocol, "Strings").
const NAME_BYTES_MAX: usize = 4096;
