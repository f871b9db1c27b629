//! What a job does, so that it can be begun, stopped for a hand-over, and begun again.
//!
//! Promises: work that was suspended has left the chain as it was; begun again it does what is
//! left. Control thread.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use ringdisk_disk::name::is_export;
use ringdisk_disk::{
    CommitOptions, Disk, Error, Format, MirrorControl, MirrorOptions, MirrorSync, Progress,
    StreamOptions,
};
use ringdisk_ring::Ring;

use super::begin::shown;
use super::handed::{JobWords, Role, WorkWords};
use super::mirror::{file_of, told};
use crate::confine::HeldForDisk;
use crate::control::protocol::Mirror;

type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a job does.
pub(super) enum Work {
    /// With what it says at its end.
    Commit(CommitOptions, String),
    /// The same.
    Stream(StreamOptions, String),
    Mirror(Box<MirrorWork>),
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
    /// For another process.
    pub(super) fn words(&self) -> WorkWords {
        match self {
            Work::Commit(options, _) => WorkWords::Commit { top: options.top, base: options.base },
            Work::Stream(options, _) => WorkWords::Stream { base: options.base },
            Work::Mirror(mirror) => WorkWords::Mirror(Box::new(mirror.wanted.clone())),
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
            Work::Commit(options, text) => Box::pin(async move {
                disk.commit(ring, *options, progress).await.map(|()| text.clone())
            }),
            Work::Stream(options, text) => Box::pin(async move {
                disk.stream(ring, *options, progress).await.map(|()| text.clone())
            }),
            Work::Mirror(mirror) => Box::pin(mirror.run(disk, ring, progress)),
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
            Work::Commit(..) | Work::Stream(..) => Ok(()),
        }
    }

    /// It goes on here after all.
    ///
    /// Errors: the target of a mirror cannot be used any more.
    pub(super) async fn take_back(&mut self, ring: &Ring) -> Result<(), Error> {
        let Work::Mirror(mirror) = self else { return Ok(()) };
        if let Some(target) = &mirror.target {
            target.resume(ring).await?;
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
            None => open(disk, ring, &self.wanted).await?,
        };
        self.target = Some(Arc::clone(&target));
        if let Some(id) = file_of(&target) {
            self.held.has_file(id);
        }
        let new = shown(&target.layers()[0]);
        let mut options = self.options.clone();
        options.left = self.options.left.take();
        let end = disk.mirror(ring, target, options, progress, &self.control).await?;
        Ok(told(end, &new, &self.old))
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
            if let Some(target) = self.target.take()
                && let Err(errno) = target.close(ring).await
            {
                tracing::warn!("the target of a mirror cannot be closed: {errno}");
                words.left = None;
            }
            return Ok(());
        }
        let Some(target) = &self.target else { return Ok(()) };
        let handed = target.hand_over(ring).await?;
        words.target = Some(handed.description);
        words.roles.extend(handed.fds.iter().map(|_| Role::Target));
        descriptors.extend(handed.fds);
        Ok(())
    }
}

/// Opens the target as the disk would be.
///
/// Errors: no such format; those of opening it.
pub(super) async fn open(
    disk: &Arc<Disk>,
    ring: &Ring,
    wanted: &Mirror,
) -> Result<Arc<Disk>, Error> {
    let format = wanted.format.as_deref().map(str::parse::<Format>).transpose()?;
    let path = Path::new(&wanted.target);
    // On the heap, as above.
    let opening: Boxed<'_, Result<Arc<Disk>, Error>> =
        Box::pin(disk.open_mirror(ring, path, format, wanted.protect_raw));
    opening.await
}
