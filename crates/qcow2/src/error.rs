//! The error of the control path, such as opening an image.
//!
//! Promises: a kind for programs, one sentence for people (which file, which field, which value,
//! why, what to do), and the cause where the system reported one. The data path reports
//! [`Errno`](ringdisk_ring::Errno) only.

use std::borrow::Cow;
use std::fmt;

use crate::cause::Cause;

/// What sort of failure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file does not start like a qcow2 image.
    NotQcow2,
    /// The image breaks the specification, is truncated, or is marked corrupt and was to be
    /// written.
    Corrupt,
    /// The image, or what was asked for, needs a feature that ringdisk does not have.
    Unsupported,
    /// The image is encrypted.
    Encrypted,
    /// A table is larger than the limits allow.
    TooLarge,
    /// The storage reported an error.
    Io,
    /// The caller asked for something that does not fit this image.
    InvalidRequest,
    /// The caller ended a long operation.
    Cancelled,
}

/// Why an image could not be opened.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    file: String,
    reason: String,
    advice: Cow<'static, str>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
    cause: Option<Box<Cause>>,
}

impl Error {
    /// * `file`: name of the image as the user knows it.
    /// * `reason`: what is wrong, with field and value.
    /// * `advice`: what the user can do.
    pub(crate) fn new(
        kind: ErrorKind,
        file: &str,
        reason: impl Into<String>,
        advice: impl Into<Cow<'static, str>>,
    ) -> Error {
        Error {
            kind,
            file: file.to_owned(),
            reason: reason.into(),
            advice: advice.into(),
            source: None,
            cause: None,
        }
    }

    /// The image breaks the specification.
    pub(crate) fn corrupt(file: &str, reason: impl Into<String>) -> Error {
        Error::new(
            ErrorKind::Corrupt,
            file,
            reason,
            "the image is damaged or truncated: look at it with `ringdisk check`, or restore it \
             from a copy",
        )
    }

    /// A table is over its limit.
    pub(crate) fn too_large(file: &str, reason: impl Into<String>) -> Error {
        Error::new(
            ErrorKind::TooLarge,
            file,
            reason,
            "no known program writes such an image, so it is damaged or made to exhaust memory; \
             restore it from a copy",
        )
    }

    /// The storage reported `source` while `doing`.
    pub(crate) fn io(file: &str, doing: &str, source: ringdisk_ring::Errno) -> Error {
        Error {
            source: Some(Box::new(std::io::Error::from(source))),
            ..Error::new(
                ErrorKind::Io,
                file,
                format!("{doing} failed"),
                "check the disk or file system that holds the image (see the kernel log)",
            )
        }
    }

    /// Whether the storage, or what the user may take of it, is full.
    pub fn is_out_of_space(&self) -> bool {
        use ringdisk_ring::Errno;
        let cause = self.source.as_ref().and_then(|source| source.downcast_ref::<std::io::Error>());
        let errno = cause.and_then(std::io::Error::raw_os_error);
        errno.is_some_and(|errno| {
            [Errno::NOSPC, Errno::DQUOT].contains(&Errno::from_raw_os_error(errno))
        })
    }

    /// Adds what is missing, for programs.
    pub(crate) fn because(mut self, cause: Cause) -> Error {
        self.cause = Some(Box::new(cause));
        self
    }

    /// What is missing, where that is what is wrong.
    pub fn cause(&self) -> Option<&Cause> {
        self.cause.as_deref()
    }

    /// The sort of failure.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Name of the image file.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// What is wrong: field, value and rule.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// What the user can do about it.
    pub fn advice(&self) -> &str {
        &self.advice
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}': {}; {}", self.file, self.reason, self.advice)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
