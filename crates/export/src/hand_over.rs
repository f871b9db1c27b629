//! The hand-over of an export to a successor process: what passes between the thread that asks for
//! it and the control thread of the export, and the steps of the latter.
//!
//! Promises: the thread that asks waits for a limited time, and hears why there is no hand-over. An
//! export that stands still for a successor goes on when that takes too long, or when the thread
//! that asked gives up. Control path.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use ringdisk_disk::Disk;

use crate::{Error, ErrorKind};

/// The successor has so long to take everything; clients wait meanwhile.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long what clients have written may take to reach the storage before that; they are still
/// served.
const FLUSHING: Duration = Duration::from_secs(20);
/// An export has so long to stand still and to be packed.
const STANDING: Duration = Duration::from_secs(10);

/// All that a successor needs to go on with an export: to be sent as it is, the descriptors in this
/// order.
#[derive(Debug)]
pub struct HandOverState {
    /// JSON in a form of its own.
    pub description: String,
    /// Descriptors; the description says what each is.
    pub fds: Vec<OwnedFd>,
}

/// A request to hand an export over, for its control thread. Dropping it says that the export is
/// served no longer.
#[derive(Debug)]
pub struct HandOverRequest<S> {
    /// Something comes when the export begins to stand still.
    stands: SyncSender<()>,
    answer: SyncSender<Result<S, Error>>,
    /// Something comes: the successor has it. The sender goes: it has not.
    verdict: Receiver<()>,
}

impl<S> HandOverRequest<S> {
    /// Whether a thread still waits for it.
    #[must_use]
    pub fn is_awaited(&self) -> bool {
        !matches!(self.verdict.try_recv(), Err(TryRecvError::Disconnected))
    }

    /// The export begins to stand still. Returns whether the thread that asked still waits.
    #[must_use]
    pub fn stands(&self) -> bool {
        self.stands.send(()).is_ok()
    }

    /// The export cannot be handed over, and goes on.
    pub fn refuse(self, why: Error) {
        let _ = self.answer.send(Err(why));
    }

    /// Gives the state of the export, which stands still, and waits for the verdict. Returns
    /// whether the successor has the export; else it has to go on here.
    #[must_use]
    pub fn offer(self, packed: Result<S, Error>) -> bool {
        let is_packed = packed.is_ok();
        let is_awaited = self.answer.send(packed).is_ok();
        is_packed && is_awaited && self.verdict.recv_timeout(TIMEOUT).is_ok()
    }
}

/// What an export does to be handed over. Called by its control thread, by [`carry_out`].
pub trait HandOverSteps {
    /// All that a successor needs to go on with the export.
    type State;

    /// The disks of the export.
    fn disks(&self) -> Vec<Arc<Disk>>;

    /// Why the export cannot be handed over. Nothing stands still yet.
    fn refusal(&mut self) -> Option<Error>;

    /// Flushes what clients have written while they are served, so that they wait for less later. A
    /// failure comes again in [`HandOverSteps::stand_still`].
    ///
    /// * `is_awaited`: whether a thread still waits for the hand-over.
    fn flush(&mut self, is_awaited: &dyn Fn() -> bool);

    /// Waits until no request is in flight, keeps later ones waiting, and packs the state. Requests
    /// that wait for limits of the disks go on meanwhile.
    ///
    /// Errors: why the export cannot be handed over; [`HandOverSteps::go_on`] is called.
    fn stand_still(&mut self) -> Result<Self::State, Error>;

    /// Goes on here, with what [`HandOverSteps::stand_still`] has stopped.
    fn go_on(&mut self);
}

/// Hands an export over, on its control thread. Returns whether the successor has it; else it goes
/// on here.
#[must_use]
pub fn carry_out<E: HandOverSteps>(request: HandOverRequest<E::State>, export: &mut E) -> bool {
    if !request.is_awaited() {
        // Clients need not wait.
        return false;
    }
    if let Some(why) = export.refusal() {
        request.refuse(why);
        return false;
    }
    export.flush(&|| request.is_awaited());
    // Something may have come meanwhile.
    if let Some(why) = export.refusal() {
        request.refuse(why);
        return false;
    }
    if !request.stands() {
        // The flush took too long.
        return false;
    }
    let packed = {
        // A deep queue under a low limit would not be empty in time.
        let disks = export.disks();
        let _lifted: Vec<_> = disks.iter().map(|disk| disk.lift_limits()).collect();
        export.stand_still()
    };
    if request.offer(packed) {
        return true;
    }
    export.go_on();
    false
}

/// An export that stands still because it is being handed over. Dropping it lets the export go on
/// here.
#[derive(Debug)]
#[must_use = "clients wait"]
pub struct HandedOver {
    verdict: SyncSender<()>,
}

impl HandedOver {
    /// The successor goes on: this export ends, and touches nothing any more. `false` when it came
    /// too late: this export goes on.
    #[must_use]
    pub fn commit(self) -> bool {
        // A channel without room: it is taken, or not given.
        self.verdict.send(()).is_ok()
    }
}

/// Asks the control thread of an export for its state; waits until requests in flight are done, but
/// not for ever.
///
/// * `send`: gives the request to the control thread.
///
/// Errors: why it cannot be handed over at the moment; it goes on then.
pub fn ask_hand_over<S>(send: impl FnOnce(HandOverRequest<S>)) -> Result<(S, HandedOver), Error> {
    ask_within(send, FLUSHING, STANDING)
}

fn ask_within<S>(
    send: impl FnOnce(HandOverRequest<S>),
    flushing: Duration,
    limit: Duration,
) -> Result<(S, HandedOver), Error> {
    let (stands, stood) = sync_channel(1);
    let (answer, answered) = sync_channel(1);
    let (verdict, verdict_receiver) = sync_channel(0);
    send(HandOverRequest { stands, answer, verdict: verdict_receiver });
    // An answer that comes later finds that no thread waits, and the export goes on. One that does
    // not get so far says why below.
    if stood.recv_timeout(flushing) == Err(RecvTimeoutError::Timeout) {
        let text = format!("what was written is not flushed after {} s", flushing.as_secs());
        return Err(Error::new(ErrorKind::Refused, text));
    }
    let state = answered.recv_timeout(limit).map_err(|error| match error {
        RecvTimeoutError::Disconnected => Error::new(ErrorKind::Halted, "it is served no longer"),
        RecvTimeoutError::Timeout => {
            let text = format!("requests in flight are not done after {} s", limit.as_secs());
            Error::new(ErrorKind::Refused, text)
        }
    })??;
    Ok((state, HandedOver { verdict }))
}

#[cfg(test)]
mod tests;
