//! Why a connection ends.
//!
//! Promises: plain values; only an end that a user has to know of has a text.

use ringdisk_nbd_protocol::Malformed;
use ringdisk_ring::Errno;
use ringdisk_tls::StreamError;

/// Why a connection ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The client said so, or closed its socket between two requests.
    Clean,
    /// The client closed its socket in the middle of something.
    Truncated,
    /// The socket failed.
    Socket(Errno),
    /// The client broke the protocol.
    Protocol(&'static str),
    /// The handshake took too long.
    TooSlow,
    /// TLS has failed, or does not let the client in.
    Tls(String),
    /// It has not ended: it stands still for a successor, between two messages.
    StandsStill,
    /// It has not ended: another process goes on with it.
    Moved,
}

impl End {
    /// For people; `None`: nothing to tell.
    pub(crate) fn text(&self) -> Option<String> {
        match self {
            End::Clean | End::StandsStill | End::Moved => None,
            End::Truncated => Some(String::from("it closed the connection within a message")),
            End::Socket(errno) => Some(errno.to_string()),
            End::Protocol(what) => Some(String::from(*what)),
            End::Tls(why) => Some(why.clone()),
            End::TooSlow => Some(String::from("its handshake took too long")),
        }
    }
}

impl From<Malformed> for End {
    fn from(malformed: Malformed) -> End {
        End::Protocol(malformed.0)
    }
}

impl From<Errno> for End {
    fn from(errno: Errno) -> End {
        End::Socket(errno)
    }
}

impl From<StreamError> for End {
    fn from(error: StreamError) -> End {
        match error {
            StreamError::Socket(errno) => End::Socket(errno),
            error => End::Tls(error.to_string()),
        }
    }
}

/// An end within a message is never a clean one.
pub(crate) fn within_a_message(end: End) -> End {
    if end == End::Clean { End::Truncated } else { end }
}
