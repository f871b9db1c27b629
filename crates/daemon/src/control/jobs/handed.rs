//! A job as another process can go on with it: words, and descriptors with their roles.
//!
//! Promises: a description of another version, or one that makes no sense, is refused as a whole.
//! Words say which images a job is about by their numbers, never by names that are followed; what
//! the process that described it may do is judged by descriptors and by the word of a user
//! ([`crate::helper::approval`]), since it may have been taken over.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_disk::{Disk, Layer, MirrorLeft};
use ringdisk_export::HandOverState;
use ringdisk_messages::state::Versions;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::claims::Claims;
use super::job::{Job, Kind, NewJob};
use super::words::check_name;
use crate::control::protocol::{Backup, Mirror};
use crate::failure::{Exit, Failure};
use crate::terminal::{shell_word, visible};

/// Of what is handed over of one job.
const VERSIONS: Versions = Versions::new(1, 1);
/// Digits of a token.
const TOKEN_LEN_MAX: usize = 16;
/// In the description of an export.
const KEY: &str = "jobs";
/// The same, of jobs that have ended.
const ENDED_KEY: &str = "ended-jobs";

/// Device and inode number; `None`: the image is no file of this machine.
pub(super) type Id = Option<(u64, u64)>;

/// What a job does, with numbers of layers from the top down.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum WorkWords {
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
pub(super) struct EndedWords {
    /// A word of [`Kind`].
    pub(super) kind: String,
    pub(super) what: String,
    /// Its exit code; 0: it has done its work.
    pub(super) exit: u8,
    /// What it gave.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub(super) value: Value,
    /// Why it failed, and what the user can do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) why: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) hint: Option<String>,
}

impl EndedWords {
    pub(super) fn result(&self) -> Result<Value, Failure> {
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
pub(super) struct LeftWords {
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
pub(super) enum Role {
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
    pub(super) id: String,
    /// As of [`super::job::Job::token`]; empty: the process before knew none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) token: String,
    pub(super) work: WorkWords,
    /// The images of the disk when the job began, the top one first.
    pub(super) chain: Vec<Id>,
    pub(super) speed: u64,
    pub(super) on_error: String,
    pub(super) paused: bool,
    /// A mirror was told to end; true: by a switch-over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) pivot: Option<bool>,
    /// Of a mirror that stands still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) left: Option<LeftWords>,
    /// As [`ringdisk_disk::HandOver::description`], of the target of a mirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) target: Option<String>,
    /// What each descriptor is.
    #[serde(default)]
    pub(super) roles: Vec<Role>,
    /// The process that ran it was killed, and nobody knows what it was doing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) was_killed: bool,
}

impl JobWords {
    pub(super) fn new(id: &str, work: WorkWords, chain: Vec<Id>) -> JobWords {
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
    pub(super) fn kind(&self) -> Kind {
        match &self.work {
            WorkWords::Ended(ended) => Kind::of(&ended.kind),
            WorkWords::Commit { .. } => Kind::Commit,
            WorkWords::Stream { .. } => Kind::Stream,
            WorkWords::Mirror(_) => Kind::Mirror,
            WorkWords::Backup(_) => Kind::Backup,
        }
    }

    /// The job, for a list only.
    pub(super) fn listed(&self, what: String) -> NewJob {
        NewJob {
            name: Some(self.id.clone()),
            before: Some(self.token.clone()),
            kind: self.kind(),
            what,
            holds: Vec::new(),
            claims: Claims::default(),
            progress: Arc::default(),
            mirror: None,
        }
    }

    /// Errors: why it makes no sense here.
    fn check(&self) -> Result<(), String> {
        let is_token = |byte: u8| byte.is_ascii_hexdigit();
        if self.token.len() > TOKEN_LEN_MAX || !self.token.bytes().all(is_token) {
            return Err(String::from("its token is none"));
        }
        check_name(&self.id)
    }

    /// The disk has this chain now: numbers of layers are those of it. A commit whose images it
    /// has not stays as it is, so that [`JobWords::stands`] tells.
    pub(super) fn chain_is(&mut self, now: &[Id]) {
        if let WorkWords::Commit { top, base } = &mut self.work {
            let Some(place) = place_now((*top, *base), &self.chain, now) else { return };
            (*top, *base) = place;
        }
        self.chain = now.to_vec();
    }

    /// What the chain tells of a job that was stopped, or whose process was killed.
    ///
    /// * `now`: the images that the disk has.
    pub(super) fn stands(&self, now: &[Id]) -> Stands {
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
pub(super) fn place_now(
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
pub(super) enum Stands {
    /// Something is left to do.
    GoesOn,
    /// Its last step was made.
    Done,
    /// Its images are not where they were, by another job.
    Displaced,
}

/// The images of a disk by their numbers, the top one first.
pub(super) fn chain_of(disk: &Disk) -> Vec<Id> {
    ids_of(&disk.layers())
}

/// As [`chain_of`], of these images.
pub(super) fn ids_of(layers: &[Arc<Layer>]) -> Vec<Id> {
    layers.iter().map(|layer| layer.file().and_then(|file| file.identity())).collect()
}

/// A job on its way to another process.
#[derive(Debug)]
pub struct HandedJob {
    pub(super) words: JobWords,
    pub(super) descriptors: Vec<OwnedFd>,
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

    /// How it is listed before it is begun.
    pub(super) fn to_come(&self) -> Job {
        let words = &self.words;
        let what = match &words.work {
            WorkWords::Mirror(wanted) => shell_word(&visible(&wanted.target)),
            WorkWords::Backup(wanted) => shell_word(&visible(&wanted.target)),
            WorkWords::Ended(ended) => visible(&ended.what),
            WorkWords::Commit { .. } | WorkWords::Stream { .. } => String::new(),
        };
        let job = Job::new(words.id.clone(), words.listed(what));
        job.progress().set_speed(words.speed);
        if words.paused {
            job.progress().pause();
        }
        job
    }

    /// The descriptors of a role.
    pub(super) fn take(&mut self, role: Role) -> Vec<OwnedFd> {
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

/// Adds jobs to the state of an export.
///
/// Errors: the state is no object.
///
/// * `disk`: its number among those of the export.
pub fn pack(state: &mut HandOverState, disk: usize, jobs: Vec<HandedJob>) -> Result<(), String> {
    if jobs.is_empty() {
        return Ok(());
    }
    let mut value: Value =
        serde_json::from_str(&state.description).map_err(|error| error.to_string())?;
    let object = value.as_object_mut().ok_or("the state of the export is no object")?;
    let (mut words, mut ended) = (Vec::new(), Vec::new());
    for job in jobs {
        let list = if job.has_ended() { &mut ended } else { &mut words };
        list.push(VERSIONS.to_value(&job.words).map_err(|error| error.to_string())?);
        state.fds.extend(job.descriptors);
    }
    object.insert(key(KEY, disk), Value::Array(words));
    if !ended.is_empty() {
        object.insert(key(ENDED_KEY, disk), Value::Array(ended));
    }
    state.description = value.to_string();
    Ok(())
}

/// Takes the jobs out of the state of an export.
///
/// Errors: they are of another version, or make no sense.
///
/// * `disk`: as for [`pack`]; the last one that was packed first.
pub fn unpack(state: &mut HandOverState, disk: usize) -> Result<Vec<HandedJob>, String> {
    let Ok(mut value) = serde_json::from_str::<Value>(&state.description) else {
        // The reader of the state says so.
        return Ok(Vec::new());
    };
    let Some(words) = value.as_object_mut().and_then(|object| object.remove(&key(KEY, disk)))
    else {
        return Ok(Vec::new());
    };
    let ended = value.as_object_mut().and_then(|object| object.remove(&key(ENDED_KEY, disk)));
    // They ended before those that go on.
    let all = [ended.unwrap_or_else(|| Value::Array(Vec::new())), words].map(listed);
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?.concat();
    all.iter().try_for_each(JobWords::check)?;
    let count: usize = all.iter().map(|words| words.roles.len()).sum();
    let at = state.fds.len().checked_sub(count);
    let at = at.ok_or_else(|| String::from("descriptors of its jobs are missing"))?;
    let mut fds = state.fds.split_off(at).into_iter();
    state.description = value.to_string();
    Ok(all
        .into_iter()
        .map(|words| {
            let descriptors = fds.by_ref().take(words.roles.len()).collect();
            HandedJob { words, descriptors }
        })
        .collect())
}

/// Errors: a list of jobs is none, or one of them is not understood.
fn listed(list: Value) -> Result<Vec<JobWords>, String> {
    let Value::Array(jobs) = list else { return Err(String::from("its jobs are no list")) };
    let read = |job| VERSIONS.from_value(job).map_err(|why| format!("a job: {why}"));
    jobs.into_iter().map(read).collect()
}

/// The name of a list in the description: the first disk's has none of its own.
fn key(name: &str, disk: usize) -> String {
    if disk == 0 { name.to_owned() } else { format!("{name}-{disk}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> OwnedFd {
        tempfile::tempfile().expect("a file").into()
    }

    fn handed(id: &str, roles: &[Role]) -> HandedJob {
        let work = WorkWords::Commit { top: 0, base: 1 };
        let mut words = JobWords::new(id, work, vec![Some((1, u64::MAX)), None]);
        words.roles = roles.to_vec();
        HandedJob { words, descriptors: roles.iter().map(|_| file()).collect() }
    }

    #[test]
    fn jobs_travel_with_their_descriptors_and_leave_the_state_as_it_was() {
        let description = String::from("{\"version\":1}");
        let mut state = HandOverState { description: description.clone(), fds: vec![file()] };
        pack(&mut state, 0, Vec::new()).expect("packed");
        assert_eq!(state.description, description, "without jobs nothing is added");
        let jobs = vec![handed("a", &[Role::Word, Role::Kept]), handed("b", &[Role::Target])];
        let words: Vec<JobWords> = jobs.iter().map(|job| job.words.clone()).collect();
        let mut jobs = jobs;
        let ended = EndedWords { kind: String::from("mirror"), ..EndedWords::default() };
        let old = JobWords::new("old", WorkWords::Ended(Box::new(ended)), Vec::new());
        jobs.push(HandedJob { words: old, descriptors: Vec::new() });
        pack(&mut state, 0, jobs).expect("packed");
        assert_eq!(state.fds.len(), 4);
        let mut found = unpack(&mut state, 0).expect("unpacked");
        let ended = found.remove(0);
        assert!(ended.has_ended() && ended.id() == "old", "{ended:?}");
        assert_eq!((ended.words.kind(), ended.descriptors.len()), (Kind::Mirror, 0));
        assert_eq!((&state.description, state.fds.len()), (&description, 1));
        assert_eq!(found.iter().map(|job| job.words.clone()).collect::<Vec<_>>(), words);
        assert_eq!(found[0].take(Role::Kept).len(), 1);
        assert_eq!((found[0].take(Role::Target).len(), found[0].descriptors.len()), (0, 1));
    }

    #[test]
    fn jobs_of_another_version_and_what_makes_no_sense_are_refused() {
        let state = |change: &dyn Fn(&mut JobWords)| {
            let mut job = handed("a", &[Role::Word]);
            change(&mut job.words);
            let description = String::from("{}");
            let mut state = HandOverState { description, fds: Vec::new() };
            pack(&mut state, 0, vec![job]).expect("packed");
            state
        };
        assert!(unpack(&mut state(&|_| ()), 0).is_ok());
        let changes: [&dyn Fn(&mut JobWords); 3] = [
            &|words| words.id = String::from("a b"),
            &|words| words.token = String::from("\u{1b}"),
            &|words| words.roles.push(Role::Kept),
        ];
        for change in changes {
            assert!(unpack(&mut state(change), 0).is_err());
        }
        let mut newer = state(&|_| ());
        newer.description = newer.description.replace("\"version\":1", "\"version\":2");
        let why = unpack(&mut newer, 0).expect_err("another version");
        assert_eq!(why, "a job: its version is 2, this program knows 1");
    }

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
