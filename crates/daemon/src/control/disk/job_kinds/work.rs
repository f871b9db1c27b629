//! What a job does, so that it can be begun, stopped for a hand-over, and begun again.
//!
//! Promises: work that was suspended has left the chain as it was; begun again it does what is
//! left. Control thread.

mod backup;
mod mirror;

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use ringdisk_disk::{CommitOptions, Disk, Error, ErrorKind, Layer, Progress, StreamOptions};
use ringdisk_ring::Ring;

use crate::control::jobs::description::{Id, JobWords, WorkWords, chain_of, ids_of, place_now};

pub(super) use backup::{BackupWork, LOST};
pub(super) use mirror::MirrorWork;

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a job does.
pub(super) enum Work {
    Commit(CommitWork),
    /// With what it says at its end.
    Stream(StreamOptions, String),
    Mirror(Box<MirrorWork>),
    Backup(Box<BackupWork>),
}

/// A commit.
pub(super) struct CommitWork {
    /// With numbers of layers of this chain; the disk may have another one after commits of others.
    pub(super) options: CommitOptions,
    pub(super) chain: Vec<Id>,
    /// What it says at its end.
    pub(super) text: String,
}

impl CommitWork {
    /// Gives the numbers that its layers have in a chain.
    ///
    /// Errors: `Busy` where another change has taken them apart.
    fn place(&self) -> impl FnOnce(&[Arc<Layer>]) -> Result<CommitOptions, Error> + use<> {
        let (options, then) = (self.options, self.chain.clone());
        move |layers| {
            let CommitOptions { top, base, keep_top } = options;
            let placed = place_now((top, base), &then, &ids_of(layers));
            let (top, base) = placed.ok_or_else(|| {
                let text = "another change came first, and its images are not as they were in the \
                            chain of the disk";
                Error::new(ErrorKind::Busy, text)
            })?;
            Ok(CommitOptions { top, base, keep_top })
        }
    }

    /// The same for another process, with the chain that the numbers are of.
    ///
    /// * `now`: the chain of the disk.
    fn words(&self, now: Vec<Id>) -> (WorkWords, Vec<Id>) {
        let CommitOptions { top, base, .. } = self.options;
        match place_now((top, base), &self.chain, &now) {
            Some((top, base)) => (WorkWords::Commit { top, base }, now),
            None => (WorkWords::Commit { top, base }, self.chain.clone()),
        }
    }
}

impl Work {
    /// For another process, with the chain of the disk that they are of.
    pub(super) fn words(&self, disk: &Disk) -> (WorkWords, Vec<Id>) {
        let chain = chain_of(disk);
        let words = match self {
            Work::Commit(commit) => return commit.words(chain),
            Work::Stream(options, _) => WorkWords::Stream { base: options.base },
            Work::Mirror(mirror) => WorkWords::Mirror(Box::new(mirror.wanted.clone())),
            Work::Backup(backup) => WorkWords::Backup(Box::new(backup.wanted.clone())),
        };
        (words, chain)
    }

    /// The job is begun: what the helper process holds for it stays until its end.
    pub(super) fn is_begun(&self) {
        match self {
            Work::Mirror(mirror) => mirror.is_begun(),
            Work::Backup(backup) => backup.is_begun(),
            Work::Commit(..) | Work::Stream(..) => {}
        }
    }

    /// Does it. Gives what it has done, for people.
    ///
    /// Errors: those of the disk.
    pub(super) async fn run(
        &mut self,
        disk: &Arc<Disk>,
        ring: &Ring,
        progress: &Arc<Progress>,
    ) -> Result<String, Error> {
        // On the heap: with all that they wait for they are large.
        let work: Boxed<'_, Result<String, Error>> = match self {
            Work::Commit(commit) => Box::pin(async move {
                let place = commit.place();
                disk.commit_placed(ring, place, progress).await.map(|()| commit.text.clone())
            }),
            Work::Stream(options, text) => Box::pin(async move {
                disk.stream(ring, *options, progress).await.map(|()| text.clone())
            }),
            Work::Mirror(mirror) => Box::pin(mirror.run(disk, ring, progress)),
            Work::Backup(backup) => Box::pin(backup.run(progress)),
        };
        work.await
    }

    /// After it was suspended: adds what another process needs to go on, and lets go of it.
    ///
    /// Errors: it cannot be handed over.
    pub(super) async fn hand_over(
        &mut self,
        ring: &Ring,
        words: &mut JobWords,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(), Error> {
        match self {
            Work::Mirror(mirror) => mirror.hand_over(ring, words, descriptors).await,
            Work::Commit(..) | Work::Stream(..) | Work::Backup(_) => Ok(()),
        }
    }

    /// It goes on here after all.
    ///
    /// Errors: the target of a mirror cannot be used any more; it is a backup.
    pub(super) async fn take_back(&mut self, ring: &Ring) -> Result<(), Error> {
        match self {
            Work::Mirror(mirror) => mirror.take_back(ring).await,
            Work::Backup(_) => Err(Error::new(ErrorKind::Busy, LOST)),
            Work::Commit(..) | Work::Stream(..) => Ok(()),
        }
    }
}
