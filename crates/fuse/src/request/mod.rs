//! From the bytes of a frame to a typed request.
//!
//! Promises: a [`Request`] is a small owned value that outlives the buffer it came from, so an
//! entry may keep it across waits. Called by queue threads for each request: no allocation, no
//! lock, no panic, whatever the bytes. WRITE data is located, not copied.

use std::fmt;

use zerocopy::FromBytes;

use crate::abi::opcode;
use crate::abi::{
    BatchForgetIn, FallocateIn, FlushIn, ForgetIn, FsyncIn, GetattrIn, IN_HEADER_BYTES, InHeader,
    InitIn, InterruptIn, LseekIn, OpenIn, REQUEST_HEAD_BYTES, ReadIn, ReleaseIn, SetattrIn,
    WriteIn,
};

/// Bytes of the first INIT request (up to protocol 7.35).
const INIT_IN_BYTES_OLD: usize = 16;

/// One request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Who asks, and the `unique` that the reply must carry.
    pub header: InHeader,
    /// What is asked.
    pub operation: Operation,
}

/// The operation of a request with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// First request of a mount. Fields that an old kernel did not send are 0.
    Init(InitIn),
    /// Look-up of a name below the root; the name itself is of no interest: a file has no children.
    Lookup,
    /// No reply.
    Forget(ForgetIn),
    /// No reply.
    BatchForget(BatchForgetIn),
    /// Attributes.
    Getattr(GetattrIn),
    /// Change of attributes, including the size.
    Setattr(SetattrIn),
    /// Open.
    Open(OpenIn),
    /// Last close.
    Release(ReleaseIn),
    /// Read.
    Read(ReadIn),
    /// Write; the data are the `size` bytes after the arguments: at
    /// [`crate::abi::WRITE_DATA_OFFSET`] of the frame on `/dev/fuse`.
    Write(WriteIn),
    /// Statistics of the filesystem.
    Statfs,
    /// fsync and fdatasync.
    Fsync(FsyncIn),
    /// Each close of a descriptor.
    Flush(FlushIn),
    /// fallocate.
    Fallocate(FallocateIn),
    /// SEEK_DATA and SEEK_HOLE.
    Lseek(LseekIn),
    /// The caller of a request was interrupted. No reply.
    Interrupt(InterruptIn),
    /// Answer to a RETRIEVE notification, which we never send. No reply.
    NotifyReply,
    /// The filesystem goes away.
    Destroy,
    /// An operation that an export does not have, or a number that we do not know: the answer is
    /// ENOSYS.
    Unsupported(u32),
}

/// Why the bytes are not a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseError {
    /// Fewer bytes than a header: the stream is broken and cannot be resynchronised.
    ShortHeader {
        /// Bytes received.
        received: usize,
    },
    /// The length in the header is not the number of bytes received: the stream is broken.
    Length {
        /// Length that the header states.
        stated: u32,
        /// Bytes received.
        received: usize,
    },
    /// The frame is whole but its arguments do not fit its operation. The request can be answered
    /// with EINVAL.
    Arguments {
        /// Header of the frame.
        header: InHeader,
    },
}

impl ParseError {
    /// Whether the transport can no longer trust the device (the *halted* state), as opposed to one
    /// bad request.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        !matches!(self, ParseError::Arguments { .. })
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParseError::ShortHeader { received } => write!(
                formatter,
                "request of {received} bytes is shorter than a header ({IN_HEADER_BYTES})"
            ),
            ParseError::Length { stated, received } => {
                write!(formatter, "request states {stated} bytes but {received} were received")
            }
            ParseError::Arguments { header } => {
                write!(
                    formatter,
                    "arguments of {} ({}) do not fit a request of {} bytes",
                    opcode::name(header.opcode),
                    header.opcode,
                    header.len
                )
            }
        }
    }
}

impl std::error::Error for ParseError {}

impl Request {
    /// Parses a frame read from `/dev/fuse`.
    ///
    /// * `head`: the first bytes of the frame, all of it or at least [`REQUEST_HEAD_BYTES`].
    /// * `received`: bytes that the read returned.
    ///
    /// Errors: see [`ParseError`]; those with [`ParseError::is_fatal`] end the transport.
    pub fn parse(head: &[u8], received: usize) -> Result<Request, ParseError> {
        let head = &head[..head.len().min(received)];
        let Ok((header, arguments)) = InHeader::read_from_prefix(head) else {
            return Err(ParseError::ShortHeader { received });
        };
        if usize::try_from(header.len) != Ok(received) {
            return Err(ParseError::Length { stated: header.len, received });
        }
        debug_assert!(head.len() == received || head.len() >= REQUEST_HEAD_BYTES);
        Request::from_parts(header, arguments, received - IN_HEADER_BYTES)
    }

    /// Builds a request from a header and the bytes after it.
    ///
    /// * `arguments`: start of what follows the header.
    /// * `length`: length of all that follows the header, in bytes (may be more than `arguments`
    ///   holds).
    ///
    /// Errors: [`ParseError::Arguments`].
    pub fn from_parts(
        header: InHeader,
        arguments: &[u8],
        length: usize,
    ) -> Result<Request, ParseError> {
        let arguments = &arguments[..arguments.len().min(length)];
        let operation = match header.opcode {
            opcode::INIT => init(arguments).map(Operation::Init),
            opcode::LOOKUP => Some(Operation::Lookup),
            opcode::FORGET => take(arguments).map(Operation::Forget),
            opcode::BATCH_FORGET => take(arguments).map(Operation::BatchForget),
            opcode::GETATTR => take(arguments).map(Operation::Getattr),
            opcode::SETATTR => take(arguments).map(Operation::Setattr),
            opcode::OPEN => take(arguments).map(Operation::Open),
            opcode::RELEASE => take(arguments).map(Operation::Release),
            opcode::READ => take(arguments).map(Operation::Read),
            opcode::WRITE => write(arguments, length).map(Operation::Write),
            opcode::STATFS => Some(Operation::Statfs),
            opcode::FSYNC => take(arguments).map(Operation::Fsync),
            opcode::FLUSH => take(arguments).map(Operation::Flush),
            opcode::FALLOCATE => take(arguments).map(Operation::Fallocate),
            opcode::LSEEK => take(arguments).map(Operation::Lseek),
            opcode::INTERRUPT => take(arguments).map(Operation::Interrupt),
            opcode::NOTIFY_REPLY => Some(Operation::NotifyReply),
            opcode::DESTROY => Some(Operation::Destroy),
            other => Some(Operation::Unsupported(other)),
        };
        match operation {
            Some(operation) => Ok(Request { header, operation }),
            None => Err(ParseError::Arguments { header }),
        }
    }

    /// Whether the kernel waits for a reply to this request.
    #[must_use]
    pub fn expects_reply(&self) -> bool {
        !matches!(
            self.operation,
            Operation::Forget(_)
                | Operation::BatchForget(_)
                | Operation::Interrupt(_)
                | Operation::NotifyReply
        )
    }
}

/// Whether the kernel waits for a reply to a request with this operation number; for frames that
/// could not be parsed.
#[must_use]
pub fn opcode_expects_reply(number: u32) -> bool {
    !matches!(
        number,
        opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::NOTIFY_REPLY
    )
}

/// Copies the arguments out of the frame, which need not be aligned. Longer arguments are those of
/// a newer kernel: accepted.
fn take<T: FromBytes>(arguments: &[u8]) -> Option<T> {
    T::read_from_prefix(arguments).ok().map(|(value, _)| value)
}

/// Old kernels send a shorter INIT; what is missing counts as 0.
fn init(arguments: &[u8]) -> Option<InitIn> {
    if arguments.len() < INIT_IN_BYTES_OLD {
        return None;
    }
    let mut bytes = [0; size_of::<InitIn>()];
    let len = arguments.len().min(bytes.len());
    bytes[..len].copy_from_slice(&arguments[..len]);
    take(&bytes)
}

/// A WRITE must carry exactly the data that it announces.
fn write(arguments: &[u8], length: usize) -> Option<WriteIn> {
    let argument: WriteIn = take(arguments)?;
    let announced = usize::try_from(argument.size).ok()?;
    (length.checked_sub(size_of::<WriteIn>()) == Some(announced)).then_some(argument)
}

#[cfg(test)]
mod tests;
