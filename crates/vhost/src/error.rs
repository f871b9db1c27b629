//! Errors of the control path: sockets, options, the start and the end of an export.
//!
//! Promises: `Display` names the object, the reason, and what the user can do; the cause is the
//! source. Never used for a request: the data path knows status bytes only.

use std::error::Error as StdError;
use std::fmt;

use ringdisk_ring::Errno;

/// What went wrong, for callers that act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The front end sent something that the protocol does not know or allow.
    Protocol,
    /// The front end asked for what cannot be, in a message that has no way to be told so.
    Refused,
    /// The front end stopped in the middle of a message, or does not take our replies.
    TimedOut,
    /// An option asks for what cannot be, such as a CPU that the machine does not have.
    Usage,
    /// A socket cannot be made or used: its path, its kind, its directory.
    Socket,
    /// Somebody else listens on the socket.
    Busy,
    /// Not allowed.
    PermissionDenied,
    /// This version, or the kernel, lacks something that we cannot do without.
    Unsupported,
    /// io_uring is forbidden here.
    RingForbidden,
    /// The export broke down.
    Halted,
    /// The storage below failed, and the export was told to stop then; or the last flush failed.
    Storage,
    /// Any other failure of the system.
    System,
}

/// An error of the control path.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// * `message`: the object and the reason, without a full stop.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), hint: None, source: None }
    }

    /// Adds what the user can do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
        self.source = Some(source.into());
        self
    }

    /// Adds an errno as the cause.
    #[must_use]
    pub fn errno(self, errno: Errno) -> Error {
        self.source(std::io::Error::from(errno))
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What the user can do, if we know.
    #[must_use]
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(formatter, ": {source}")?;
        }
        if let Some(hint) = &self.hint {
            write!(formatter, "; {hint}")?;
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}
