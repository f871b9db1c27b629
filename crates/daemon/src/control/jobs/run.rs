//! Runs a job to its end, and tells of each of its states.
//!
//! Promises: each state that a job is seen in is an event of the disk and a line of the log. A job
//! that stops for a hand-over of the disk waits for how that ends, and begins again where the disk
//! goes on here. Control thread.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ringdisk_disk::Events;
use ringdisk_ring::Ring;
use serde_json::Value;

use super::description::HandedJob;
use super::job::{Job, State, Verdict};
use crate::failure::Failure;

/// How often a job that stands still looks whether it is to go on.
const VERDICT_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Why a job has ended early.
#[derive(Debug)]
pub(in crate::control) enum Early {
    /// It was suspended: it goes on in another process, or begins again here.
    Suspended,
    /// It failed, or was cancelled.
    Failed(Failure),
}

/// What a job does, as [`run`] has it done.
pub(in crate::control) trait Steps {
    /// Does it.
    ///
    /// Errors: why it has ended early.
    async fn run(&mut self) -> Result<Value, Early>;

    /// What another process needs to go on, after it was suspended.
    ///
    /// Errors: it cannot be handed over.
    async fn describe(&mut self) -> Result<HandedJob, String>;

    /// It is to begin again here: waits until it can.
    ///
    /// Errors: it cannot.
    async fn take_back(&mut self) -> Result<(), Failure>;
}

/// Runs a job.
///
/// Errors: those of `steps`.
pub(in crate::control) async fn run(
    job: &Arc<Job>,
    events: &Events,
    ring: &Ring,
    mut steps: impl Steps,
) -> Result<Value, Failure> {
    let mut reported = State::Created;
    report_state(job, events, State::Created);
    let result = loop {
        let result = {
            let work = pin!(steps.run());
            watch(job, events, &mut reported, work).await
        };
        match result {
            Ok(value) => break Ok(value),
            // Also where a hand-over has begun meanwhile: the next process hears how it ended.
            Err(Early::Failed(failure)) => break Err(failure),
            Err(Early::Suspended) => {}
        }
        job.stand_still(steps.describe().await);
        if verdict(job, ring).await == Verdict::Moved {
            // Those who wait have been told where it goes on.
            report_state(job, events, State::Moved);
            return job.ended().await;
        }
        if let Err(failure) = steps.take_back().await {
            break Err(failure);
        }
        job.progress().begin_again();
    };
    // It may have ended in the moment in which it was cancelled.
    if reported != State::Aborting && job.state() == State::Aborting {
        report_state(job, events, State::Aborting);
    }
    conclude(job, events, &result);
    result
}

/// Ends a job.
pub(in crate::control) fn conclude(job: &Job, events: &Events, result: &Result<Value, Failure>) {
    job.conclude(result);
    report_state(job, events, State::Concluded);
}

/// Waits for the end of the work, and tells of the states of the job.
async fn watch<T>(
    job: &Arc<Job>,
    events: &Events,
    reported: &mut State,
    mut work: impl Future<Output = T> + Unpin,
) -> T {
    let mut waited = false;
    loop {
        let turn = job.progress().turn();
        let (state, waits) = (job.state(), job.waits_for_space());
        if state != *reported || waits && !waited {
            *reported = state;
            job.mark();
            match state {
                State::Running | State::Ready if waited => goes_on(job, events, state),
                _ => report_state(job, events, state),
            }
        }
        waited = waits;
        let mut changed = pin!(job.progress().changed(turn));
        let mut ready = pin!(job.ready());
        let ended = poll_fn(|context| {
            if let Poll::Ready(result) = std::pin::Pin::new(&mut work).poll(context) {
                return Poll::Ready(Some(result));
            }
            if *reported == State::Created && job.state() != *reported {
                return Poll::Ready(None);
            }
            let may_get_ready = matches!(*reported, State::Created | State::Running);
            if may_get_ready && ready.as_mut().poll(context).is_ready() {
                return Poll::Ready(None);
            }
            changed.as_mut().poll(context).map(|()| None)
        });
        if let Some(result) = ended.await {
            return result;
        }
    }
}

/// Waits until it is known where a job goes on that stands still.
async fn verdict(job: &Job, ring: &Ring) -> Verdict {
    loop {
        match job.verdict() {
            Some(verdict) => return verdict,
            None if job.progress().is_cancelled() => return Verdict::GoesOn,
            None => ring.sleep(VERDICT_POLL_INTERVAL).await,
        }
    }
}

/// Logs the state of a job and emits it as an event.
fn report_state(job: &Job, events: &Events, state: State) {
    report_state_because(job, events, state, job.why());
}

/// Tells that a job which waited for space goes on: who saw the warning sees the end of it, too.
fn goes_on(job: &Job, events: &Events, state: State) {
    report_state_because(job, events, state, Some(String::from("the target has space again")));
}

fn report_state_because(job: &Job, events: &Events, state: State, why: Option<String>) {
    let (id, kind, state) = (job.id(), job.kind().word(), state.word());
    let disk = job.disk();
    let because = why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    let text = format!("job {id} ({kind} of {}) is {state}{because}", job.what());
    match why {
        Some(_) if !job.has_moved() => tracing::warn!(disk, event = "job", "{text}"),
        _ => tracing::info!(disk, event = "job", "{text}"),
    }
    let mut fields =
        vec![("id", id.to_owned()), ("kind", kind.to_owned()), ("state", state.to_owned())];
    fields.extend(why.map(|why| ("why", why)));
    events.emit_with("job", text, fields);
}
