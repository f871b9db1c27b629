//! Control path errors: opening, resizing and describing images.
//!
//! Promises: every message names the object (a file, an option), the reason, and what the user can
//! do about it. Callers match on [`ErrorKind`]; reporters print the error and then its sources.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use ringdisk_storage::words;

use crate::cause::Cause;

/// What went wrong, for callers that decide by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The image or a file that it names does not exist.
    NotFound,
    /// The operating system refused access, or the file system is read-only.
    PermissionDenied,
    /// A backing or data file lies outside the allowed directories.
    NotAllowed,
    /// The file is neither a regular file nor a block device.
    NotAnImage,
    /// The format is not known, or not named where it must be.
    UnknownFormat,
    /// The image asks for something that this version does not do.
    Unsupported,
    /// An option or a name inside the image makes no sense.
    Invalid,
    /// The backing chain comes back to a file that is already in it.
    Loop,
    /// The backing chain has more layers than [`LAYERS_MAX`](crate::LAYERS_MAX).
    TooDeep,
    /// Another program holds a lock on the image.
    Locked,
    /// Another change of the disk is under way.
    Busy,
    /// The user ended the operation early.
    Cancelled,
    /// The image is damaged.
    Corrupt,
    /// The operating system reported another error.
    Io,
}

/// A control path error: kind, message and cause.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    errno: Option<rustix::io::Errno>,
    source: Option<Box<dyn StdError + Send + Sync + 'static>>,
    cause: Option<Box<Cause>>,
}

impl Error {
    /// An error without a deeper cause.
    ///
    /// * `message`: one sentence that names the object, the reason and the way out.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Error {
        Error { kind, message: message.into(), errno: None, source: None, cause: None }
    }

    /// Adds the cause; `Display` of this error does not repeat it.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Error {
        self.source = Some(Box::new(source));
        self
    }

    /// Puts what was being done in front of the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Error {
        self.message = format!("{context}: {}", self.message);
        self.cause = self.cause.map(|cause| Box::new(cause.of_part()));
        self
    }

    /// Adds the cause, for programs.
    #[must_use]
    pub(crate) fn because(mut self, cause: impl Into<Option<Cause>>) -> Error {
        self.cause = cause.into().map(Box::new);
        self
    }

    /// Says that this happened to a backing file.
    ///
    /// * `file`: its name, for people.
    /// * `of`: what the message says behind the name.
    pub(crate) fn of_backing_file(self, file: &str, of: &str) -> Error {
        let cause = Cause::of_backing_file(file.to_owned(), &self.message, self.cause());
        self.context(format_args!("backing file '{file}'{of}")).because(cause)
    }

    /// A file cannot be opened.
    ///
    /// * `what`: `the image ` or nothing.
    pub(crate) fn not_opened(what: &str, file: &str, errno: rustix::io::Errno) -> Error {
        let cause = ringdisk_storage::Cause::NotOpened {
            file: file.to_owned(),
            why: why(errno),
            is_missing: errno == rustix::io::Errno::NOENT,
        };
        Error::os(format_args!("cannot open {what}'{file}'"), errno).because(Cause::Storage(cause))
    }

    /// An error of the operating system while `doing` was being done.
    pub(crate) fn os(doing: impl fmt::Display, errno: rustix::io::Errno) -> Error {
        use rustix::io::Errno;
        let kind = match errno {
            Errno::NOENT | Errno::NOTDIR => ErrorKind::NotFound,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => ErrorKind::PermissionDenied,
            Errno::ISDIR | Errno::NXIO | Errno::NODEV => ErrorKind::NotAnImage,
            Errno::LOOP => ErrorKind::Loop,
            Errno::CANCELED => ErrorKind::Cancelled,
            _ => ErrorKind::Io,
        };
        let mut error = Error::new(kind, format!("{doing}: {}", why(errno)));
        error.errno = Some(errno);
        error
    }

    /// What went wrong.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What the operating system said, where it was that.
    pub fn errno(&self) -> Option<rustix::io::Errno> {
        self.errno
    }

    /// Notes what the operating system said.
    #[must_use]
    pub(crate) fn with_errno(mut self, errno: Option<rustix::io::Errno>) -> Error {
        self.errno = errno;
        self
    }

    /// Why, for programs that act on it or say it in words of their own.
    pub fn cause(&self) -> Option<&Cause> {
        self.cause.as_deref()
    }

    /// The message without the causes.
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// What the operating system says, and what the user can do.
fn why(errno: rustix::io::Errno) -> String {
    use rustix::io::Errno;
    let hint = match errno {
        Errno::MFILE => "; raise the limit with `ulimit -n`",
        Errno::ROFS => "; open it read-only",
        _ => "",
    };
    format!("{}{hint}", words(&io::Error::from(errno)))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.source {
            Some(source) => Some(source.as_ref()),
            None => None,
        }
    }
}
