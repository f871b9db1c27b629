//! Begins a job as a command asks for it.
//!
//! Promises: in the background the answer comes at once, and what keeps the user's word is dropped
//! at the end of the job; in the foreground the job is given up when its client leaves. Control
//! thread.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{Disk, Error, Layer, MirrorControl, OnError, Progress};
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;
use serde_json::{Value, json};

use super::job::{Kind, NewJob};
use super::run::run;
use super::words::Terms;
use crate::control::disk::DiskControl;
use crate::failure::{Exit, Failure};
use crate::terminal::{shell_word, visible};

/// A job that a command asks for.
pub(super) struct Asked {
    /// What it does.
    pub(super) kind: Kind,
    /// What it does with what, for people.
    pub(super) what: String,
    /// The images that nothing else may change meanwhile.
    pub(super) holds: Vec<String>,
    /// How it is run.
    pub(super) terms: Terms,
    /// Of a mirror.
    pub(super) mirror: Option<Arc<MirrorControl>>,
}

impl DiskControl {
    /// Runs a job; in the background the answer comes at once.
    ///
    /// * `word`: what keeps the user's word while a job in the background runs.
    /// * `progress`: of the client that asks.
    /// * `work`: the job itself; gives what it has done, for people.
    ///
    /// Errors: words that have no meaning here; another change is under way; in the foreground
    /// those of the job.
    pub(super) async fn run_job<W>(
        &self,
        ring: &Ring,
        asked: Asked,
        word: Option<OwnedFd>,
        progress: &Arc<Progress>,
        work: impl FnOnce(Arc<Disk>, Ring, Arc<Progress>) -> W,
    ) -> Result<Value, Failure>
    where
        W: Future<Output = Result<String, Error>> + 'static,
    {
        let disk = self.disk()?;
        let Asked { kind, what, holds, terms, mirror } = asked;
        let progress = match terms.background {
            true => Arc::new(Progress::new()),
            false => Arc::clone(progress),
        };
        set(kind, &progress, &terms)?;
        let (name, for_job) = (terms.name, Arc::clone(&progress));
        let job = self.begin_job(NewJob { name, kind, what, holds, progress: for_job, mirror })?;
        self.settle();
        let (held, advice) = (self.held(), self.advice());
        let events = Arc::clone(disk.events());
        let work = work(Arc::clone(&disk), ring.clone(), progress);
        let work = async move {
            let result = work.await;
            held.settle(&disk);
            let text = result.map_err(|error| advice.explain(Failure::from(error), None))?;
            let mut value = chain(&disk);
            value["text"] = json!(text);
            Ok(value)
        };
        if !terms.background {
            return run(&job, &events, work).await;
        }
        let id = job.id().to_owned();
        ring.spawn(async move {
            // Those who wait for the job get the result.
            let _ = run(&job, &events, work).await;
            drop(word);
        });
        Ok(json!({ "id": id }))
    }
}

/// Takes over what the user says of speed and errors.
///
/// Errors: no such word; one that has no meaning here.
fn set(kind: Kind, progress: &Progress, terms: &Terms) -> Result<(), Failure> {
    let on_error = terms.on_error().map_err(|why| Failure::new(Exit::Usage, why))?;
    if on_error == OnError::Ignore && kind != Kind::Mirror {
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

/// The name of an image, for people.
pub(super) fn shown(layer: &Layer) -> String {
    shell_word(&layer.name().display().to_string())
}

/// The names of images, for people.
pub(super) fn all_shown(layers: &[Arc<Layer>]) -> Vec<String> {
    layers.iter().map(|layer| shown(layer)).collect()
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
