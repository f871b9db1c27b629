//! Jobs that another process has begun: they go on here.
//!
//! Promises: a job keeps its name, its limit and its pause. What the process before says counts
//! little, since it may have been taken over: an image below the top is written, and the target of
//! a mirror used, on the word of the user that came along ([`crate::helper::approval`]); the layers
//! are those that the disk has. A job that cannot go on is in the list, with the reason.
//!
//! Control thread.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::{
    CommitOptions, Disk, Error, Format, HandOver, MirrorControl, Progress, StreamOptions,
};
use ringdisk_ring::Ring;
use serde_json::json;

use super::begin::Asked;
use super::names::quoted_names;
use super::work::LOST;
use super::{commit, mirror, stream};
use crate::confine::{self, NamedTarget};
use crate::control::disk::DiskControl;
use crate::control::jobs::description::{
    EndedWords, HandedJob, JobWords, Role, Stands, WorkWords, chain_of,
};
use crate::control::jobs::{UserWord, run};
use crate::control::protocol::Mirror;
use crate::control::protocol::jobs::Terms;
use crate::failure::{Exit, Failure};
use crate::terminal::{shell_word, visible};

/// How long the target of a mirror may stay locked by the process before.
const TARGET_FREE: Duration = Duration::from_secs(60);
/// How often it is tried.
const TARGET_POLL_INTERVAL: Duration = Duration::from_millis(100);

impl DiskControl {
    /// Goes on with the jobs of another process, once this one is in its sandbox.
    pub(in crate::control) async fn go_on_with_jobs(&self, ring: &Ring) {
        let jobs = self.take_handed_jobs();
        if jobs.is_empty() || self.entered(ring, &Progress::new()).await.is_err() {
            self.jobs().have_come();
            return;
        }
        for job in jobs {
            let words = job.words.clone();
            let mut file = None;
            if let Err(failure) = Box::pin(self.go_on(ring, job, &mut file)).await {
                self.note_lost(&words, &failure);
                if words.left.is_some()
                    && let Ok(disk) = self.disk()
                {
                    disk.forget_changes(ring).await;
                }
            }
            if let (Some(file), Ok(disk)) = (file, self.disk()) {
                file.let_go(&disk);
            }
        }
        // Those that do not go on are kept no longer.
        self.jobs().keep_changes();
        self.jobs().have_come();
    }

    /// * `file`: gets the target that the helper process holds for it.
    ///
    /// Errors: it cannot go on.
    async fn go_on(
        &self,
        ring: &Ring,
        mut job: HandedJob,
        file: &mut Option<NamedTarget>,
    ) -> Result<(), Failure> {
        let disk = self.disk()?;
        let word = UserWord { given: one(&mut job, Role::Word), kept: one(&mut job, Role::Kept) };
        if let Some(given) = &word.given {
            *file = confine::pass_on(given).map(|file| self.held().named(file));
        }
        let mut words = job.words.clone();
        if let WorkWords::Ended(ended) = &words.work {
            self.list_ended(&words, ended);
            return Ok(());
        }
        if let WorkWords::Backup(_) = words.work {
            return Err(Failure::new(Exit::General, LOST));
        }
        if words.was_killed {
            tracing::info!("job {} begins again: the process that ran it was killed", words.id);
        }
        let terms = Terms {
            name: Some(words.id.clone()),
            background: true,
            speed: words.speed,
            on_error: Some(words.on_error.clone()),
        };
        let progress = Arc::new(Progress::new());
        if words.paused {
            progress.pause();
        }
        let chain = chain_of(&disk);
        match words.stands(&chain) {
            Stands::GoesOn => words.chain_is(&chain),
            Stands::Done => {
                self.note_done(&words);
                return Ok(());
            }
            Stands::Displaced => {
                let text = "the disk has switched over to the target of a mirror meanwhile";
                return Err(Failure::new(Exit::General, text));
            }
        }
        let mut asked = match &words.work {
            WorkWords::Mirror(wanted) => {
                let mut wanted = (**wanted).clone();
                wanted.job = Some(terms);
                self.mirror_again(ring, &disk, wanted, job).await?
            }
            WorkWords::Commit { top, base } => {
                let options = CommitOptions { top: *top, base: *base, keep_top: false };
                commit::asked(&disk.layers(), options, terms)?
            }
            WorkWords::Stream { base } => {
                stream::asked(&disk.layers(), StreamOptions { base: *base }, terms)?
            }
            WorkWords::Backup(_) | WorkWords::Ended(_) => {
                return Err(Failure::new(Exit::General, LOST));
            }
        };
        asked.before = Some(words.token.clone());
        self.run_job(ring, asked, word, &progress).await.map(drop)
    }

    async fn mirror_again(
        &self,
        ring: &Ring,
        disk: &Arc<Disk>,
        wanted: Mirror,
        mut job: HandedJob,
    ) -> Result<Asked, Failure> {
        let mut options = mirror::options(&wanted)?;
        options.left = job.words.left.take().map(Into::into);
        if options.left.is_none() {
            // What clients wrote since is not known.
            options.sync = ringdisk_disk::MirrorSync::Full;
        }
        let fds = job.take(Role::Target);
        let target = match job.words.target.take() {
            Some(description) => {
                let format = wanted.format.as_deref().map(str::parse::<Format>).transpose()?;
                let handed = HandOver { description, fds };
                let opened: Pin<Box<dyn Future<Output = _>>> =
                    Box::pin(disk.take_mirror(ring, handed, format, wanted.protect_raw));
                let opened: Result<Arc<Disk>, Error> = opened.await;
                let target = opened.map_err(|error| Failure::from(error).context("the target"))?;
                mirror::check_named(&target)?;
                target
            }
            None => self.open_free_target(ring, disk, &wanted).await?,
        };
        disk.check_mirror(&target, job.words.pivot == Some(true))?;
        let control = Arc::new(MirrorControl::new());
        if let Some(pivot) = job.words.pivot {
            control.complete(pivot)?;
        }
        Ok(mirror::asked(disk, wanted, options, target, control, self.held()))
    }

    /// Opens the target of a mirror by its name: the helper process lets it be the one that the
    /// user has named. Writes of a process that was killed may be on their way to it yet, and keep
    /// it locked.
    async fn open_free_target(
        &self,
        ring: &Ring,
        disk: &Arc<Disk>,
        wanted: &Mirror,
    ) -> Result<Arc<Disk>, Failure> {
        let end = Instant::now() + TARGET_FREE;
        loop {
            match self.open_target(ring, disk, wanted).await {
                Err(failure) if failure.exit == Exit::Locked && Instant::now() < end => {
                    ring.sleep(TARGET_POLL_INTERVAL).await;
                }
                result => return result,
            }
        }
    }

    /// A job that cannot go on.
    fn note_lost(&self, words: &JobWords, failure: &Failure) {
        let text = format!("it cannot go on: {}", failure.message());
        let lost = Failure::new(Exit::General, text).with_code(failure.code());
        self.note_ended(words, &Err(lost));
    }

    /// A job whose last step was made.
    fn note_done(&self, words: &JobWords) {
        let text = "The process that ran it was killed when it was done.";
        self.note_ended(words, &Ok(json!({ "text": text })));
    }

    /// A job that has ended in the process before, which has told of it.
    fn list_ended(&self, words: &JobWords, ended: &EndedWords) {
        match self.jobs().begin(words.listed(visible(&ended.what))) {
            Ok(job) => job.conclude(&ended.result()),
            Err(failure) => tracing::debug!("job {}: {}", words.id, failure.message()),
        }
    }

    fn note_ended(&self, words: &JobWords, result: &Result<serde_json::Value, Failure>) {
        let Ok(disk) = self.disk() else { return };
        let what = match &words.work {
            WorkWords::Mirror(_) | WorkWords::Backup(_) => {
                let target = match &words.work {
                    WorkWords::Mirror(wanted) => &wanted.target,
                    WorkWords::Backup(wanted) => &wanted.target,
                    _ => "",
                };
                shell_word(&visible(target))
            }
            _ => quoted_names(&disk.layers()).join(" "),
        };
        match self.jobs().begin(words.listed(what)) {
            Ok(job) => run::conclude(&job, disk.events(), result),
            Err(failure) => tracing::warn!("job {}: {}", words.id, failure.message()),
        }
    }
}

/// The one descriptor of a role.
fn one(job: &mut HandedJob, role: Role) -> Option<OwnedFd> {
    job.take(role).into_iter().next()
}
