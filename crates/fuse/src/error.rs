//! Errors of the control path: mounting, unmounting, setting up a transport.
//!
//! Promises: `Display` names the object, the reason, and what the user can do; the cause is the
//! source. Never used for a request: the data path knows errno only.

use std::error::Error as StdError;
use std::fmt;

use rustix::io::Errno;

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
    /// A ringdisk (or other FUSE) mount is there whose server is gone.
    Stale,
    /// The mount is in use and was not told to go anyway.
    Busy,
    /// There is no such mount.
    NotMounted,
    /// Not allowed.
    PermissionDenied,
    /// `--allow-other` is not allowed for this user.
    AllowOtherDenied,
    /// `/dev/fuse` does not exist or has no driver.
    DeviceMissing,
    /// `/dev/fuse` may not be opened.
    DeviceForbidden,
    /// `fusermount3` is needed and was not found.
    HelperMissing,
    /// The kernel lacks something that we cannot do without.
    Unsupported,
    /// io_uring is forbidden here.
    RingForbidden,
    /// The transport broke down and the export was halted.
    Halted,
    /// An option asks for what cannot be, such as a CPU that the machine does not have.
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
