//! A disk for virtual machines: vhost-user-blk.
//!
//! Rooms, from the wire inwards:
//! - [`protocol`]: bytes to messages and replies to bytes, without a socket;
//! - [`session`]: what one front end has said and what follows from it, without a thread;
//! - [`Connection`], [`BackChannel`]: the sockets.

#![forbid(unsafe_code)]

mod back_channel;
mod connection;
mod error;
pub mod protocol;
pub mod session;
mod wire;

pub use back_channel::BackChannel;
pub use connection::{Connection, Received};
pub use error::{Error, ErrorKind};
