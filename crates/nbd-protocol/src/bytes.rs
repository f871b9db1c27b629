//! Reads numbers from the front of a slice.
//!
//! Promises: what is too short is [`Malformed`]; nothing panics.

use std::error::Error;
use std::fmt;

/// Bytes of the peer that are not what the protocol has in this place, with the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl Error for Malformed {}

/// The bytes that were not read yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bytes<'a>(pub(crate) &'a [u8]);

impl<'a> Bytes<'a> {
    /// The next `len` bytes.
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed("data is too short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed("data is too short"))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_be_bytes)
    }

    /// A length of 32 bits, then so many bytes.
    pub(crate) fn counted(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()?;
        self.take(usize::try_from(len).map_err(|_| Malformed("data is too short"))?)
    }

    /// Nothing may follow.
    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("data is too long")) }
    }
}

/// Appends a length of 32 bits and the bytes.
///
/// Panics: more than `u32::MAX` bytes, which no caller has (names and texts have at most 4096).
pub(crate) fn push_counted(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend(length(bytes.len()).to_be_bytes());
    out.extend(bytes);
}

/// A length that was bounded before, as the wire has it.
pub(crate) fn length(len: usize) -> u32 {
    u32::try_from(len).expect("the length of a name, a text or an option")
}
