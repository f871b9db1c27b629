//! Requests as a driver writes them (virtio 1.3, section 5.2.6), copied once and checked.
//!
//! Promises: pure; bytes are parsed after they were copied, so a guest that changes them meanwhile
//! changes nothing here. A range outside of the disk, or one that overflows, is `None`, never a
//! panic. Allocates nothing.

use super::SECTOR_BYTES;
use super::config::{RANGE_SECTORS_MAX, RANGES_MAX};

/// Bytes of the header in front of the data.
pub(crate) const HEADER_BYTES: usize = 16;
/// Bytes of a segment of a discard or of a request to write zeroes.
pub(crate) const RANGE_BYTES: usize = 16;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;

/// Flag of a range: the space may be given back (write zeroes only).
const RANGE_UNMAP: u32 = 1;

/// What the driver is told (the last byte that it lets us write).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    /// Anything else: secure erase, zones, what a later specification adds.
    Unknown,
}

impl Kind {
    /// For messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Read => "a read",
            Kind::Write => "a write",
            Kind::Flush => "a flush",
            Kind::GetId => "reading the serial number",
            Kind::Discard => "a discard",
            Kind::WriteZeroes => "zeroing",
            Kind::Unknown => "an unknown request",
        }
    }
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// In units of [`SECTOR_BYTES`].
    pub(crate) sector: u64,
}

impl Header {
    /// Reads a header from bytes that no other thread can change any more. The priority in it is
    /// not used.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Header {
        let kind = match le32(bytes, 0) {
            TYPE_IN => Kind::Read,
            TYPE_OUT => Kind::Write,
            TYPE_FLUSH => Kind::Flush,
            TYPE_GET_ID => Kind::GetId,
            TYPE_DISCARD => Kind::Discard,
            TYPE_WRITE_ZEROES => Kind::WriteZeroes,
            _ => Kind::Unknown,
        };
        Header { kind, sector: le64(bytes, 8) }
    }

    /// Where the data lie, bytes; `None` when the driver asks for what is not there, or for parts
    /// of logical blocks.
    ///
    /// * `len`: of the data, bytes.
    /// * `capacity`: of the disk as the driver knows it, bytes.
    pub(crate) fn place(&self, len: u64, logical_block: u32, capacity: u64) -> Option<u64> {
        let offset = self.sector.checked_mul(SECTOR_BYTES)?;
        let end = offset.checked_add(len)?;
        let block = u64::from(logical_block);
        let whole = offset.is_multiple_of(block) && len.is_multiple_of(block);
        (whole && end <= capacity).then_some(offset)
    }
}

/// A range of a discard or of a request to write zeroes. Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) may_unmap: bool,
}

impl Range {
    /// Reads one range.
    ///
    /// Errors: `Unsupported` for flags that do not belong there, `IoError` for a place that is not
    /// on the disk (virtio 1.3, section 5.2.6.2).
    pub(crate) fn parse(
        bytes: &[u8; RANGE_BYTES],
        kind: Kind,
        logical_block: u32,
        capacity: u64,
    ) -> Result<Range, Status> {
        let flags = le32(bytes, 12);
        let allowed = if kind == Kind::WriteZeroes { RANGE_UNMAP } else { 0 };
        if flags & !allowed != 0 {
            return Err(Status::Unsupported);
        }
        let sectors = le32(bytes, 8);
        if sectors > RANGE_SECTORS_MAX {
            return Err(Status::IoError);
        }
        let len = u64::from(sectors) * SECTOR_BYTES;
        let header = Header { kind, sector: le64(bytes, 0) };
        let offset = header.place(len, logical_block, capacity).ok_or(Status::IoError)?;
        Ok(Range { offset, len, may_unmap: flags & RANGE_UNMAP != 0 })
    }
}

/// How many ranges the data hold; `None` for a part of one, none, or too many.
pub(crate) fn range_count(data_len: u64) -> Option<usize> {
    let count = data_len / RANGE_BYTES as u64;
    let fits =
        data_len.is_multiple_of(RANGE_BYTES as u64) && count >= 1 && count <= u64::from(RANGES_MAX);
    fits.then(|| usize::try_from(count).ok()).flatten()
}

fn le32(bytes: &[u8; 16], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn le64(bytes: &[u8; 16], at: usize) -> u64 {
    u64::from(le32(bytes, at)) | u64::from(le32(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests;
