//! Why a link is not used any more.
//!
//! Promises: plain values.

use ringdisk_ring::Errno;
use ringdisk_tls::StreamError;

use super::slots::Violation;

/// Why a link is not used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// The server ended the connection, so it reads no further request of it.
    Ended,
    /// The connection failed, and what the server knows of that is unknown.
    Failed(Errno),
    /// The server breaks the protocol.
    Violation(Violation),
    /// The memory of a request was taken back in the middle of its reply.
    Abandoned,
}

impl Lost {
    /// Whether requests that change the disk may be sent again: not where the server may still
    /// carry out the old ones later.
    pub(super) fn repeats_changes(self) -> bool {
        self == Lost::Ended
    }
}

impl From<Violation> for Lost {
    fn from(violation: Violation) -> Lost {
        Lost::Violation(violation)
    }
}

impl From<Errno> for Lost {
    fn from(errno: Errno) -> Lost {
        match errno {
            Errno::CONNRESET | Errno::PIPE => Lost::Ended,
            errno => Lost::Failed(errno),
        }
    }
}

impl From<StreamError> for Lost {
    fn from(error: StreamError) -> Lost {
        match error {
            StreamError::Socket(errno) => errno.into(),
            StreamError::Ended => Lost::Ended,
            StreamError::Tls(_) => Lost::Violation("what it sends cannot be decrypted"),
        }
    }
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lost::Ended => f.write_str("the server ended it"),
            Lost::Failed(errno) => errno.fmt(f),
            Lost::Violation(why) => write!(f, "the server breaks the protocol: {why}"),
            Lost::Abandoned => f.write_str("a request was given up in the middle of its reply"),
        }
    }
}
