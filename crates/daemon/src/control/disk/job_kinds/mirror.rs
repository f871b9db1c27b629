//! The job `mirror`: a copy of the disk that stays in step with it, and that the disk may switch
//! over to.
//!
//! Promises: as [`ringdisk_disk::Disk::mirror`]: until the switch-over has succeeded the disk is
//! what it was; errors of the target are no errors of its clients.

use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{Disk, MirrorControl, MirrorOptions, MirrorSync, Progress};
use ringdisk_ring::Ring;
use serde_json::Value;

use super::begin::{Asked, own};
use super::names::{quoted_name, quoted_names};
use super::target::{check_is_other, file_of, open, place_of};
use super::work::{MirrorWork, Work};
use crate::confine::{self, HeldForDisk, NamedTarget};
use crate::control::disk::DiskControl;
use crate::control::jobs::{Claims, Kind, Span, UserWord};
use crate::control::protocol::Mirror;
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

impl DiskControl {
    /// Mirrors; in the background the answer comes at once.
    ///
    /// * `word`: of the user; with the target, where the helper process holds it since the user has
    ///   named it.
    /// * `progress`: of the client that asks.
    ///
    /// Errors: the target cannot be opened, or is none for this disk; another change is under way;
    /// in the foreground those of the job.
    pub(in crate::control) async fn mirror(
        &self,
        ring: &Ring,
        wanted: &Mirror,
        (word, file): (UserWord, Option<NamedTarget>),
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let result = self.mirror_held(ring, wanted, word, progress).await;
        if let (Some(file), Ok(disk)) = (file, self.disk()) {
            file.let_go(&disk);
        }
        result
    }

    async fn mirror_held(
        &self,
        ring: &Ring,
        wanted: &Mirror,
        word: UserWord,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        self.entered(ring, progress).await?;
        let terms = wanted.job.clone().unwrap_or_default();
        if !terms.background && !wanted.complete {
            let text = "a mirror that does not complete runs in the background";
            return Err(Failure::new(Exit::Usage, text));
        }
        let options = options(wanted)?;
        let disk = self.disk()?;
        let layers = disk.layers();
        let path = Path::new(&wanted.target);
        check_is_other(&layers, path)?;
        self.check_beside(&Claims { span: Span::Content, ..Claims::default() })?;
        let target = self.open_target(ring, &disk, wanted).await?;
        let control = Arc::new(MirrorControl::new());
        if wanted.complete {
            // It has not begun, so nothing refuses this yet; `check_mirror` has.
            control.complete(true)?;
        }
        let mut wanted = wanted.clone();
        wanted.job = Some(terms);
        let asked = asked(&disk, wanted, options, target, control, self.held());
        let progress = own(&asked.terms, progress);
        self.run_job(ring, asked, word, &progress).await
    }

    /// Opens the target as the disk would be, and looks whether it can be one.
    pub(super) async fn open_target(
        &self,
        ring: &Ring,
        disk: &Arc<Disk>,
        wanted: &Mirror,
    ) -> Result<Arc<Disk>, Failure> {
        let explain = |failure| self.advice().explain(failure, Some(&wanted.target));
        let opened = open(disk, ring, place_of(wanted)).await;
        let target = opened.map_err(|error| {
            explain(Failure::from(error).context("the target of the mirror cannot be opened"))
        })?;
        disk.check_mirror(&target, wanted.complete)?;
        Ok(target)
    }
}

/// The job.
pub(super) fn asked(
    disk: &Disk,
    mut wanted: Mirror,
    options: MirrorOptions,
    target: Arc<Disk>,
    control: Arc<MirrorControl>,
    held: Arc<HeldForDisk>,
) -> Asked {
    let layers = disk.layers();
    let what = format!("{} to {}", quoted_name(&layers[0]), quoted_name(&target.layers()[0]));
    let old = quoted_names(&layers);
    let needs = quoted_names(&target.layers());
    let holds: Vec<String> = old.iter().chain(&needs).cloned().collect();
    let writes = needs.iter().take(1).cloned().collect();
    let claims = Claims { span: Span::Content, writes, needs };
    let terms = wanted.job.take().unwrap_or_default();
    let mirror = Some(Arc::clone(&control));
    let target = Some(target);
    let work = MirrorWork { wanted, options, target, control, held, old };
    let work = Work::Mirror(Box::new(work));
    Asked { kind: Kind::Mirror, what, holds, claims, terms, before: None, mirror, work }
}

/// Whether a target that another process has handed over is one that a user has named: the helper
/// process has it then.
///
/// Errors: it is none.
pub(super) fn check_named(target: &Disk) -> Result<(), Failure> {
    let is_named = file_of(target).is_none_or(confine::is_held);
    if is_named {
        return Ok(());
    }
    let text = "no user of this process has named the target";
    Err(Failure::new(Exit::Permission, text).hint("begin the mirror again"))
}

/// What the words of a client mean.
///
/// Errors: no such word; a bitmap beside one.
pub(super) fn options(wanted: &Mirror) -> Result<MirrorOptions, Failure> {
    let sync = match (wanted.sync.as_deref(), &wanted.bitmap) {
        (None, Some(bitmap)) => MirrorSync::Bitmap(bitmap.clone()),
        (None | Some("full"), None) => MirrorSync::Full,
        (Some("top"), None) => MirrorSync::Top,
        (Some("none"), None) => MirrorSync::None,
        (Some(_), Some(_)) => {
            return Err(Failure::new(Exit::Usage, "give either a sync or a bitmap for a mirror"));
        }
        (Some(other), None) => {
            let text = format!("no such sync: '{}'; known: full, top, none", visible(other));
            return Err(Failure::new(Exit::Usage, text));
        }
    };
    Ok(MirrorOptions { sync, left: None, write_blocking: wanted.write_blocking })
}
