//! The head of a request.
//!
//! Promises: pure functions on arrays, without allocation; used by both sides.

use crate::Malformed;
use crate::bytes::Bytes;
use crate::numbers::{EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC};

/// Length of a compact head, bytes.
pub const COMPACT_BYTES: usize = 28;
/// Length of an extended head, bytes.
pub const EXTENDED_BYTES: usize = 32;

/// How the two sides talk after the handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// Compact heads, simple replies.
    #[default]
    Simple,
    /// Compact heads, replies in chunks.
    Structured,
    /// Heads with lengths of 64 bits, replies in chunks only.
    Extended,
}

impl Style {
    /// Length of the head of a request, bytes.
    #[must_use]
    pub const fn request_bytes(self) -> usize {
        match self {
            Style::Simple | Style::Structured => COMPACT_BYTES,
            Style::Extended => EXTENDED_BYTES,
        }
    }
}

/// The head of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Flags ([`crate::numbers::command_flags`]).
    pub flags: u16,
    /// What is asked for ([`crate::numbers::command`]).
    pub command: u16,
    /// Comes back in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Length, bytes; of the effect, or of the payload with the flag `PAYLOAD_LEN`.
    pub len: u64,
}

impl Request {
    /// The bytes of a compact head. The length is cut to 32 bits: callers ask for no more.
    #[must_use]
    pub fn to_compact(self) -> [u8; COMPACT_BYTES] {
        let mut out = [0; COMPACT_BYTES];
        self.put(REQUEST_MAGIC, &mut out);
        debug_assert!(self.len <= u64::from(u32::MAX), "a length of 32 bits");
        out[24..].copy_from_slice(&self.len.to_be_bytes()[4..]);
        out
    }

    /// The bytes of an extended head.
    #[must_use]
    pub fn to_extended(self) -> [u8; EXTENDED_BYTES] {
        let mut out = [0; EXTENDED_BYTES];
        self.put(EXTENDED_REQUEST_MAGIC, &mut out);
        out[24..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// What both heads have in the same place.
    fn put(self, magic: u32, out: &mut [u8]) {
        out[..4].copy_from_slice(&magic.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
    }

    /// The request at the front of `bytes`, which has [`Style::request_bytes`] of them at least.
    ///
    /// Errors: the magic number that was found, when it is not the one of the style; 0 when there
    /// are too few bytes.
    pub fn parse(style: Style, bytes: &[u8]) -> Result<Request, WrongMagic> {
        let expected = match style {
            Style::Simple | Style::Structured => REQUEST_MAGIC,
            Style::Extended => EXTENDED_REQUEST_MAGIC,
        };
        let mut bytes = Bytes(bytes);
        let mut read = || -> Result<Result<Request, u32>, Malformed> {
            let magic = bytes.u32()?;
            if magic != expected {
                return Ok(Err(magic));
            }
            let (flags, command) = (bytes.u16()?, bytes.u16()?);
            let (cookie, offset) = (bytes.u64()?, bytes.u64()?);
            let len = match style {
                Style::Simple | Style::Structured => u64::from(bytes.u32()?),
                Style::Extended => bytes.u64()?,
            };
            Ok(Ok(Request { flags, command, cookie, offset, len }))
        };
        read().unwrap_or(Err(0)).map_err(|got| WrongMagic { got, expected })
    }
}

/// The first number of what should be a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongMagic {
    /// What it is.
    pub got: u32,
    /// What it should be.
    pub expected: u32,
}

#[cfg(test)]
mod tests;
