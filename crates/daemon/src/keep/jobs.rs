//! What is kept of the jobs of a kept mount, or of a kept disk of a virtual machine.
//!
//! Promises: the words of users are with the process that keeps the mount before the state names
//! them; what no state names any more is let go of. The next process uses a job as
//! [`crate::control::jobs::handed`] says: its description counts little. Control path.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use super::StateFile;
use super::held::LATE;
use crate::control::jobs::HandedJob;
use crate::control::jobs::keeper::{JobKeeper, KeptJob};
use crate::notify::Notify;

/// The first number of a descriptor of a job: an export numbers its own from 1 on.
const FIRST: u64 = 1 << 48;

/// Whether a descriptor that comes and goes is one of a job.
pub(super) fn is_of_job(number: u64) -> bool {
    number >= FIRST
}

/// Whether a descriptor was kept. Also where the helper process has ended: then the mount or disk
/// is served on without being kept.
///
/// Errors: it was not kept, for another reason.
pub(super) fn kept_or_alone(stored: io::Result<()>) -> io::Result<()> {
    let is_gone = |error: &io::Error| {
        matches!(Errno::from_io_error(error), Some(Errno::PIPE | Errno::CONNRESET))
    };
    stored.or_else(|error| if is_gone(&error) { Ok(()) } else { Err(error) })
}

/// Keeps the jobs of one disk.
#[derive(Debug)]
pub struct KeptJobs {
    notify: Arc<Notify>,
    disk: usize,
    state: StateFile,
    next: AtomicU64,
    /// Descriptors of the process before, which the next state no longer names.
    old: Mutex<Vec<u64>>,
}

impl KeptJobs {
    /// * `disk`: its number; 0 of a mount.
    /// * `state`: of its images.
    pub fn new(notify: &Arc<Notify>, disk: usize, state: StateFile) -> KeptJobs {
        // Numbers that the process before has used are taken.
        let used = state.state().into_iter().flat_map(|state| state.jobs);
        let used = used.flat_map(|job| job.numbers).filter(|number| is_of_job(*number)).max();
        let next = used.map_or(FIRST, |used| used.saturating_add(1));
        let (notify, next, old) = (Arc::clone(notify), AtomicU64::new(next), Mutex::default());
        KeptJobs { notify, disk, state, next, old }
    }

    fn name(&self, number: u64) -> String {
        format!("{LATE}{}-{number}", self.disk)
    }

    /// The jobs of the process before. They stay kept as they are until [`JobKeeper::write`].
    ///
    /// * `parked`: descriptors by their numbers.
    pub fn found(&self, parked: Vec<(u64, OwnedFd)>) -> Vec<HandedJob> {
        let jobs = self.state.state().map(|state| state.jobs).unwrap_or_default();
        let mut parked: HashMap<u64, OwnedFd> = parked.into_iter().collect();
        *self.old.lock().unwrap_or_else(PoisonError::into_inner) = parked.keys().copied().collect();
        let found = jobs.into_iter().filter_map(|KeptJob { words, numbers }| {
            let descriptors = numbers.iter().map(|number| parked.remove(number)).collect();
            HandedJob::found(words, descriptors)
        });
        found.collect()
    }
}

impl JobKeeper for KeptJobs {
    fn park(&self, descriptor: BorrowedFd<'_>) -> io::Result<u64> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        kept_or_alone(self.notify.store(&self.name(number), descriptor))?;
        Ok(number)
    }

    fn release(&self, number: u64) {
        self.notify.unstore(&self.name(number));
    }

    fn write(&self, jobs: Vec<KeptJob>) {
        let Some(mut state) = self.state.state() else { return };
        state.jobs = jobs;
        if let Err(failure) = self.state.write(state) {
            tracing::warn!("{}; jobs end with this process", failure.message());
        }
        let old = std::mem::take(&mut *self.old.lock().unwrap_or_else(PoisonError::into_inner));
        old.into_iter().for_each(|number| self.release(number));
    }
}
