//! The job `commit`: what overlays hold goes into an image below.
//!
//! Promises: as [`ringdisk_disk::Disk::commit`]: a cancelled one leaves the chain as it was.

use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{CommitOptions, Layer, Progress};
use ringdisk_ring::Ring;
use serde_json::Value;

use super::begin::{Asked, own};
use super::names::{find, quoted_name, quoted_names};
use super::work::{CommitWork, Work};
use crate::control::disk::DiskControl;
use crate::control::jobs::description::ids_of;
use crate::control::jobs::{Claims, Kind, Span, UserWord};
use crate::control::protocol::Commit;
use crate::control::protocol::jobs::Terms;
use crate::failure::{Exit, Failure};

impl DiskControl {
    /// Commits; in the background the answer comes at once.
    ///
    /// * `word`: of the user.
    /// * `progress`: of the client that asks.
    ///
    /// Errors: no such images; another change is under way; in the foreground those of the job.
    pub(in crate::control) async fn commit(
        &self,
        ring: &Ring,
        wanted: &Commit,
        word: UserWord,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        self.entered(ring, progress).await?;
        let layers = self.disk()?.layers();
        let options = options(&layers, wanted)?;
        let asked = asked(&layers, options, wanted.job.clone().unwrap_or_default())?;
        let progress = own(&asked.terms, progress);
        self.run_job(ring, asked, word, &progress).await
    }
}

/// The job.
///
/// Errors: there are no such images.
pub(super) fn asked(
    layers: &[Arc<Layer>],
    options: CommitOptions,
    terms: Terms,
) -> Result<Asked, Failure> {
    let CommitOptions { top, base, .. } = options;
    let none = || Failure::new(Exit::Usage, "the disk has no such images");
    let (merged, base) = layers.get(top..base).zip(layers.get(base)).ok_or_else(none)?;
    let mut holds = quoted_names(merged);
    let what = format!("{} into {}", holds.join(" "), quoted_name(base));
    holds.push(quoted_name(base));
    let (chain, text) = (ids_of(layers), committed(merged, base));
    let work = Work::Commit(CommitWork { options, chain, text });
    let span = if top == 0 { Span::Whole } else { Span::Below };
    let claims = Claims { span, writes: holds.clone(), needs: holds.clone() };
    Ok(Asked { kind: Kind::Commit, what, holds, claims, terms, before: None, mirror: None, work })
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

/// What a commit has done, for people.
///
/// * `emptied`: the images that were written down.
/// * `base`: the image that has their data.
fn committed(emptied: &[Arc<Layer>], base: &Layer) -> String {
    format!(
        "What was written is in {} now. Left behind, empty, and used no longer: {}; it may be \
         removed if no other image has it as its backing file.",
        quoted_name(base),
        quoted_names(emptied).join(" ")
    )
}
