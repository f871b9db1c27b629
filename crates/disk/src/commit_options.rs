//! What a commit merges, and how many run at once.
//!
//! Promises: plain values; whether the disk has such layers is checked where the commit begins.

/// Commits of layers below the top that may run at once.
pub(crate) const COMMITS_MAX: usize = 2;

/// Which layers are merged; indexes into [`Disk::layers`](crate::Disk::layers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitOptions {
    /// The uppermost layer that is merged; 0 is the top one.
    pub top: usize,
    /// The layer that it is merged into, with all between.
    pub base: usize,
    /// The merged layers are not emptied. They show a mixture once the base has changed, so this is
    /// for a disk that is closed after the commit.
    pub keep_top: bool,
}

impl CommitOptions {
    /// Merges the top layer into the one below.
    pub const TOP: CommitOptions = CommitOptions { top: 0, base: 1, keep_top: false };
}
