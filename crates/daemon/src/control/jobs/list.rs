//! The jobs of one disk.
//!
//! Promises: names are unique among the jobs that are listed; a job that changes an image is not
//! begun while another one holds that image. Any thread; takes a lock for a moment.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::job::{Job, NewJob, State};
use super::words::check_name;
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

/// Jobs that have ended and are listed still.
pub const KEPT_MAX: usize = 16;

/// The jobs of one disk.
#[derive(Debug, Default)]
pub struct Jobs(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    /// The oldest first.
    jobs: VecDeque<Arc<Job>>,
    /// Jobs that were begun so far, for their names.
    begun: u64,
    /// The disk ends: none is begun any more.
    is_over: bool,
}

impl Jobs {
    /// A panic elsewhere leaves it valid, so poison is ignored.
    fn list(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a new job into the list.
    ///
    /// Errors: its name is taken or none; another job holds one of its images; the disk ends.
    pub fn begin(&self, mut new: NewJob) -> Result<Arc<Job>, Failure> {
        let mut list = self.list();
        if list.is_over {
            return Err(Failure::new(Exit::Halted, "the disk ends, so no job is begun"));
        }
        if let Some(job) = list.holder(&new.holds) {
            return Err(held_by(&job, &new.holds));
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

    /// Whether a change of these images may be made now.
    ///
    /// Errors: a job holds one of them, or other images of the chain: the disk makes one change of
    /// its chain at a time.
    pub fn check_free(&self, images: &[String]) -> Result<(), Failure> {
        let list = self.list();
        match list.holder(images).or_else(|| list.running().next().cloned()) {
            Some(job) => Err(held_by(&job, images)),
            None => Ok(()),
        }
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
    fn running(&self) -> impl Iterator<Item = &Arc<Job>> {
        self.jobs.iter().filter(|job| job.state() != State::Concluded)
    }

    /// The job that holds one of these images.
    fn holder(&self, images: &[String]) -> Option<Arc<Job>> {
        let holds = |job: &&Arc<Job>| job.holds().iter().any(|held| images.contains(held));
        self.running().find(holds).cloned()
    }

    /// Drops the oldest of those that have ended, down to [`KEPT_MAX`].
    fn forget(&mut self) {
        let ended = |job: &Arc<Job>| job.state() == State::Concluded;
        let mut surplus = self.jobs.iter().filter(|job| ended(job)).count();
        self.jobs.retain(|job| {
            let goes = surplus > KEPT_MAX && ended(job);
            surplus -= usize::from(goes);
            !goes
        });
    }
}

/// A job is in the way.
///
/// * `images`: what was to be changed.
fn held_by(job: &Job, images: &[String]) -> Failure {
    let (id, kind) = (job.id(), job.kind().word());
    let why = match job.holds().iter().find(|held| images.contains(held)) {
        Some(image) => format!("holds the image {image}"),
        None => String::from("is changing the chain of the disk"),
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
