//! Jobs of a walk: a commit, a stream, a mirror or a backup that runs as a task, and what happens
//! to it.

use ringdisk_qcow2::Bytes;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_testkit::process::patient;

use super::{LIMIT, SIZE_MAX, Walk};
use crate::{CommitOptions, Disk, Errno, Error, ErrorKind, Progress, ResizeOptions};

/// What becomes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Ends,
    /// It is given up at some moment, and may have ended before.
    Cancelled,
}

/// A job that runs.
pub(super) struct Running<T> {
    pub(super) progress: Arc<Progress>,
    ended: Rc<RefCell<Option<Result<T, Error>>>>,
}

impl<T> Running<T> {
    pub(super) fn is_over(&self) -> bool {
        self.ended.borrow().is_some()
    }
}

impl Walk {
    pub(super) fn fate(&mut self) -> Fate {
        if self.prng.below(3) == 0 { Fate::Cancelled } else { Fate::Ends }
    }

    /// Runs a job as a task, perhaps a slow one.
    pub(super) fn spawn<T: 'static, F: Future<Output = Result<T, Error>> + 'static>(
        &mut self,
        job: impl FnOnce(Arc<Disk>, ringdisk_ring::Ring, Arc<Progress>) -> F,
    ) -> Running<T> {
        let progress = Arc::new(Progress::new());
        if self.prng.below(3) == 0 {
            progress.set_speed(20 << 20);
        }
        let running = Running { progress: Arc::clone(&progress), ended: Rc::default() };
        let slot = Rc::clone(&running.ended);
        let job = job(Arc::clone(&self.disk), self.ring.clone(), progress);
        self.ring.spawn(async move {
            let result = job.await;
            *slot.borrow_mut() = Some(result);
        });
        running
    }

    /// Waits for the end of a job.
    pub(super) async fn end<T>(&self, job: &Running<T>) -> Result<T, Error> {
        let begun = Instant::now();
        loop {
            if let Some(result) = job.ended.borrow_mut().take() {
                return result;
            }
            assert!(begun.elapsed() < patient(LIMIT), "a job does not end");
            self.ring.sleep(Duration::from_micros(200)).await;
        }
    }

    /// What happens while a job runs: it rests, its speed changes, other changes are tried, and it
    /// is given up.
    pub(super) async fn meanwhile<T>(&mut self, job: &Running<T>, fate: Fate) {
        // A change before its beginning would be none meanwhile.
        let begun = Instant::now();
        while !job.is_over() && job.progress.total() == Bytes::ZERO {
            assert!(begun.elapsed() < patient(LIMIT), "a job does not begin");
            self.ring.sleep(Duration::from_micros(200)).await;
        }
        for _ in 0..self.prng.below(4) {
            if job.is_over() {
                return;
            }
            match self.prng.below(5) {
                0 => {
                    job.progress.pause();
                    self.some().await;
                    job.progress.resume();
                }
                1 => job.progress.set_speed([0, 5 << 20, 50 << 20][self.below(3)]),
                2 => self.try_others().await,
                3 => self.lengthen().await,
                _ => self.some().await,
            }
        }
        job.progress.set_speed(0);
        if fate == Fate::Cancelled {
            job.progress.cancel();
        }
    }

    /// Changes that a job is in the way of; where it has just ended they are made.
    async fn try_others(&mut self) {
        let size = (self.bytes.len() + (1 << 20)).min(SIZE_MAX);
        let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        match self.disk.resize_with(&self.ring, Bytes::of(size), options).await {
            Ok(_) => self.bytes.resize(size, 0),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
        }
        // One that is not possible anyway.
        let none = CommitOptions { top: 90, base: 91, keep_top: false };
        let error = self.disk.commit(&self.ring, none, &Arc::default()).await;
        let kind = error.expect_err("no such layers").kind();
        assert!(matches!(kind, ErrorKind::Busy | ErrorKind::Invalid), "{kind:?}");
    }

    /// A client makes the disk longer, which is not possible during a mirror.
    async fn lengthen(&mut self) {
        let size = (self.bytes.len() + (64 << 10)).min(SIZE_MAX);
        match self.disk.grow(&self.ring, Bytes::of(size)).await {
            Ok(()) => self.bytes.resize(self.bytes.len().max(size), 0),
            Err(errno) => assert_eq!(errno, Errno::BUSY),
        }
    }

    /// A job that was to end has ended well; one that was given up has done so or ended before.
    /// Returns whether it was made.
    pub(super) fn judge<T>(&self, fate: Fate, result: Result<T, Error>) -> Option<T> {
        match (fate, result) {
            (_, Ok(value)) => Some(value),
            (Fate::Cancelled, Err(error)) => {
                assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
                None
            }
            (Fate::Ends, Err(error)) => panic!("{error}"),
        }
    }
}
