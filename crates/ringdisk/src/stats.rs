//! Counters for people: at the end (`--stats`) and on SIGUSR1.
//!
//! Promises: pure formatting; nothing is divided by zero, so a mount that served nothing has
//! numbers too.

use std::fmt;
use std::time::Duration;

use crate::size::{human_size, human_time};

/// Latencies that are shown, in percent of the requests that were at most that slow.
pub(crate) const PERCENTILES: [f64; 4] = [50.0, 90.0, 99.0, 99.9];

/// What one queue thread did since the mount was ready.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    pub(crate) thread: usize,
    /// The CPU that the thread is bound to.
    pub(crate) cpu: Option<usize>,
    pub(crate) requests: u64,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    pub(crate) errors: u64,
    /// Most requests that were in flight at once.
    pub(crate) depth_max: u64,
    pub(crate) enters: u64,
    pub(crate) sqes: u64,
    pub(crate) cqes: u64,
    pub(crate) sleeps: u64,
    pub(crate) polls_paid: u64,
    pub(crate) polls_missed: u64,
    pub(crate) queue_full: u64,
    pub(crate) eagain: u64,
    /// CPU time of the thread, nanoseconds.
    pub(crate) cpu_ns: u64,
    /// Latency at each of [`PERCENTILES`]; `None` before the first request.
    pub(crate) latency: Option<[Duration; PERCENTILES.len()]>,
}

/// What a mount did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stats {
    /// The image, for the heading.
    pub(crate) name: String,
    /// Since the mount was ready.
    pub(crate) elapsed: Duration,
    pub(crate) queues: Vec<Queue>,
    /// Latency of all queues together.
    pub(crate) latency: Option<[Duration; PERCENTILES.len()]>,
}

impl Stats {
    fn sum(&self, of: impl Fn(&Queue) -> u64) -> u64 {
        self.queues.iter().map(of).fold(0, u64::saturating_add)
    }

    /// `count` per second of the time since the start.
    fn rate(&self, count: u64) -> f64 {
        ratio(count, self.elapsed.as_secs_f64())
    }
}

/// A quotient that is 0 where there is nothing to divide by.
#[allow(clippy::cast_precision_loss)] // Shown with a few digits.
fn ratio(count: u64, by: f64) -> f64 {
    if by > 0.0 { count as f64 / by } else { 0.0 }
}

/// A quotient of two counts.
#[allow(clippy::cast_precision_loss)] // Shown with a few digits.
fn per(count: u64, by: u64) -> f64 {
    ratio(count, by as f64)
}

/// Bytes per second for people.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Never negative, shown rounded.
fn human_rate(bytes_per_second: f64) -> String {
    format!("{}/s", human_size(bytes_per_second as u64))
}

fn percentiles(latency: Option<&[Duration; PERCENTILES.len()]>) -> String {
    let Some(latency) = latency else { return String::from("no requests yet") };
    let pairs = PERCENTILES.iter().zip(latency);
    pairs.map(|(p, time)| format!("p{p} {}", human_time(*time))).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests = self.sum(|q| q.requests);
        let cpu_ns = self.sum(|q| q.cpu_ns);
        writeln!(f, "ringdisk: {} after {:.1} s", self.name, self.elapsed.as_secs_f64())?;
        for (what, count, bytes) in [
            ("reads ", self.sum(|q| q.reads), self.sum(|q| q.read_bytes)),
            ("writes", self.sum(|q| q.writes), self.sum(|q| q.write_bytes)),
        ] {
            writeln!(
                f,
                "  {what}   {count} ({:.0} IOPS), {} ({})",
                self.rate(count),
                human_size(bytes),
                human_rate(self.rate(bytes)),
            )?;
        }
        let depth = self.queues.iter().map(|q| q.depth_max).max().unwrap_or(0);
        let errors = self.sum(|q| q.errors);
        writeln!(f, "  requests {requests}, {errors} answered with an error")?;
        writeln!(f, "  latency  {}", percentiles(self.latency.as_ref()))?;
        writeln!(f, "  depth    at most {depth} in flight in one queue")?;
        write!(f, "  CPU      {:.2} us per request", per(cpu_ns, requests) / 1e3)?;
        self.queues.iter().try_for_each(|queue| write!(f, "\n{queue}"))
    }
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.cpu.map_or_else(|| String::from("any CPU"), |cpu| format!("CPU {cpu}"));
        writeln!(
            f,
            "  queue {} on {place}: {} requests ({} reads {}, {} writes {}), {} errors, depth {}",
            self.thread,
            self.requests,
            self.reads,
            human_size(self.read_bytes),
            self.writes,
            human_size(self.write_bytes),
            self.errors,
            self.depth_max,
        )?;
        writeln!(
            f,
            "    CPU {:.2} us per request; latency {}",
            per(self.cpu_ns, self.requests) / 1e3,
            percentiles(self.latency.as_ref()),
        )?;
        write!(
            f,
            "    ring: {} enters ({:.2} per request), {} SQEs, {} CQEs, {} sleeps, polls {} paid \
             {} missed, {} queue full, {} EAGAIN",
            self.enters,
            per(self.enters, self.requests),
            self.sqes,
            self.cqes,
            self.sleeps,
            self.polls_paid,
            self.polls_missed,
            self.queue_full,
            self.eagain,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_served_has_numbers_too() {
        let stats = Stats { queues: vec![Queue::default()], ..Stats::default() };
        let text = stats.to_string();
        assert!(text.contains("0 (0 IOPS), 0 B (0 B/s)"), "{text}");
        assert!(text.contains("CPU      0.00 us per request"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert!(!Stats::default().to_string().contains("NaN"));
    }

    #[test]
    fn totals_are_the_sums_of_the_queues() {
        let latency = Some([1, 2, 3, 4].map(Duration::from_micros));
        let queue = Queue {
            cpu: Some(1),
            requests: 1000,
            reads: 600,
            writes: 400,
            read_bytes: 600 * 4096,
            write_bytes: 400 * 4096,
            depth_max: 16,
            enters: 500,
            cpu_ns: 2_500_000,
            latency,
            ..Queue::default()
        };
        let stats = Stats {
            name: String::from("disk.img"),
            elapsed: Duration::from_secs(2),
            queues: vec![queue.clone(), Queue { thread: 1, depth_max: 3, ..queue }],
            latency,
        };
        let text = stats.to_string();
        assert!(text.starts_with("ringdisk: disk.img after 2.0 s\n"), "{text}");
        assert!(text.contains("reads    1200 (600 IOPS), 4.69 MiB (2.34 MiB/s)"), "{text}");
        assert!(text.contains("at most 16 in flight"), "{text}");
        assert!(text.contains("CPU      2.50 us per request"), "{text}");
        assert!(text.contains("p50 1.00 us, p90 2.00 us, p99 3.00 us, p99.9 4.00 us"), "{text}");
        assert!(text.contains("500 enters (0.50 per request)"), "{text}");
    }
}
