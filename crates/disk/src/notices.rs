//! What happens to a disk without an error of a client that names it: a fault of its images, and
//! limits that begin to hold requests back.
//!
//! Promises: nothing here is on the path of a request. A thread that watches the disk looks when a
//! client got an error, and each second while there are limits; several of them tell each thing
//! once.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use ringdisk_throttle::{Limits, Waits};

/// Limits that held nobody back for so long, and do so now, are news.
const QUIET: Duration = Duration::from_secs(10);

/// Something that was noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// An image takes no more changes, and why.
    Fault(String),
    /// Requests wait for these limits.
    Limited(String),
}

/// What was noticed of a disk so far.
#[derive(Debug, Default)]
pub(crate) struct Notices(Mutex<Noticed>);

#[derive(Debug, Default)]
struct Noticed {
    fault: Option<String>,
    /// Requests that had waited for limits at the last look.
    waits: u64,
    /// When a look last found some that waited.
    limited_at: Option<Instant>,
    /// Threads that watch the disk.
    watchers: Vec<Thread>,
}

impl Notices {
    fn lock(&self) -> MutexGuard<'_, Noticed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This thread looks from now on.
    pub(crate) fn add(&self, watcher: &Thread) {
        self.lock().watchers.push(watcher.clone());
    }

    /// This thread looks no longer.
    pub(crate) fn remove(&self, watcher: &Thread) {
        self.lock().watchers.retain(|one| one.id() != watcher.id());
    }

    /// There may be limits now: the threads find out.
    pub(crate) fn wake(&self) {
        self.lock().watchers.iter().for_each(Thread::unpark);
    }

    /// What is new since the last look of any thread.
    ///
    /// * `fault`: that of the disk now.
    /// * `limits`, `waits`: its limits, and how much requests waited for them.
    pub(crate) fn take(&self, fault: Option<String>, limits: &Limits, waits: Waits) -> Vec<Notice> {
        let mut noticed = self.lock();
        let mut new = Vec::new();
        if fault != noticed.fault {
            new.extend(fault.clone().map(Notice::Fault));
            noticed.fault = fault;
        }
        if waits.now > 0 || waits.requests > noticed.waits {
            let is_news = noticed.limited_at.is_none_or(|at| at.elapsed() >= QUIET);
            noticed.limited_at = Some(Instant::now());
            if is_news {
                new.push(Notice::Limited(limits.to_string()));
            }
        }
        noticed.waits = waits.requests;
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thing_is_told_once() {
        let (notices, limits) = (Notices::default(), Limits::default());
        let waits = |requests, now| Waits { requests, now, ..Waits::default() };
        assert_eq!(notices.take(None, &limits, waits(0, 0)), []);
        let limited = Notice::Limited(limits.to_string());
        assert_eq!(notices.take(None, &limits, waits(0, 1)), [limited]);
        assert_eq!(notices.take(None, &limits, waits(9, 3)), []);
        let fault = || Some(String::from("damaged"));
        let told = notices.take(fault(), &limits, waits(9, 0));
        assert_eq!(told, [Notice::Fault(String::from("damaged"))]);
        assert_eq!(notices.take(fault(), &limits, waits(9, 0)), []);
    }
}
