//! The job `stream`: what images below hold goes into the image on top.
//!
//! Promises: as [`ringdisk_disk::Disk::stream`]: a cancelled one leaves the chain as it was, and
//! what was copied in the top image.

use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{Layer, Progress, StreamOptions};
use ringdisk_ring::Ring;
use serde_json::Value;

use super::begin::{Asked, own};
use super::names::{find, quoted_name, quoted_names};
use super::work::Work;
use crate::control::disk::DiskControl;
use crate::control::jobs::{Claims, Kind, Span, UserWord};
use crate::control::protocol::Stream;
use crate::control::protocol::jobs::Terms;
use crate::failure::{Exit, Failure};

impl DiskControl {
    /// Streams; in the background the answer comes at once.
    ///
    /// * `word`: of the user.
    /// * `progress`: of the client that asks.
    ///
    /// Errors: no such base; nothing to stream; another change is under way; in the foreground
    /// those of the job.
    pub(in crate::control) async fn stream(
        &self,
        ring: &Ring,
        wanted: &Stream,
        word: UserWord,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        self.entered(ring, progress).await?;
        let layers = self.disk()?.layers();
        let options = StreamOptions { base: base_of(&layers, wanted)? };
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
    options: StreamOptions,
    terms: Terms,
) -> Result<Asked, Failure> {
    let end = options.base.unwrap_or(layers.len());
    let none = || Failure::new(Exit::Usage, "the disk has no such images");
    let (top, dropped) = layers.first().zip(layers.get(1..end)).ok_or_else(none)?;
    let what = format!("{} into {}", quoted_names(dropped).join(" "), quoted_name(top));
    let text = streamed(top, dropped, layers.get(end).map(|base| &**base));
    let holds = quoted_names(&layers[..(end + 1).min(layers.len())]);
    let work = Work::Stream(options, text);
    let span = if end < layers.len() { Span::Upper } else { Span::Whole };
    let claims = Claims { span, writes: vec![quoted_name(top)], needs: holds.clone() };
    Ok(Asked { kind: Kind::Stream, what, holds, claims, terms, before: None, mirror: None, work })
}

/// The place of the image that becomes the backing file; `None`: none does.
///
/// Errors: it is not in the chain, or has nothing between it and the top; there is no backing file.
fn base_of(layers: &[Arc<Layer>], wanted: &Stream) -> Result<Option<usize>, Failure> {
    let base = wanted.base.as_ref().map(|name| find(layers, Path::new(name))).transpose()?;
    let why = match base {
        None if layers.len() < 2 => "the disk has no backing file, so there is nothing to stream",
        Some(0) => "the base must be below the top",
        Some(1) => "the base is the backing file of the top already, so nothing is to be streamed",
        _ => return Ok(base),
    };
    Err(Failure::new(Exit::Usage, why))
}

/// What a stream has done, for people.
///
/// * `dropped`: the images whose content the top has now.
/// * `base`: what is its backing file now.
fn streamed(top: &Layer, dropped: &[Arc<Layer>], base: Option<&Layer>) -> String {
    let below = match base {
        Some(base) => format!("has the backing file {} now", quoted_name(base)),
        None => String::from("needs no backing file any more"),
    };
    format!(
        "{} {below}. Used by this disk no longer: {}; each may be removed if no other image has it \
         as its backing file.",
        quoted_name(top),
        quoted_names(dropped).join(" ")
    )
}
