//! Why a check ends early, as an error that does not name the file yet.
//!
//! Promises: each reason becomes an error with what the user can do.

use ringdisk_ring::Errno;

use crate::check::counts::OutOfMemory;
use crate::error::{Error, ErrorKind};

/// What can be done about an image that cannot even be checked.
const ADVICE: &str = "a check can go no further, and a repair cannot make it right: restore the \
                      image from a copy";

/// Why a check ended early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The storage reported an error while doing this.
    Io(&'static str, Errno),
    /// The caller wanted it.
    Cancelled,
    /// The image needs more memory than the limit allows.
    Memory,
    /// The storage cannot grow, and no cluster is free.
    Full,
    /// A structure that everything else depends on cannot be read.
    Corrupt(String),
    /// A ready message.
    Error(Error),
}

impl Stop {
    /// As [`into_error`](Stop::into_error), for the caller of a check: an open would advise to make
    /// one.
    pub(super) fn into_check_error(self, name: &str) -> Error {
        let error = self.into_error(name);
        if error.kind() == ErrorKind::Corrupt {
            return Error::new(ErrorKind::Corrupt, name, error.reason(), ADVICE);
        }
        error
    }

    /// The error for the caller, about the file `name`.
    pub(super) fn into_error(self, name: &str) -> Error {
        match self {
            Stop::Io(doing, errno) => Error::io(name, doing, errno),
            Stop::Cancelled => Error::new(
                ErrorKind::Cancelled,
                name,
                "the check was cancelled",
                "the image is as whole as it was; check it again when there is time",
            ),
            Stop::Memory => Error::new(
                ErrorKind::TooLarge,
                name,
                format!(
                    "the check needs more than {} MiB of memory to count the references of this \
                     image",
                    crate::limits::CHECK_BYTES_MAX >> 20
                ),
                "the image maps more clusters than any real one, or they lie scattered over a \
                 huge sparse file: copy its contents with `convert`",
            ),
            Stop::Full => Error::io(
                name,
                "placing new refcount structures on storage that cannot grow",
                Errno::NOSPC,
            ),
            Stop::Corrupt(reason) => Error::new(ErrorKind::Corrupt, name, reason, ADVICE),
            Stop::Error(error) => error,
        }
    }
}

impl From<OutOfMemory> for Stop {
    fn from(_: OutOfMemory) -> Stop {
        Stop::Memory
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Error(error)
    }
}
