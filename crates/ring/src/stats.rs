//! Counters of an export: written by its queue threads, read by anybody.
//!
//! One writer for each block: plain loads and stores, own cache lines, no allocation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::{Counters, CountersSnapshot, Remote};

/// Linear steps inside each power of two: a percentile is at most 1/16 too high.
const STEPS: usize = 16;
/// Powers of two, in nanoseconds: up to 2^40 ns, about 18 minutes.
const POWERS: usize = 40;
const BUCKETS: usize = STEPS * POWERS;

/// Log-linear histogram of latencies.
#[derive(Clone, Debug)]
pub struct Histogram(Vec<u64>);

/// Place of a latency in the histogram.
fn bucket(nanos: u64) -> usize {
    let steps = STEPS as u64;
    if nanos < steps {
        return usize::try_from(nanos).unwrap_or(0);
    }
    let power = nanos.ilog2();
    // The top bit is implied; the next four choose the step.
    let step = (nanos >> (power - 4)) & (steps - 1);
    let index = u64::from(power - 3) * steps + step;
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// Smallest latency that lies above a bucket.
fn upper(index: usize) -> u64 {
    if index < STEPS {
        return index as u64 + 1;
    }
    let power = index / STEPS + 3;
    let step = (index % STEPS) as u64;
    (STEPS as u64 + step + 1) << (power - 4)
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram(vec![0; BUCKETS])
    }
}

impl Histogram {
    /// Number of latencies.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.iter().sum()
    }

    /// The latency that `fraction` (0.0 ..= 1.0) of all requests did not exceed; zero when there
    /// are none.
    #[must_use]
    pub fn percentile(&self, fraction: f64) -> Duration {
        let count = self.count();
        if count == 0 {
            return Duration::ZERO;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a rank between 1 and the count"
        )]
        let rank = ((count as f64 * fraction.clamp(0.0, 1.0)).ceil() as u64).clamp(1, count);
        let mut seen = 0;
        for (index, n) in self.0.iter().enumerate() {
            seen += n;
            if seen >= rank {
                return Duration::from_nanos(upper(index));
            }
        }
        Duration::from_nanos(upper(BUCKETS - 1))
    }

    /// Adds another histogram to this one.
    pub fn add(&mut self, other: &Histogram) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine += theirs;
        }
    }
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Cell(AtomicU64);

impl Cell {
    /// Adds `n`. The writing thread only.
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed) + n, Relaxed);
    }

    /// Sets it. The writing thread only.
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Reads it. Any thread.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What a queue thread writes.
#[derive(Debug)]
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
    latency: Box<[Cell]>,
}

impl Default for QueueCells {
    fn default() -> Self {
        QueueCells {
            requests: Cell::default(),
            reads: Cell::default(),
            writes: Cell::default(),
            read_bytes: Cell::default(),
            write_bytes: Cell::default(),
            errors: Cell::default(),
            in_flight: Cell::default(),
            in_flight_max: Cell::default(),
            waited_ns: Cell::default(),
            eagain: Cell::default(),
            exhausted: Cell::default(),
            zero_copy: Cell::default(),
            kicks: Cell::default(),
            calls: Cell::default(),
            cpu_ns: Cell::default(),
            thread_id: Cell::default(),
            latency: (0..BUCKETS).map(|_| Cell::default()).collect(),
        }
    }
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
        self.latency[bucket(nanos)].add(1);
    }

    /// As [`QueueCells::end`], of a request that waited meanwhile: the thread did something else,
    /// or slept. One that is served in one go never does, however slow the CPU is, or busy with
    /// others.
    pub fn end_waited(&self, nanos: u64) {
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
            latency: Histogram(self.latency.iter().map(Cell::get).collect()),
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

/// Counters of one queue since the start of the export. Times in nanoseconds, sizes in bytes.
#[derive(Clone, Debug, Default)]
pub struct QueueStats {
    /// Number of the queue and its thread.
    pub thread: usize,
    /// CPU of the thread; it may have left it for a while.
    pub cpu: Option<usize>,
    /// Requests answered.
    pub requests: u64,
    /// READs among them.
    pub reads: u64,
    /// WRITEs among them.
    pub writes: u64,
    /// Bytes read by clients.
    pub read_bytes: u64,
    /// Bytes written by clients.
    pub write_bytes: u64,
    /// Requests answered with an error; not those for which the kernel learns that there is no such
    /// operation (ENOSYS).
    pub errors: u64,
    /// Requests being served now.
    pub in_flight: u64,
    /// Largest number of requests served at once.
    pub in_flight_max: u64,
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Submission entries.
    pub sqes: u64,
    /// Completion entries.
    pub cqes: u64,
    /// Enters that were willing to sleep.
    pub sleeps: u64,
    /// Polls before a sleep that found work.
    pub polls_paid: u64,
    /// Sleeps for a set time in place of a poll.
    pub naps: u64,
    /// Polls before a sleep that did not.
    pub polls_missed: u64,
    /// Reads and writes of registered memory.
    pub fixed: u64,
    /// Times that the submission queue was full, that an operation waited for a slot, or that every
    /// entry carried a request.
    pub queue_full: u64,
    /// Fetches that found the request gone.
    pub eagain: u64,
    /// Requests whose data were in pages of the client.
    pub zero_copy: u64,
    /// Wake-ups by a guest (kicks of virtqueues).
    pub kicks: u64,
    /// Wake-ups of a guest (calls).
    pub calls: u64,
    /// Time that requests were here which waited for something; counted over io_uring only.
    pub waited_ns: u64,
    /// CPU time of the thread.
    pub cpu_ns: u64,
    /// Time from fetch to reply.
    pub latency: Histogram,
}

/// Counters of an export.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// One for each queue.
    pub queues: Vec<QueueStats>,
}

impl Stats {
    /// The sum over all queues; `in_flight_max` is the sum of the queues' maxima.
    #[must_use]
    pub fn total(&self) -> QueueStats {
        let mut total = QueueStats::default();
        for queue in &self.queues {
            total.requests += queue.requests;
            total.reads += queue.reads;
            total.writes += queue.writes;
            total.read_bytes += queue.read_bytes;
            total.write_bytes += queue.write_bytes;
            total.errors += queue.errors;
            total.in_flight += queue.in_flight;
            total.in_flight_max += queue.in_flight_max;
            total.enters += queue.enters;
            total.sqes += queue.sqes;
            total.cqes += queue.cqes;
            total.sleeps += queue.sleeps;
            total.polls_paid += queue.polls_paid;
            total.naps += queue.naps;
            total.polls_missed += queue.polls_missed;
            total.fixed += queue.fixed;
            total.queue_full += queue.queue_full;
            total.eagain += queue.eagain;
            total.zero_copy += queue.zero_copy;
            total.kicks += queue.kicks;
            total.calls += queue.calls;
            total.waited_ns += queue.waited_ns;
            total.cpu_ns += queue.cpu_ns;
            total.latency.add(&queue.latency);
        }
        total
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

#[cfg(test)]
mod tests {
    use super::{BUCKETS, Histogram, QueueCells, bucket, upper};
    use std::time::Duration;

    #[test]
    fn every_latency_lies_below_the_upper_end_of_its_bucket_by_at_most_a_sixteenth() {
        for nanos in (0..2000u64).chain([4095, 4096, 123_456, 999_999_999, 1 << 39]) {
            let top = upper(bucket(nanos));
            assert!(top > nanos && top - nanos <= nanos / 16 + 1, "{nanos} in bucket below {top}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_of_nothing_are_zero() {
        assert_eq!(Histogram::default().percentile(0.99), Duration::ZERO);
    }

    #[test]
    fn percentiles_follow_the_ranks() {
        let cells = QueueCells::default();
        for n in 1..=100u64 {
            cells.begin();
            cells.end(n * 1000);
        }
        let stats = cells.snapshot(0, None, &crate::Counters::default());
        let p50 = stats.latency.percentile(0.5).as_nanos();
        assert!((50_000..=53_200).contains(&p50), "{p50}");
        assert!(stats.latency.percentile(1.0).as_nanos() >= 100_000);
        assert_eq!((stats.in_flight, stats.in_flight_max), (0, 1));
    }
}
