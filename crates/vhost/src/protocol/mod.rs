//! The vhost-user protocol as bytes: numbers, structures, messages that were taken apart, replies.
//!
//! Promises: knows no socket, no thread and no state; whatever bytes and descriptors it is given,
//! it returns a [`Message`] or says what is wrong with them. Numbers are in the byte order of the
//! machine, as the protocol has it: both sides are on one host.
//!
//! Source: the vhost-user protocol specification ("interop/vhost-user" of QEMU's documentation).

pub mod features;
mod header;
mod message;
mod payload;
mod reply;
mod request;

pub use header::{HEADER_BYTES, Header};
pub use message::{FDS_MAX, Message, PAYLOAD_BYTES_MAX};
pub use payload::{
    ConfigHead, DeviceState, Inflight, Log, MemoryHead, Region, SingleRegion, VringAddress,
    VringState,
};
pub use reply::{Reply, config_change};
pub use request::Request;

/// What is wrong with the bytes or the descriptors of a message; ends the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed(pub(crate) String);

impl std::fmt::Display for Malformed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests;
