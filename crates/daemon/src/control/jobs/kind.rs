//! The kinds of jobs.
//!
//! Promises: each has one word, for programs, for people and for names of jobs.

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Merges images into one below them.
    Commit,
    /// Fills the image on top from images below it.
    Stream,
    /// Copies the disk to a target.
    Mirror,
    /// Copies the state of one instant to a target.
    Backup,
}

impl Kind {
    /// Of its word; that of a newer program counts as a commit.
    pub(super) fn of(word: &str) -> Kind {
        let known = [Kind::Commit, Kind::Stream, Kind::Mirror, Kind::Backup];
        known.into_iter().find(|kind| kind.word() == word).unwrap_or(Kind::Commit)
    }

    /// The word for programs and names.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Commit => "commit",
            Kind::Stream => "stream",
            Kind::Mirror => "mirror",
            Kind::Backup => "backup",
        }
    }
}
