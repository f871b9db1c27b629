//! Counters while their queue thread writes them.
//!
//! Promises: one writer for each block, so plain loads and stores are enough; a block has its own
//! cache lines; counting allocates nothing. Any thread may read.

use std::sync::Arc;
use std::time::Instant;

use ringdisk_ring::{Counters, CountersSnapshot, Remote};

use super::QueueStats;
use super::cell::Cell;
use super::histogram::LatencyCells;

/// What a queue thread writes.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueCells {
    /// Requests answered.
    pub requests: Cell,
    /// Reads among them.
    pub reads: Cell,
    /// Writes among them.
    pub writes: Cell,
    /// Bytes read by clients.
    pub read_bytes: Cell,
    /// Bytes written by clients.
    pub write_bytes: Cell,
    /// Requests answered with an error.
    pub errors: Cell,
    /// Requests being served.
    pub in_flight: Cell,
    /// Most of them at once.
    pub in_flight_max: Cell,
    /// Fetches that found the request gone.
    pub eagain: Cell,
    /// Times that every entry carried a request.
    pub exhausted: Cell,
    /// Requests whose data were in pages of the client.
    pub zero_copy: Cell,
    /// Wake-ups by a guest (kicks of virtqueues).
    pub kicks: Cell,
    /// Wake-ups of a guest (calls).
    pub calls: Cell,
    /// Time that requests were here which waited for something, all added up, nanoseconds.
    pub waited_ns: Cell,
    /// CPU time of the thread, set at its end, nanoseconds.
    pub cpu_ns: Cell,
    /// Thread id, to read its CPU time while it runs.
    pub thread_id: Cell,
    latency: LatencyCells,
}

impl QueueCells {
    /// A request was fetched.
    pub fn begin(&self) {
        let in_flight = self.in_flight.get() + 1;
        self.in_flight.set(in_flight);
        if in_flight > self.in_flight_max.get() {
            self.in_flight_max.set(in_flight);
        }
    }

    /// Its reply was queued, `nanos` after it was fetched.
    pub fn end(&self, nanos: u64) {
        self.in_flight.set(self.in_flight.get().saturating_sub(1));
        self.requests.add(1);
        self.latency.add(nanos);
    }

    /// As [`QueueCells::end`], of a request that was fetched at this moment.
    pub fn end_since(&self, begun: Instant) {
        self.end(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    /// As [`QueueCells::end_since`], of a request that waited meanwhile: the thread did something
    /// else, or slept. One that is served in one go never does, however slow the CPU is, or busy
    /// with others.
    pub fn end_waited_since(&self, begun: Instant) {
        let nanos = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.end(nanos);
        self.waited_ns.add(nanos);
    }

    /// What they say now. Any thread.
    pub fn snapshot(&self, thread: usize, cpu: Option<usize>, ring: &Counters) -> QueueStats {
        let ring: CountersSnapshot = ring.snapshot();
        QueueStats {
            thread,
            cpu,
            requests: self.requests.get(),
            reads: self.reads.get(),
            writes: self.writes.get(),
            read_bytes: self.read_bytes.get(),
            write_bytes: self.write_bytes.get(),
            errors: self.errors.get(),
            in_flight: self.in_flight.get(),
            in_flight_max: self.in_flight_max.get(),
            enters: ring.enters,
            sqes: ring.sqes,
            cqes: ring.cqes,
            sleeps: ring.sleeps,
            polls_paid: ring.polls_paid,
            naps: ring.naps,
            polls_missed: ring.polls_missed,
            fixed: ring.fixed,
            queue_full: ring.queue_full + ring.slots_full + self.exhausted.get(),
            eagain: self.eagain.get(),
            zero_copy: self.zero_copy.get(),
            kicks: self.kicks.get(),
            calls: self.calls.get(),
            waited_ns: self.waited_ns.get(),
            cpu_ns: self.cpu_ns(),
            latency: self.latency.snapshot(),
        }
    }

    fn cpu_ns(&self) -> u64 {
        if self.cpu_ns.get() != 0 {
            return self.cpu_ns.get();
        }
        // First field: time on a CPU in nanoseconds (Documentation/scheduler/sched-stats.rst).
        std::fs::read_to_string(format!("/proc/self/task/{}/schedstat", self.thread_id.get()))
            .ok()
            .and_then(|text| text.split_whitespace().next()?.parse().ok())
            .unwrap_or(0)
    }
}

/// What a snapshot needs of a queue.
#[derive(Clone, Debug)]
pub struct QueueView {
    /// What the thread counts.
    pub cells: Arc<QueueCells>,
    /// What its ring counts.
    pub ring: Arc<Counters>,
    /// Reaches the thread.
    pub remote: Remote,
    /// CPU that it is bound to.
    pub cpu: Option<usize>,
}

impl QueueView {
    /// What the queue has counted until now.
    ///
    /// * `number`: of the queue and its thread.
    #[must_use]
    pub fn snapshot(&self, number: usize) -> QueueStats {
        self.cells.snapshot(number, self.cpu, &self.ring)
    }
}
