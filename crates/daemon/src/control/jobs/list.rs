//! The jobs of one disk.
//!
//! Promises: names are unique among the jobs that are listed; a job is not begun while another one
//! has to do with an image that either writes ([`Claims`]). Any thread; takes a lock for a moment.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ringdisk_disk::Progress;

use super::claims::{BELOW_MAX, Claims, Span};
use super::description::{HandedJob, Id, JobWords};
use super::job::{Job, NewJob, State};
use super::keeper::{JobKeeper, KeptJobs};
use super::user_word::UserWord;
use crate::control::protocol::jobs::check_name;
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

/// How long jobs may take to stand still; the disk does so already.
const STANDING: Duration = Duration::from_secs(5);
/// How often it is looked whether they do.
const STANDING_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Jobs that have ended and are listed still.
pub const KEPT_MAX: usize = 16;

/// The jobs of one disk.
#[derive(Debug, Default)]
pub struct Jobs(Mutex<List>, OnceLock<KeptJobs>);

#[derive(Debug, Default)]
struct List {
    /// The oldest first.
    jobs: VecDeque<Arc<Job>>,
    /// Jobs that were begun so far, for their names.
    begun: u64,
    /// The disk ends: none is begun any more.
    is_over: bool,
    /// The disk is being handed over: none is begun or changed.
    is_moving: bool,
    /// Those of the process before that are about to be begun, as far as they are known.
    coming: Vec<Arc<Job>>,
}

/// The jobs of a disk that is being handed over; they go on here when this is dropped.
#[derive(Debug)]
pub struct Moving<'a> {
    all: &'a Jobs,
    jobs: Vec<Arc<Job>>,
    has_moved: bool,
}

impl Moving<'_> {
    /// What they are controlled by, for [`ringdisk_disk::Disk::suspend_for_hand_over`].
    pub fn progresses(&self) -> Vec<Arc<Progress>> {
        self.jobs.iter().map(|job| Arc::clone(job.progress())).collect()
    }

    /// Has all stop, and waits for that. Gives those that have not ended, and how the others have.
    /// Blocks.
    ///
    /// Errors: one does not stop in time, or cannot be handed over.
    pub fn stand_still(&self) -> Result<Vec<HandedJob>, String> {
        let end = Instant::now() + STANDING;
        self.jobs.iter().for_each(|job| job.progress().suspend());
        let mut handed = Vec::new();
        for job in &self.jobs {
            loop {
                if job.state() == State::Concluded {
                    break;
                }
                if let Some(still) = job.take_handed() {
                    let what = |why| format!("its job '{}' cannot be handed over: {why}", job.id());
                    handed.push(still.map_err(what)?);
                    break;
                }
                if Instant::now() >= end {
                    return Err(format!("its job '{}' does not stop", job.id()));
                }
                std::thread::sleep(STANDING_POLL_INTERVAL);
            }
        }
        let ended = self.all.all().into_iter().filter_map(|job| job.ended_words());
        handed.extend(ended.map(|words| HandedJob { words, descriptors: Vec::new() }));
        Ok(handed)
    }

    /// The other process goes on with them.
    ///
    /// * `process`: its pid; 0: the system does not tell.
    pub fn have_moved(mut self, process: i32) {
        self.has_moved = true;
        let under_way = self.jobs.iter().filter(|job| job.state() != State::Concluded);
        under_way.for_each(|job| job.move_to(process));
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        if !self.has_moved {
            self.all.list().is_moving = false;
            self.jobs.iter().for_each(|job| job.goes_on());
        }
    }
}

impl Jobs {
    /// Keeps jobs there from now on; once.
    pub fn keep_at(&self, keeper: Box<dyn JobKeeper>) {
        let _ = self.1.set(KeptJobs::new(keeper));
    }

    /// Keeps a job that begins, as [`KeptJobs::keep`].
    pub(in crate::control) fn keep(&self, job: &Arc<Job>, words: JobWords, word: &UserWord) {
        if let Some(kept) = self.kept() {
            kept.keep(job, words, word);
        }
    }

    /// A job has ended, and may have changed the chain, as [`KeptJobs::chain_is`].
    pub(in crate::control) fn chain_is(&self, chain: &[Id]) {
        if let Some(kept) = self.kept() {
            kept.chain_is(chain);
        }
    }

    /// A job was changed, or has ended: what is kept of it is, too.
    pub(in crate::control) fn keep_changes(&self) {
        if let Some(kept) = self.kept() {
            kept.keep_changes();
        }
    }

    fn kept(&self) -> Option<&KeptJobs> {
        self.1.get()
    }

    /// A panic elsewhere leaves it valid, so poison is ignored.
    fn list(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a new job into the list.
    ///
    /// Errors: its name is taken or none; another job holds one of its images; the disk ends; jobs
    /// of the process before come first.
    pub fn begin(&self, mut new: NewJob) -> Result<Arc<Job>, Failure> {
        let mut list = self.list();
        if list.is_over {
            return Err(Failure::new(Exit::Halted, "the disk ends, so no job is begun"));
        }
        if list.is_moving {
            return Err(moving());
        }
        if new.before.is_none() {
            list.check_came()?;
        }
        if let Some((job, image)) = list.clash(&new.claims) {
            return Err(held_by(&job, Some(&image)));
        }
        let is_taken = |list: &List, name: &str| list.jobs.iter().any(|job| job.id() == name);
        let id = match new.name.take() {
            Some(name) => {
                check_name(&name).map_err(|why| Failure::new(Exit::Usage, why))?;
                if is_taken(&list, &name) {
                    let text = format!("there is a job '{name}' already");
                    return Err(Failure::new(Exit::Usage, text).hint("give it another name"));
                }
                name
            }
            None => loop {
                list.begun += 1;
                let name = format!("{}-{}", new.kind.word(), list.begun);
                if !is_taken(&list, &name) {
                    break name;
                }
            },
        };
        let job = Arc::new(Job::new(id, new));
        list.jobs.push_back(Arc::clone(&job));
        list.forget();
        Ok(job)
    }

    /// All of them, and those of the process before that are about to be begun, as they will be.
    pub(super) fn listed(&self) -> Vec<Arc<Job>> {
        let list = self.list();
        let is_here = |id: &str| list.jobs.iter().any(|job| job.id() == id);
        let coming = list.coming.iter().filter(|job| !is_here(job.id()));
        list.jobs.iter().chain(coming).cloned().collect()
    }

    /// All of them, the oldest first.
    pub fn all(&self) -> Vec<Arc<Job>> {
        self.list().jobs.iter().cloned().collect()
    }

    /// Those that have not ended.
    pub fn running(&self) -> Vec<Arc<Job>> {
        self.list().running().cloned().collect()
    }

    /// The job of a name.
    ///
    /// Errors: there is none.
    pub fn find(&self, id: &str) -> Result<Arc<Job>, Failure> {
        let list = self.list();
        list.jobs.iter().find(|job| job.id() == id).cloned().ok_or_else(|| {
            let names: Vec<&str> = list.jobs.iter().map(|job| job.id()).collect();
            let hint = match names.as_slice() {
                [] => String::from("the disk has had no job since it is served"),
                names => format!("its jobs are {}", names.join(", ")),
            };
            Failure::new(Exit::Usage, format!("the disk has no job '{}'", visible(id))).hint(hint)
        })
    }

    /// Whether a job with these claims may begin now.
    ///
    /// Errors: it may not run beside one that is running ([`Claims`]).
    pub fn check_beside(&self, claims: &Claims) -> Result<(), Failure> {
        let list = self.list();
        if let Some((job, image)) = list.clash(claims) {
            return Err(held_by(&job, Some(&image)));
        }
        let below = list.running().filter(|job| job.claims().span == Span::Below).count();
        let is_full = claims.span == Span::Below && below >= BELOW_MAX;
        let in_the_way = list.running().find(|job| {
            let span = job.claims().span;
            !claims.is_beside(span) || is_full && span == Span::Below
        });
        in_the_way.map_or(Ok(()), |job| Err(held_by(job, None)))
    }

    /// Whether a command may change the disk now: a backup is not in its way.
    ///
    /// Errors: another job is running, or about to go on.
    pub fn check_free(&self) -> Result<(), Failure> {
        let list = self.list();
        list.check_came()?;
        let in_the_way = list.running().find(|job| job.claims().span != Span::Instant);
        in_the_way.map_or(Ok(()), |job| Err(held_by(job, None)))
    }

    /// The disk is about to be handed over, and its jobs with it. Blocks for a moment: those of the
    /// process before have to go on here first.
    ///
    /// Errors: they do not in time.
    pub fn begin_move(&self) -> Result<Moving<'_>, Failure> {
        let end = Instant::now() + STANDING;
        let jobs: Vec<_> = loop {
            let mut list = self.list();
            match list.check_came() {
                Err(failure) if !list.is_over && Instant::now() >= end => return Err(failure),
                Err(_) if !list.is_over => {}
                _ => {
                    list.is_moving = true;
                    break list.running().cloned().collect();
                }
            }
            drop(list);
            std::thread::sleep(STANDING_POLL_INTERVAL);
        };
        // They may have to go on first after a hand-over that was given up.
        let end = Instant::now() + STANDING;
        for job in &jobs {
            while job.progress().is_suspended() && !job.has_ended() && Instant::now() < end {
                std::thread::sleep(STANDING_POLL_INTERVAL);
            }
            job.await_verdict();
        }
        Ok(Moving { all: self, jobs, has_moved: false })
    }

    /// Those of the process before are about to be begun.
    pub(in crate::control) fn are_to_come(&self, jobs: &[HandedJob]) {
        let coming = jobs.iter().map(|job| Arc::new(job.to_come())).collect();
        self.list().coming = coming;
    }

    /// All of them have been begun, or do not go on.
    pub(in crate::control) fn have_come(&self) {
        self.list().coming.clear();
    }

    /// Whether those of the process before are about to be begun.
    pub(super) fn are_coming(&self) -> bool {
        let list = self.list();
        !list.is_over && !list.coming.is_empty()
    }

    /// Whether one of this name is about to be begun.
    pub(super) fn is_coming(&self, id: &str) -> bool {
        let list = self.list();
        let is_here = || list.jobs.iter().any(|job| job.id() == id);
        !list.is_over && list.coming.iter().any(|job| job.id() == id) && !is_here()
    }

    /// Errors: those of the process before are about to be begun.
    pub(in crate::control) fn check_came(&self) -> Result<(), Failure> {
        self.list().check_came()
    }

    /// Errors: the disk is being handed over, or was.
    pub fn check_stays(&self) -> Result<(), Failure> {
        if self.list().is_moving { Err(moving()) } else { Ok(()) }
    }

    /// Cancels all. Any thread.
    pub fn cancel(&self) {
        for job in self.running() {
            job.progress().cancel();
        }
    }

    /// Cancels all, for good: none is begun any more.
    pub fn end(&self) {
        self.list().is_over = true;
        self.cancel();
    }
}

impl List {
    /// Errors: those of the process before are about to be begun.
    fn check_came(&self) -> Result<(), Failure> {
        if self.coming.is_empty() {
            return Ok(());
        }
        let text = "jobs of the process before are about to go on";
        Err(Failure::new(Exit::Locked, text).hint("try it again in a moment"))
    }

    fn running(&self) -> impl Iterator<Item = &Arc<Job>> {
        self.jobs.iter().filter(|job| !job.has_ended())
    }

    /// A job that has an image to do with which these claims have, too, and the image.
    fn clash(&self, claims: &Claims) -> Option<(Arc<Job>, String)> {
        self.running().find_map(|job| {
            let image = claims.clash(job.claims())?;
            Some((Arc::clone(job), image.to_owned()))
        })
    }

    /// Drops the oldest of those that have ended, down to [`KEPT_MAX`].
    fn forget(&mut self) {
        let ended = |job: &Arc<Job>| job.has_ended();
        let mut surplus = self.jobs.iter().filter(|job| ended(job)).count();
        self.jobs.retain(|job| {
            let goes = surplus > KEPT_MAX && ended(job);
            surplus -= usize::from(goes);
            !goes
        });
    }
}

/// The disk is on its way to another process.
fn moving() -> Failure {
    Failure::new(Exit::Locked, "another process takes the disk over at this moment")
        .hint("try it again in a moment")
}

/// A job is in the way.
///
/// * `image`: over which both meet.
fn held_by(job: &Job, image: Option<&str>) -> Failure {
    let (id, kind) = (job.id(), job.kind().word());
    let why = match (image, job.claims().span) {
        (Some(image), ..) => format!("holds the image {image}"),
        (None, Span::Instant) => {
            String::from("keeps a point in time of the disk, which has one at a time")
        }
        (None, Span::Content) => String::from(
            "copies the disk; beside it only a backup, or commits of images below the one on top, \
             may run",
        ),
        (None, Span::Below) => String::from(
            "is changing the chain of the disk; beside it only a backup, a mirror, a stream down \
             to an image above, or one more commit of other images below the one on top may run",
        ),
        (None, Span::Upper) => String::from(
            "is changing the chain of the disk; beside it only a backup, or commits of images \
             below its base, may run",
        ),
        (None, Span::Whole) => {
            String::from("is changing the chain of the disk; beside it only a backup may run")
        }
    };
    let hint = match job.state() {
        State::Ready => format!(
            "`ringdisk job complete {id}` switches over to the copy, `ringdisk job cancel {id}` \
             leaves it"
        ),
        _ => format!(
            "`ringdisk job wait {id}` waits for its end, `ringdisk job cancel {id}` gives it up"
        ),
    };
    Failure::new(Exit::Locked, format!("the job '{id}' ({kind}, {}) {why}", job.state().word()))
        .hint(hint)
}
