//! What an image lacks, for programs.
//!
//! Promises: plain values, to be matched by programs; the text for people is that of the error.

/// What was asked for and is not in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cause {
    /// There is no snapshot with that name or id.
    NoSnapshot {
        /// The name or id.
        wanted: String,
    },
    /// There is no such snapshot that could be opened in place of the disk.
    NoSnapshotToLoad,
    /// There is no such bitmap.
    NoBitmap {
        /// Its name.
        name: String,
    },
}
