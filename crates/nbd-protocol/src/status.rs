//! Block status: the payloads of its replies, and the filter of its request.
//!
//! Promises: pure functions on bytes. Parsing allocates nothing: extents are read while they are
//! iterated. Whether the sum of the extents fits the request is the caller's to judge.

use crate::Malformed;
use crate::bytes::Bytes;
use crate::numbers::{EXTENTS_MAX, chunk};

/// Length of an extent of 32 bits, bytes.
pub const EXTENT_BYTES: usize = 8;
/// Length of an extent of 64 bits, bytes.
pub const EXTENDED_EXTENT_BYTES: usize = 16;

/// A run of bytes with the same flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length, bytes.
    pub len: u64,
    /// Flags of the context; the depth of `qemu:allocation-depth`.
    pub flags: u64,
}

/// Appends the payload of a chunk `BLOCK_STATUS` or `BLOCK_STATUS_EXTENDED`.
///
/// * `is_extended`: 64 bits; otherwise lengths and flags are cut to 32 bits, which callers see to.
pub fn push_extents(out: &mut Vec<u8>, is_extended: bool, id: u32, extents: &[Extent]) {
    out.extend(id.to_be_bytes());
    if is_extended {
        out.extend(crate::bytes::length(extents.len()).to_be_bytes());
    }
    for extent in extents {
        let (len, flags) = (extent.len.to_be_bytes(), extent.flags.to_be_bytes());
        let from = if is_extended { 0 } else { 4 };
        out.extend(&len[from..]);
        out.extend(&flags[from..]);
    }
}

/// The payload of a chunk `BLOCK_STATUS` or `BLOCK_STATUS_EXTENDED`.
#[derive(Clone, Copy, Debug)]
pub struct StatusPayload<'a> {
    /// Number of the context, from its `META_CONTEXT`.
    pub id: u32,
    is_extended: bool,
    extents: &'a [u8],
}

impl<'a> StatusPayload<'a> {
    /// * `kind`: of the chunk.
    ///
    /// Errors: another kind; a length that is no whole number of extents; none, or more than
    /// [`EXTENTS_MAX`]; an extent of length 0.
    pub fn parse(kind: u16, payload: &'a [u8]) -> Result<StatusPayload<'a>, Malformed> {
        let mut payload = Bytes(payload);
        let id = payload.u32()?;
        let is_extended = match kind {
            chunk::BLOCK_STATUS => false,
            chunk::BLOCK_STATUS_EXTENDED => true,
            _ => return Err(Malformed("not a chunk of block status")),
        };
        let each = if is_extended { EXTENDED_EXTENT_BYTES } else { EXTENT_BYTES };
        let said = if is_extended { Some(payload.u32()?) } else { None };
        let count = payload.0.len() / each;
        if payload.0.len() % each != 0 {
            return Err(Malformed("block status is cut off"));
        }
        if said.is_some_and(|said| usize::try_from(said) != Ok(count)) {
            return Err(Malformed("block status has another number of extents than it says"));
        }
        if count == 0 || count > EXTENTS_MAX {
            return Err(Malformed("block status has no extents, or too many"));
        }
        let status = StatusPayload { id, is_extended, extents: payload.0 };
        if status.extents().any(|extent| extent.len == 0) {
            return Err(Malformed("block status has an empty extent"));
        }
        Ok(status)
    }

    /// The extents, in order.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + 'a {
        let (mut rest, is_extended) = (Bytes(self.extents), self.is_extended);
        std::iter::from_fn(move || {
            let mut number = || {
                if is_extended { rest.u64().ok() } else { rest.u32().ok().map(u64::from) }
            };
            Some(Extent { len: number()?, flags: number()? })
        })
    }
}

/// The payload of a request for block status with the flag `PAYLOAD_LEN`.
#[derive(Clone, Copy, Debug)]
pub struct StatusFilter<'a> {
    /// Length of the range, bytes.
    pub len: u64,
    ids: &'a [u8],
}

impl<'a> StatusFilter<'a> {
    /// Errors: a length that is no whole number of contexts.
    pub fn parse(payload: &'a [u8]) -> Result<StatusFilter<'a>, Malformed> {
        let mut payload = Bytes(payload);
        let len = payload.u64()?;
        if payload.0.len() % size_of::<u32>() != 0 {
            return Err(Malformed("the filter of block status is cut off"));
        }
        Ok(StatusFilter { len, ids: payload.0 })
    }

    /// The contexts, in the order of the request; may repeat and may be unknown.
    pub fn ids(&self) -> impl Iterator<Item = u32> + 'a {
        let mut rest = Bytes(self.ids);
        std::iter::from_fn(move || rest.u32().ok())
    }

    /// Appends the payload.
    pub fn push(out: &mut Vec<u8>, len: u64, ids: &[u32]) {
        out.extend(len.to_be_bytes());
        out.extend(ids.iter().flat_map(|id| id.to_be_bytes()));
    }
}

#[cfg(test)]
mod tests;
