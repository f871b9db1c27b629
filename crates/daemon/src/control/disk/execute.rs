//! What comes over the control socket of a disk, and which part of the server does it.
//!
//! Promises: descriptors that a client sends are the command's, in their order, or are closed;
//! commands that change the disk hold it ([`DiskControl::change`]).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::Progress;
use ringdisk_ring::Ring;
use serde_json::{Value, json};

use super::DiskControl;
use crate::confine;
use crate::control::follow::Follower;
use crate::control::jobs::{Claims, Span, UserWord};
use crate::control::protocol::checkpoint::Begin;
use crate::control::protocol::{self, Command, Refusal, Request};
use crate::control::server::Commands;
use crate::failure::Failure;
use crate::metrics;
use crate::stopping::Stage;

/// How long the answer to a stop waits until it is known whether the mount is in use, and by whom:
/// 5 s in polls of 20 ms.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);
const STOP_POLLS: u32 = 250;
/// How often it is looked whether the jobs have ended, at the end of the disk.
const END_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The descriptors of a command.
struct Given {
    /// The user's word.
    word: UserWord,
    /// The fleecing file of a backup.
    fleece: Option<OwnedFd>,
    /// Files of a checkpoint.
    images: Vec<OwnedFd>,
}

impl Given {
    /// What each of the descriptors is that came with a command.
    fn with(command: &Command, mut given: Vec<OwnedFd>) -> Given {
        // It comes before the user's word.
        let has_fleece = matches!(command, Command::Backup(_)) && !given.is_empty();
        let fleece = has_fleece.then(|| given.remove(0));
        // The user's end of the word, which lasts as long as it is open.
        let is_needed = command.needs_word_later() && given.len() > 1;
        let kept = is_needed.then(|| given.pop()).flatten();
        if matches!(command, Command::CheckpointBegin(_)) {
            return Given { word: UserWord { given: None, kept }, fleece, images: given };
        }
        given.truncate(1);
        Given { word: UserWord { given: given.pop(), kept }, fleece, images: Vec::new() }
    }
}

impl DiskControl {
    /// Waits until it is known what a stop waits for.
    ///
    /// * `progress`: cancelled when nobody waits for the answer.
    async fn stopped(&self, ring: &Ring, force: bool, progress: &Progress) -> Value {
        let Some(stopping) = &self.stopping else { return json!({}) };
        for _ in 0..STOP_POLLS {
            match stopping.stage() {
                Stage::InUse(users) if !force => return json!({ "in-use": users }),
                Stage::Ended => break,
                Stage::Serving | Stage::InUse(_) => {}
            }
            if progress.is_cancelled() {
                break;
            }
            ring.sleep(STOP_POLL_INTERVAL).await;
        }
        json!({})
    }

    /// Asks for the end, as a signal does.
    async fn stop(&self, ring: &Ring, force: bool, progress: &Progress) -> Value {
        self.cancel();
        if let Ok(disk) = self.disk() {
            self.happened(&disk, "stopping", "`ringdisk ctl stop` asks for the end");
        }
        (self.stop)(force);
        self.stopped(ring, force, progress).await
    }

    async fn stats_now(&self, ring: &Ring) -> Result<Value, Failure> {
        // The size of a file that the kernel writes itself is what the file has now.
        if let Ok(disk) = self.disk() {
            let _ = disk.follow_length(ring).await;
        }
        self.stats()
    }

    fn set_copy_on_read(&self, on: bool) -> Result<Value, Failure> {
        self.disk()?.set_copy_on_read(on).map_err(Failure::from)?;
        Ok(json!({}))
    }

    async fn begin_checkpoint(
        &self,
        ring: &Ring,
        wanted: Begin,
        (images, progress): (Vec<OwnedFd>, &Arc<Progress>),
    ) -> Result<Value, Failure> {
        let _changing = self.change(ring, progress).await?;
        let instant = Claims { span: Span::Instant, ..Claims::default() };
        self.jobs.check_beside(&instant)?;
        let (disk, images) = (self.disk()?, (images, progress));
        let begun = self.checkpoints.begin(ring, disk, &self.serving, wanted, images).await;
        self.explained(begun, None)
    }

    fn explained(
        &self,
        result: Result<Value, Failure>,
        file: Option<&str>,
    ) -> Result<Value, Failure> {
        result.map_err(|failure| self.explain(failure, file))
    }
}

impl Commands for DiskControl {
    fn follow(&self, request: &Request) -> Option<Result<Follower, Refusal>> {
        if request.execute != "events" {
            return None;
        }
        let checked = Command::read(request);
        Some(checked.and_then(|_| Ok(Follower::new(Arc::clone(self.disk()?.events())))))
    }

    fn ended(&self) -> Option<Value> {
        self.ended.get().map(|(exit, text)| protocol::ended(*exit, text))
    }

    async fn execute(
        &self,
        ring: &Ring,
        request: &Request,
        given: Vec<OwnedFd>,
        progress: &Arc<Progress>,
    ) -> Result<Value, Refusal> {
        let command = Command::read(request)?;
        let Given { word, fleece, images } = Given::with(&command, given);
        let mut target = None;
        if let Some(given) = &word.given {
            // Before, no helper process is there that would take it.
            self.entered(ring, progress).await?;
            target = confine::pass_on(given).map(|file| self.held().named(file));
        }
        if command.begins_job() {
            self.jobs.wait_for_coming(ring, progress).await;
        }
        let value = match command {
            Command::Stats => self.stats_now(ring).await,
            Command::Topology => Ok(self.serving.topology()),
            Command::Describe => self.describe(),
            Command::Metrics => Ok(metrics::to_json(&self.samples())),
            Command::Events => Ok(json!({})),
            Command::Accel(wanted) => self.accel(ring, wanted.on).await,
            Command::CopyOnRead(wanted) => self.set_copy_on_read(wanted.on),
            Command::CheckpointBegin(wanted) => {
                self.begin_checkpoint(ring, *wanted, (images, progress)).await
            }
            Command::CheckpointEnd(wanted) => self.checkpoints.end(ring, &wanted).await,
            Command::CheckpointList => Ok(self.checkpoints.list(&*self.disk()?)),
            Command::CheckpointDirty(wanted) => self.checkpoints.dirty(&wanted),
            Command::Limit(wanted) => self.limit(ring, &wanted).await,
            Command::Stop(wanted) => Ok(self.stop(ring, wanted.force, progress).await),
            Command::Resize(wanted) => {
                let _changing = self.change(ring, progress).await?;
                self.explained(self.resize(ring, &wanted, progress).await, None)
            }
            Command::Snapshot(wanted) => {
                let _changing = self.change(ring, progress).await?;
                self.explained(self.snapshot(ring, &wanted).await, wanted.file.as_deref())
            }
            Command::Backing(wanted) => {
                let _changing = self.change(ring, progress).await?;
                let changed = self.backing(ring, &wanted, progress).await;
                self.explained(changed, wanted.file.as_deref())
            }
            Command::Commit(wanted) => self.commit(ring, &wanted, word, progress).await,
            Command::Stream(wanted) => self.stream(ring, &wanted, word, progress).await,
            // On the heap: with all that it waits for it is large.
            Command::Mirror(wanted) => {
                Box::pin(self.mirror(ring, &wanted, (word, target), progress)).await
            }
            Command::Backup(wanted) => {
                Box::pin(self.backup(ring, &wanted, (word, target, fleece), progress)).await
            }
            Command::Job(wanted) => {
                let (_, target) = self.served_as.parts();
                self.jobs.execute(ring, &wanted, &target, progress).await
            }
        };
        Ok(value?)
    }

    async fn begin(&self, ring: &Ring) {
        self.go_on_with_jobs(ring).await;
    }

    async fn end(&self, ring: &Ring) {
        self.jobs.end();
        while !self.jobs.running().is_empty() {
            ring.sleep(END_POLL_INTERVAL).await;
        }
    }
}
