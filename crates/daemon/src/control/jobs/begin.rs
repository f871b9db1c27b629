//! Begins a job as a command asks for it.
//!
//! Promises: in the background the answer comes at once, and what keeps the user's word is dropped
//! at the end of the job; in the foreground the job is given up when its client leaves. Control
//! thread.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Disk, Layer, MirrorControl, OnError, Progress};
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;
use serde_json::{Value, json};

use super::claims::Claims;
use super::handed::{HandedJob, Role, chain_of};
use super::job::{Job, Kind, NewJob};
use super::run::{Early, Steps, run};
use super::words::Terms;
use super::work::Work;
use crate::confine::HeldForDisk;
use crate::control::disk::{Advice, DiskControl};
use crate::failure::{Exit, Failure};
use crate::terminal::{shell_word, visible};

/// How often it is looked whether the disk is active again.
const ACTIVE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A job that a command asks for.
pub(super) struct Asked {
    /// What it does.
    pub(super) kind: Kind,
    /// What it does with what, for people.
    pub(super) what: String,
    /// The images that nothing else may change meanwhile.
    pub(super) holds: Vec<String>,
    /// What it works on.
    pub(super) claims: Claims,
    /// How it is run.
    pub(super) terms: Terms,
    /// As of [`NewJob::before`].
    pub(super) before: Option<String>,
    /// Of a mirror.
    pub(super) mirror: Option<Arc<MirrorControl>>,
    /// The job itself.
    pub(super) work: Work,
}

/// The word of the user who asks for a job ([`crate::helper::approval`]).
#[derive(Debug, Default)]
pub struct UserWord {
    /// What the helper process has heard, and that of the next server will hear.
    pub given: Option<OwnedFd>,
    /// What the user keeps; of a job in the background this process does, as long as it runs.
    pub kept: Option<OwnedFd>,
}

impl DiskControl {
    /// Runs a job; in the background the answer comes at once.
    ///
    /// * `word`: of the user.
    /// * `progress`: of the client that asks; of a job in the background, what it is controlled by.
    ///
    /// Errors: words that have no meaning here; another change is under way; in the foreground
    /// those of the job.
    pub(super) async fn run_job(
        &self,
        ring: &Ring,
        asked: Asked,
        word: UserWord,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let disk = self.disk()?;
        let Asked { kind, what, holds, claims, terms, before, mirror, work } = asked;
        set(kind, progress, &terms)?;
        let (name, for_job) = (terms.name, Arc::clone(progress));
        let progress = for_job;
        let new = NewJob { name, before, kind, what, holds, claims, progress, mirror };
        let job = self.begin_job(new)?;
        work.is_begun();
        self.settle();
        let jobs = Arc::clone(self.jobs());
        if terms.background {
            let (words, chain) = work.words(&disk);
            jobs.keep(&job, job.words(words, chain), &word);
        }
        let (held, advice, ring) = (self.held(), self.advice(), ring.clone());
        let steps =
            Running { job: Arc::clone(&job), disk, ring: ring.clone(), work, word, held, advice };
        let id = job.id().to_owned();
        let own = ring.clone();
        let run = async move {
            let disk = Arc::clone(&steps.disk);
            // What keeps the word goes at its end.
            let result = run(&job, disk.events(), &own, steps).await;
            jobs.chain_is(&chain_of(&disk));
            result
        };
        let run: Pin<Box<dyn Future<Output = Result<Value, Failure>>>> = Box::pin(run);
        if !terms.background {
            return run.await;
        }
        ring.spawn(async move {
            // Those who wait for the job get the result.
            let _ = run.await;
        });
        Ok(json!({ "id": id }))
    }
}

/// A job of a disk that runs.
struct Running {
    job: Arc<Job>,
    disk: Arc<Disk>,
    ring: Ring,
    work: Work,
    word: UserWord,
    held: Arc<HeldForDisk>,
    advice: Advice,
}

impl Steps for Running {
    async fn run(&mut self) -> Result<Value, Early> {
        let progress = self.job.progress();
        let result = self.work.run(&self.disk, &self.ring, progress).await;
        if result.as_ref().is_err_and(|error| progress.was_suspended(error)) {
            // What is held for it is needed yet.
            return Err(Early::Suspended);
        }
        self.held.settle(&self.disk);
        let explained = |error| Early::Failed(self.advice.explain(Failure::from(error), None));
        let text = result.map_err(explained)?;
        let mut value = chain(&self.disk);
        value["text"] = json!(text);
        Ok(value)
    }

    async fn describe(&mut self) -> Result<HandedJob, String> {
        let (words, chain) = self.work.words(&self.disk);
        let mut words = self.job.words(words, chain);
        let mut descriptors = Vec::new();
        for (role, of) in [(Role::Word, &self.word.given), (Role::Kept, &self.word.kept)] {
            let Some(descriptor) = of else { continue };
            descriptors.push(descriptor.try_clone().map_err(|error| error.to_string())?);
            words.roles.push(role);
        }
        let handed = self.work.hand_over(&self.ring, &mut words, &mut descriptors).await;
        handed.map_err(|error| error.to_string())?;
        Ok(HandedJob { words, descriptors })
    }

    async fn take_back(&mut self) -> Result<(), Failure> {
        // The disk is taken back by another thread, in a moment.
        while !self.disk.is_active() && !self.job.progress().is_cancelled() {
            self.ring.sleep(ACTIVE_POLL_INTERVAL).await;
        }
        Ok(self.work.take_back(&self.ring).await?)
    }
}

/// What a job is controlled by: in the foreground, what the client is.
pub(super) fn own(terms: &Terms, client: &Arc<Progress>) -> Arc<Progress> {
    if terms.background { Arc::new(Progress::new()) } else { Arc::clone(client) }
}

/// Takes over what the user says of speed and errors.
///
/// Errors: no such word; one that has no meaning here.
fn set(kind: Kind, progress: &Progress, terms: &Terms) -> Result<(), Failure> {
    let on_error = terms.on_error().map_err(|why| Failure::new(Exit::Usage, why))?;
    if on_error == OnError::Ignore && !matches!(kind, Kind::Mirror | Kind::Backup) {
        let kind = kind.word();
        return Err(Failure::new(
            Exit::Usage,
            format!("a {kind} cannot ignore errors: what was not copied would be lost"),
        )
        .hint("`--on-error stop` pauses it, and it tries again when it is resumed"));
    }
    progress.set_on_error(on_error);
    progress.set_speed(terms.speed);
    Ok(())
}

/// The names of the images, the top one first.
pub(in crate::control) fn chain(disk: &Disk) -> Value {
    let names: Vec<String> =
        disk.layers().iter().map(|layer| layer.name().display().to_string()).collect();
    json!({ "chain": names })
}

/// The name of an image, quoted as a word of a shell.
pub(super) fn quoted_name(layer: &Layer) -> String {
    shell_word(&layer.name().display().to_string())
}

/// The names of images, each quoted as a word of a shell.
pub(super) fn quoted_names(layers: &[Arc<Layer>]) -> Vec<String> {
    layers.iter().map(|layer| quoted_name(layer)).collect()
}

/// The place of an image in the chain.
///
/// * `name`: an absolute path.
pub(super) fn find(layers: &[Arc<Layer>], name: &Path) -> Result<usize, Failure> {
    let id = name.metadata().map(|meta| Storage::identity_of(&meta)).ok();
    let is_it = |layer: &Arc<Layer>| {
        let file = layer.file().and_then(|file| file.identity());
        file.is_some() && file == id
    };
    layers.iter().position(is_it).ok_or_else(|| {
        let names: Vec<String> =
            layers.iter().map(|layer| format!("'{}'", layer.name().display())).collect();
        Failure::new(
            Exit::Usage,
            format!("'{}' is not in the chain of the disk", visible(&name.to_string_lossy())),
        )
        .hint(format!("the chain is {}", names.join(", ")))
    })
}
