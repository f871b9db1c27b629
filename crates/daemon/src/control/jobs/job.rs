//! One job: what it is, how far it is, and how it ended.
//!
//! Promises: any thread may look; a look takes a lock for a moment and never waits for the job. A
//! job ends once, and its result stays.

use std::future::poll_fn;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ringdisk_disk::{Errno, MirrorControl, Pause, Progress};
use serde_json::{Value, json};

use super::claims::Claims;
use super::description::{EndedWords, HandedJob, Id, JobWords, WorkWords};
use super::kind::Kind;
use crate::control::protocol::jobs::ON_ERROR;
use crate::failure::{Exit, Failure};

/// The rate is that of the last so much to twice as much time.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// How a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It was begun, and has done nothing yet.
    Created,
    /// It works.
    Running,
    /// It rests.
    Paused,
    /// A mirror whose target is in step.
    Ready,
    /// It was cancelled, and puts things back.
    Aborting,
    /// Another process goes on with it.
    Moved,
    /// It has ended.
    Concluded,
}

/// How a hand-over has ended for a job that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Another process goes on with it.
    Moved,
    /// It goes on here.
    GoesOn,
}

impl State {
    /// The word for programs.
    pub fn word(self) -> &'static str {
        match self {
            State::Created => "created",
            State::Running => "running",
            State::Paused => "paused",
            State::Ready => "ready",
            State::Aborting => "aborting",
            State::Moved => "moved",
            State::Concluded => "concluded",
        }
    }
}

/// What a new job is.
#[derive(Clone, Debug)]
pub struct NewJob {
    /// A name that the user gave; `None`: one is made.
    pub name: Option<String>,
    /// The token that it has in the process before, which has begun it, empty where that knew none;
    /// `None`: it is begun here.
    pub before: Option<String>,
    /// What it does.
    pub kind: Kind,
    /// What it does with what, for people: `'a' into 'b'`.
    pub what: String,
    /// The images that nothing else may change meanwhile, by their names.
    pub holds: Vec<String>,
    /// What it works on.
    pub claims: Claims,
    /// What it counts in, and is controlled by.
    pub progress: Arc<Progress>,
    /// Of a mirror.
    pub mirror: Option<Arc<MirrorControl>>,
}

/// A job.
#[derive(Debug)]
pub struct Job {
    id: String,
    token: String,
    kind: Kind,
    what: String,
    holds: Vec<String>,
    claims: Claims,
    progress: Arc<Progress>,
    mirror: Option<Arc<MirrorControl>>,
    since: SystemTime,
    /// The name of its disk in the log.
    disk: OnceLock<String>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    result: Option<Ended>,
    /// It stands still, with what another process needs, or why it cannot be handed over.
    still: Option<Result<HandedJob, String>>,
    verdict: Option<Verdict>,
    /// The process that goes on with it.
    moved_to: Option<i32>,
    /// Moments and what was done by then; the older one first.
    marks: [(Instant, u64); 2],
    waiting: Vec<Waker>,
}

/// How a job ended.
#[derive(Clone, Debug)]
struct Ended {
    at: SystemTime,
    /// What it gives; or why it failed: exit code, text, and what the user can do.
    result: Result<Value, (u8, String, Option<String>)>,
}

impl Job {
    pub(super) fn new(id: String, new: NewJob) -> Job {
        let mark = (Instant::now(), new.progress.done().0);
        let (still, verdict, moved_to) = (None, None, None);
        let (result, marks, waiting) = (None, [mark; 2], Vec::new());
        let inner = Inner { result, still, verdict, moved_to, marks, waiting };
        let NewJob { before, kind, what, holds, claims, progress, mirror, .. } = new;
        let token = before.filter(|token| !token.is_empty()).unwrap_or_else(new_token);
        let since = SystemTime::now();
        Job {
            id,
            token,
            kind,
            what,
            holds,
            claims,
            progress,
            mirror,
            since,
            disk: OnceLock::new(),
            inner: Mutex::new(inner),
        }
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What no other job has, and this one keeps in the next process: names are used again.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// What it does.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What it does with what, for people.
    pub fn what(&self) -> &str {
        &self.what
    }

    /// Says what the log calls its disk; once.
    pub(in crate::control) fn is_of(&self, disk: String) {
        let _ = self.disk.set(disk);
    }

    /// What the log calls its disk.
    pub(super) fn disk(&self) -> &str {
        self.disk.get().map_or("", String::as_str)
    }

    /// The images that nothing else may change meanwhile.
    pub fn holds(&self) -> &[String] {
        &self.holds
    }

    /// What it works on.
    pub(super) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// What it is controlled by.
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// What a mirror is completed by.
    pub fn mirror(&self) -> Option<&Arc<MirrorControl>> {
        self.mirror.as_ref()
    }

    /// Waits until a mirror is ready. Other jobs never are.
    pub(super) async fn ready(&self) {
        let is_ready = match &self.mirror {
            Some(mirror) => mirror.ready().await,
            None => false,
        };
        if !is_ready {
            std::future::pending::<()>().await;
        }
    }

    /// A panic elsewhere leaves it valid, so poison is ignored.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it is.
    pub fn state(&self) -> State {
        let inner = self.inner();
        if inner.result.is_some() {
            return if inner.moved_to.is_some() { State::Moved } else { State::Concluded };
        }
        drop(inner);
        if self.progress.is_cancelled() {
            return State::Aborting;
        }
        match (self.progress.paused(), self.progress.total().0) {
            (Some(_), _) => State::Paused,
            (None, _) if self.mirror.as_ref().is_some_and(|it| it.is_ready()) => State::Ready,
            (None, 0) => State::Created,
            (None, _) => State::Running,
        }
    }

    /// Whether it has ended here.
    pub fn has_ended(&self) -> bool {
        self.inner().result.is_some()
    }

    /// Why it rests or has failed, or where it goes on, for people.
    pub fn why(&self) -> Option<String> {
        let inner = self.inner();
        if let Some(process) = inner.moved_to {
            return Some(format!("it goes on in process {process}"));
        }
        if let Some(ended) = &inner.result {
            return ended.result.as_ref().err().map(|(_, text, _)| text.clone());
        }
        drop(inner);
        match self.progress.paused()? {
            Pause::Asked => None,
            Pause::Full(errno) => Some(format!("waiting for space on the target: {}", text(errno))),
            Pause::Error(errno) => Some(format!("cannot write: {}", text(errno))),
        }
    }

    /// Whether it rests since its target is full, and tries again by itself.
    pub(super) fn waits_for_space(&self) -> bool {
        matches!(self.progress.paused(), Some(Pause::Full(_)))
    }

    /// It has ended, with this result. Wakes those who wait.
    pub(in crate::control) fn conclude(&self, result: &Result<Value, Failure>) {
        let result = match result {
            Ok(value) => Ok(value.clone()),
            Err(failure) => Err((
                failure.code(),
                failure.message().to_owned(),
                failure.hint_text().map(str::to_owned),
            )),
        };
        let mut inner = self.inner();
        inner.result.get_or_insert(Ended { at: SystemTime::now(), result });
        inner.waiting.drain(..).for_each(Waker::wake);
    }

    /// Its result, when it has ended. A task that stops waiting leaves its waker behind until then.
    ///
    /// Errors: why it failed.
    pub async fn ended(&self) -> Result<Value, Failure> {
        poll_fn(|context| {
            let mut inner = self.inner();
            if let Some(ended) = &inner.result {
                return Poll::Ready(ended.result.clone());
            }
            if !inner.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                inner.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await
        .map_err(|(code, text, hint)| {
            let failure = Failure::new(Exit::General, text).with_code(code);
            match hint {
                Some(hint) => failure.hint(hint),
                None => failure,
            }
        })
    }

    /// What another process has to know of it.
    ///
    /// * `chain`: the images of the disk.
    pub(in crate::control) fn words(&self, work: WorkWords, chain: Vec<Id>) -> JobWords {
        let on_error = self.progress.on_error();
        let on_error = ON_ERROR.iter().find(|(_, known)| *known == on_error);
        let mut words = JobWords::new(&self.id, work, chain);
        words.token.clone_from(&self.token);
        words.speed = self.progress.speed();
        words.on_error = on_error.map_or_else(String::new, |(word, _)| (*word).to_owned());
        words.paused = self.progress.paused() == Some(Pause::Asked);
        words.pivot = self.mirror.as_ref().and_then(|mirror| mirror.wanted());
        words
    }

    /// How it ended, for another process; `None`: it has not, or elsewhere.
    pub(super) fn ended_words(&self) -> Option<JobWords> {
        let inner = self.inner();
        let ended = inner.result.as_ref().filter(|_| inner.moved_to.is_none())?;
        let mut words = EndedWords {
            kind: self.kind.word().to_owned(),
            what: self.what.clone(),
            ..EndedWords::default()
        };
        match &ended.result {
            Ok(value) => words.value = value.clone(),
            Err((exit, why, hint)) => {
                (words.exit, words.why, words.hint) = (*exit, Some(why.clone()), hint.clone());
            }
        }
        drop(inner);
        let mut words = JobWords::new(&self.id, WorkWords::Ended(Box::new(words)), Vec::new());
        words.token.clone_from(&self.token);
        Some(words)
    }

    /// It has stopped for a hand-over.
    pub(super) fn stand_still(&self, handed: Result<HandedJob, String>) {
        self.inner().still = Some(handed);
    }

    /// What another process needs to go on with it; `None`: it does not stand still yet.
    ///
    /// Errors (inside): why it cannot be handed over.
    pub(super) fn take_handed(&self) -> Option<Result<HandedJob, String>> {
        self.inner().still.take()
    }

    /// A hand-over begins: what came of an earlier one does not count.
    pub(super) fn await_verdict(&self) {
        let mut inner = self.inner();
        (inner.still, inner.verdict) = (None, None);
    }

    /// It goes on here.
    pub(super) fn goes_on(&self) {
        let mut inner = self.inner();
        (inner.still, inner.verdict) = (None, Some(Verdict::GoesOn));
    }

    /// Another process goes on with it. Wakes those who wait.
    ///
    /// * `process`: its pid; 0: the system does not tell.
    pub(super) fn move_to(&self, process: i32) {
        let told = json!({
            "id": self.id,
            "token": self.token,
            "state": State::Moved.word(),
            "process": process,
        });
        {
            let mut inner = self.inner();
            (inner.still, inner.verdict) = (None, Some(Verdict::Moved));
            inner.moved_to.get_or_insert(process);
        }
        self.conclude(&Ok(told));
    }

    /// How the hand-over has ended for which it stands still.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        self.inner().verdict
    }

    /// Whether another process goes on with it.
    pub fn has_moved(&self) -> bool {
        self.inner().moved_to.is_some()
    }

    /// Forgets the rate: the job was paused, resumed or limited.
    pub(super) fn mark(&self) {
        self.inner().marks = [(Instant::now(), self.progress.done().0); 2];
    }

    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        if self.state() != State::Running {
            return 0.0;
        }
        let (now, done) = (Instant::now(), self.progress.done().0);
        let mut inner = self.inner();
        let [(from, was), last] = inner.marks;
        if now.saturating_duration_since(last.0) >= RATE_WINDOW {
            inner.marks = [last, (now, done)];
        }
        #[allow(clippy::cast_precision_loss)] // Shown to people.
        let bytes = done.saturating_sub(was) as f64;
        match now.saturating_duration_since(from).as_secs_f64() {
            0.0 => 0.0,
            seconds => bytes / seconds,
        }
    }

    /// For programs.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn to_json(&self) -> Value {
        let (state, rate, why) = (self.state(), self.rate(), self.why());
        let (done, total) = (self.progress.done().0, self.progress.total().0);
        let left = total.saturating_sub(done) as f64;
        let estimate = (rate >= 1.0 && total > 0).then(|| (left / rate).round() as u64);
        let on_error = self.progress.on_error();
        let on_error = ON_ERROR.iter().find(|(_, known)| *known == on_error);
        let ended = self.inner().result.clone();
        let exit = ended.as_ref().map(|ended| ended.result.as_ref().map_or_else(|it| it.0, |_| 0));
        json!({
            "id": self.id,
            "token": self.token,
            "kind": self.kind.word(),
            "what": self.what,
            "state": state.word(),
            "why": why,
            "done": done,
            "total": total,
            "rate": rate.round() as u64,
            "estimate-seconds": estimate,
            "speed": self.progress.speed(),
            "on-error": on_error.map(|(word, _)| *word),
            "holds": self.holds,
            "since": seconds(self.since),
            "ended": ended.map(|ended| seconds(ended.at)),
            "exit": exit,
        })
    }
}

/// An error, for people.
fn text(errno: Errno) -> String {
    let error = std::io::Error::from_raw_os_error(errno.raw_os_error());
    crate::failure::words(&error)
}

/// A token: 64 random bits, from where hash tables have theirs.
fn new_token() -> String {
    format!("{:016x}", RandomState::new().hash_one(SystemTime::now()))
}

/// Seconds since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
