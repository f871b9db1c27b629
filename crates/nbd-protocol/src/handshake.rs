//! The handshake: greeting, the heads of options, and the heads of their replies.
//!
//! Promises: pure functions on arrays; used by both sides. The data behind the heads is in
//! [`crate::options`].

use crate::Malformed;
use crate::bytes::Bytes;
use crate::numbers::{
    GREETING_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, PADDING_BYTES, handshake_flags,
};

/// Length of the greeting, bytes.
pub const GREETING_BYTES: usize = 18;
/// Length of the client's flags, bytes.
pub const CLIENT_FLAGS_BYTES: usize = 4;
/// Length of the head of an option, bytes.
pub const OPTION_BYTES: usize = 16;
/// Length of the head of a reply to an option, bytes.
pub const OPTION_REPLY_BYTES: usize = 20;
/// Length of the reply to `EXPORT_NAME` without zeroes, bytes.
pub const EXPORT_BYTES: usize = 10;

/// The first bytes of a server.
#[must_use]
pub fn greeting(flags: u16) -> [u8; GREETING_BYTES] {
    let mut out = [0; GREETING_BYTES];
    out[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
    out[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    out[16..].copy_from_slice(&flags.to_be_bytes());
    out
}

/// The flags ([`handshake_flags`]) of a server's greeting.
///
/// Errors: no NBD server, or one that speaks the old style only.
pub fn parse_greeting(bytes: &[u8; GREETING_BYTES]) -> Result<u16, Malformed> {
    let mut bytes = Bytes(bytes);
    if bytes.u64()? != GREETING_MAGIC {
        return Err(Malformed("the peer is no NBD server"));
    }
    if bytes.u64()? != OPTION_MAGIC {
        return Err(Malformed("the server speaks the old style of NBD, without options"));
    }
    bytes.u16()
}

/// The client's answer to the greeting.
#[must_use]
pub fn client_flags(flags: u16) -> [u8; CLIENT_FLAGS_BYTES] {
    u32::from(flags).to_be_bytes()
}

/// The flags ([`handshake_flags`]) of a client's answer.
///
/// Errors: a flag that was not offered.
pub fn parse_client_flags(bytes: [u8; CLIENT_FLAGS_BYTES]) -> Result<u16, Malformed> {
    const KNOWN: u16 = handshake_flags::FIXED_NEWSTYLE | handshake_flags::NO_ZEROES;
    match u16::try_from(u32::from_be_bytes(bytes)) {
        Ok(flags) if flags & !KNOWN == 0 => Ok(flags),
        _ => Err(Malformed("the client sets unknown flags")),
    }
}

/// The head of an option; `len` bytes of data follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHead {
    /// Which option ([`crate::numbers::option`]).
    pub option: u32,
    /// Length of its data, bytes.
    pub len: u32,
}

impl OptionHead {
    /// The bytes of the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; OPTION_BYTES] {
        let mut out = [0; OPTION_BYTES];
        out[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.to_be_bytes());
        out[12..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Errors: the magic number is another one.
    pub fn parse(bytes: &[u8; OPTION_BYTES]) -> Result<OptionHead, Malformed> {
        let mut bytes = Bytes(bytes);
        if bytes.u64()? != OPTION_MAGIC {
            return Err(Malformed("bad magic number of an option"));
        }
        Ok(OptionHead { option: bytes.u32()?, len: bytes.u32()? })
    }
}

/// The head of a reply to an option; `len` bytes of data follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHead {
    /// The option that is answered.
    pub option: u32,
    /// Kind of the reply ([`crate::numbers::option_reply`]).
    pub kind: u32,
    /// Length of its data, bytes.
    pub len: u32,
}

impl OptionReplyHead {
    /// The bytes of the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; OPTION_REPLY_BYTES] {
        let mut out = [0; OPTION_REPLY_BYTES];
        out[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.to_be_bytes());
        out[12..16].copy_from_slice(&self.kind.to_be_bytes());
        out[16..].copy_from_slice(&self.len.to_be_bytes());
        out
    }

    /// Errors: the magic number is another one.
    pub fn parse(bytes: &[u8; OPTION_REPLY_BYTES]) -> Result<OptionReplyHead, Malformed> {
        let mut bytes = Bytes(bytes);
        if bytes.u64()? != OPTION_REPLY_MAGIC {
            return Err(Malformed("bad magic number of the reply to an option"));
        }
        Ok(OptionReplyHead { option: bytes.u32()?, kind: bytes.u32()?, len: bytes.u32()? })
    }
}

/// Size and flags of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size, bytes.
    pub size: u64,
    /// What the export can do ([`crate::numbers::export_flags`]).
    pub flags: u16,
}

impl ExportInfo {
    /// The bytes of the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; EXPORT_BYTES] {
        let mut out = [0; EXPORT_BYTES];
        out[..8].copy_from_slice(&self.size.to_be_bytes());
        out[8..].copy_from_slice(&self.flags.to_be_bytes());
        out
    }

    /// Never fails: any bytes are a size and flags.
    pub fn parse(bytes: &[u8; EXPORT_BYTES]) -> Result<ExportInfo, Malformed> {
        let mut bytes = Bytes(bytes);
        Ok(ExportInfo { size: bytes.u64()?, flags: bytes.u16()? })
    }

    /// Appends the reply to `EXPORT_NAME`.
    ///
    /// * `has_zeroes`: the two sides did not agree on `NO_ZEROES`.
    pub fn push_export_name_reply(self, has_zeroes: bool, out: &mut Vec<u8>) {
        out.extend(self.to_bytes());
        if has_zeroes {
            out.extend([0; PADDING_BYTES]);
        }
    }
}

#[cfg(test)]
mod tests;
