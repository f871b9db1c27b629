//! The job `commit`: what overlays hold goes into an image below.
//!
//! Promises: as [`ringdisk_disk::Disk::commit`]: a cancelled one leaves the chain as it was.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{CommitOptions, Disk, Layer, OnError, Progress};
use ringdisk_ring::Ring;
use ringdisk_storage::Storage;
use serde_json::{Value, json};

use super::job::{Kind, NewJob};
use super::run::run;
use super::words::Terms;
use crate::control::disk::DiskControl;
use crate::control::protocol::Commit;
use crate::failure::{Exit, Failure};
use crate::terminal::{shell_word, visible};

impl DiskControl {
    /// Commits; in the background the answer comes at once.
    ///
    /// * `word`: what keeps the user's word while a job in the background runs.
    /// * `progress`: of the client that asks.
    ///
    /// Errors: no such images; another change is under way; in the foreground those of the job.
    pub(in crate::control) async fn commit(
        &self,
        ring: &Ring,
        wanted: &Commit,
        word: Option<OwnedFd>,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        self.entered(ring, progress).await?;
        let disk = self.disk()?;
        let layers = disk.layers();
        let options = options(&layers, wanted)?;
        let terms = wanted.job.clone().unwrap_or_default();
        let progress = match terms.background {
            true => Arc::new(Progress::new()),
            false => Arc::clone(progress),
        };
        set(&progress, &terms)?;
        let (merged, base) = (&layers[options.top..options.base], &layers[options.base]);
        let mut holds: Vec<String> = merged.iter().map(|layer| shown(layer)).collect();
        let what = format!("{} into {}", holds.join(" "), shown(base));
        holds.push(shown(base));
        let job = self.begin_job(NewJob {
            name: terms.name,
            kind: Kind::Commit,
            what,
            holds,
            progress: Arc::clone(&progress),
        })?;
        self.settle();
        let text = committed(merged, base);
        let (held, advice, inner) = (self.held(), self.advice(), ring.clone());
        let (events, for_work) = (Arc::clone(disk.events()), Arc::clone(&progress));
        let work = async move {
            let result = disk.commit(&inner, options, &for_work).await;
            held.settle(&disk);
            let explained = |error| advice.explain(Failure::from(error), None);
            result.map_err(explained)?;
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
fn set(progress: &Progress, terms: &Terms) -> Result<(), Failure> {
    let on_error = terms.on_error().map_err(|why| Failure::new(Exit::Usage, why))?;
    if on_error == OnError::Ignore {
        return Err(Failure::new(
            Exit::Usage,
            "a commit cannot ignore errors: what was not copied would be lost",
        )
        .hint("`--on-error stop` pauses it, and it tries again when it is resumed"));
    }
    progress.set_on_error(on_error);
    progress.set_speed(terms.speed);
    Ok(())
}

/// Which images are merged.
///
/// Errors: an image that is not in the chain, or above the one that it shall go into.
fn options(layers: &[Arc<Layer>], wanted: &Commit) -> Result<CommitOptions, Failure> {
    let place = |name: &Option<String>, otherwise: usize| match name {
        None => Ok(otherwise),
        Some(name) => find(layers, Path::new(name)),
    };
    let top = place(&wanted.top, 0)?;
    let base = place(&wanted.base, top + 1)?;
    if base >= layers.len() {
        return Err(Failure::new(Exit::Usage, "there is no image below to write into"));
    }
    if base <= top {
        return Err(Failure::new(Exit::Usage, "the base must be below the top"));
    }
    Ok(CommitOptions { top, base, keep_top: false })
}

/// The names of the images, the top one first.
pub(in crate::control) fn chain(disk: &Disk) -> Value {
    let names: Vec<String> =
        disk.layers().iter().map(|layer| layer.name().display().to_string()).collect();
    json!({ "chain": names })
}

/// The name of an image, for people.
fn shown(layer: &Layer) -> String {
    shell_word(&layer.name().display().to_string())
}

/// What a commit has done, for people.
///
/// * `emptied`: the images that were written down.
/// * `base`: the image that has their data.
fn committed(emptied: &[Arc<Layer>], base: &Layer) -> String {
    let names: Vec<String> = emptied.iter().map(|layer| shown(layer)).collect();
    format!(
        "What was written is in {} now. Left behind, empty, and used no longer: {}; it may be \
         removed if no other image has it as its backing file.",
        shown(base),
        names.join(" ")
    )
}

/// The place of an image in the chain.
///
/// * `name`: an absolute path.
fn find(layers: &[Arc<Layer>], name: &Path) -> Result<usize, Failure> {
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
