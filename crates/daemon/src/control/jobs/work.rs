//! What a job does, so that it can be begun, stopped for a hand-over, and begun again.
//!
//! Promises: work that was suspended has left the chain as it was; begun again it does what is
//! left. Control thread.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::name::is_export;
use ringdisk_disk::{
    CommitOptions, Disk, Error, ErrorKind, Format, Layer, MirrorControl, MirrorOptions, MirrorSync,
    Progress, StreamOptions,
};
use ringdisk_ring::Ring;

use super::backup::{BackupWork, LOST};
use super::begin::quoted_name;
use super::handed::{Id, JobWords, Role, WorkWords, chain_of, ids_of, place_now};
use super::mirror::{file_of, result_text};
use crate::confine::HeldForDisk;
use crate::control::protocol::Mirror;

/// How long the target of a mirror has to answer before a hand-over, and after one that was given
/// up.
const TARGET_ANSWER: Duration = Duration::from_secs(2);

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

/// A mirror.
pub(super) struct MirrorWork {
    /// As the client said it.
    pub(super) wanted: Mirror,
    pub(super) options: MirrorOptions,
    /// `None`: it is to be opened.
    pub(super) target: Option<Arc<Disk>>,
    pub(super) control: Arc<MirrorControl>,
    pub(super) held: Arc<HeldForDisk>,
    /// The images of the disk, for people.
    pub(super) old: Vec<String>,
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
            Work::Mirror(mirror) => {
                let file = mirror.target.as_deref().and_then(file_of);
                file.inspect(|id| mirror.held.begins_copy(*id));
            }
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
        let mirror = match self {
            Work::Mirror(mirror) => mirror,
            Work::Backup(_) => return Err(Error::new(ErrorKind::Busy, LOST)),
            Work::Commit(..) | Work::Stream(..) => return Ok(()),
        };
        if let Some(target) = &mirror.target {
            let resumed = ring.within(TARGET_ANSWER, target.resume(ring)).await;
            let silent = "the target of the mirror does not answer";
            resumed.map_err(|_| Error::new(ErrorKind::Busy, silent))??;
        }
        mirror.control.begin_again();
        // Clients may have gone on before the mirror does, so what they wrote is not known.
        mirror.options.left = None;
        mirror.options.sync = MirrorSync::Full;
        Ok(())
    }
}

impl MirrorWork {
    async fn run(
        &mut self,
        disk: &Arc<Disk>,
        ring: &Ring,
        progress: &Arc<Progress>,
    ) -> Result<String, Error> {
        let target = match &self.target {
            Some(target) => Arc::clone(target),
            None => open(disk, ring, place_of(&self.wanted)).await?,
        };
        self.target = Some(Arc::clone(&target));
        let file = file_of(&target);
        file.inspect(|id| self.held.begins_copy(*id));
        let new = quoted_name(&target.layers()[0]);
        let mut options = self.options.clone();
        options.left = self.options.left.take();
        let result = disk.mirror(ring, target, options, progress, &self.control).await;
        // What is held for one that goes on elsewhere is needed yet.
        if !result.as_ref().is_err_and(|error| progress.was_suspended(error)) {
            file.inspect(|id| self.held.ends_copy(*id));
        }
        Ok(result_text(result?, &new, &self.old))
    }

    async fn hand_over(
        &mut self,
        ring: &Ring,
        words: &mut JobWords,
        descriptors: &mut Vec<OwnedFd>,
    ) -> Result<(), Error> {
        words.pivot = self.control.wanted();
        words.left = self.control.take_left().map(Into::into);
        if is_export(Path::new(&self.wanted.target)) {
            // A connection is no file; the other process makes one of its own.
            let Some(target) = self.target.take() else { return Ok(()) };
            let closed = ring.within(TARGET_ANSWER, target.close(ring)).await;
            let why = match closed {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(errno)) => format!("cannot be closed: {errno}"),
                Err(_) => String::from("does not answer"),
            };
            tracing::warn!("the target of a mirror {why}; all is copied again");
            words.left = None;
            return Ok(());
        }
        let Some(target) = &self.target else { return Ok(()) };
        let handed = match ring.within(TARGET_ANSWER, target.hand_over(ring)).await {
            Ok(handed) => handed?,
            Err(_) => {
                // The other process opens it by its name, when this one is gone.
                tracing::warn!("the target of a mirror does not answer; all is copied again");
                words.left = None;
                return Ok(());
            }
        };
        words.target = Some(handed.description);
        words.roles.extend(handed.fds.iter().map(|_| Role::Target));
        descriptors.extend(handed.fds);
        Ok(())
    }
}

/// Name, format, and whether it is protected as a raw one without a note, of a target.
pub(super) type Place<'a> = (&'a str, Option<&'a str>, bool);

/// That of a mirror.
pub(super) fn place_of(wanted: &Mirror) -> Place<'_> {
    (&wanted.target, wanted.format.as_deref(), wanted.protect_raw)
}

/// Opens a target as the disk would be.
///
/// Errors: no such format; those of opening it.
pub(super) async fn open(
    disk: &Arc<Disk>,
    ring: &Ring,
    (target, format, protect_raw): Place<'_>,
) -> Result<Arc<Disk>, Error> {
    let format = format.map(str::parse::<Format>).transpose()?;
    // On the heap, as above.
    let opening: Boxed<'_, Result<Arc<Disk>, Error>> =
        Box::pin(disk.open_mirror(ring, Path::new(target), format, protect_raw));
    opening.await
}
