//! The description of a job for another process: words, and descriptors with their roles.
//!
//! Promises: words say which images a job is about by their numbers, never by names that are
//! followed; what the process that described it may do is judged by descriptors and by the word of
//! a user ([`crate::helper::approval`]), since it may have been taken over.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_disk::{Disk, Layer, MirrorLeft};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::kind::Kind;
use crate::control::protocol::jobs::check_name;
use crate::control::protocol::{Backup, Mirror};
use crate::failure::{Exit, Failure};

/// Digits of a token.
const TOKEN_LEN_MAX: usize = 16;

/// Device and inode number; `None`: the image is no file of this machine.
pub(in crate::control) type Id = Option<(u64, u64)>;

/// What a job does, with numbers of layers from the top down.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::control) enum WorkWords {
    /// The uppermost layer that is merged, and the one that it is merged into.
    Commit { top: usize, base: usize },
    /// The layer that becomes the backing file; `None`: none does.
    Stream { base: Option<usize> },
    /// As the client said it.
    Mirror(Box<Mirror>),
    /// The same. It is described so that the next process can say that it was lost.
    Backup(Box<Backup>),
    /// Nothing any more: so that the next process can say how it ended.
    Ended(Box<EndedWords>),
}

/// How a job ended.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::control) struct EndedWords {
    /// A word of [`Kind`].
    pub(in crate::control) kind: String,
    pub(in crate::control) what: String,
    /// Its exit code; 0: it has done its work.
    pub(in crate::control) exit: u8,
    /// What it gave.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(in crate::control) value: Value,
    /// Why it failed, and what the user can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::control) why: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::control) hint: Option<String>,
}

impl EndedWords {
    pub(in crate::control) fn result(&self) -> Result<Value, Failure> {
        if self.exit == 0 {
            return Ok(self.value.clone());
        }
        let why = self.why.clone().unwrap_or_default();
        let failure = Failure::new(Exit::General, why).with_code(self.exit);
        Err(match &self.hint {
            Some(hint) => failure.hint(hint.clone()),
            None => failure,
        })
    }
}

/// What the target of a mirror does not have.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::control) struct LeftWords {
    first: Vec<(u64, u64)>,
    changed: Vec<(u64, u64)>,
    is_new: bool,
}

impl From<MirrorLeft> for LeftWords {
    fn from(left: MirrorLeft) -> LeftWords {
        LeftWords { first: left.first, changed: left.changed, is_new: left.is_new }
    }
}

impl From<LeftWords> for MirrorLeft {
    fn from(left: LeftWords) -> MirrorLeft {
        MirrorLeft { first: left.first, changed: left.changed, is_new: left.is_new }
    }
}

/// What a descriptor is.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(in crate::control) enum Role {
    /// The word of the user, for the helper process.
    Word,
    /// The end of it that the user keeps, as long as the job runs.
    Kept,
    /// A file of the target of a mirror.
    Target,
}

/// The description of a job.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct JobWords {
    pub(in crate::control) id: String,
    /// As of [`Job::token`](super::Job::token); empty: the process before knew none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(in crate::control) token: String,
    pub(in crate::control) work: WorkWords,
    /// The images of the disk when the job began, the top one first.
    pub(in crate::control) chain: Vec<Id>,
    pub(in crate::control) speed: u64,
    pub(in crate::control) on_error: String,
    pub(in crate::control) paused: bool,
    /// A mirror was told to end; true: by a switch-over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::control) pivot: Option<bool>,
    /// Of a mirror that stands still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::control) left: Option<LeftWords>,
    /// As [`ringdisk_disk::HandOver::description`], of the target of a mirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::control) target: Option<String>,
    /// What each descriptor is.
    #[serde(default)]
    pub(in crate::control) roles: Vec<Role>,
    /// The process that ran it was killed, and nobody knows what it was doing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::control) was_killed: bool,
}

impl JobWords {
    pub(in crate::control) fn new(id: &str, work: WorkWords, chain: Vec<Id>) -> JobWords {
        JobWords {
            id: id.to_owned(),
            token: String::new(),
            work,
            chain,
            speed: 0,
            on_error: String::new(),
            paused: false,
            pivot: None,
            left: None,
            target: None,
            roles: Vec::new(),
            was_killed: false,
        }
    }

    /// What it does.
    pub(in crate::control) fn kind(&self) -> Kind {
        match &self.work {
            WorkWords::Ended(ended) => Kind::of(&ended.kind),
            WorkWords::Commit { .. } => Kind::Commit,
            WorkWords::Stream { .. } => Kind::Stream,
            WorkWords::Mirror(_) => Kind::Mirror,
            WorkWords::Backup(_) => Kind::Backup,
        }
    }

    /// Errors: why it makes no sense here.
    pub(super) fn check(&self) -> Result<(), String> {
        let is_token = |byte: u8| byte.is_ascii_hexdigit();
        if self.token.len() > TOKEN_LEN_MAX || !self.token.bytes().all(is_token) {
            return Err(String::from("its token is none"));
        }
        check_name(&self.id)
    }

    /// The disk has this chain now: numbers of layers are those of it. A commit whose images it
    /// has not stays as it is, so that [`JobWords::stands`] tells.
    pub(in crate::control) fn chain_is(&mut self, now: &[Id]) {
        if let WorkWords::Commit { top, base } = &mut self.work {
            let Some(place) = place_now((*top, *base), &self.chain, now) else { return };
            (*top, *base) = place;
        }
        self.chain = now.to_vec();
    }

    /// What the chain tells of a job that was stopped, or whose process was killed.
    ///
    /// * `now`: the images that the disk has.
    pub(in crate::control) fn stands(&self, now: &[Id]) -> Stands {
        let has_same_top = now.first() == self.chain.first();
        match self.work {
            // It goes by no numbers of layers, and a commit below the top may have ended beside it.
            WorkWords::Mirror(_) if has_same_top => Stands::GoesOn,
            // Its last step keeps the top: a mirror beside it has switched over.
            WorkWords::Commit { top, .. } if top > 0 && !has_same_top => Stands::Displaced,
            // Another commit below the top may have ended beside it.
            WorkWords::Commit { top, base }
                if top > 0 && place_now((top, base), &self.chain, now).is_some() =>
            {
                Stands::GoesOn
            }
            _ if now == self.chain => Stands::GoesOn,
            _ => Stands::Done,
        }
    }
}

/// Where the images of a commit are after commits of others have ended: all of them, one below the
/// other as they were. `None`: they are not there.
///
/// * `top`, `base`: the first and the last one in the chain `then`.
/// * `now`: the chain as it is.
pub(in crate::control) fn place_now(
    (top, base): (usize, usize),
    then: &[Id],
    now: &[Id],
) -> Option<(usize, usize)> {
    if then == now {
        return Some((top, base));
    }
    let images = then.get(top..=base).filter(|images| images.iter().all(Option::is_some))?;
    let at = now.windows(images.len()).position(|part| part == images)?;
    Some((at, at + base - top))
}

/// How a job stands that another process has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::control) enum Stands {
    /// Something is left to do.
    GoesOn,
    /// Its last step was made.
    Done,
    /// Its images are not where they were, by another job.
    Displaced,
}

/// The images of a disk by their numbers, the top one first.
pub(in crate::control) fn chain_of(disk: &Disk) -> Vec<Id> {
    ids_of(&disk.layers())
}

/// As [`chain_of`], of these images.
pub(in crate::control) fn ids_of(layers: &[Arc<Layer>]) -> Vec<Id> {
    layers.iter().map(|layer| layer.file().and_then(|file| file.identity())).collect()
}

/// A job on its way to another process.
#[derive(Debug)]
pub struct HandedJob {
    pub(in crate::control) words: JobWords,
    pub(in crate::control) descriptors: Vec<OwnedFd>,
}

impl HandedJob {
    /// A job of a process that was killed. `None`: its description makes no sense.
    ///
    /// * `descriptors`: as its roles say; those that were not kept are missing.
    pub fn found(mut words: JobWords, descriptors: Vec<Option<OwnedFd>>) -> Option<HandedJob> {
        if let Err(why) = words.check() {
            tracing::warn!("a job of the process before does not go on: {why}");
            return None;
        }
        words.was_killed = true;
        // What stood still was another process.
        (words.left, words.target) = (None, None);
        let roles = std::mem::take(&mut words.roles);
        let both = roles.into_iter().zip(descriptors);
        let both = both.filter(|(role, _)| *role != Role::Target);
        let (roles, descriptors) =
            both.filter_map(|(role, descriptor)| Some((role, descriptor?))).unzip();
        words.roles = roles;
        Some(HandedJob { words, descriptors })
    }

    /// Whether it goes on with what a mirror has left, for which changes have to be recorded
    /// ([`Disk::record_changes`]).
    pub fn needs_changes(&self) -> bool {
        self.words.left.is_some()
    }

    /// Whether it has ended, and is told of only.
    pub(in crate::control) fn has_ended(&self) -> bool {
        matches!(self.words.work, WorkWords::Ended(_))
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.words.id
    }

    /// The descriptors of a role.
    pub(in crate::control) fn take(&mut self, role: Role) -> Vec<OwnedFd> {
        let roles = std::mem::take(&mut self.words.roles);
        let all = std::mem::take(&mut self.descriptors);
        let mut taken = Vec::new();
        for (of, descriptor) in roles.into_iter().zip(all) {
            if of == role {
                taken.push(descriptor);
            } else {
                self.words.roles.push(of);
                self.descriptors.push(descriptor);
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_that_ends_beside_a_mirror_is_no_end_of_the_mirror() {
        let [old, below, base, target] = [1, 2, 3, 4].map(|inode| Some((1, inode)));
        let before = vec![old, below, base];
        let words = |work| JobWords::new("a", work, before.clone());
        let mirror = words(WorkWords::Mirror(Box::default()));
        let in_the_middle = words(WorkWords::Commit { top: 1, base: 2 });
        let of_the_top = words(WorkWords::Commit { top: 0, base: 1 });
        let stream = words(WorkWords::Stream { base: None });
        for job in [&mirror, &in_the_middle, &of_the_top, &stream] {
            assert_eq!(job.stands(&before), Stands::GoesOn, "{job:?}");
        }
        let committed = [old, base];
        assert_eq!(mirror.stands(&committed), Stands::GoesOn);
        assert_eq!(in_the_middle.stands(&committed), Stands::Done);
        assert_eq!(of_the_top.stands(&[below, base]), Stands::Done);
        assert_eq!(stream.stands(&[old]), Stands::Done);
        // Another commit below the top has ended, of images below these or above them.
        let [one, two, three] = [7, 8, 9].map(|number| Some((1, number)));
        let top = old;
        let long = vec![top, one, two, below, three, base];
        let all = |work| JobWords::new("a", work, long.clone());
        let upper = all(WorkWords::Commit { top: 1, base: 2 });
        let mut lower = all(WorkWords::Commit { top: 3, base: 5 });
        assert_eq!(upper.stands(&[top, one, two, base]), Stands::GoesOn);
        assert_eq!(lower.stands(&[top, one, two, base]), Stands::Done);
        assert_eq!(upper.stands(&[top, two, below, three, base]), Stands::Done);
        let now = [top, two, below, three, base];
        assert_eq!(lower.stands(&now), Stands::GoesOn);
        lower.chain_is(&now);
        assert_eq!(lower.work, WorkWords::Commit { top: 2, base: 4 });
        assert_eq!(lower.chain, now);
        assert_eq!(lower.stands(&now), Stands::GoesOn);
        // Its images were taken apart, or nobody knows which these are.
        assert_eq!(place_now((1, 2), &long, &[top, one, three, two, base]), None);
        assert_eq!(place_now((0, 1), &[None, None], &[None]), None);
        assert_eq!(place_now((0, 1), &[None, None], &[None, None]), Some((0, 1)));
        let mut done = all(WorkWords::Commit { top: 1, base: 2 });
        done.chain_is(&[top, two, base]);
        assert_eq!((done.chain.len(), done.stands(&[top, two, base])), (6, Stands::Done));
        for switched in [&[target][..], &[target, below, base]] {
            assert_eq!(mirror.stands(switched), Stands::Done);
            assert_eq!(in_the_middle.stands(switched), Stands::Displaced);
        }
    }
}
