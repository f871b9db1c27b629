//! Makes a connection on a thread of its own, for a task of a ring.
//!
//! Promises: the ring's thread does not block; a connection whose task is gone meanwhile is free
//! for other rings. Control path: once for each connection.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use super::link::Link;
use super::shared::Shared;

#[derive(Debug)]
enum Outcome {
    Running(Option<Waker>),
    Done(Option<Arc<Link>>),
    /// The task is gone, or has taken the result.
    Over,
}

/// The task's end.
struct Waiting<'a>(&'a Mutex<Outcome>, &'a Shared);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut outcome = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Outcome::Done(Some(link)) = std::mem::replace(&mut *outcome, Outcome::Over) {
            self.1.release(&link);
        }
    }
}

/// Makes the connection that [`super::shared::Next::Open`] asked for. `None`: there is none.
///
/// * `driver`: gets it.
pub(super) async fn run(shared: Arc<Shared>, driver: u64) -> Option<Arc<Link>> {
    let outcome = Arc::new(Mutex::new(Outcome::Running(None)));
    let (theirs, for_thread) = (Arc::clone(&outcome), Arc::clone(&shared));
    let thread = std::thread::Builder::new().name(String::from("nbd-connect"));
    let started = thread.spawn(move || {
        let link = for_thread.open(driver);
        let mut outcome = theirs.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *outcome, Outcome::Over) {
            Outcome::Running(waker) => {
                *outcome = Outcome::Done(link);
                drop(outcome);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            Outcome::Over | Outcome::Done(_) => {
                if let Some(link) = link {
                    for_thread.release(&link);
                }
            }
        }
    });
    if let Err(error) = started {
        tracing::warn!("'{}': no thread to connect with: {error}", shared.name);
        shared.opening_failed();
        return None;
    }
    let waiting = Waiting(&outcome, &shared);
    poll_fn(|cx| {
        let mut outcome = waiting.0.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *outcome, Outcome::Over) {
            Outcome::Running(_) => {
                *outcome = Outcome::Running(Some(cx.waker().clone()));
                Poll::Pending
            }
            Outcome::Done(link) => Poll::Ready(link),
            Outcome::Over => Poll::Ready(None),
        }
    })
    .await
}
