//! The work of a mirror.
//!
//! Promises: it can be stopped for a hand-over, and goes on in another process or here. What the
//! helper process holds for its target stays until its end. Control thread.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::name::is_export;
use ringdisk_disk::{
    Disk, Error, ErrorKind, MirrorControl, MirrorEnd, MirrorOptions, MirrorSync, Progress,
};
use ringdisk_ring::Ring;

use crate::confine::HeldForDisk;
use crate::control::disk::job_kinds::names::quoted_name;
use crate::control::disk::job_kinds::target::{file_of, open, place_of};
use crate::control::jobs::description::{JobWords, Role};
use crate::control::protocol::Mirror;

/// How long the target of a mirror has to answer before a hand-over, and after one that was given
/// up.
const TARGET_ANSWER: Duration = Duration::from_secs(2);

/// A mirror.
pub(in crate::control::disk::job_kinds) struct MirrorWork {
    /// As the client said it.
    pub(in crate::control::disk::job_kinds) wanted: Mirror,
    pub(in crate::control::disk::job_kinds) options: MirrorOptions,
    /// `None`: it is to be opened.
    pub(in crate::control::disk::job_kinds) target: Option<Arc<Disk>>,
    pub(in crate::control::disk::job_kinds) control: Arc<MirrorControl>,
    pub(in crate::control::disk::job_kinds) held: Arc<HeldForDisk>,
    /// The images of the disk, for people.
    pub(in crate::control::disk::job_kinds) old: Vec<String>,
}

impl MirrorWork {
    /// The job is begun: what the helper process holds for it stays until its end.
    pub(super) fn is_begun(&self) {
        let file = self.target.as_deref().and_then(file_of);
        file.inspect(|id| self.held.begins_copy(*id));
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

    /// After it was suspended: adds what another process needs to go on, and lets go of the target.
    ///
    /// Errors: it cannot be handed over.
    pub(super) async fn hand_over(
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

    /// It goes on here after all.
    ///
    /// Errors: the target cannot be used any more.
    pub(super) async fn take_back(&mut self, ring: &Ring) -> Result<(), Error> {
        if let Some(target) = &self.target {
            let resumed = ring.within(TARGET_ANSWER, target.resume(ring)).await;
            let silent = "the target of the mirror does not answer";
            resumed.map_err(|_| Error::new(ErrorKind::Busy, silent))??;
        }
        self.control.begin_again();
        // Clients may have gone on before the mirror does, so what they wrote is not known.
        self.options.left = None;
        self.options.sync = MirrorSync::Full;
        Ok(())
    }
}

/// What a mirror has done, for people.
///
/// * `new`: the target.
/// * `old`: the images that the disk had.
fn result_text(end: MirrorEnd, new: &str, old: &[String]) -> String {
    match end {
        MirrorEnd::Pivoted => format!(
            "The disk is in {new} now: name that one when it is served again. Left behind as they \
             were at that moment, and used no longer unless {new} has them below it: {}",
            old.join(" ")
        ),
        MirrorEnd::Copied => format!(
            "{new} holds what the disk held at this moment, and does not follow it any more."
        ),
    }
}
