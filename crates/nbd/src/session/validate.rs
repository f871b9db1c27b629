//! Judges the head of a request: what belongs to it, and whether it can be carried out.
//!
//! Promises: pure. Texts of errors are those of qemu-nbd where it has one; numbers are those of the
//! protocol. Only a refusal allocates.

use ringdisk_nbd_protocol::numbers::{PAYLOAD_BYTES_MAX, command, command_flags as flags, errno};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::Errno;

/// Longest payload of a request for block status, bytes: the range, and a number for each of 512
/// contexts; twice as many as an export has.
const FILTER_BYTES_MAX: u64 = 8 + 512 * 4;
/// Why such a payload is refused.
pub(super) const BAD_FILTER: &str = "CMD_BLOCK_STATUS payload not valid";

/// What a request is judged by.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) style: Style,
    /// Of the disk, bytes.
    pub(super) size: u64,
    pub(super) is_read_only: bool,
    /// Contexts of block status were chosen.
    pub(super) has_contexts: bool,
}

/// A request that is answered with an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// Of the wire.
    pub(super) error: u32,
    pub(super) text: String,
    /// Why the disk failed, if it did: for the log.
    pub(super) cause: Option<Errno>,
}

impl Refusal {
    pub(super) fn new(error: u32, text: impl Into<String>) -> Refusal {
        Refusal { error, text: text.into(), cause: None }
    }
}

/// Bytes that follow the head of a request.
pub(super) fn payload_bytes(request: &Request, style: Style) -> u64 {
    let says_so = style == Style::Extended && request.flags & flags::PAYLOAD_LEN != 0;
    if request.command == command::WRITE || says_so { request.len } else { 0 }
}

/// Whether a payload is so long that it cannot be skipped either: the connection ends.
pub(super) fn ends_the_connection(payload: u64) -> bool {
    payload > u64::from(PAYLOAD_BYTES_MAX)
}

/// Errors: what the client is told.
pub(super) fn judge(request: &Request, rules: &Rules) -> Result<(), Refusal> {
    let &Request { command, offset, len, .. } = request;
    check_flags(request, rules.style)?;
    let is_change = matches!(command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if is_change && rules.is_read_only {
        return Err(Refusal::new(errno::EPERM, "Export is read-only"));
    }
    let has_data = matches!(command, command::READ | command::WRITE | command::CACHE);
    if has_data && len > u64::from(PAYLOAD_BYTES_MAX) {
        let text = format!("len ({len}) is larger than max len ({PAYLOAD_BYTES_MAX})");
        return Err(Refusal::new(errno::EINVAL, text));
    }
    if command == command::FLUSH || command == command::DISCONNECT {
        return Ok(());
    }
    // With a filter the length is in the payload, which is judged when it is there.
    let has_filter = command == command::BLOCK_STATUS && request.flags & flags::PAYLOAD_LEN != 0;
    if !has_filter {
        check_range(request, offset, len, rules.size)?;
    } else if len > FILTER_BYTES_MAX {
        return Err(Refusal::new(errno::EINVAL, BAD_FILTER));
    }
    if command == command::BLOCK_STATUS {
        if len == 0 {
            return Err(Refusal::new(errno::EINVAL, "need non-zero length"));
        }
        if !rules.has_contexts {
            let text = "CMD_BLOCK_STATUS not negotiated";
            return Err(Refusal::new(errno::EINVAL, text));
        }
    }
    Ok(())
}

/// Errors: the range leaves the disk.
pub(super) fn check_range(
    request: &Request,
    offset: u64,
    len: u64,
    size: u64,
) -> Result<(), Refusal> {
    if offset <= size && len <= size - offset {
        return Ok(());
    }
    let is_write = matches!(request.command, command::WRITE | command::WRITE_ZEROES);
    let error = if is_write { errno::ENOSPC } else { errno::EINVAL };
    let text = format!("operation past EOF; From: {offset}, Len: {len}, Size: {size}");
    Err(Refusal::new(error, text))
}

/// Errors: an unknown command; a flag that the command does not have.
fn check_flags(request: &Request, style: Style) -> Result<(), Refusal> {
    let extended = |flag: u16| if style == Style::Extended { flag } else { 0 };
    let chunks = |flag: u16| if style == Style::Simple { 0 } else { flag };
    let (name, allowed) = match request.command {
        command::READ => ("read", chunks(flags::DF)),
        command::WRITE => ("write", extended(flags::PAYLOAD_LEN)),
        command::DISCONNECT => ("disconnect", u16::MAX),
        command::FLUSH => ("flush", 0),
        command::TRIM => ("trim", 0),
        command::CACHE => ("cache", 0),
        command::WRITE_ZEROES => ("write zeroes", flags::NO_HOLE | flags::FAST_ZERO),
        command::BLOCK_STATUS => {
            ("block status", chunks(flags::REQ_ONE) | extended(flags::PAYLOAD_LEN))
        }
        other => {
            let text = format!("invalid request type ({other}) received");
            return Err(Refusal::new(errno::EINVAL, text));
        }
    };
    // Without a meaning for some commands, and taken with all.
    if request.flags & !(allowed | flags::FUA) == 0 {
        return Ok(());
    }
    let got = request.flags;
    let text = format!("unsupported flags for command {name} (got 0x{got:x})");
    Err(Refusal::new(errno::EINVAL, text))
}

/// What a client is told about an error of the disk.
pub(super) fn failed(error: Errno) -> Refusal {
    let number = errno::of_system(error.raw_os_error());
    let refusal = Refusal::new(number, std::io::Error::from(error).to_string());
    Refusal { cause: Some(error), ..refusal }
}

#[cfg(test)]
mod tests;
