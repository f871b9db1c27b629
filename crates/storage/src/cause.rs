//! Why storage could not be opened, for programs.
//!
//! Promises: has what a program needs to act on the error, or to say it in words of its own; the
//! text for people is that of the [`Error`](crate::Error).

/// Why storage could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// Another process uses the file in a way that excludes ours.
    InUse {
        /// Name of the file, as the user knows it.
        file: String,
        /// How that process uses it.
        by: OtherUse,
    },
    /// There is no such file, it may not be opened, or the system or the server refuses it.
    NotOpened {
        /// Name of the file, as the user knows it.
        file: String,
        /// Why, in words.
        why: String,
        /// There is no file of that name.
        is_missing: bool,
    },
    /// The file system has no direct I/O.
    NoDirectIo {
        /// Name of the file, as the user knows it.
        file: String,
    },
    /// A directory was named in place of a file.
    IsDirectory {
        /// Its name, as the user knows it.
        file: String,
    },
}

/// How another process uses an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherUse {
    /// It writes, so reading shows bytes that change.
    Writes,
    /// It shares the image with readers only.
    NoOtherWriter,
    /// It shares the image with nobody.
    Alone,
}
