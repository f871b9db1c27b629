//! What the control socket of a disk does, however the disk is served.
//!
//! Promises: commands that change the disk run one at a time; a second one is told so. Those that
//! take long are jobs ([`crate::control::jobs`]). The clients of the disk go on meanwhile, except
//! where the disk itself has to stop them. A stop cancels what is under way.

mod advice;
mod changes;
mod describe;
mod execute;
mod job_kinds;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use ringdisk_disk::{Disk, Progress};
use ringdisk_export::Pulse;
use ringdisk_ring::Ring;
use serde_json::{Value, json};

use crate::confine::HeldForDisk;
use crate::control::checkpoint::{Accel, Checkpoints};
use crate::control::jobs::keeper::JobKeeper;
use crate::control::jobs::{Claims, HandedJob, Job, Jobs, NewJob};
use crate::control::serving::Serving;
use crate::failure::{Exit, Failure};
use crate::helper::Named;
use crate::size::human_time;
use crate::stats::layer_json;
use crate::stopping::{Stage, Stopping};

use advice::Advice;
pub use describe::{NbdPlace, ServedAs};

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
        self.jobs.are_to_come(&jobs);
        DiskControl { handed_jobs: Mutex::new(jobs), ..self }
    }

    /// Its jobs are kept there, for the next process.
    pub fn keeps_jobs_at(self, keeper: impl JobKeeper + 'static) -> DiskControl {
        self.jobs.keep_at(Box::new(keeper));
        self
    }

    /// There is no control socket, so no thread goes on with them.
    pub fn lose_jobs(&self) {
        for job in self.take_handed_jobs().iter().filter(|job| !job.has_ended()) {
            tracing::warn!("job {} does not go on: there is no control socket", job.id());
        }
        self.jobs.have_come();
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
        disk.events().emit(event, text);
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
        self.jobs.check_beside(&new.claims)?;
        let job = self.jobs.begin(new)?;
        job.is_of(self.log_name());
        Ok(job)
    }

    /// Whether a job may begin.
    ///
    /// Errors: a command, or a job that it may not run beside, is changing the disk.
    pub(in crate::control) fn check_beside(&self, claims: &Claims) -> Result<(), Failure> {
        if self.changing().is_some() {
            return Err(being_changed());
        }
        self.jobs.check_came()?;
        self.jobs.check_beside(claims)
    }

    /// The data path of a disk that the host kernel serves is in this process as long as what this
    /// gives.
    ///
    /// Errors: it stays in the kernel.
    pub(in crate::control) async fn take_accel_back(
        &self,
        ring: &Ring,
        disk: &Arc<Disk>,
    ) -> Result<Option<Accel>, Failure> {
        self.checkpoints.take_accel_back(ring, disk, &self.serving).await
    }

    /// What changes the disk; a panic elsewhere leaves it valid, so poison is ignored.
    fn changing(&self) -> MutexGuard<'_, Option<Arc<Progress>>> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Errors: another command changes the disk.
    async fn change(&self, ring: &Ring, progress: &Arc<Progress>) -> Result<Changing<'_>, Failure> {
        self.entered(ring, progress).await?;
        self.jobs.wait_for_coming(ring, progress).await;
        let mut changing = self.changing();
        if changing.is_some() {
            return Err(being_changed());
        }
        self.jobs.check_free()?;
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
            object.insert(String::from("size"), json!(disk.size().0));
            let window = disk.window();
            let window = window
                .map(|(offset, size)| json!({ "offset": offset, "size": size.map(|size| size.0) }));
            object.insert(String::from("window"), json!(window));
            object.insert(String::from("read-only"), json!(disk.is_read_only()));
            object.insert(String::from("fault"), json!(disk.fault()));
            let (limits, waits) = (disk.limits(), disk.limit_waits());
            object.insert(String::from("limits"), json!(limits.to_string()));
            let waited = json!({
                "requests": waits.requests, "seconds": waits.time.as_secs_f64(), "now": waits.now
            });
            object.insert(String::from("waited-for-limits"), waited);
            object.insert(String::from("copy-on-read"), json!(disk.copies_on_read()));
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

#[cfg(test)]
mod tests;
