//! What queue threads agree on without a lock: who has an entry, and whether the mount is live.
//!
//! Promises: an entry is never with two threads, and with none only while it is on its way; an
//! entry that fails is heard of, by the start or by the mount. Any thread. One atomic step each;
//! never blocks. Built on [`super::sync`], so that the model test can run it under every order of
//! steps.

use super::sync::{AtomicBool, AtomicI32, Ordering};

/// Which thread may touch an entry: the one that has it, and none while it is on its way.
///
/// The message that says "it is yours" may be one that was meant for another mount, whose ring had
/// the number that ours has now. So the message alone gives nothing: who does not find the entry on
/// its way must not touch it.
#[derive(Debug)]
pub(super) struct Ownership(AtomicBool);

impl Ownership {
    pub(super) fn new() -> Ownership {
        Ownership(AtomicBool::new(false))
    }

    /// The entry is on its way: the caller had it and touches it no more. Before the message is
    /// sent.
    pub(super) fn send(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// The message could not be sent. False: another thread has taken the entry all the same.
    pub(super) fn take_back(&self) -> bool {
        self.take()
    }

    /// A message has come. True: the entry is the caller's, with all that the sender wrote into it.
    pub(super) fn take(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

/// Not live yet, and nothing has failed.
const STARTING: i32 = 0;
/// No errno.
const LIVE: i32 = i32::MAX;

/// How far a start has come: it ends by the first of two, that it is said to be live or that
/// something fails.
#[derive(Debug)]
pub(super) struct Outcome(AtomicI32);

impl Outcome {
    pub(super) fn new() -> Outcome {
        Outcome(AtomicI32::new(STARTING))
    }

    /// Something has failed, with this errno. True: before the mount was live, which it will not
    /// be; false: the mount is live and has to end.
    pub(super) fn fail(&self, errno: i32) -> bool {
        let before = self.0.compare_exchange(STARTING, errno, Ordering::AcqRel, Ordering::Acquire);
        before != Err(LIVE)
    }

    /// Requests travel in the rings from now on. Errors: what failed before.
    pub(super) fn go_live(&self) -> Result<(), i32> {
        match self.0.compare_exchange(STARTING, LIVE, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(LIVE) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Why the mount cannot go live.
    pub(super) fn failure(&self) -> Option<i32> {
        match self.0.load(Ordering::Acquire) {
            STARTING | LIVE => None,
            errno => Some(errno),
        }
    }
}
