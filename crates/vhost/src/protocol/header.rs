//! The 12 bytes before each message.
//!
//! Promises: pure; any 12 bytes are read, and those of another version are refused. Numbers are in
//! the byte order of the machine, as both ends run on it. Source: vhost-user specification,
//! "Header".

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Malformed;

/// Bytes of a [`Header`].
pub const HEADER_BYTES: usize = 12;

/// The only version there is.
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 0b11;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// Header of a message in either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Number of the request ([`super::Request`]); a reply repeats it.
    pub request: u32,
    /// Version (bits 0-1), reply (bit 2), need_reply (bit 3).
    pub flags: u32,
    /// Bytes of the payload.
    pub size: u32,
}

const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

impl Header {
    /// A header as a front end sends it.
    ///
    /// * `size`: bytes of the payload.
    #[must_use]
    pub fn request(request: u32, size: u32, need_reply: bool) -> Header {
        let flags = VERSION | if need_reply { NEED_REPLY } else { 0 };
        Header { request, flags, size }
    }

    /// The header of a reply to `request`.
    #[must_use]
    pub fn reply(request: u32, size: u32) -> Header {
        Header { request, flags: VERSION | REPLY, size }
    }

    /// Reads a header. None of it is checked yet.
    #[must_use]
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Header {
        zerocopy::transmute!(*bytes)
    }

    /// Whether the sender waits for an answer even where the message has none of its own. Means
    /// something once REPLY_ACK was negotiated.
    #[must_use]
    pub fn need_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Whether this is a reply.
    #[must_use]
    pub fn is_reply(&self) -> bool {
        self.flags & REPLY != 0
    }

    /// Checks what a request may have. Bits that the specification does not name are ignored.
    ///
    /// Errors: another version; a reply without a request.
    pub(crate) fn check(&self, name: &str) -> Result<(), Malformed> {
        if self.flags & VERSION_MASK != VERSION {
            let version = self.flags & VERSION_MASK;
            return Err(Malformed(format!("{name}: version {version}, only {VERSION} is known")));
        }
        if self.is_reply() {
            return Err(Malformed(format!("{name}: marked as a reply, but nothing was asked")));
        }
        Ok(())
    }
}
