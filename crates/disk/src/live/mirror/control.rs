//! What others ask of a mirror that runs, and what it tells them.
//!
//! Promises: for any thread; takes a lock for a few instructions.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use super::MirrorLeft;
use crate::{Error, ErrorKind};

/// Shared in an `Arc` with the threads that watch or complete a mirror.
#[derive(Debug, Default)]
pub struct MirrorControl {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    is_ready: bool,
    is_over: bool,
    /// The mirror is to end; true: by a switch-over.
    wanted: Option<bool>,
    /// Why the disk cannot switch over.
    refusal: Option<String>,
    /// What the target of a suspended mirror does not have.
    left: Option<MirrorLeft>,
    waiters: Vec<Waker>,
}

impl State {
    fn wait(&mut self, waker: &Waker) {
        if !self.waiters.iter().any(|other| other.will_wake(waker)) {
            self.waiters.push(waker.clone());
        }
    }
}

impl MirrorControl {
    /// For one mirror.
    pub fn new() -> MirrorControl {
        MirrorControl::default()
    }

    /// Whether the target is in step but for a small rest: a completion takes a moment. It stays
    /// true when clients write faster than the target for a while.
    pub fn is_ready(&self) -> bool {
        self.state().is_ready
    }

    /// Waits until [`MirrorControl::is_ready`]. False: the mirror ended before.
    pub async fn ready(&self) -> bool {
        poll_fn(|context| {
            let mut state = self.state();
            if state.is_ready || state.is_over {
                return Poll::Ready(state.is_ready);
            }
            state.wait(context.waker());
            Poll::Pending
        })
        .await
    }

    /// Ends the mirror as soon as it is ready.
    ///
    /// * `pivot`: the disk switches over to the target; otherwise the target is left as a copy of
    ///   that moment. A switch-over waits for the end of a checkpoint, a backup and a commit that
    ///   are running.
    ///
    /// Errors: `Unsupported` with the reason where the disk cannot switch over; the mirror goes on.
    pub fn complete(&self, pivot: bool) -> Result<(), Error> {
        if let Some(reason) = self.state().refusal.as_ref().filter(|_| pivot) {
            return Err(cannot_switch(reason));
        }
        self.change(|state| state.wanted = Some(pivot));
        Ok(())
    }

    /// Whether [`MirrorControl::complete`] was called.
    pub fn is_completing(&self) -> bool {
        self.state().wanted.is_some()
    }

    /// What [`MirrorControl::complete`] was called with.
    pub fn wanted(&self) -> Option<bool> {
        self.state().wanted
    }

    /// Waits for [`MirrorControl::complete`].
    pub(super) async fn until_wanted(&self) {
        poll_fn(|context| {
            let mut state = self.state();
            if state.wanted.is_some() {
                return Poll::Ready(());
            }
            state.wait(context.waker());
            Poll::Pending
        })
        .await;
    }

    /// The mirror begins.
    ///
    /// * `refusal`: why the disk cannot switch over.
    pub(super) fn begin(&self, refusal: Option<String>) {
        self.state().refusal = refusal;
    }

    /// Errors: `Unsupported` where a switch-over was asked for before the mirror began, and the
    /// disk cannot.
    pub(super) fn check(&self) -> Result<(), Error> {
        let state = self.state();
        match state.refusal.as_ref().filter(|_| state.wanted == Some(true)) {
            Some(reason) => Err(cannot_switch(reason)),
            None => Ok(()),
        }
    }

    pub(super) fn set_ready(&self) {
        self.change(|state| state.is_ready = true);
    }

    pub(super) fn end(&self) {
        self.change(|state| state.is_over = true);
    }

    /// What the target of a mirror that was suspended ([`crate::Progress::suspend`]) did not have
    /// when it stopped; once. `None`: nobody knows, so all is to be copied.
    pub fn take_left(&self) -> Option<MirrorLeft> {
        self.state().left.take()
    }

    pub(super) fn set_left(&self, left: MirrorLeft) {
        self.state().left = Some(left);
    }

    /// For a mirror that begins again; how it is to end stays.
    pub fn begin_again(&self) {
        self.change(|state| {
            state.is_ready = false;
            state.is_over = false;
            state.left = None;
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let waiters = {
            let mut state = self.state();
            change(&mut state);
            std::mem::take(&mut state.waiters)
        };
        waiters.into_iter().for_each(Waker::wake);
    }

    /// The state; a panic of another holder leaves it valid, so poison is ignored.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) fn cannot_switch(reason: &str) -> Error {
    let text = format!("the disk cannot switch over to the target: {reason}");
    Error::new(ErrorKind::Unsupported, text)
}
