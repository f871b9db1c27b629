//! A job as another process can go on with it: words, and descriptors with their roles.
//!
//! Promises: a description of another version, or one that makes no sense, is refused as a whole.
//! Words say which images a job is about by their numbers, never by names that are followed; what
//! the process that described it may do is judged by descriptors and by the word of a user
//! ([`crate::helper::approval`]), since it may have been taken over.

use std::os::fd::OwnedFd;

use ringdisk_disk::{Disk, MirrorLeft};
use ringdisk_export::HandOverState;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::job::Kind;
use super::words::check_name;
use crate::control::protocol::Mirror;

/// Changes when a field changes its meaning.
const VERSION: u32 = 1;
/// In the description of an export.
const KEY: &str = "jobs";

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
    version: u32,
    pub(super) id: String,
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
            version: VERSION,
            id: id.to_owned(),
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
        match self.work {
            WorkWords::Commit { .. } => Kind::Commit,
            WorkWords::Stream { .. } => Kind::Stream,
            WorkWords::Mirror(_) => Kind::Mirror,
        }
    }

    /// Errors: why it makes no sense here.
    fn check(&self) -> Result<(), String> {
        if self.version != VERSION {
            let version = self.version;
            return Err(format!("its version is {version}, this program knows {VERSION}"));
        }
        check_name(&self.id)
    }
}

/// The images of a disk by their numbers, the top one first.
pub(super) fn chain_of(disk: &Disk) -> Vec<Id> {
    let layers = disk.layers();
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

    /// Its name.
    pub fn id(&self) -> &str {
        &self.words.id
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
pub fn pack(state: &mut HandOverState, jobs: Vec<HandedJob>) -> Result<(), String> {
    if jobs.is_empty() {
        return Ok(());
    }
    let mut value: Value =
        serde_json::from_str(&state.description).map_err(|error| error.to_string())?;
    let object = value.as_object_mut().ok_or("the state of the export is no object")?;
    let mut words = Vec::new();
    for job in jobs {
        words.push(serde_json::to_value(&job.words).map_err(|error| error.to_string())?);
        state.fds.extend(job.descriptors);
    }
    object.insert(KEY.to_owned(), Value::Array(words));
    state.description = value.to_string();
    Ok(())
}

/// Takes the jobs out of the state of an export.
///
/// Errors: they are of another version, or make no sense.
pub fn unpack(state: &mut HandOverState) -> Result<Vec<HandedJob>, String> {
    let Ok(mut value) = serde_json::from_str::<Value>(&state.description) else {
        // Whoever reads the state says so.
        return Ok(Vec::new());
    };
    let Some(words) = value.as_object_mut().and_then(|object| object.remove(KEY)) else {
        return Ok(Vec::new());
    };
    let all: Vec<JobWords> =
        serde_json::from_value(words).map_err(|error| format!("a job cannot be read ({error})"))?;
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
        pack(&mut state, Vec::new()).expect("packed");
        assert_eq!(state.description, description, "without jobs nothing is added");
        let jobs = vec![handed("a", &[Role::Word, Role::Kept]), handed("b", &[Role::Target])];
        let words: Vec<JobWords> = jobs.iter().map(|job| job.words.clone()).collect();
        pack(&mut state, jobs).expect("packed");
        assert_eq!(state.fds.len(), 4);
        let mut found = unpack(&mut state).expect("unpacked");
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
            pack(&mut state, vec![job]).expect("packed");
            state
        };
        assert!(unpack(&mut state(&|_| ())).is_ok());
        let changes: [&dyn Fn(&mut JobWords); 3] =
            [&|words| words.version += 1, &|words| words.id = String::from("a b"), &|words| {
                words.roles.push(Role::Kept);
            }];
        for change in changes {
            assert!(unpack(&mut state(change)).is_err());
        }
    }
}
