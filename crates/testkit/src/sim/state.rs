//! The state of a simulated storage: content, what is not durable yet, what waits.
//!
//! Promises: locked for the length of one step; nothing waits under the lock.

use std::collections::{BTreeMap, VecDeque};
use std::task::Waker;

use ringdisk_storage::{Errno, Kind, Limits};

use super::image::Image;
use super::operation::{Action, Change, Held, OpKind, Outcome, Record};
use super::prng::Prng;
use super::recording::{Event, History};
use super::rules::Rule;

/// Why an operation waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Released,
    Timer,
    Forever,
}

#[derive(Debug)]
pub(crate) struct Pending {
    pub(crate) record: Record,
    pub(crate) action: Action,
    wait: Wait,
    waker: Option<Waker>,
    outcome: Option<Result<Outcome, Errno>>,
    /// Its future is gone; it may take effect all the same.
    orphan: bool,
}

impl Pending {
    /// Whether it has not taken effect yet.
    pub(crate) fn is_waiting(&self) -> bool {
        self.outcome.is_none()
    }
}

/// What a flush did.
#[derive(Clone, Debug)]
pub(crate) struct Flushed {
    /// Durable before it.
    pub(crate) before: Image,
    /// Made durable by it.
    pub(crate) changes: Vec<Change>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) image: Image,
    pub(crate) durable: Image,
    /// Changes that are not durable, with their numbers, in the order in which they took effect.
    pub(crate) journal: VecDeque<(u64, Change)>,
    /// What the last flush made durable, and what was durable before.
    pub(crate) flushed: Option<Flushed>,
    /// The last flush had nothing to do: `flushed` is about one before it.
    pub(crate) idle_since: bool,
    next_change: u64,
    pub(crate) pending: BTreeMap<u64, Pending>,
    pub(crate) rules: Vec<Rule>,
    pub(crate) prng: Prng,
    pub(crate) log: Vec<Record>,
    /// What happens is noted here.
    pub(crate) history: Option<History>,
    pub(crate) limits: Limits,
    pub(crate) kind: Kind,
    /// It zeroes by writing only.
    pub(crate) refuses_holes: bool,
    pub(crate) read_only: bool,
    pub(crate) powered: bool,
}

impl State {
    pub(crate) fn new(len: u64, seed: u64) -> State {
        State::with_image(Image::new(len), seed)
    }

    pub(crate) fn with_image(image: Image, seed: u64) -> State {
        State {
            durable: image.clone(),
            image,
            journal: VecDeque::new(),
            flushed: None,
            idle_since: false,
            next_change: 0,
            pending: BTreeMap::new(),
            rules: Vec::new(),
            prng: Prng::new(seed),
            log: Vec::new(),
            history: None,
            limits: Limits::byte_granular(),
            kind: Kind::Custom,
            refuses_holes: false,
            read_only: false,
            powered: true,
        }
    }

    pub(crate) fn put(&mut self, offset: u64, bytes: &[u8]) {
        self.image.write(offset, bytes);
        self.durable.write(offset, bytes);
    }

    pub(crate) fn set_len_behind(&mut self, len: u64) {
        self.image.set_len(len);
        self.durable.set_len(len);
    }

    /// Number of the next change.
    pub(crate) fn next_change(&self) -> u64 {
        self.next_change
    }

    /// The next change has this number.
    pub(crate) fn start_at(&mut self, change: u64) {
        self.next_change = change;
    }

    /// Notes that an operation begins.
    pub(crate) fn begin(&mut self, kind: OpKind, offset: u64, len: u64) -> Record {
        let record = Record { number: self.log.len() as u64, kind, offset, len };
        self.log.push(record);
        record
    }

    /// The action of a flush that begins now.
    pub(crate) fn flush_action(&self) -> Action {
        Action::Flush { before: self.next_change }
    }

    /// Makes the changes with numbers below `before` durable.
    pub(crate) fn flush(&mut self, before: u64) {
        if let Some(history) = &mut self.history {
            history.events.push(Event::Flush { before });
        }
        let mut flushed = Flushed { before: self.durable.clone(), changes: Vec::new() };
        while let Some((_, change)) = self.journal.pop_front_if(|(number, _)| *number < before) {
            change.apply(&mut self.durable);
            flushed.changes.push(change);
        }
        // A flush with nothing to do is no barrier: the one before it still is.
        self.idle_since = flushed.changes.is_empty();
        if !flushed.changes.is_empty() {
            self.flushed = Some(flushed);
        }
    }

    /// A change takes effect.
    pub(crate) fn change(&mut self, change: Change) {
        if let Some(history) = &mut self.history {
            history.events.push(Event::Change(change.clone()));
        }
        change.apply(&mut self.image);
        self.journal.push_back((self.next_change, change));
        self.next_change += 1;
    }

    /// Lets an operation wait.
    pub(crate) fn park(&mut self, record: Record, action: Action, wait: Wait) {
        let pending = Pending { record, action, wait, waker: None, outcome: None, orphan: false };
        self.pending.insert(record.number, pending);
    }

    /// The outcome of a waiting operation, when it has one; it waits no longer then.
    pub(crate) fn poll(&mut self, number: u64, waker: &Waker) -> Option<Result<Outcome, Errno>> {
        if !self.powered {
            self.pending.remove(&number);
            return Some(Err(Errno::IO));
        }
        let Some(pending) = self.pending.get_mut(&number) else { return Some(Err(Errno::IO)) };
        if pending.outcome.is_none() {
            pending.waker = Some(waker.clone());
            return None;
        }
        self.pending.remove(&number)?.outcome
    }

    /// The future of a waiting operation is gone. A change may still reach the medium, as in a
    /// real disk; what only reads is forgotten.
    pub(crate) fn abandon(&mut self, number: u64) {
        if let Some(pending) = self.pending.get_mut(&number) {
            pending.orphan = true;
            pending.waker = None;
            let write = matches!(pending.action, Action::Write { .. } | Action::Zero { .. });
            if !write || pending.outcome.is_some() || pending.wait != Wait::Released {
                self.pending.remove(&number);
            }
        }
    }

    /// Ends the wait of a held operation.
    pub(crate) fn release(&mut self, number: u64, errno: Option<Errno>) -> bool {
        let ready =
            |pending: &&mut Pending| pending.wait == Wait::Released && pending.outcome.is_none();
        let Some(pending) = self.pending.get_mut(&number).filter(ready) else { return false };
        let action = pending.action.clone();
        let outcome = errno.map_or_else(|| self.perform(&action), Err);
        self.finish(number, outcome);
        true
    }

    fn finish(&mut self, number: u64, outcome: Result<Outcome, Errno>) {
        let Some(pending) = self.pending.get_mut(&number) else { return };
        if pending.orphan {
            self.pending.remove(&number);
            return;
        }
        pending.outcome = Some(outcome);
        if let Some(waker) = pending.waker.take() {
            waker.wake();
        }
    }

    pub(crate) fn held(&self) -> Vec<Held> {
        let waits =
            |pending: &&Pending| pending.wait == Wait::Released && pending.outcome.is_none();
        self.pending.values().filter(waits).map(|pending| pending.record).collect()
    }

    pub(crate) fn hanging(&self) -> usize {
        self.pending.values().filter(|pending| pending.wait == Wait::Forever).count()
    }

    /// Every operation fails from now on, waiting ones too.
    pub(crate) fn power_off(&mut self) {
        self.powered = false;
        let wakers = self.pending.values_mut().filter_map(|pending| pending.waker.take());
        wakers.for_each(Waker::wake);
    }

    pub(crate) fn is_powered(&self) -> bool {
        self.powered
    }
}
