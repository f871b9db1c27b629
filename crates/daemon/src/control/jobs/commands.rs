//! What clients of the control socket ask of the jobs of a disk.
//!
//! Promises: nothing but `job-wait` waits for a job. While another process takes the disk over,
//! commands wait for a moment, as that may be given up; and in that process, where the job is only
//! about to be begun, `job-wait` as long as that takes.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_disk::Progress;
use ringdisk_ring::Ring;
use serde_json::{Value, json};

use super::job::{Job, State};
use super::list::Jobs;
use crate::control::protocol::jobs::JobCommand;
use crate::control::server::{First, first};
use crate::failure::{Exit, Failure};

/// How often a client that waits is told how far the job is.
const REPORT: Duration = Duration::from_millis(200);
/// How long a command waits for a hand-over, of which clients notice less.
const HAND_OVER: Duration = Duration::from_secs(2);
/// How often it looks.
const HAND_OVER_POLL_INTERVAL: Duration = Duration::from_millis(5);

impl Jobs {
    /// Waits for a moment until the jobs of the process before have been begun.
    ///
    /// * `progress`: of the client that asks.
    pub(in crate::control) async fn wait_for_coming(&self, ring: &Ring, progress: &Progress) {
        let end = Instant::now() + HAND_OVER;
        while self.are_coming() && !progress.is_cancelled() && Instant::now() < end {
            ring.sleep(HAND_OVER_POLL_INTERVAL).await;
        }
    }

    /// Does what is asked for.
    ///
    /// * `target`: where the disk is served, for people.
    /// * `progress`: of the client that asks; cancelled when it leaves.
    ///
    /// Errors: no such job; it has ended, or cannot do that.
    pub async fn execute(
        &self,
        ring: &Ring,
        command: &JobCommand,
        target: &str,
        progress: &Arc<Progress>,
    ) -> Result<Value, Failure> {
        let Some(id) = command.id() else {
            let jobs: Value = self.listed().iter().map(|job| job.to_json()).collect();
            return Ok(json!({ "target": target, "jobs": jobs }));
        };
        let waits = matches!(command, JobCommand::Wait(_));
        let end = Instant::now() + HAND_OVER;
        while self.is_coming(id) && !progress.is_cancelled() && (waits || Instant::now() < end) {
            ring.sleep(HAND_OVER_POLL_INTERVAL).await;
        }
        if self.is_coming(id) {
            self.check_came()?;
        }
        let job = self.find(id)?;
        if let JobCommand::Wait(_) = command {
            return wait(ring, &job, progress).await;
        }
        let end = Instant::now() + HAND_OVER;
        while self.check_stays().is_err() && !progress.is_cancelled() && Instant::now() < end {
            ring.sleep(HAND_OVER_POLL_INTERVAL).await;
        }
        check_goes_on(&job)?;
        self.check_stays()?;
        match command {
            JobCommand::Pause(_) => job.progress().pause(),
            JobCommand::Resume(_) if job.progress().paused().is_none() => {
                return Err(Failure::new(Exit::Usage, format!("the job '{id}' is not paused")));
            }
            JobCommand::Resume(_) => job.progress().resume(),
            JobCommand::Limit(wanted) => {
                job.progress().set_speed(wanted.speed);
                job.mark();
            }
            JobCommand::Cancel(_) => {
                let told = cancel(&job);
                self.keep_changes();
                return Ok(told);
            }
            JobCommand::Complete(_) => complete(&job)?,
            JobCommand::List | JobCommand::Wait(_) => {}
        }
        self.keep_changes();
        Ok(job.to_json())
    }
}

/// Gives a job up. A mirror whose target is in step leaves that as a copy; told so twice, or told
/// to switch over before, it is given up, too.
fn cancel(job: &Job) -> Value {
    let mirror = job.mirror().filter(|it| it.is_ready() && !it.is_completing());
    let is_left = job.progress().paused().is_none()
        && mirror.is_some_and(|mirror| mirror.complete(false).is_ok());
    if !is_left {
        job.progress().cancel();
    }
    let mut value = job.to_json();
    if is_left {
        value["text"] = json!(format!(
            "The target of '{}' is left as a copy of the disk; `ringdisk job wait` says when it is \
             whole.",
            job.id()
        ));
    }
    value
}

/// Has a mirror switch over as soon as it is ready.
///
/// Errors: it is no mirror; the disk cannot switch over; it is left as a copy already.
fn complete(job: &Job) -> Result<(), Failure> {
    let id = job.id();
    let Some(mirror) = job.mirror() else {
        let text = format!("the job '{id}' (a {}) completes by itself", job.kind().word());
        return Err(Failure::new(Exit::Usage, text)
            .hint(format!("`ringdisk job wait {id}` waits for its end")));
    };
    if mirror.is_completing() {
        return Err(Failure::new(Exit::Usage, format!("the job '{id}' was told to end already"))
            .hint(format!("`ringdisk job wait {id}` waits for its end")));
    }
    mirror.complete(true)?;
    Ok(())
}

/// Errors: the job has ended, or was cancelled.
fn check_goes_on(job: &Job) -> Result<(), Failure> {
    let id = job.id();
    match job.state() {
        State::Moved => {
            let why = job.why().unwrap_or_default();
            Err(Failure::new(Exit::Locked, format!("the job '{id}' has moved: {why}"))
                .hint("try it again in a moment"))
        }
        State::Concluded => {
            Err(Failure::new(Exit::Usage, format!("the job '{id}' has ended already")))
        }
        State::Aborting => {
            Err(Failure::new(Exit::Usage, format!("the job '{id}' was cancelled already")))
        }
        _ => Ok(()),
    }
}

/// Waits for the end of a job; of a mirror that nobody has told to end: until it is ready.
///
/// Errors: why it failed; the client has left.
async fn wait(ring: &Ring, job: &Job, progress: &Progress) -> Result<Value, Failure> {
    loop {
        progress.set_total(job.progress().total());
        progress.set_done(job.progress().done());
        let turn = progress.turn();
        if job.state() == State::Ready && job.mirror().is_some_and(|it| !it.is_completing()) {
            return Ok(job.to_json());
        }
        if progress.is_cancelled() && !job.has_ended() {
            return Err(Failure::new(Exit::General, "nobody waits any longer"));
        }
        let pause = pin!(async {
            let _ = ring.within(REPORT, progress.changed(turn)).await;
        });
        match first(pin!(job.ended()), pause).await {
            First::Left(result) => {
                let mut told = job.to_json();
                told["result"] = result?;
                return Ok(told);
            }
            First::Right(()) => {}
        }
    }
}
