//! What the control socket of a disk does, however the disk is served.
//!
//! Promises: commands that change the disk run one at a time; a second one is told so. Those that
//! take long are jobs ([`crate::control::jobs`]). The clients of the disk go on meanwhile, except
//! where the disk itself has to stop them. A stop cancels what is under way.

mod advice;
mod describe;
mod serving;

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use ringdisk_disk::{
    Backing, Disk, Error, ErrorKind, Format, NewSize as WantedSize, OverlayOptions, Progress,
    ResizeOptions, SnapshotChange,
};
use ringdisk_export::Pulse;
use ringdisk_qcow2::Preallocation;
use ringdisk_ring::Ring;
use ringdisk_throttle::Limits;
use serde_json::{Value, json};

use crate::confine::{self, HeldForDisk};
use crate::control::checkpoint::Checkpoints;
use crate::control::follow::Follower;
use crate::control::jobs::keeper::JobKeeper;
use crate::control::jobs::{HandedJob, Job, Jobs, NewJob, UserWord, chain};
use crate::control::protocol::{
    self, Command, Limit, NewBacking, NewSize, Refusal, Request, Resize, Snapshot,
};
use crate::control::server::Commands;
use crate::failure::{Exit, Failure};
use crate::helper::Named;
use crate::metrics;
use crate::new_file::check_new_name;
use crate::size::human_time;
use crate::stats::layer_json;
use crate::stopping::{Stage, Stopping};
use crate::terminal::visible;

pub(in crate::control) use advice::Advice;
pub use describe::{NbdPlace, ServedAs, SocketClient};
pub use serving::Serving;

/// A disk under control.
pub struct DiskControl {
    /// `None` when it is served no longer.
    disk: Mutex<Option<Arc<Disk>>>,
    serving: Arc<dyn Serving>,
    /// The command that changes the disk now.
    changing: Mutex<Option<Arc<Progress>>>,
    /// What the process is confined to, when it is known.
    sandbox: OnceLock<String>,
    /// Whom the process has become, who started as root.
    user: OnceLock<String>,
    /// It will be: what is opened or made before would be out of reach then.
    is_confined_later: bool,
    /// What is held for the disk outside of the sandbox.
    held: Arc<HeldForDisk>,
    /// Asks for a clean stop, as signals do, or for the end now; returns at once.
    stop: Box<dyn Fn(bool) + Send + Sync>,
    /// Long changes of its images.
    jobs: Arc<Jobs>,
    /// Jobs that another process has begun.
    handed_jobs: Mutex<Vec<HandedJob>>,
    /// Kept states of the disk.
    checkpoints: Arc<Checkpoints>,
    /// How far a stop has come, where it may have to wait for users.
    stopping: Option<Arc<Stopping>>,
    /// How it has ended: exit code and text.
    ended: OnceLock<(u8, String)>,
    /// Where clients find it.
    served_as: ServedAs,
    /// Since when this process serves it.
    since: SystemTime,
}

/// How long the answer to a stop waits until it is known whether the mount is in use, and by whom:
/// 5 s in looks of 20 ms.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(20);
const STOP_LOOKS: u32 = 250;
/// How often it is looked whether the jobs have ended, at the end of the disk.
const END_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How often it is looked whether the process is in its sandbox, which takes some milliseconds.
const ENTER_POLL_INTERVAL: Duration = Duration::from_millis(5);

impl fmt::Debug for DiskControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskControl").finish_non_exhaustive()
    }
}

impl DiskControl {
    /// * `stop`: asks for a clean stop, or with `true` for the end now; returns at once.
    pub fn new(
        disk: Arc<Disk>,
        serving: impl Serving + 'static,
        stop: impl Fn(bool) + Send + Sync + 'static,
    ) -> DiskControl {
        DiskControl {
            disk: Mutex::new(Some(disk)),
            serving: Arc::new(serving),
            changing: Mutex::new(None),
            sandbox: OnceLock::new(),
            user: OnceLock::new(),
            is_confined_later: false,
            held: Arc::default(),
            jobs: Arc::default(),
            handed_jobs: Mutex::default(),
            stop: Box::new(stop),
            checkpoints: Arc::default(),
            stopping: None,
            ended: OnceLock::new(),
            served_as: ServedAs::default(),
            since: describe::now(),
        }
    }

    /// Its jobs.
    pub fn jobs(&self) -> &Arc<Jobs> {
        &self.jobs
    }

    /// Goes on with jobs that another process has begun, when the control socket is there.
    pub fn takes_up(self, jobs: Vec<HandedJob>) -> DiskControl {
        DiskControl { handed_jobs: Mutex::new(jobs), ..self }
    }

    /// Its jobs are kept there, for the next process.
    pub fn keeps_jobs_at(self, keeper: impl JobKeeper + 'static) -> DiskControl {
        self.jobs.keep_at(Box::new(keeper));
        self
    }

    /// There is no control socket, so no thread goes on with them.
    pub fn lose_jobs(&self) {
        for job in self.take_handed_jobs() {
            tracing::warn!("job {} does not go on: there is no control socket", job.id());
        }
    }

    /// The jobs that another process has begun, once.
    pub fn take_handed_jobs(&self) -> Vec<HandedJob> {
        std::mem::take(&mut self.handed_jobs.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// For a watchdog: asks whether the queue threads of the disk answer.
    pub fn pulses(&self) -> Vec<Pulse> {
        self.serving.queues().iter().map(Pulse::of).collect()
    }

    /// Says how serving has ended, for those who wait for that.
    pub fn end(&self, result: &Result<(), Failure>) {
        let ended = match result {
            Ok(()) => (Exit::Clean.code(), String::new()),
            Err(failure) => (failure.code(), failure.message().to_owned()),
        };
        let _ = self.ended.set(ended);
    }

    /// A stop may have to wait for users, as is said there.
    pub fn in_stages(self, stopping: Arc<Stopping>) -> DiskControl {
        DiskControl { stopping: Some(stopping), ..self }
    }

    /// Whether the process enters a sandbox after this ([`DiskControl::confined`]): commands that
    /// change the disk wait for that.
    pub fn confined_later(self, is_confined_later: bool) -> DiskControl {
        DiskControl { is_confined_later, ..self }
    }

    /// Waits until the process is in its sandbox, if it enters one.
    ///
    /// Errors: the command was given up.
    pub(in crate::control) async fn entered(
        &self,
        ring: &Ring,
        progress: &Progress,
    ) -> Result<(), Failure> {
        while self.is_confined_later && self.sandbox.get().is_none() {
            if progress.is_cancelled() {
                let text = "the command was given up before the server was ready";
                return Err(Failure::new(Exit::General, text));
            }
            ring.sleep(ENTER_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until it is known what a stop waits for.
    ///
    /// * `progress`: cancelled when nobody waits for the answer.
    async fn stopped(&self, ring: &Ring, force: bool, progress: &Progress) -> Value {
        let Some(stopping) = &self.stopping else { return json!({}) };
        for _ in 0..STOP_LOOKS {
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

    /// Says what the process is confined to, once.
    pub fn confined(&self, sandbox: String) {
        let _ = self.sandbox.set(sandbox);
    }

    /// Says whom the process has become, once.
    pub fn runs_as(&self, user: String) {
        let _ = self.user.set(user);
    }

    /// Outside of the sandbox new overlays of the disk are made in this directory.
    pub fn held_outside(&self, directory: &Named) {
        self.held.has(directory);
    }

    /// Lets go of the disk, so that its image is free when clients hear of the end. Any thread.
    pub fn let_go(&self) {
        self.cancel();
        self.checkpoints.let_go();
        drop(self.disk.lock().unwrap_or_else(PoisonError::into_inner).take());
        self.held.end();
    }

    /// Says in the log and to those who watch the disk what has happened to it.
    fn happened(&self, disk: &Disk, event: &'static str, text: &str) {
        let name = self.log_name();
        tracing::info!(disk = name, event, "{name}: {text}");
        disk.events().tell(event, text);
    }

    /// Errors: it is served no longer.
    pub(in crate::control) fn disk(&self) -> Result<Arc<Disk>, Failure> {
        let disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        disk.clone().ok_or_else(|| Failure::new(Exit::Halted, "the disk is served no longer"))
    }

    /// Cancels what is under way. Any thread.
    pub fn cancel(&self) {
        if let Some(progress) = &*self.changing() {
            progress.cancel();
        }
        self.jobs.cancel();
    }

    /// What helps when the user or the sandbox of the process is in the way.
    pub(in crate::control) fn advice(&self) -> Advice {
        Advice { user: self.user.get().cloned(), sandbox: self.sandbox.get().cloned() }
    }

    fn explain(&self, failure: Failure, file: Option<&str>) -> Failure {
        self.advice().explain(failure, file)
    }

    /// What is held for the disk outside of the sandbox.
    pub(in crate::control) fn held(&self) -> Arc<HeldForDisk> {
        Arc::clone(&self.held)
    }

    /// Puts a job into the list.
    ///
    /// Errors: a command or another job is changing the disk; as [`Jobs::begin`].
    pub(in crate::control) fn begin_job(&self, new: NewJob) -> Result<Arc<Job>, Failure> {
        if self.changing().is_some() {
            return Err(being_changed());
        }
        self.jobs.check_free(&new.holds)?;
        let job = self.jobs.begin(new)?;
        job.is_of(self.log_name());
        Ok(job)
    }

    /// Errors: a command or a job is changing the disk.
    pub(in crate::control) fn check_no_change(&self) -> Result<(), Failure> {
        if self.changing().is_some() {
            return Err(being_changed());
        }
        self.jobs.check_free(&[])
    }

    /// What changes the disk; a panic elsewhere leaves it valid, so poison is ignored.
    fn changing(&self) -> MutexGuard<'_, Option<Arc<Progress>>> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Errors: another command changes the disk.
    async fn change(&self, ring: &Ring, progress: &Arc<Progress>) -> Result<Changing<'_>, Failure> {
        self.entered(ring, progress).await?;
        let mut changing = self.changing();
        if changing.is_some() {
            return Err(being_changed());
        }
        self.jobs.check_free(&[])?;
        *changing = Some(Arc::clone(progress));
        drop(changing);
        self.settle();
        Ok(Changing(self))
    }

    /// What the chain has no longer is held no longer.
    pub(in crate::control) fn settle(&self) {
        if let Ok(disk) = self.disk() {
            self.held.settle(&disk);
        }
    }

    fn stats(&self) -> Result<Value, Failure> {
        let disk = self.disk()?;
        let report = self.serving.report();
        let mut value = report.to_json();
        let layers = disk.layers();
        if let Value::Object(object) = &mut value {
            object.insert(String::from("size"), json!(disk.size()));
            let window = disk.window();
            let window = window.map(|(offset, size)| json!({ "offset": offset, "size": size }));
            object.insert(String::from("window"), json!(window));
            object.insert(String::from("read-only"), json!(disk.is_read_only()));
            object.insert(String::from("fault"), json!(disk.fault()));
            let (limits, waits) = (disk.limits(), disk.limit_waits());
            object.insert(String::from("limits"), json!(limits.to_string()));
            let waited = json!({
                "requests": waits.requests, "seconds": waits.time.as_secs_f64(), "now": waits.now
            });
            object.insert(String::from("waited-for-limits"), waited);
            object.insert(String::from("sandbox"), json!(self.sandbox.get()));
            let jobs: Value = self.jobs.all().iter().map(|job| job.to_json()).collect();
            object.insert(String::from("jobs"), jobs);
            object.insert(String::from("serving"), self.describe()?);
            object.insert(
                String::from("layers"),
                layers.iter().map(|layer| layer_json(layer, report.reads_and_writes())).collect(),
            );
            let mut text = report.with_layers(&layers, disk.fault().as_deref());
            if !limits.are_none() || waits.requests > 0 {
                text.push_str(&format!(
                    "\n  limits: {limits}; {} requests waited for them, {} in all",
                    waits.requests,
                    human_time(waits.time)
                ));
            }
            if let Some(sandbox) = self.sandbox.get() {
                text.push_str(&format!("\n  sandbox: {sandbox}"));
            }
            if let Some(Stage::InUse(users)) = self.stopping.as_ref().map(|stage| stage.stage()) {
                text.push_str(&format!("\n  stopping: still in use by {users}"));
                object.insert(String::from("in-use-by"), json!(users));
            }
            object.insert(String::from("text"), json!(text));
        }
        Ok(value)
    }

    async fn accel(&self, ring: &Ring, on: bool) -> Result<Value, Failure> {
        if on && !self.disk()?.limits().are_none() {
            return Err(Failure::new(
                Exit::Unsupported,
                "the disk has limits, which the host kernel does not know",
            )
            .hint("`ringdisk ctl TARGET limit none` removes them"));
        }
        let serving = Arc::clone(&self.serving);
        self.checkpoints.accel_is_wanted(on);
        // Requests that the kernel has are waited for.
        let switched = ring.offload(move || serving.switch_accel(on)).await;
        match switched {
            Ok(serves) => Ok(json!({ "on": on, "kernel-serves": serves })),
            Err(why) => Err(Failure::new(Exit::Usage, why)),
        }
    }

    /// Shows the limits of the disk, or changes them.
    async fn limit(&self, ring: &Ring, wanted: &Limit) -> Result<Value, Failure> {
        let disk = self.disk()?;
        let usage = |text: String| Failure::new(Exit::Usage, text);
        let limits = match &wanted.change {
            None => disk.limits(),
            Some(text) => {
                let wanted = disk.limits().changed(text).map_err(|why| usage(why.to_string()))?;
                if !wanted.are_none() {
                    let serving = Arc::clone(&self.serving);
                    // Requests that the kernel has are waited for.
                    let is_ours = ring.offload(move || serving.serve_here()).await;
                    is_ours.map_err(usage)?;
                }
                // Again: another command may have changed others meanwhile.
                let change = |current: &Limits| {
                    let changed = current.changed(text);
                    changed.map_err(|why| Error::new(ErrorKind::Invalid, why.to_string()))
                };
                let limits = disk.change_limits(change)?;
                self.happened(&disk, "limited", &format!("the limits are {limits} now"));
                limits
            }
        };
        let waits = disk.limit_waits();
        Ok(json!({
            "limits": limits.to_string(),
            "waiting": waits.now,
            "waited": waits.requests,
            "waited-seconds": waits.time.as_secs_f64(),
        }))
    }

    async fn resize(
        &self,
        ring: &Ring,
        wanted: &Resize,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let usage = |text: String| Failure::new(Exit::Usage, text);
        let disk = self.disk()?;
        // What is relative is computed when its turn comes: clients and other changes may be faster
        // than this command.
        let size = match wanted.size {
            NewSize::To(0) if disk.size() > 0 => {
                return Err(usage(String::from("nothing would be left of the disk")));
            }
            NewSize::To(size) => WantedSize::To(size),
            NewSize::Grow(by) => WantedSize::Grow(by),
            NewSize::Shrink(by) => WantedSize::Shrink(by),
        };
        let preallocation = match wanted.preallocation.as_deref() {
            None | Some("off") => Preallocation::Off,
            Some("metadata") => Preallocation::Metadata,
            Some("falloc") => Preallocation::Falloc,
            Some("full") => Preallocation::Full,
            Some(other) => {
                return Err(usage(format!("no such preallocation: '{}'", visible(other))));
            }
        };
        let options = ResizeOptions { shrink: wanted.shrink, preallocation };
        // Zeroes for a large disk take long: the client that asked for them may have left, and a
        // stop must not wait for them.
        let resized = disk.resize_unless_cancelled(ring, size, options, progress).await;
        let resized = resized.map_err(Failure::of_change)?;
        Ok(json!({ "old-size": resized.before, "size": resized.after }))
    }

    async fn snapshot(&self, ring: &Ring, wanted: &Snapshot) -> Result<Value, Failure> {
        let disk = self.disk()?;
        match (&wanted.file, &wanted.internal) {
            (Some(file), None) => {
                check_new_name(Path::new(file))?;
                disk.add_overlay(ring, file, OverlayOptions::default()).await?;
                let text = format!(
                    "Further writes go to '{}': name that one when the disk is served again.",
                    visible(file)
                );
                Ok(json!({ "file": file, "text": text }))
            }
            (None, Some(name)) => {
                disk.snapshot(ring, SnapshotChange::Create(name.clone())).await?;
                let text = format!("The image holds the snapshot '{}' now.", visible(name));
                Ok(json!({ "internal": name, "text": text }))
            }
            _ => Err(Failure::new(Exit::Usage, "give either 'file' or 'internal'")),
        }
    }

    async fn backing(
        &self,
        ring: &Ring,
        wanted: &NewBacking,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let usage = |text: &str| Failure::new(Exit::Usage, text);
        let backing = match (&wanted.file, &wanted.format) {
            (None, None) => None,
            (None, Some(_)) => {
                return Err(usage("a format of a backing file is given, and no backing file"));
            }
            (Some(_), None) => {
                return Err(usage(
                    "the format of the backing file is missing; it is never guessed",
                ));
            }
            (Some(file), Some(format)) => {
                Some(Backing { file: file.as_bytes().to_vec(), format: format.parse::<Format>()? })
            }
        };
        let disk = self.disk()?;
        disk.change_backing(ring, backing, progress).await?;
        Ok(chain(&disk))
    }
}

/// A command is in the way.
fn being_changed() -> Failure {
    Failure::new(Exit::Locked, "another command is changing the disk").hint("wait until it is done")
}

/// Held while a command changes the disk.
struct Changing<'a>(&'a DiskControl);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.settle();
        *self.0.changing() = None;
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
        mut given: Vec<OwnedFd>,
        progress: &Arc<Progress>,
    ) -> Result<Value, Refusal> {
        let command = Command::read(request)?;
        // The user's end of the word, which lasts as long as it is open.
        let is_needed = command.needs_word_later() && given.len() > 1;
        let kept = is_needed.then(|| given.pop()).flatten();
        let is_word = !matches!(command, Command::CheckpointBegin(_));
        if is_word {
            given.truncate(1);
        }
        let word = UserWord { given: is_word.then(|| given.pop()).flatten(), kept };
        let mut target = None;
        if let Some(given) = &word.given {
            // Before, nobody is there who would take it.
            self.entered(ring, progress).await?;
            target = confine::pass_on(given);
        }
        match command {
            Command::Stats => {
                // The size of a file that the kernel writes itself is what the file has now.
                if let Ok(disk) = self.disk() {
                    let _ = disk.follow_length(ring).await;
                }
                Ok(self.stats()?)
            }
            Command::Topology => Ok(self.serving.topology()),
            Command::Describe => Ok(self.describe()?),
            Command::Metrics => Ok(metrics::to_json(&self.samples())),
            Command::Events => Ok(json!({})),
            Command::Accel(wanted) => Ok(self.accel(ring, wanted.on).await?),
            Command::CopyOnRead(wanted) => {
                self.disk()?.set_copy_on_read(wanted.on).map_err(Failure::from)?;
                Ok(json!({}))
            }
            Command::CheckpointBegin(wanted) => {
                let _changing = self.change(ring, progress).await?;
                let disk = self.disk()?;
                let begun =
                    self.checkpoints.begin(ring, disk, &self.serving, *wanted, (given, progress));
                Ok(begun.await.map_err(|failure| self.explain(failure, None))?)
            }
            Command::CheckpointEnd(wanted) => Ok(self.checkpoints.end(ring, &wanted).await?),
            Command::CheckpointList => Ok(self.checkpoints.list(&*self.disk()?)),
            Command::CheckpointDirty(wanted) => Ok(self.checkpoints.dirty(&wanted)?),
            Command::Limit(wanted) => Ok(self.limit(ring, &wanted).await?),
            Command::Stop(wanted) => {
                self.cancel();
                if let Ok(disk) = self.disk() {
                    self.happened(&disk, "stopping", "`ringdisk ctl stop` asks for the end");
                }
                (self.stop)(wanted.force);
                Ok(self.stopped(ring, wanted.force, progress).await)
            }
            Command::Resize(wanted) => {
                let _changing = self.change(ring, progress).await?;
                Ok(self
                    .resize(ring, &wanted, progress)
                    .await
                    .map_err(|failure| self.explain(failure, None))?)
            }
            Command::Snapshot(wanted) => {
                let _changing = self.change(ring, progress).await?;
                let explain = |failure| self.explain(failure, wanted.file.as_deref());
                Ok(self.snapshot(ring, &wanted).await.map_err(explain)?)
            }
            Command::Backing(wanted) => {
                let _changing = self.change(ring, progress).await?;
                Ok(self
                    .backing(ring, &wanted, progress)
                    .await
                    .map_err(|failure| self.explain(failure, wanted.file.as_deref()))?)
            }
            Command::Commit(wanted) => Ok(self.commit(ring, &wanted, word, progress).await?),
            Command::Stream(wanted) => Ok(self.stream(ring, &wanted, word, progress).await?),
            // On the heap: with all that it waits for it is large.
            Command::Mirror(wanted) => {
                Ok(Box::pin(self.mirror(ring, &wanted, (word, target), progress)).await?)
            }
            Command::Job(wanted) => {
                let (_, target) = self.served_as.parts();
                Ok(self.jobs.execute(ring, &wanted, &target, progress).await?)
            }
        }
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

#[cfg(test)]
mod tests;
