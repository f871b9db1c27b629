//! Counters of an export, as they were at one moment.
//!
//! Promises: reading them stops nobody. The queue thread writes its [`QueueCells`]; any thread
//! takes a snapshot of them through a [`QueueView`].

mod cell;
mod cells;
mod histogram;

pub use cell::Cell;
pub use cells::{QueueCells, QueueView};
pub use histogram::Histogram;

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
    /// Number of polls before a sleep that ended without finding work.
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
    /// What all queues of an export have counted until now.
    #[must_use]
    pub fn of(queues: &[QueueView]) -> Stats {
        let queues = queues.iter().enumerate();
        Stats { queues: queues.map(|(number, queue)| queue.snapshot(number)).collect() }
    }

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

#[cfg(test)]
mod tests {
    use super::QueueCells;

    #[test]
    fn percentiles_follow_the_ranks() {
        let cells = QueueCells::default();
        for n in 1..=100u64 {
            cells.begin();
            cells.end(n * 1000);
        }
        let stats = cells.snapshot(0, None, &ringdisk_ring::Counters::default());
        let p50 = stats.latency.percentile(0.5).as_nanos();
        assert!((50_000..=53_200).contains(&p50), "{p50}");
        assert!(stats.latency.percentile(1.0).as_nanos() >= 100_000);
        assert_eq!((stats.in_flight, stats.in_flight_max), (0, 1));
    }
}
