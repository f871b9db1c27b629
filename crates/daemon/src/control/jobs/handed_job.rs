//! Jobs on their way to another process, in the state of the export that serves their disk.
//!
//! Promises: a description of another version, or one that makes no sense, is refused as a whole.

use std::sync::Arc;

use ringdisk_export::HandOverState;
use ringdisk_messages::state::Versions;
use serde_json::Value;

use super::claims::Claims;
use super::description::{HandedJob, JobWords, WorkWords};
use super::job::{Job, NewJob};
use crate::terminal::{shell_word, visible};

/// Of what is handed over of one job.
const VERSIONS: Versions = Versions::new(1, 1);
/// In the description of an export.
const KEY: &str = "jobs";
/// The same, of jobs that have ended.
const ENDED_KEY: &str = "ended-jobs";

impl JobWords {
    /// The job, for a list only.
    pub(in crate::control) fn listed(&self, what: String) -> NewJob {
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
}

impl HandedJob {
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
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::control::jobs::Kind;
    use crate::control::jobs::description::{EndedWords, Role};

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
}
