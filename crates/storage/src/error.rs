//! The error of opening storage: a kind for programs, a sentence for people.
//!
//! Promises: the sentence names the object, the reason and what the user can do. Control path only:
//! the data path uses [`rustix::io::Errno`] alone.

use rustix::io::Errno;

use crate::cause::Cause;

/// What kind of failure it is, for callers that act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// O_DIRECT was asked for and the file cannot do it: open it buffered, or give up.
    DirectUnsupported,
    /// `create_new`, and the file is there already.
    Exists,
    /// Options that contradict each other.
    InvalidInput,
    /// Any other failure of the system; see the source.
    Io,
    /// Another process uses the image in a way that excludes ours.
    Locked,
    /// There is no such file.
    NotFound,
    /// The user may not open it.
    PermissionDenied,
    /// Write access to something that can only be read.
    ReadOnly,
    /// Neither a regular file nor a block device.
    WrongType,
}

/// A failure to open storage. `Display` names the object, the reason and what the user can do. The
/// system's error is the `source` where it says more than that.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    context: String,
    errno: Option<Errno>,
    /// The errno again, unless the context says it in better words.
    source: Option<Errno>,
    cause: Option<Box<Cause>>,
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, context: String) -> Error {
        Error { kind, context, errno: None, source: None, cause: None }
    }

    /// Takes the kind from the errno, whose meaning the context explains.
    pub(crate) fn explained(context: String, errno: Errno) -> Error {
        Error { source: None, ..Error::system(context, errno) }
    }

    /// Takes the kind from the errno, which becomes the source.
    pub(crate) fn system(context: String, errno: Errno) -> Error {
        let kind = match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::NXIO | Errno::NODEV => ErrorKind::NotFound,
            Errno::ACCESS | Errno::PERM => ErrorKind::PermissionDenied,
            Errno::ROFS => ErrorKind::ReadOnly,
            Errno::ISDIR => ErrorKind::WrongType,
            Errno::EXIST => ErrorKind::Exists,
            _ => ErrorKind::Io,
        };
        Error { kind, context, errno: Some(errno), source: Some(errno), cause: None }
    }

    pub(crate) fn with_source(mut self, errno: Errno) -> Error {
        self.errno = Some(errno);
        self.source = Some(errno);
        self
    }

    /// Adds the cause, for programs.
    pub(crate) fn because(mut self, cause: Cause) -> Error {
        self.cause = Some(Box::new(cause));
        self
    }

    /// It could not be opened. The text is `cannot open 'FILE': WHY`.
    pub(crate) fn not_opened(kind: ErrorKind, file: &str, why: &str) -> Error {
        let error = Error::new(kind, format!("cannot open '{file}': {why}"));
        error.because(not_opened(file, why, false))
    }

    /// As [`Error::not_opened`]; takes the kind from the errno, which `why` explains.
    pub(crate) fn not_opened_since(file: &str, why: &str, errno: Errno) -> Error {
        let error = Error::explained(format!("cannot open '{file}': {why}"), errno);
        error.because(not_opened(file, why, false))
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Why, for programs that say it in words of their own.
    pub fn cause(&self) -> Option<&Cause> {
        self.cause.as_deref()
    }

    /// The system's error, if there is one.
    pub fn errno(&self) -> Option<Errno> {
        self.errno
    }
}

/// The cause of a file that could not be opened.
pub(crate) fn not_opened(file: &str, why: &str, is_missing: bool) -> Cause {
    Cause::NotOpened { file: file.to_owned(), why: why.to_owned(), is_missing }
}

/// The words of the system, without the number `(os error N)` that the standard library adds.
pub fn words(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.context)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|errno| errno as _)
    }
}
