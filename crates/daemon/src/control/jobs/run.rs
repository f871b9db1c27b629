//! Runs a job to its end, and tells of each of its states.
//!
//! Promises: each state that a job is seen in is an event of the disk and a line of the log.
//! Control thread.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use ringdisk_disk::Events;
use serde_json::Value;

use super::job::{Job, State};
use crate::failure::Failure;

/// Runs a job.
///
/// Errors: those of `work`.
pub(super) async fn run(
    job: &Arc<Job>,
    events: &Events,
    work: impl Future<Output = Result<Value, Failure>>,
) -> Result<Value, Failure> {
    let mut work = pin!(work);
    let mut told = State::Created;
    tell(job, events, State::Created);
    let result = loop {
        let turn = job.progress().turn();
        let state = job.state();
        if state != told {
            told = state;
            job.mark();
            tell(job, events, state);
        }
        let mut changed = pin!(job.progress().changed(turn));
        let mut ready = pin!(job.ready());
        let ended = poll_fn(|context| {
            if let Poll::Ready(result) = work.as_mut().poll(context) {
                return Poll::Ready(Some(result));
            }
            if told == State::Created && job.state() != told {
                return Poll::Ready(None);
            }
            let may_get_ready = matches!(told, State::Created | State::Running);
            if may_get_ready && ready.as_mut().poll(context).is_ready() {
                return Poll::Ready(None);
            }
            changed.as_mut().poll(context).map(|()| None)
        });
        if let Some(result) = ended.await {
            break result;
        }
    };
    // It may have ended in the moment in which it was cancelled.
    if told != State::Aborting && job.state() == State::Aborting {
        tell(job, events, State::Aborting);
    }
    job.conclude(&result);
    tell(job, events, State::Concluded);
    result
}

/// Tells of a state.
fn tell(job: &Job, events: &Events, state: State) {
    let (id, kind, state) = (job.id(), job.kind().word(), state.word());
    let why = job.why();
    let because = why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
    let text = format!("job {id} ({kind} of {}) is {state}{because}", job.what());
    match why {
        Some(_) => tracing::warn!(event = "job", "{text}"),
        None => tracing::info!(event = "job", "{text}"),
    }
    let mut fields =
        vec![("id", id.to_owned()), ("kind", kind.to_owned()), ("state", state.to_owned())];
    fields.extend(why.map(|why| ("why", why)));
    events.tell_with("job", text, fields);
}
