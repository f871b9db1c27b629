//! Errors of the control path: what ends a connection, or an export.
//!
//! Promises: `Display` names the message or object and the reason. Never used for a request of a guest: the data path knows status
//! bytes only.

use std::error::Error as StdError;
use std::fmt;

use rustix::io::Errno;

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
    /// Any other failure of the system.
    System,
}

/// An error of the control path.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// * `message`: the object and the reason, without a full stop.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), source: None }
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
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(formatter, ": {source}")?;
        }
        Ok(())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}
