//! Replies: simple ones, the heads of chunks, and the payloads of chunks but block status.
//!
//! Promises: pure functions on bytes, without allocation; used by both sides.

use crate::Malformed;
use crate::bytes::Bytes;
use crate::numbers::{
    CHUNK_MAGIC, EXTENDED_CHUNK_MAGIC, NAME_BYTES_MAX, SIMPLE_REPLY_MAGIC, chunk, chunk_flags,
};
use crate::request::Style;

/// Length of a simple reply, bytes.
pub const SIMPLE_BYTES: usize = 16;
/// Length of the head of a chunk, bytes.
pub const CHUNK_BYTES: usize = 20;
/// Length of the extended head of a chunk, bytes.
pub const EXTENDED_CHUNK_BYTES: usize = 32;
/// Length of the payload of `OFFSET_DATA` before the data, bytes.
pub const DATA_OFFSET_BYTES: usize = 8;
/// Length of the payload of `OFFSET_HOLE`, bytes.
pub const HOLE_BYTES: usize = 12;
/// Length of the payload of an error before the text, bytes.
pub const ERROR_BYTES: usize = 6;

/// A simple reply. The data of a read follows, if there is no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// 0, or an error ([`crate::numbers::errno`]).
    pub error: u32,
    /// That of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// The bytes of the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; SIMPLE_BYTES] {
        let mut out = [0; SIMPLE_BYTES];
        out[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        out[4..8].copy_from_slice(&self.error.to_be_bytes());
        out[8..].copy_from_slice(&self.cookie.to_be_bytes());
        out
    }
}

/// The head of a chunk; `len` bytes of payload follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chunk {
    /// Flags ([`chunk_flags`]).
    pub flags: u16,
    /// Kind ([`chunk`]).
    pub kind: u16,
    /// That of the request.
    pub cookie: u64,
    /// Offset of the request; on the wire with extended heads only, 0 otherwise.
    pub offset: u64,
    /// Length of the payload, bytes.
    pub len: u64,
}

impl Chunk {
    /// Whether it is the last one of its reply.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.flags & chunk_flags::DONE != 0
    }

    /// Whether its payload is an error.
    #[must_use]
    pub const fn is_error(&self) -> bool {
        self.kind & chunk::ERROR_BIT != 0
    }

    /// The head for a style. Gives the number of bytes that were written.
    ///
    /// The length is cut to 32 bits where the style is not [`Style::Extended`]: payloads are not
    /// longer.
    pub fn put(self, style: Style, out: &mut [u8; EXTENDED_CHUNK_BYTES]) -> usize {
        let is_extended = style == Style::Extended;
        let magic = if is_extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC };
        out[..4].copy_from_slice(&magic.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.kind.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        if is_extended {
            out[16..24].copy_from_slice(&self.offset.to_be_bytes());
            out[24..].copy_from_slice(&self.len.to_be_bytes());
            return EXTENDED_CHUNK_BYTES;
        }
        debug_assert!(self.len <= u64::from(u32::MAX), "a length of 32 bits");
        out[16..20].copy_from_slice(&self.len.to_be_bytes()[4..]);
        CHUNK_BYTES
    }
}

/// The head of a reply, as a client finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHead {
    /// A simple reply.
    Simple(SimpleReply),
    /// A chunk.
    Chunk(Chunk),
}

impl ReplyHead {
    /// The head at the front of `bytes`, and its length. `None`: more bytes are needed.
    ///
    /// Errors: a magic number that the style does not have.
    pub fn parse(style: Style, bytes: &[u8]) -> Result<Option<(ReplyHead, usize)>, Malformed> {
        let mut rest = Bytes(bytes);
        let Ok(magic) = rest.u32() else { return Ok(None) };
        let len = match (magic, style) {
            (SIMPLE_REPLY_MAGIC, Style::Simple | Style::Structured) => SIMPLE_BYTES,
            (CHUNK_MAGIC, Style::Structured) => CHUNK_BYTES,
            (EXTENDED_CHUNK_MAGIC, Style::Extended) => EXTENDED_CHUNK_BYTES,
            _ => return Err(Malformed("bad magic number of a reply")),
        };
        if bytes.len() < len {
            return Ok(None);
        }
        let head = if magic == SIMPLE_REPLY_MAGIC {
            ReplyHead::Simple(SimpleReply { error: rest.u32()?, cookie: rest.u64()? })
        } else {
            let (flags, kind, cookie) = (rest.u16()?, rest.u16()?, rest.u64()?);
            let (offset, len) = match style {
                Style::Extended => (rest.u64()?, rest.u64()?),
                Style::Simple | Style::Structured => (0, u64::from(rest.u32()?)),
            };
            ReplyHead::Chunk(Chunk { flags, kind, cookie, offset, len })
        };
        Ok(Some((head, len)))
    }
}

/// Payload of `OFFSET_HOLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hole {
    /// First byte on the disk.
    pub offset: u64,
    /// Length, bytes.
    pub len: u32,
}

impl Hole {
    /// The bytes of the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HOLE_BYTES] {
        let mut out = [0; HOLE_BYTES];
        out[..8].copy_from_slice(&self.offset.to_be_bytes());
        out[8..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Errors: another length than 12 bytes.
    pub fn parse(payload: &[u8]) -> Result<Hole, Malformed> {
        let mut payload = Bytes(payload);
        let hole = Hole { offset: payload.u64()?, len: payload.u32()? };
        payload.end()?;
        Ok(hole)
    }
}

/// The offset at the front of the payload of `OFFSET_DATA`; the data follows.
///
/// Errors: fewer than 8 bytes.
pub fn parse_data_offset(payload: &[u8]) -> Result<u64, Malformed> {
    Bytes(payload).u64()
}

/// Payload of the chunks `ERROR` and `ERROR_OFFSET`, and of all unknown errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorPayload<'a> {
    /// Not 0 ([`crate::numbers::errno`]).
    pub error: u32,
    /// A text for people.
    pub text: &'a [u8],
    /// Where it happened; of `ERROR_OFFSET` only.
    pub offset: Option<u64>,
}

impl<'a> ErrorPayload<'a> {
    /// The bytes before the text of an `ERROR`.
    ///
    /// * `len`: length of the text, bytes; at most [`NAME_BYTES_MAX`].
    #[must_use]
    pub fn head(error: u32, len: usize) -> [u8; ERROR_BYTES] {
        let mut out = [0; ERROR_BYTES];
        out[..4].copy_from_slice(&error.to_be_bytes());
        let len = u16::try_from(len).expect("the length of a text");
        out[4..].copy_from_slice(&len.to_be_bytes());
        out
    }

    /// * `kind`: of the chunk.
    ///
    /// Errors: lengths that do not fit; the error 0; a text of more than [`NAME_BYTES_MAX`] bytes.
    pub fn parse(kind: u16, payload: &'a [u8]) -> Result<ErrorPayload<'a>, Malformed> {
        let mut payload = Bytes(payload);
        let (error, len) = (payload.u32()?, usize::from(payload.u16()?));
        let text = payload.take(len)?;
        if error == 0 {
            return Err(Malformed("an error chunk without an error"));
        }
        if len > NAME_BYTES_MAX {
            return Err(Malformed("the text of an error is too long"));
        }
        let mut offset = None;
        if kind == chunk::ERROR_OFFSET {
            offset = Some(payload.u64()?);
        }
        if kind == chunk::ERROR || kind == chunk::ERROR_OFFSET {
            payload.end()?;
        }
        Ok(ErrorPayload { error, text, offset })
    }
}

#[cfg(test)]
mod tests;
