//! What a pid file holds.
//!
//! Promises: pure; a file that is neither empty nor a number is not taken for a pid file, so it is
//! not overwritten.

/// Longest content that is taken for a pid: 20 digits of a 64-bit number and a newline.
pub(super) const CONTENT_BYTES_MAX: usize = 21;

/// Whether a file with this content may be taken over: empty, or a number.
pub(super) fn is_pid(content: &[u8]) -> bool {
    let digits = content.strip_suffix(b"\n").unwrap_or(content);
    content.len() <= CONTENT_BYTES_MAX && digits.iter().all(u8::is_ascii_digit)
}
