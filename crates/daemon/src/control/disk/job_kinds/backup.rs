//! The job `backup`: a copy of the disk as it is at one instant.
//!
//! Promises: as [`ringdisk_disk::Disk::begin_backup`]: the instant is before the answer to the
//! command that begins the job. Errors of the target are no errors of the clients of the disk, and
//! nothing switches over. The job does not outlive its process, since what is kept of the instant
//! does not: it ends as failed then, and never begins again at another instant.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{BackupOptions, BackupSync, Bytes, Disk, Progress};
use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, OpenOptions, Storage};
use serde_json::Value;

use super::begin::{Asked, own};
use super::names::{quoted_name, quoted_names};
use super::target::{check_is_other, open};
use super::work::{BackupWork, Work};
use crate::confine::NamedTarget;
use crate::control::disk::DiskControl;
use crate::control::jobs::{Claims, Kind, Span, UserWord};
use crate::control::protocol::Backup;
use crate::failure::{Exit, Failure};
use crate::terminal::visible;

impl DiskControl {
    /// Backs the disk up; in the background the answer comes when the instant is kept.
    ///
    /// * `word`, `file`: as of [`DiskControl::mirror`].
    /// * `fleece`: the fleecing file, as of a checkpoint.
    /// * `progress`: of the client that asks.
    ///
    /// Errors: the target cannot be opened, or is none for this disk; the state of the disk cannot
    /// be kept; a change is under way that a backup may not run beside; in the foreground those of
    /// the job.
    pub(in crate::control) async fn backup(
        &self,
        ring: &Ring,
        wanted: &Backup,
        (word, file, fleece): (UserWord, Option<NamedTarget>, Option<OwnedFd>),
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let result = self.backup_held(ring, wanted, word, fleece, progress).await;
        if let (Some(file), Ok(disk)) = (file, self.disk()) {
            file.let_go(&disk);
        }
        result
    }

    async fn backup_held(
        &self,
        ring: &Ring,
        wanted: &Backup,
        word: UserWord,
        fleece: Option<OwnedFd>,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        self.entered(ring, progress).await?;
        let sync = sync(wanted)?;
        let no_file = || Failure::new(Exit::Usage, "a backup comes with a file for old data");
        let fleece = fleece.ok_or_else(no_file)?;
        let disk = self.disk()?;
        check_is_other(&disk.layers(), Path::new(&wanted.target))?;
        self.check_beside(&Claims { span: Span::Instant, ..Claims::default() })?;
        let place = (wanted.target.as_str(), wanted.format.as_deref(), wanted.protect_raw);
        let target = open(&disk, ring, place).await.map_err(|error| {
            let failure = Failure::from(error).context("the target of the backup cannot be opened");
            self.advice().explain(failure, Some(&wanted.target))
        })?;
        disk.check_backup(&target)?;
        let claims = claims(&target);
        // Once more: opening takes a while.
        self.check_beside(&claims)?;
        let accel = self.take_accel_back(ring, &disk).await?;
        let options = OpenOptions { lock: Lock::None, no_flush: true, ..OpenOptions::default() };
        let fleece = Arc::new(Storage::from_fd(fleece, "the fleecing file", &options)?);
        let options = BackupOptions { sync, fleece, fleece_max: Bytes(wanted.fleece_max) };
        let running = disk.begin_backup(ring, Arc::clone(&target), options).await?;
        let mut wanted = wanted.clone();
        let terms = wanted.job.take().unwrap_or_default();
        let new = quoted_name(&target.layers()[0]);
        let work = BackupWork {
            wanted,
            running: Some(running),
            held: self.held(),
            text: format!("{new} holds what the disk held when the backup began."),
            _accel: accel,
        };
        let what = format!("{} to {new}", quoted_name(&disk.layers()[0]));
        let (holds, work) = (claims.needs.clone(), Work::Backup(Box::new(work)));
        let asked = Asked {
            kind: Kind::Backup,
            what,
            holds,
            claims,
            terms,
            before: None,
            mirror: None,
            work,
        };
        let progress = own(&asked.terms, progress);
        self.run_job(ring, asked, word, &progress).await
    }
}

/// What a backup works on.
fn claims(target: &Disk) -> Claims {
    let needs = quoted_names(&target.layers());
    Claims { span: Span::Instant, writes: needs.iter().take(1).cloned().collect(), needs }
}

/// What the words of a client mean.
///
/// Errors: no such word; a bitmap beside one.
fn sync(wanted: &Backup) -> Result<BackupSync, Failure> {
    match (wanted.sync.as_deref(), &wanted.bitmap) {
        (None, Some(bitmap)) => Ok(BackupSync::Bitmap(bitmap.clone())),
        (None | Some("full"), None) => Ok(BackupSync::Full),
        (Some("top"), None) => Ok(BackupSync::Top),
        (Some(_), Some(_)) => {
            Err(Failure::new(Exit::Usage, "give either a sync or a bitmap for a backup"))
        }
        (Some(other), None) => {
            let text = format!("no such sync: '{}'; known: full, top", visible(other));
            Err(Failure::new(Exit::Usage, text))
        }
    }
}
