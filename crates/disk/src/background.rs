//! How jobs of a disk, and readers of its checkpoints, yield to its clients.
//!
//! Promises: while clients have asked for nothing for [`QUIET`], such work is held up by nothing.
//! While they work, one piece of it is under way at a time, a small one, and as long as a piece
//! took the storage is left to the clients after it (twice as long after one of a reader). So a
//! request of a client waits for one small piece at most, and the work goes on however much clients
//! do. Where a small piece takes longer than [`SLOW`], which its bytes are seldom the reason for (a
//! far storage, no free CPU), the next one has four times the bytes and waits for others no longer
//! than that: otherwise the work would hardly go on. It takes its turn before it enters the graph
//! and before it claims a range: a change or a client's write never waits for a turn.
//!
//! Clients pay one store for each request ([`Gateway::entered`](crate::graph::Gateway::entered)).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Ring;

use crate::clock::now;
use crate::layer::Layer;
use crate::task_mutex::{TaskGuard, TaskMutex};

/// Clients count as at work for so long after their last request.
const QUIET: Duration = Duration::from_millis(100);
/// How long a look at the count of requests is good for.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Bytes of one piece beside clients, unless a cluster is larger: what storage answers about as
/// fast as a small request.
pub(crate) const SMALL_BYTES: Bytes = Bytes(64 << 10);
/// The same for a reader of a checkpoint: a program that writes what it has read, often to the same
/// storage, when nobody here knows of it. So it gets less at once.
pub(crate) const READER_BYTES: Bytes = Bytes(16 << 10);
/// And rests for so many times as long.
const READER_RESTS: u64 = 2;
/// Longest rest after a piece: storage that hangs for a while does not stop a job for as long.
const REST_MAX: Duration = Duration::from_millis(50);
/// Shorter rests are added to the next one.
const REST_MIN: Duration = Duration::from_micros(100);
/// What a small piece takes at most where storage and CPUs are near.
const SLOW: Duration = Duration::from_millis(20);
/// A piece after a slow one has so many times the bytes.
const SLOW_FACTOR: u64 = 4;
/// But not more than this for that reason, bytes.
const SLOW_BYTES: Bytes = Bytes(256 << 10);
/// Parts without data grow by so many powers of two at most.
const GROWTH_MAX: u32 = 8;
/// Longest wait for one piece of others: one whose target is slow, or hangs, does not hold up the
/// rest.
const TURN_MAX: Duration = SLOW;

/// Whose turn it is, and since when clients are quiet.
#[derive(Debug, Default)]
pub(crate) struct Background {
    /// Requests of clients, as counted at the last look.
    seen: AtomicU64,
    /// Time of the last look, and until when clients count as at work; as [`nanos`].
    looked_at: AtomicU64,
    busy_until: AtomicU64,
    /// When the next piece may begin, as [`nanos`].
    free_at: AtomicU64,
    turn: TaskMutex,
    /// Turns that were taken.
    turns: AtomicU64,
    /// The last piece took longer than its bytes explain.
    is_slow: AtomicBool,
}

/// The right to copy one piece beside the clients. Dropped when the piece is done.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    /// `None`: clients are quiet.
    beside: Option<&'a Background>,
    /// As [`nanos`].
    begun: u64,
    /// So many times as long as the piece takes is left to the clients.
    rests: u64,
    /// The piece before was slow.
    is_long: bool,
    /// `None`: another one takes longer than [`TURN_MAX`].
    _guard: Option<TaskGuard<'a>>,
}

impl Background {
    /// Waits for the turn of a piece of a job, or of a read of a checkpoint. The caller holds
    /// nothing that a client or a change may wait for meanwhile.
    ///
    /// * `requests`: gives how many requests clients had so far.
    pub(crate) async fn turn(&self, ring: &Ring, requests: impl FnOnce() -> u64) -> Turn<'_> {
        if !self.has_clients(nanos(), requests) {
            return Turn::at_once();
        }
        let mut lock = self.turn.lock();
        let guard = loop {
            let seen = self.turns.load(Ordering::Relaxed);
            match ring.within(TURN_MAX, &mut lock).await {
                Ok(guard) => break Some(guard),
                Err(_) if self.turns.load(Ordering::Relaxed) != seen => {}
                Err(_) => break None,
            }
        };
        self.turns.fetch_add(1, Ordering::Relaxed);
        let rest = self.rest(nanos());
        if rest >= REST_MIN {
            ring.sleep(rest).await;
        }
        let is_long = self.is_slow.load(Ordering::Relaxed);
        Turn { beside: Some(self), begun: nanos(), rests: 1, is_long, _guard: guard }
    }

    /// Whether clients are at work.
    ///
    /// * `requests`: as [`Background::turn`].
    fn has_clients(&self, now: u64, requests: impl FnOnce() -> u64) -> bool {
        let looked_at = self.looked_at.load(Ordering::Relaxed);
        let is_due = looked_at == 0 || now.saturating_sub(looked_at) >= as_nanos(POLL_INTERVAL);
        let looks = || {
            let (order, failed) = (Ordering::Relaxed, Ordering::Relaxed);
            self.looked_at.compare_exchange(looked_at, now, order, failed).is_ok()
        };
        if is_due && looks() {
            let requests = requests();
            // When they are counted for the first time all of them are old.
            if self.seen.swap(requests, Ordering::Relaxed) != requests && looked_at != 0 {
                self.busy_until.store(now + as_nanos(QUIET), Ordering::Relaxed);
            }
        }
        now < self.busy_until.load(Ordering::Relaxed)
    }

    /// How long the next piece has to wait.
    fn rest(&self, now: u64) -> Duration {
        let wait = self.free_at.load(Ordering::Relaxed).saturating_sub(now);
        Duration::from_nanos(wait).min(REST_MAX)
    }

    /// Decides how long the next piece is.
    ///
    /// * `took`: by the last one, nanoseconds.
    /// * `was_long`: it was after a slow one.
    fn look_at_pace(&self, took: u64, was_long: bool) {
        let limit = as_nanos(SLOW) * if was_long { SLOW_FACTOR } else { 1 };
        self.is_slow.store(took > limit, Ordering::Relaxed);
    }

    /// A piece has ended.
    ///
    /// * `rests`: as of [`Turn`].
    fn ended(&self, begun: u64, now: u64, rests: u64) {
        let took = now.saturating_sub(begun).min(as_nanos(REST_MAX)) * rests;
        // A rest that was too short to be taken is added.
        let owed = self.free_at.load(Ordering::Relaxed).saturating_sub(begun);
        let rest = (took + owed).min(as_nanos(REST_MAX));
        self.free_at.store(now + rest, Ordering::Relaxed);
    }
}

/// A range that is copied in turns.
#[derive(Debug)]
pub(crate) struct Parts {
    at: GuestOffset,
    end: GuestOffset,
    /// What is written at once: parts end at its multiples.
    unit: Bytes,
    /// Parts without data, one after the other: the next one is the longer.
    empty: u32,
}

impl Parts {
    /// * `unit`: bytes that are written or recorded at once; small parts are multiples of it.
    pub(crate) fn new(offset: GuestOffset, len: Bytes, unit: Bytes) -> Parts {
        let unit = Bytes(unit.0.next_power_of_two()).max(SMALL_BYTES);
        Parts { at: offset, end: offset + len, unit, empty: 0 }
    }

    /// Those of a reader of a checkpoint.
    pub(crate) fn of_reader(offset: GuestOffset, len: Bytes) -> Parts {
        Parts { at: offset, end: offset + len, unit: READER_BYTES, empty: 0 }
    }

    /// The part that is copied in this turn: all that is left while clients are quiet. The same
    /// again until [`Parts::done`].
    pub(crate) fn next(&self, turn: &Turn<'_>) -> (GuestOffset, Bytes) {
        let left = self.end.saturating_sub(self.at);
        if turn.beside.is_none() {
            return (self.at, left);
        }
        let unit = match turn.is_long {
            true => self.unit.max(self.unit.saturating_mul(SLOW_FACTOR).min(SLOW_BYTES)),
            false => self.unit,
        };
        let unit = unit.saturating_mul(1 << self.empty.min(GROWTH_MAX));
        (self.at, (self.at.align_down(unit) + unit - self.at).min(left))
    }

    /// A part is done.
    ///
    /// * `copied`: bytes of data in it.
    pub(crate) fn done(&mut self, len: Bytes, copied: Bytes) {
        self.at += len;
        self.empty = if copied > Bytes::ZERO { 0 } else { self.empty + 1 };
    }

    /// Whether nothing is left.
    pub(crate) fn is_over(&self) -> bool {
        self.at >= self.end
    }
}

impl Turn<'_> {
    /// A turn of work that yields to nobody: what is left of it grows while it does.
    pub(crate) fn at_once() -> Turn<'static> {
        Turn { beside: None, begun: 0, rests: 1, is_long: false, _guard: None }
    }

    /// The turn of a reader of a checkpoint.
    pub(crate) fn of_reader(self) -> Self {
        let mut turn = self;
        turn.rests = READER_RESTS;
        turn
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(background) = self.beside {
            let now = nanos();
            background.look_at_pace(now.saturating_sub(self.begun), self.is_long);
            background.ended(self.begun, now, self.rests);
        }
    }
}

/// The bytes that a layer writes at once; 1 where any number will do.
pub(crate) fn unit_of(layer: &Layer) -> Bytes {
    layer.qcow2().map_or(Bytes(1), |image| image.info().cluster_size())
}

/// Nanoseconds of [`now`], never 0.
fn nanos() -> u64 {
    as_nanos(now()) + 1
}

fn as_nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
