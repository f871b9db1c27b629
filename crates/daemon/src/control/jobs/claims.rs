//! What a job works on, and which jobs of one disk may run at once.
//!
//! Promises: pure. Two jobs that run at once never write an image that the other one needs, and at
//! most one of them changes or records the chain from the image on top on:
//! - a backup runs beside each other job: it reads the state of one instant;
//! - a mirror runs beside commits of images below the one on top, since the disk reads the same
//!   then;
//! - two such commits run at once where none merges, or writes, an image that the other one does;
//! - a stream down to an image that stays runs beside commits of images below that one;
//! - nothing else runs beside another job.

/// Commits of images below the one on top that run at once, as
/// [`ringdisk_disk::Disk::commit`] allows.
pub(super) const BELOW_MAX: usize = 2;

/// Which part of the chain a job works on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Span {
    /// From the image on top on: a commit of that one, a stream of everything.
    #[default]
    Whole,
    /// From the image on top down to one that stays: a stream.
    Upper,
    /// Images below the one on top: a commit of those.
    Below,
    /// The content, whatever the images are: a mirror.
    Content,
    /// The content at one instant: a backup.
    Instant,
}

/// What a job works on; images by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Of the chain.
    pub span: Span,
    /// What it writes, or empties.
    pub writes: Vec<String>,
    /// What nothing else may write meanwhile.
    pub needs: Vec<String>,
}

impl Claims {
    /// The image over which two jobs would meet.
    pub(super) fn clash<'a>(&'a self, other: &'a Claims) -> Option<&'a str> {
        let meet = |writes: &'a [String], one: &'a Claims| {
            writes.iter().find(|image| one.needs.contains(image) || one.writes.contains(image))
        };
        meet(&self.writes, other).or_else(|| meet(&other.writes, self)).map(String::as_str)
    }

    /// Whether a job on this part may run beside one on the other.
    pub(super) fn is_beside(&self, other: Span) -> bool {
        match (self.span, other) {
            (Span::Instant, other) | (other, Span::Instant) => other != Span::Instant,
            (Span::Below, Span::Content | Span::Below | Span::Upper) => true,
            (Span::Content | Span::Upper, Span::Below) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Span; 5] = [Span::Whole, Span::Upper, Span::Below, Span::Content, Span::Instant];

    fn claims(span: Span, writes: &[&str], needs: &[&str]) -> Claims {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Claims { span, writes: owned(writes), needs: owned(needs) }
    }

    #[test]
    fn a_backup_runs_beside_all_and_a_mirror_or_a_stream_beside_commits_below_the_top() {
        for (at, one) in ALL.into_iter().enumerate() {
            for (other_at, other) in ALL.into_iter().enumerate() {
                let pair = (at.min(other_at), at.max(other_at));
                let may = matches!(pair, (0..=3, 4) | (1..=2, 2) | (2, 3));
                assert_eq!(claims(one, &[], &[]).is_beside(other), may, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn jobs_meet_where_one_writes_what_the_other_needs() {
        let commit = claims(Span::Below, &["mid", "base"], &["mid", "base"]);
        let apart = claims(Span::Content, &["copy"], &["copy", "other"]);
        assert_eq!((commit.clash(&apart), apart.clash(&commit)), (None, None));
        let stream = |base| claims(Span::Upper, &["top"], &["top", "other", base]);
        assert_eq!(stream("above").clash(&commit), None);
        assert_eq!(stream("mid").clash(&commit), Some("mid"));
        let over = claims(Span::Instant, &["copy"], &["copy", "base"]);
        assert_eq!(commit.clash(&over), Some("base"));
        assert_eq!(over.clash(&commit), Some("base"));
        let both_read = claims(Span::Content, &["other"], &["other", "base"]);
        assert_eq!(both_read.clash(&over), None, "both only read it");
    }
}
