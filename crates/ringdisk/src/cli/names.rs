//! Names that go into an image.
//!
//! Promises: what is accepted here can be listed on one line, typed again, and stored by QEMU too.

use ringdisk_daemon::terminal::visible;
use ringdisk_disk::SnapshotChoice;

/// Longest name of an internal snapshot, bytes: QEMU keeps 255.
const SNAPSHOT_BYTES_MAX: usize = 255;
/// Longest name of a bitmap, bytes (qcow2 specification, "Bitmap directory").
const BITMAP_BYTES_MAX: usize = 1023;
/// Longest name of a backing file, bytes (qcow2 specification, "Header").
pub(crate) const BACKING_BYTES_MAX: usize = 1023;

/// Reads the name of a new snapshot.
pub(crate) fn parse_snapshot(text: &str) -> Result<String, String> {
    checked(text, SNAPSHOT_BYTES_MAX)
}

/// Reads the name of a new bitmap.
pub(crate) fn parse_bitmap(text: &str) -> Result<String, String> {
    checked(text, BITMAP_BYTES_MAX)
}

/// Reads the name of a snapshot or bitmap that is there already: whatever it is, but something.
pub(crate) fn parse_existing(text: &str) -> Result<String, String> {
    if text.is_empty() { Err(String::from("the name is empty")) } else { Ok(text.to_owned()) }
}

/// Reads which internal snapshot is meant.
pub(crate) fn parse_choice(text: &str) -> Result<SnapshotChoice, String> {
    text.parse()
}

/// Reads the name of a file that is written into an image; empty: none.
pub(crate) fn parse_file(text: &str) -> Result<String, String> {
    if text.is_empty() { Ok(String::new()) } else { checked(text, BACKING_BYTES_MAX) }
}

fn checked(text: &str, max: usize) -> Result<String, String> {
    if text.is_empty() {
        return Err(String::from("the name is empty"));
    }
    if text.len() > max {
        return Err(format!("the name has {} bytes; {max} is the most", text.len()));
    }
    if text.chars().any(char::is_control) {
        return Err(format!(
            "the name '{}' has a control character (a line break or the like) in it",
            visible(text)
        ));
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_cannot_be_listed_are_refused() {
        for (text, reason) in [
            ("", "is empty"),
            ("a\nb", "control character"),
            ("\x1b[31m", "control character"),
            (&"x".repeat(256), "255 is the most"),
        ] {
            let error = parse_snapshot(text).expect_err(text);
            assert!(error.contains(reason), "{error}");
        }
        assert_eq!(parse_snapshot("before größe ..").as_deref(), Ok("before größe .."));
        assert!(parse_bitmap(&"x".repeat(1023)).is_ok());
        assert!(parse_bitmap(&"x".repeat(1024)).is_err());
        assert!(parse_existing("a\nb").is_ok() && parse_existing("").is_err());
        assert_eq!(parse_file("").as_deref(), Ok(""));
    }
}
