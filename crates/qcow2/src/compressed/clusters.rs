//! The cache of decompressed clusters: those that were used last, and those that are being loaded.
//!
//! Promises: a cluster is loaded once, however many requests wait for it; what is forgotten while
//! it is being loaded is not kept; a load that is dropped lets the waiting requests try again. Any
//! thread; takes a lock for a short search and copies nothing.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

use super::Compressed;
use crate::sync::{Arc, Mutex, lock};
use crate::units::HostOffset;

/// Buffers that are kept for the next clusters: of clusters that were pushed out, and of compressed
/// bytes. Fresh memory costs more than decompressing into it.
const SPARE_MAX: usize = 16;

/// A decompressed cluster, or the start of one.
#[derive(Clone)]
pub(super) struct Data {
    bytes: Arc<Vec<u8>>,
    valid: usize,
}

impl Data {
    /// Bytes `range` of the cluster; `None` when they were not decompressed.
    pub(super) fn get(&self, range: Range<usize>) -> Option<&[u8]> {
        self.bytes.get(..self.valid)?.get(range)
    }
}

/// The clusters of one image.
pub(super) struct Clusters {
    cluster_size: usize,
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Counts uses and loads: the time of the cache.
    now: u64,
    kept: Vec<Kept>,
    loading: Vec<Loading>,
    /// Buffers of one cluster each.
    spare: Vec<Vec<u8>>,
    /// Buffers that held compressed bytes.
    inputs: Vec<Vec<u8>>,
}

struct Kept {
    key: Compressed,
    used: u64,
    data: Data,
}

struct Loading {
    key: Compressed,
    number: u64,
    flight: Arc<Flight>,
}

/// One load and the requests that wait for it.
#[derive(Default)]
struct Flight(Mutex<Wait>);

#[derive(Default)]
struct Wait {
    outcome: Option<Outcome>,
    waiting: Vec<Waker>,
}

#[derive(Clone)]
enum Outcome {
    Done(Result<Data, Errno>),
    /// The ticket was dropped.
    Abandoned,
}

/// The answer to a reader.
pub(super) enum Look {
    Ready(Data),
    /// Another request loads it.
    Wait(Follower),
    /// The caller has to.
    Load(Ticket),
}

impl Clusters {
    /// * `capacity`: clusters to keep.
    pub(super) fn new(cluster_size: usize, capacity: usize) -> Clusters {
        Clusters { cluster_size, capacity, state: Mutex::default() }
    }

    /// Asks for the first `need` bytes of a cluster.
    pub(super) fn look(self: &Arc<Self>, key: Compressed, need: usize) -> Look {
        let mut state = lock(&self.state);
        state.now += 1;
        let now = state.now;
        let mut need = need;
        if let Some(kept) = state.kept.iter_mut().find(|kept| kept.key == key) {
            kept.used = now;
            if kept.data.valid >= need {
                return Look::Ready(kept.data.clone());
            }
            // A second reader of the same cluster: there will be more.
            need = self.cluster_size;
        }
        match state.loading.iter().find(|loading| loading.key == key) {
            Some(loading) => Look::Wait(Follower::new(&loading.flight)),
            None => Look::Load(self.ticket(&mut state, key, need)),
        }
    }

    /// A ticket to load a whole cluster ahead of its use; `None`: it is there or on its way.
    pub(super) fn begin(self: &Arc<Self>, key: Compressed) -> Option<Ticket> {
        let mut state = lock(&self.state);
        let whole = |kept: &Kept| kept.key == key && kept.data.valid == self.cluster_size;
        if state.kept.iter().any(whole) || state.loading.iter().any(|other| other.key == key) {
            return None;
        }
        state.now += 1;
        Some(self.ticket(&mut state, key, self.cluster_size))
    }

    fn ticket(self: &Arc<Self>, state: &mut State, key: Compressed, need: usize) -> Ticket {
        let flight = Arc::new(Flight::default());
        let number = state.now;
        state.loading.push(Loading { key, number, flight: flight.clone() });
        Ticket { clusters: self.clone(), key, need, number, flight: Some(flight) }
    }

    /// Drops everything that lies in a range of the image file, and what is being loaded from there
    /// is not kept.
    pub(super) fn forget(&self, host: &Range<HostOffset>) {
        let inside = |key: Compressed| key.host_offset < host.end && host.start < key.host_end();
        let mut state = lock(&self.state);
        state.kept.retain(|kept| !inside(kept.key));
        state.loading.retain(|loading| !inside(loading.key));
    }

    /// A buffer of one cluster; its content is anything.
    fn buffer(&self) -> Vec<u8> {
        let spare = lock(&self.state).spare.pop();
        spare.unwrap_or_else(|| vec![0; self.cluster_size])
    }

    fn keep_input(&self, input: Vec<u8>) {
        let mut state = lock(&self.state);
        if state.inputs.len() < SPARE_MAX {
            state.inputs.push(input);
        }
    }

    fn end(&self, ticket: &Ticket, flight: &Flight, outcome: Outcome) {
        let mut dropped = None;
        {
            let mut state = lock(&self.state);
            let place = state.loading.iter().position(|other| other.number == ticket.number);
            if let Some(place) = place {
                state.loading.swap_remove(place);
                if let Outcome::Done(Ok(data)) = &outcome {
                    dropped = state.keep(ticket.key, data.clone(), self.capacity);
                }
            }
        }
        // No reader has it: its memory is used for the next one.
        if let Some(bytes) = dropped.and_then(|data| Arc::into_inner(data.bytes)) {
            let mut state = lock(&self.state);
            if state.spare.len() < SPARE_MAX {
                state.spare.push(bytes);
            }
        }
        flight.end(outcome);
    }
}

impl State {
    /// Keeps a cluster; returns the one that had to go.
    fn keep(&mut self, key: Compressed, data: Data, capacity: usize) -> Option<Data> {
        let entry = Kept { key, used: self.now, data };
        let place = match self.kept.iter().position(|kept| kept.key == key) {
            Some(place) => place,
            None if self.kept.len() < capacity => {
                self.kept.push(entry);
                return None;
            }
            None => (0..self.kept.len()).min_by_key(|&place| self.kept[place].used)?,
        };
        Some(std::mem::replace(&mut self.kept[place], entry).data)
    }
}

impl Flight {
    fn end(&self, outcome: Outcome) {
        let waiting = {
            let mut wait = lock(&self.0);
            wait.outcome = Some(outcome);
            std::mem::take(&mut wait.waiting)
        };
        for waker in waiting {
            waker.wake();
        }
    }
}

/// The right and task to load a cluster. Moves between threads; when it is dropped, another request
/// may try.
pub(super) struct Ticket {
    clusters: Arc<Clusters>,
    key: Compressed,
    need: usize,
    number: u64,
    /// `None`: done.
    flight: Option<Arc<Flight>>,
}

impl Ticket {
    /// Where the cluster is.
    pub(super) fn place(&self) -> Compressed {
        self.key
    }

    /// Waits for this load.
    pub(super) fn follower(&self) -> Option<Follower> {
        self.flight.as_ref().map(Follower::new)
    }

    /// A buffer for compressed bytes, with room for at least `len`; its content is anything.
    pub(super) fn input(&self, len: usize) -> Vec<u8> {
        let mut input = lock(&self.clusters.state).inputs.pop().unwrap_or_default();
        if input.len() < len {
            input.resize(len, 0);
        }
        input
    }

    /// Fills the cluster, keeps it and gives it to the waiting requests.
    ///
    /// * `input`: a buffer that holds the compressed bytes.
    /// * `fill`: gets it, and room for as much of the cluster as is needed.
    pub(super) fn fill(
        mut self,
        input: Vec<u8>,
        fill: impl FnOnce(&[u8], &mut [u8]) -> Result<(), Errno>,
    ) {
        let mut bytes = self.clusters.buffer();
        let valid = self.need.min(bytes.len());
        let result = fill(&input, &mut bytes[..valid]);
        self.clusters.keep_input(input);
        self.end(Outcome::Done(result.map(|()| Data { bytes: Arc::new(bytes), valid })));
    }

    /// Reports a failure to the waiting requests.
    pub(super) fn fail(mut self, errno: Errno) {
        self.end(Outcome::Done(Err(errno)));
    }

    fn end(&mut self, outcome: Outcome) {
        if let Some(flight) = self.flight.take() {
            self.clusters.end(self, &flight, outcome);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A decoder that panics would do so again for each request that tries.
        let panicked = std::thread::panicking();
        self.end(if panicked { Outcome::Done(Err(Errno::IO)) } else { Outcome::Abandoned });
    }
}

/// Waits for a load. `None`: it was given up, look again.
pub(super) struct Follower {
    flight: Arc<Flight>,
    /// Where its waker is.
    place: Option<usize>,
}

impl Follower {
    fn new(flight: &Arc<Flight>) -> Follower {
        Follower { flight: flight.clone(), place: None }
    }
}

impl Future for Follower {
    type Output = Option<Result<Data, Errno>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut wait = lock(&this.flight.0);
        match &wait.outcome {
            Some(Outcome::Done(result)) => return Poll::Ready(Some(result.clone())),
            Some(Outcome::Abandoned) => return Poll::Ready(None),
            None => {}
        }
        match this.place {
            Some(place) => wait.waiting[place].clone_from(context.waker()),
            None => {
                this.place = Some(wait.waiting.len());
                wait.waiting.push(context.waker().clone());
            }
        }
        Poll::Pending
    }
}
