//! The data of options and of their replies.
//!
//! Promises: parsed values borrow the data; memory is bounded by the length of the data. Used once
//! for each connection, so building appends to a `Vec`. Names are bytes: nothing checks that they
//! are UTF-8, and nothing is longer than the data that it came in.

use crate::Malformed;
use crate::bytes::{Bytes, length, push_counted};
use crate::handshake::{EXPORT_BYTES, ExportInfo, OptionHead, OptionReplyHead};
use crate::numbers::{NAME_BYTES_MAX, info, option_reply};

/// Appends an option: its head and its data.
pub fn push_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend(OptionHead { option, len: length(data.len()) }.to_bytes());
    out.extend(data);
}

/// Appends a reply to an option: its head and its data.
pub fn push_reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(OptionReplyHead { option, kind, len: length(data.len()) }.to_bytes());
    out.extend(data);
}

/// A name of at most [`NAME_BYTES_MAX`] bytes, without NUL.
fn name(bytes: &[u8]) -> Result<&[u8], Malformed> {
    if bytes.len() > NAME_BYTES_MAX {
        return Err(Malformed("a name is too long"));
    }
    if bytes.contains(&0) {
        return Err(Malformed("a name contains a NUL"));
    }
    Ok(bytes)
}

/// Data of `INFO` and `GO`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Name of the export.
    pub name: &'a [u8],
    /// What the client wants to know ([`info`]).
    pub wanted: Vec<u16>,
}

impl<'a> InfoRequest<'a> {
    /// Appends the data.
    pub fn push(&self, out: &mut Vec<u8>) {
        push_counted(out, self.name);
        let count = u16::try_from(self.wanted.len()).expect("a list of a few kinds");
        out.extend(count.to_be_bytes());
        out.extend(self.wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    }

    /// Errors: lengths that do not fit the data, a name that is too long or has a NUL.
    pub fn parse(data: &'a [u8]) -> Result<InfoRequest<'a>, Malformed> {
        let mut data = Bytes(data);
        let name = name(data.counted()?)?;
        let count = data.u16()?;
        if data.0.len() != usize::from(count) * size_of::<u16>() {
            return Err(Malformed("the number of information requests does not fit the data"));
        }
        let wanted = (0..count).map(|_| data.u16()).collect::<Result<_, _>>()?;
        Ok(InfoRequest { name, wanted })
    }
}

/// Data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetaRequest<'a> {
    /// Name of the export.
    pub export: &'a [u8],
    /// Contexts, or the start of their names.
    pub queries: Vec<&'a [u8]>,
}

impl<'a> MetaRequest<'a> {
    /// Appends the data.
    pub fn push(&self, out: &mut Vec<u8>) {
        push_counted(out, self.export);
        out.extend(length(self.queries.len()).to_be_bytes());
        self.queries.iter().for_each(|query| push_counted(out, query));
    }

    /// Errors: lengths that do not fit the data, names that are too long or have a NUL.
    pub fn parse(data: &'a [u8]) -> Result<MetaRequest<'a>, Malformed> {
        let mut data = Bytes(data);
        let export = name(data.counted()?)?;
        let count = data.u32()?;
        // Each query takes four bytes at least, so the data bounds the number of turns.
        let mut queries = Vec::new();
        for _ in 0..count {
            queries.push(name(data.counted()?)?);
        }
        data.end()?;
        Ok(MetaRequest { export, queries })
    }
}

/// The name in the data of `EXPORT_NAME`.
///
/// Errors: a name that is too long or has a NUL.
pub fn parse_export_name(data: &[u8]) -> Result<&[u8], Malformed> {
    name(data)
}

/// Data of a reply `SERVER`: one export of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedExport<'a> {
    /// Name.
    pub name: &'a [u8],
    /// A text for people; may be empty.
    pub description: &'a [u8],
}

impl<'a> ListedExport<'a> {
    /// Appends the data.
    pub fn push(&self, out: &mut Vec<u8>) {
        push_counted(out, self.name);
        out.extend(self.description);
    }

    /// Errors: lengths that do not fit the data, names that are too long or have a NUL.
    pub fn parse(data: &'a [u8]) -> Result<ListedExport<'a>, Malformed> {
        let mut data = Bytes(data);
        let name = name(data.counted()?)?;
        Ok(ListedExport { name, description: data.0 })
    }
}

/// Smallest, preferred and largest request, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Alignment of requests.
    pub minimum: u32,
    /// Alignment that is fastest.
    pub preferred: u32,
    /// Longest payload; `u32::MAX`: no limit.
    pub maximum: u32,
}

/// Data of a reply `INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InfoReply<'a> {
    /// Size and flags.
    Export(ExportInfo),
    /// The canonical name.
    Name(&'a [u8]),
    /// A text for people.
    Description(&'a [u8]),
    /// Sizes of requests.
    BlockSizes(BlockSizes),
    /// A kind that is not known here; to be ignored.
    Other(u16),
}

impl<'a> InfoReply<'a> {
    /// Appends the data.
    pub fn push(&self, out: &mut Vec<u8>) {
        match self {
            InfoReply::Export(export) => {
                out.extend(info::EXPORT.to_be_bytes());
                out.extend(export.to_bytes());
            }
            InfoReply::Name(name) => {
                out.extend(info::NAME.to_be_bytes());
                out.extend(*name);
            }
            InfoReply::Description(text) => {
                out.extend(info::DESCRIPTION.to_be_bytes());
                out.extend(*text);
            }
            InfoReply::BlockSizes(sizes) => {
                out.extend(info::BLOCK_SIZE.to_be_bytes());
                for size in [sizes.minimum, sizes.preferred, sizes.maximum] {
                    out.extend(size.to_be_bytes());
                }
            }
            InfoReply::Other(kind) => out.extend(kind.to_be_bytes()),
        }
    }

    /// Errors: data that is too short or too long for its kind.
    pub fn parse(data: &'a [u8]) -> Result<InfoReply<'a>, Malformed> {
        let mut data = Bytes(data);
        let reply = match data.u16()? {
            info::EXPORT => {
                let bytes = data.take(EXPORT_BYTES)?;
                let bytes = bytes.first_chunk().ok_or(Malformed("data is too short"))?;
                InfoReply::Export(ExportInfo::parse(bytes)?)
            }
            info::NAME => return Ok(InfoReply::Name(data.0)),
            info::DESCRIPTION => return Ok(InfoReply::Description(data.0)),
            info::BLOCK_SIZE => {
                let (minimum, preferred, maximum) = (data.u32()?, data.u32()?, data.u32()?);
                InfoReply::BlockSizes(BlockSizes { minimum, preferred, maximum })
            }
            kind => return Ok(InfoReply::Other(kind)),
        };
        data.end()?;
        Ok(reply)
    }
}

/// Data of a reply `META_CONTEXT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaContext<'a> {
    /// Number of the context in replies to block status.
    pub id: u32,
    /// Name.
    pub name: &'a [u8],
}

impl<'a> MetaContext<'a> {
    /// Appends the data.
    pub fn push(&self, out: &mut Vec<u8>) {
        out.extend(self.id.to_be_bytes());
        out.extend(self.name);
    }

    /// Errors: data that is too short, a name that is too long or has a NUL.
    pub fn parse(data: &'a [u8]) -> Result<MetaContext<'a>, Malformed> {
        let mut data = Bytes(data);
        Ok(MetaContext { id: data.u32()?, name: name(data.0)? })
    }
}

/// Whether a reply to an option is an error; its data is a text then.
#[must_use]
pub const fn is_error(kind: u32) -> bool {
    kind & option_reply::ERROR_BIT != 0
}

#[cfg(test)]
mod tests;
