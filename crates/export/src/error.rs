//! Errors of the control path of every export: mounting, sockets, options, threads, the end.
//!
//! Promises: an error has a kind for callers that act on it, says what was being done, keeps its
//! cause as the source, and has a hint (what the user can do) as a field of its own. `Display`
//! writes the message and the cause, never the hint. Never used for a request: the data path knows
//! an errno only.

use std::error::Error as StdError;
use std::fmt;

use ringdisk_ring::{Errno, SetupError};

/// What went wrong, for callers that act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The mountpoint, or the directory it is in, does not exist.
    NotFound,
    /// The mountpoint is a directory or a special file.
    NotRegular,
    /// Something else is mounted on the mountpoint already.
    Occupied,
    /// A ringdisk export is mounted there already.
    AlreadyOurs,
    /// A mount is there whose server is gone.
    Stale,
    /// There is no such mount.
    NotMounted,
    /// A socket cannot be made or used: its path, its kind, its directory.
    Socket,
    /// The mount is in use, or another process listens on the socket.
    Busy,
    /// Not allowed.
    PermissionDenied,
    /// `--allow-other` is not allowed for this user.
    AllowOtherDenied,
    /// The device of the transport (`/dev/fuse`) does not exist or has no driver.
    DeviceMissing,
    /// The device of the transport may not be opened.
    DeviceForbidden,
    /// A helper program (`fusermount3`) is needed and was not found.
    HelperMissing,
    /// The kernel lacks something that the transport cannot do without.
    TransportMissing,
    /// This version, or the kernel, does not do what was asked for.
    Unsupported,
    /// io_uring is forbidden here.
    RingForbidden,
    /// The peer sent something that the protocol does not know or allow.
    Protocol,
    /// What was asked for cannot be done at the moment, or not with this peer.
    Refused,
    /// The peer stopped in the middle of a message, or does not take replies.
    TimedOut,
    /// The export broke down and was halted.
    Halted,
    /// The storage below failed, and the export was told to stop then; or the last flush failed.
    Storage,
    /// An option asks for what cannot be, such as CPUs of which none can be used.
    Usage,
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
    /// * `message`: the object and what was being done, or the reason; without a full stop.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), hint: None, source: None }
    }

    /// No ring can be made for a queue thread.
    #[must_use]
    pub fn of_ring(error: SetupError) -> Error {
        let kind = match error {
            SetupError::Forbidden(_) => ErrorKind::RingForbidden,
            SetupError::Missing(_) => ErrorKind::Unsupported,
            SetupError::Limit(_) | SetupError::Other(_) => ErrorKind::System,
        };
        Error::new(kind, "the queue threads could not be started").source(error)
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

    /// The error and its hint in one line, for logs.
    #[must_use]
    pub fn with_hint(&self) -> impl fmt::Display + '_ {
        WithHint(self)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(formatter, ": {source}"),
            None => Ok(()),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}

/// See [`Error::with_hint`].
struct WithHint<'a>(&'a Error);

impl fmt::Display for WithHint<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)?;
        match self.0.hint_text() {
            Some(hint) => write!(formatter, "; {hint}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_is_a_field_and_no_part_of_the_text() {
        let error = Error::new(ErrorKind::Socket, "cannot listen on 'x'")
            .errno(Errno::ACCESS)
            .hint("choose another directory");
        let text = "cannot listen on 'x': Permission denied (os error 13)";
        assert_eq!(error.to_string(), text);
        assert_eq!(error.hint_text(), Some("choose another directory"));
        let line = error.with_hint().to_string();
        assert_eq!(line, format!("{text}; choose another directory"));
    }
}
