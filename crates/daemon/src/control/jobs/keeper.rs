//! What is kept of jobs outside of the process, so that the next one goes on with them when this
//! one is killed (`--keep-mount`, `serve --keep`).
//!
//! Promises: a job in the background is kept from its beginning to its end, with its limit and its
//! pause as they are; one in the foreground ends with its client, and so with the process. A
//! failure to keep one is logged: it is gone then when the process is killed. Control thread.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use super::description::{Id, JobWords, Role};
use super::job::Job;
use super::user_word::UserWord;

/// Where it is kept.
pub trait JobKeeper: Send + Sync + fmt::Debug {
    /// Keeps a descriptor. Gives its number.
    ///
    /// Errors: it is not kept.
    fn park(&self, descriptor: BorrowedFd<'_>) -> io::Result<u64>;

    /// Lets go of a descriptor.
    fn release(&self, number: u64);

    /// Keeps the jobs from now on, each with the numbers of its descriptors.
    fn write(&self, jobs: Vec<KeptJob>);
}

/// A job as it is kept.
#[derive(Clone, Debug, serde::Deserialize, PartialEq, Eq, serde::Serialize)]
pub struct KeptJob {
    /// Its description.
    pub words: JobWords,
    /// The numbers of its descriptors, as its roles say.
    pub numbers: Vec<u64>,
}

/// The jobs that are kept.
#[derive(Debug)]
pub(super) struct KeptJobs {
    keeper: Box<dyn JobKeeper>,
    jobs: Mutex<Vec<(Arc<Job>, KeptJob)>>,
}

impl KeptJobs {
    pub(super) fn new(keeper: Box<dyn JobKeeper>) -> KeptJobs {
        KeptJobs { keeper, jobs: Mutex::default() }
    }

    /// Writes them as they are.
    fn write(&self) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on =
            jobs.iter().filter(|(job, _)| !job.has_ended() && !job.progress().is_cancelled());
        let now = |(job, kept): &(Arc<Job>, KeptJob)| {
            let mut kept = kept.clone();
            let roles = std::mem::take(&mut kept.words.roles);
            kept.words = job.words(kept.words.work, kept.words.chain);
            kept.words.roles = roles;
            kept
        };
        self.keeper.write(goes_on.map(now).collect());
    }

    /// Keeps a job that begins.
    pub(super) fn keep(&self, job: &Arc<Job>, mut words: JobWords, word: &UserWord) {
        let mut numbers = Vec::new();
        for (role, descriptor) in [(Role::Word, &word.given), (Role::Kept, &word.kept)] {
            let Some(descriptor) = descriptor else { continue };
            match self.keeper.park(descriptor.as_fd()) {
                Ok(number) => {
                    numbers.push(number);
                    words.roles.push(role);
                }
                Err(error) => tracing::warn!(
                    "the word of the user for job {} is not kept, so it may not go on when this \
                     process is killed: {error}",
                    job.id()
                ),
            }
        }
        let new = (Arc::clone(job), KeptJob { words, numbers });
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).push(new);
        self.write();
    }

    /// A job has ended, and may have changed the chain: those that go on are of the new one, unless
    /// they have just changed it, too, and with it the image on top. A process that is killed
    /// before this has kept the chain of before: [`JobWords::stands`] knows that.
    pub(super) fn chain_is(&self, chain: &[Id]) {
        {
            let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
            let goes_on = jobs.iter_mut().filter(|(job, _)| !job.has_ended());
            let same = goes_on.filter(|(_, kept)| kept.words.chain.first() == chain.first());
            same.for_each(|(_, kept)| kept.words.chain_is(chain));
        }
        self.keep_changes();
    }

    /// A job was changed, or has ended: what is kept of it is, too.
    pub(super) fn keep_changes(&self) {
        self.write();
        let gone: Vec<_> = {
            let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
            let gone = jobs.extract_if(.., |(job, _)| job.has_ended());
            gone.flat_map(|(_, kept)| kept.numbers).collect()
        };
        gone.into_iter().for_each(|number| self.keeper.release(number));
    }
}
