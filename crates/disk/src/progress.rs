//! Progress of a long operation, its pace, and its cancellation.
//!
//! Promises: any thread may look, cancel, pause or limit at any time. The operation calls
//! [`Progress::check`] or [`Progress::pace`] between two steps, so a cancelled operation ends after
//! the present step, and leaves every image as sound as before. A paused operation rests: no timer
//! runs, and the thread that resumes or cancels it wakes it. One that waits for space tries again
//! from time to time.
//!
//! The counters are atomics. [`Progress::pace`] takes a lock, held for a few instructions, once for
//! each piece that is copied; requests of clients never come here.

mod gate;

use ringdisk_qcow2::Bytes;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use ringdisk_ring::{Errno, Ring};

use crate::Error;
use crate::clock::now;
use gate::{Failed, Gate};
pub use gate::{OnError, Pause};

/// How often an operation that waits for space looks whether there is some: a failed write of each
/// piece under way costs next to nothing, and a person who made room sees it go on.
pub const SPACE_RETRY_INTERVAL: Duration = Duration::from_secs(3);

/// The tries of one piece: whether it is tried again to see if there is space.
#[derive(Debug, Default)]
pub struct Tries {
    looks_for_space: bool,
}

impl Tries {
    /// Whether the last one failed as the storage was full, and the next one finds out whether it
    /// is still.
    pub fn look_for_space(&self) -> bool {
        self.looks_for_space
    }
}

/// Progress of one operation. Shared in an `Arc` with the threads that show or cancel it.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
    /// It stops for a hand-over of the disk.
    suspended: AtomicBool,
    gate: Mutex<Gate>,
}

impl Progress {
    /// Nothing done of nothing.
    pub fn new() -> Progress {
        Progress::default()
    }

    /// Finished work, bytes; at most [`Progress::total`] once the total is known.
    pub fn done(&self) -> Bytes {
        Bytes(self.done.load(Ordering::Relaxed))
    }

    /// Total work, bytes; may grow while clients write. 0: not known yet.
    pub fn total(&self) -> Bytes {
        Bytes(self.total.load(Ordering::Relaxed))
    }

    /// Finished part, 0.0 to 1.0; 0.0 while the total is not known.
    #[allow(clippy::cast_precision_loss)] // Shown to people.
    pub fn fraction(&self) -> f64 {
        match self.total() {
            Bytes::ZERO => 0.0,
            total => (self.done().0 as f64 / total.0 as f64).min(1.0),
        }
    }

    /// Cancels the operation, also a paused one. For any thread, not for a signal handler.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.gate().wake();
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Stops the operation, also a paused one, as [`Progress::cancel`] does: another one, here or
    /// in another process, does the rest. Any thread.
    pub fn suspend(&self) {
        self.suspended.store(true, Ordering::Release);
        self.gate().wake();
    }

    /// Whether it is to stop, or has stopped, for another one to do the rest.
    pub fn is_suspended(&self) -> bool {
        self.suspended.load(Ordering::Acquire)
    }

    /// Whether an operation has ended with this error since it was suspended, and not for another
    /// reason.
    pub fn was_suspended(&self, error: &Error) -> bool {
        let is_cut = error.errno() == Some(Errno::CANCELED);
        is_cut && self.is_suspended() && !self.is_cancelled()
    }

    /// The operation begins again here: pause (but for one that waits for space), limit and a
    /// cancellation stay.
    pub fn begin_again(&self) {
        self.suspended.store(false, Ordering::Release);
        self.set_done(Bytes::ZERO);
        self.set_total(Bytes::ZERO);
        let mut gate = self.gate();
        // The pieces that waited for space are gone; others find out themselves.
        gate.forget_full();
        gate.wake();
    }

    /// Called between two steps of the operation. Errors: `ECANCELED` when it was cancelled, or is
    /// suspended.
    pub fn check(&self) -> Result<(), Errno> {
        if self.is_cancelled() || self.is_suspended() { Err(Errno::CANCELED) } else { Ok(()) }
    }

    /// Sets the total work, bytes. The operation has begun when there is some, which those who
    /// watch it hear.
    pub fn set_total(&self, bytes: Bytes) {
        let before = self.total.swap(bytes.0, Ordering::Relaxed);
        self.may_have_begun(before, bytes);
    }

    /// Adds to the total work, bytes. As [`Progress::set_total`].
    pub fn add_total(&self, bytes: Bytes) {
        let before = self.total.fetch_add(bytes.0, Ordering::Relaxed);
        self.may_have_begun(before, bytes);
    }

    fn may_have_begun(&self, before: u64, more: Bytes) {
        if before == 0 && !more.is_zero() {
            self.gate().wake();
        }
    }

    /// Adds to the finished work, bytes.
    pub fn add_done(&self, bytes: Bytes) {
        self.done.fetch_add(bytes.0, Ordering::Relaxed);
    }

    /// Sets the finished work, bytes.
    pub fn set_done(&self, bytes: Bytes) {
        self.done.store(bytes.0, Ordering::Relaxed);
    }

    /// Marks all work as finished.
    pub fn finish(&self) {
        self.set_done(self.total());
    }

    /// Called between two pieces of a copy, while nothing is held that a client may wait for: waits
    /// while the operation is paused, and until the speed limit has room for the next piece.
    ///
    /// * `bytes`: size of the next piece; 0 where it is told afterwards ([`Progress::charge`]). It
    ///   may be more than the limit has for a second: the pieces after it wait for it.
    ///
    /// Errors: `ECANCELED` when it was cancelled, also in the middle of a wait.
    pub async fn pace(&self, ring: &Ring, bytes: Bytes) -> Result<(), Errno> {
        loop {
            self.check()?;
            let wait = self.gate().enter(now(), bytes);
            match wait {
                gate::Wait::Go => return Ok(()),
                gate::Wait::Resume(turn) => self.changed(turn).await,
                gate::Wait::Until(turn, time) => {
                    // Either the time has come or the gate has changed: both look again.
                    let _ = ring.within(time, self.changed(turn)).await;
                }
            }
        }
    }

    /// Counts bytes of pieces that have passed already ([`Progress::pace`] with 0): the pieces
    /// after them wait for them.
    pub fn charge(&self, bytes: Bytes) {
        self.gate().charge(now(), bytes);
    }

    /// As [`Progress::pace`] before a try of a piece. One that looks for space passes while the
    /// others wait for it.
    ///
    /// Errors: as there.
    pub async fn pace_try(&self, ring: &Ring, tries: &Tries) -> Result<(), Errno> {
        if tries.looks_for_space && matches!(self.paused(), Some(Pause::Full(_))) {
            return self.check();
        }
        self.pace(ring, Bytes::ZERO).await
    }

    /// Called when a piece failed, while nothing is held that a client may wait for: says whether
    /// to try it again. Waits while the operation is paused because of it; for space at most
    /// [`SPACE_RETRY_INTERVAL`].
    ///
    /// * `tries`: of this piece; [`Progress::written`] is called with it when the piece is written.
    ///
    /// Errors: `errno` where the operation ends with it; `ECANCELED`.
    pub async fn failed(&self, ring: &Ring, tries: &mut Tries, errno: Errno) -> Result<(), Errno> {
        self.check()?;
        if errno == Errno::CANCELED {
            return Err(errno);
        }
        let failed = self.gate().fail(errno);
        match failed {
            Failed::Ends => Err(errno),
            Failed::Rests => self.pace(ring, Bytes::ZERO).await,
            Failed::WaitsForSpace(asked) => {
                if !std::mem::replace(&mut tries.looks_for_space, true) {
                    self.gate().add_without_space();
                }
                self.look_for_space(ring, asked).await
            }
        }
    }

    /// Waits until it is time to look for space. Errors: `ECANCELED`.
    async fn look_for_space(&self, ring: &Ring, asked_to_try: u64) -> Result<(), Errno> {
        let until = now().saturating_add(SPACE_RETRY_INTERVAL);
        loop {
            self.check()?;
            let wait = self.gate().look_for_space(now(), until, asked_to_try);
            match wait {
                gate::Wait::Go => return Ok(()),
                gate::Wait::Resume(turn) => self.changed(turn).await,
                gate::Wait::Until(turn, time) => {
                    let _ = ring.within(time, self.changed(turn)).await;
                }
            }
        }
    }

    /// A piece is written: an operation that waited for space goes on where this was the last one
    /// that had found none. One that was written all the same says nothing.
    pub fn written(&self, tries: &mut Tries) {
        if std::mem::take(&mut tries.looks_for_space) {
            self.gate().has_space();
        }
    }

    /// Lets the operation rest after the present pieces.
    pub fn pause(&self) {
        self.gate().pause(Pause::Asked);
    }

    /// Lets a paused operation go on. One that waits for space tries at once, and goes on if there
    /// is some.
    pub fn resume(&self) {
        self.gate().resume();
    }

    /// Why the operation rests; `None`: it does not.
    pub fn paused(&self) -> Option<Pause> {
        self.gate().paused()
    }

    /// Limits the speed from now on; what is left of the present wait is computed anew.
    ///
    /// * `speed`: bytes per second; 0: no limit.
    pub fn set_speed(&self, speed: u64) {
        self.gate().set_speed(now(), speed);
    }

    /// The speed limit, bytes per second; 0: none.
    pub fn speed(&self) -> u64 {
        self.gate().speed()
    }

    /// Sets what an error of the storage that is written does to the operation.
    pub fn set_on_error(&self, on_error: OnError) {
        self.gate().on_error = on_error;
    }

    /// What an error of the storage that is written does to the operation.
    pub fn on_error(&self) -> OnError {
        self.gate().on_error
    }

    /// The number of the last change: what [`Progress::changed`] waits from.
    pub fn turn(&self) -> u64 {
        self.gate().turn()
    }

    /// Ready when the operation was paused, resumed, limited or cancelled, or rests after an error,
    /// since `turn`.
    pub async fn changed(&self, turn: u64) {
        poll_fn(|context| self.gate().poll_change(turn, context)).await;
    }

    /// Waits for something that the operation cannot do without; after a cancellation, or when it
    /// is suspended, only for a while longer. `None`: it was given up, and the future is dropped.
    ///
    /// * `grace`: how long it is waited for then.
    pub(crate) async fn or_given_up<T>(
        &self,
        ring: &Ring,
        grace: Duration,
        awaited: impl Future<Output = T>,
    ) -> Option<T> {
        let mut awaited = pin!(awaited);
        loop {
            let turn = self.turn();
            if self.is_cancelled() || self.is_suspended() {
                return ring.within(grace, awaited).await.ok();
            }
            let mut changed = pin!(self.changed(turn));
            let done = poll_fn(|context| match awaited.as_mut().poll(context) {
                Poll::Ready(value) => Poll::Ready(Some(value)),
                Poll::Pending => changed.as_mut().poll(context).map(|()| None),
            });
            if let Some(value) = done.await {
                return Some(value);
            }
        }
    }

    /// A panic elsewhere leaves the gate valid, so poison is ignored.
    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
