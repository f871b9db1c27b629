//! NBD on the wire: what a server and a client send each other.
//!
//! Promises: every function is one on bytes, without input and output. Bytes of any content lead to
//! a value or to [`Malformed`], never to a panic, and no more memory is taken than the bytes are
//! long. What is built for a request or its reply allocates nothing. All numbers of the wire are
//! big-endian.
//!
//! ```
//! use ringdisk_nbd_protocol::numbers::command;
//! use ringdisk_nbd_protocol::request::{Request, Style};
//!
//! let read = Request { command: command::READ, offset: 4096, len: 512, cookie: 7, flags: 0 };
//! assert_eq!(Request::parse(Style::Simple, &read.to_compact()), Ok(read));
//! assert!(Request::parse(Style::Simple, &[0; 28]).is_err());
//! ```
//!
//! - [`numbers`]: magic numbers, options, commands, flags, errors and limits;
//! - [`handshake`]: the greeting, the heads of options and of their replies;
//! - [`options`]: the data of options and of their replies;
//! - [`request`]: the head of a request, 28 or 32 bytes;
//! - [`reply`]: simple replies, chunks, and the payloads of chunks;
//! - [`status`]: block status: extents, and the filter of a request.
//!
//! Source: the NBD protocol, `doc/proto.md`.

#![forbid(unsafe_code)]

mod bytes;
pub mod handshake;
pub mod numbers;
pub mod options;
pub mod reply;
pub mod request;
pub mod status;

pub use bytes::Malformed;
