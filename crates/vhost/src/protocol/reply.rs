//! What goes back to a front end.
//!
//! Promises: pure; a reply repeats the number of its request and is no longer than a payload may
//! be. Sending it is up to the connection.

use std::os::fd::OwnedFd;

use zerocopy::IntoBytes;

use super::header::{HEADER_BYTES, Header};

/// Number of CONFIG_CHANGE_MSG among the requests of a back end.
const CONFIG_CHANGE_MSG: u32 = 2;

/// A reply: header and payload, and the descriptors that go with them.
#[derive(Debug)]
pub struct Reply {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Reply {
    /// * `request`: the number of the request that is answered.
    /// * `payload`: at most [`super::PAYLOAD_BYTES_MAX`] bytes.
    pub(crate) fn new(request: u32, payload: &[u8]) -> Reply {
        let size = u32::try_from(payload.len()).expect("payloads are bounded");
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        bytes.extend_from_slice(Header::reply(request, size).as_bytes());
        bytes.extend_from_slice(payload);
        Reply { bytes, fds: Vec::new() }
    }

    /// A reply of one number; as the answer to need_reply 0 means done, anything else refused.
    pub(crate) fn number(request: u32, value: u64) -> Reply {
        Reply::new(request, value.as_bytes())
    }

    /// A reply that was made before.
    pub(crate) fn again(bytes: Vec<u8>, fds: Vec<OwnedFd>) -> Reply {
        Reply { bytes, fds }
    }

    pub(crate) fn with_fd(mut self, fd: OwnedFd) -> Reply {
        self.fds.push(fd);
        self
    }

    /// Header and payload.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The payload.
    #[must_use]
    pub fn payload(&self) -> &[u8] {
        &self.bytes[HEADER_BYTES..]
    }

    /// What goes with them.
    #[must_use]
    pub fn fds(&self) -> &[OwnedFd] {
        &self.fds
    }
}

/// The message that tells a front end, on the other socket, to read configuration space again. No
/// answer is asked for.
#[must_use]
pub fn config_change() -> [u8; HEADER_BYTES] {
    zerocopy::transmute!(Header::request(CONFIG_CHANGE_MSG, 0, false))
}
