//! What disks did between two moments: rates, latencies and depth, from the samples that their
//! processes give.
//!
//! Promises: pure; samples that are missing, or went back since a process was replaced, count as
//! nothing. Latencies are those of the time in between, exact to a power of two and interpolated
//! inside.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::metrics::Sample;

/// One disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// Where it is served.
    pub target: String,
    /// Requests in a second: reads and writes.
    pub reads: f64,
    /// See `reads`.
    pub writes: f64,
    /// Bytes in a second.
    pub read_bytes: f64,
    /// Bytes in a second.
    pub written_bytes: f64,
    /// Half of the requests took no longer; `None`: there were none.
    pub p50: Option<Duration>,
    /// 99 of 100 took no longer.
    pub p99: Option<Duration>,
    /// Requests that are served now.
    pub in_flight: f64,
    /// Those of them that wait for a limit; the others are with the storage.
    pub limited: f64,
    /// Part of the requests for which no table was read from an image, 0 to 1; `None`: there were
    /// no requests, or the disk has no tables.
    pub cache_hits: Option<f64>,
    /// CPUs that the queue threads keep busy; 1.0 is one.
    pub cpus: f64,
    /// Requests answered with an error since the start.
    pub errors: f64,
    /// It is served without a fault.
    pub is_healthy: bool,
}

/// What is sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Requests in a second, the most first.
    #[default]
    Requests,
    /// Bytes in a second, the most first.
    Bytes,
    /// p99, the longest first.
    Latency,
    /// Names.
    Target,
}

impl Order {
    /// The next one, from the last to the first.
    #[must_use]
    pub fn next(self) -> Order {
        match self {
            Order::Requests => Order::Bytes,
            Order::Bytes => Order::Latency,
            Order::Latency => Order::Target,
            Order::Target => Order::Requests,
        }
    }

    /// Its name for people; that of the option `--sort`.
    pub fn word(self) -> &'static str {
        match self {
            Order::Requests => "requests",
            Order::Bytes => "bytes",
            Order::Latency => "p99",
            Order::Target => "name",
        }
    }
}

const BUCKETS: &str = "ringdisk_request_duration_seconds";
const LOADS: &str = "ringdisk_metadata_cache_loads_total";

/// The samples of one disk by name; buckets by their bound.
#[derive(Default)]
struct Known {
    values: BTreeMap<String, f64>,
    buckets: Vec<(f64, f64)>,
}

fn by_target(samples: &[Sample]) -> BTreeMap<String, Known> {
    let mut all: BTreeMap<String, Known> = BTreeMap::new();
    for sample in samples {
        let label = |name: &str| {
            let found = sample.labels.iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value.as_str())
        };
        let Some(target) = label("target") else { continue };
        let known = all.entry(target.to_owned()).or_default();
        match (sample.family.as_str(), sample.suffix.as_str()) {
            (BUCKETS, "_bucket") => {
                let bound = label("le").and_then(|bound| match bound {
                    "+Inf" => Some(f64::INFINITY),
                    bound => bound.parse().ok(),
                });
                known.buckets.extend(bound.map(|bound| (bound, sample.value)));
            }
            (name, "") => {
                // Several samples of one name are those of the images of a chain.
                *known.values.entry(name.to_owned()).or_default() += sample.value;
            }
            _ => {}
        }
    }
    for known in all.values_mut() {
        known.buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    all
}

/// The rates of all disks that are there now.
///
/// * `seconds`: between the two.
pub fn rates(before: &[Sample], now: &[Sample], seconds: f64) -> Vec<Rates> {
    let before = by_target(before);
    let nothing = Known::default();
    by_target(now)
        .into_iter()
        .filter(|(_, now)| now.values.contains_key("ringdisk_requests_total"))
        .map(|(target, now)| {
            let before = before.get(&target).unwrap_or(&nothing);
            let value = |name: &str| now.values.get(name).copied().unwrap_or(0.0);
            let rate = |name: &str| {
                let old = before.values.get(name).copied();
                let since = old.map_or(0.0, |old| (value(name) - old).max(0.0));
                if seconds > 0.0 { since / seconds } else { 0.0 }
            };
            let requests = rate("ringdisk_reads_total") + rate("ringdisk_writes_total");
            let has_tables = now.values.contains_key(LOADS) && requests > 0.0;
            Rates {
                reads: rate("ringdisk_reads_total"),
                writes: rate("ringdisk_writes_total"),
                read_bytes: rate("ringdisk_read_bytes_total"),
                written_bytes: rate("ringdisk_written_bytes_total"),
                p50: quantile(&before.buckets, &now.buckets, 0.5),
                p99: quantile(&before.buckets, &now.buckets, 0.99),
                in_flight: value("ringdisk_requests_in_flight"),
                limited: value("ringdisk_limit_waiting_requests"),
                cache_hits: has_tables.then(|| (1.0 - rate(LOADS) / requests).max(0.0)),
                cpus: rate("ringdisk_cpu_seconds_total"),
                errors: value("ringdisk_request_errors_total"),
                is_healthy: value("ringdisk_healthy") > 0.0,
                target,
            }
        })
        .collect()
}

/// The latency that a part of the requests in between did not exceed.
fn quantile(before: &[(f64, f64)], now: &[(f64, f64)], part: f64) -> Option<Duration> {
    let since = |index: usize, (bound, count): (f64, f64)| {
        let old = before.get(index).filter(|old| old.0 == bound);
        (bound, (count - old.map_or(0.0, |old| old.1)).max(0.0))
    };
    let counts: Vec<(f64, f64)> =
        now.iter().enumerate().map(|(index, bucket)| since(index, *bucket)).collect();
    let rank = counts.last().map_or(0.0, |(_, count)| *count) * part;
    if rank <= 0.0 {
        return None;
    }
    let (mut low, mut below) = (0.0, 0.0);
    for (bound, count) in counts {
        if count >= rank {
            // Above the last bound nothing is known but that.
            let high = if bound.is_finite() { bound } else { low };
            let inside = if count > below { (rank - below) / (count - below) } else { 1.0 };
            return Duration::try_from_secs_f64(low + (high - low) * inside).ok();
        }
        (low, below) = (bound, count);
    }
    None
}

/// Sorts, and leaves out what does not hold the text.
pub fn arrange(rates: &mut Vec<Rates>, order: Order, filter: &str) {
    rates.retain(|one| one.target.contains(filter));
    rates.sort_by(|a, b| {
        let first = match order {
            Order::Requests => (b.reads + b.writes).total_cmp(&(a.reads + a.writes)),
            Order::Bytes => {
                (b.read_bytes + b.written_bytes).total_cmp(&(a.read_bytes + a.written_bytes))
            }
            Order::Latency => b.p99.cmp(&a.p99),
            Order::Target => std::cmp::Ordering::Equal,
        };
        first.then_with(|| a.target.cmp(&b.target))
    });
}

#[cfg(test)]
mod tests {
    use ringdisk_export::stats::QueueCells;
    use ringdisk_throttle::Waits;

    use super::*;
    use crate::metrics::{Cache, DiskFacts, samples};

    fn disk(target: &str, requests: &[u64]) -> Vec<Sample> {
        let cells = QueueCells::default();
        for nanos in requests {
            cells.begin();
            cells.end(*nanos);
            cells.reads.add(1);
            cells.read_bytes.add(4096);
        }
        let stats = cells.snapshot(0, None, &ringdisk_ring::Counters::default());
        let facts =
            DiskFacts { target: target.to_owned(), is_healthy: true, ..DiskFacts::default() };
        samples(&facts, &stats)
    }

    #[test]
    fn rates_and_latencies_are_those_of_the_time_in_between() {
        let before = disk("/a", &[1_000_000_000; 10]);
        let now = disk("/a", &[&[1_000_000_000; 10][..], &[100_000; 200][..]].concat());
        let all = rates(&before, &now, 2.0);
        assert_eq!((all[0].reads, all[0].read_bytes, all[0].writes), (100.0, 409_600.0, 0.0));
        let p99 = all[0].p99.expect("requests");
        assert!((Duration::from_micros(65)..Duration::from_micros(132)).contains(&p99), "{p99:?}");
        assert!(all[0].p50 < Some(p99));
        let idle = rates(&now, &now, 2.0);
        assert_eq!((idle[0].reads, idle[0].p50), (0.0, None));
        // A disk that is new, and one whose process was replaced.
        assert_eq!(rates(&[], &now, 2.0)[0].reads, 0.0);
        assert_eq!(rates(&now, &before, 2.0)[0].reads, 0.0);
    }

    #[test]
    fn hits_of_the_cache_are_requests_without_a_table_read() {
        let with = |requests: usize, loads: [u64; 2]| {
            let cells = QueueCells::default();
            (0..requests).for_each(|_| cells.reads.add(1));
            let stats = cells.snapshot(0, None, &ringdisk_ring::Counters::default());
            let caches = loads.map(|loads| Cache { loads, ..Cache::default() }).to_vec();
            let waits = Waits { now: 3, ..Waits::default() };
            let target = String::from("/a");
            samples(&DiskFacts { target, caches, waits, ..DiskFacts::default() }, &stats)
        };
        let all = rates(&with(10, [5, 5]), &with(110, [15, 20]), 1.0);
        assert_eq!((all[0].cache_hits, all[0].limited), (Some(0.75), 3.0));
        assert_eq!(rates(&with(10, [5, 5]), &with(10, [5, 5]), 1.0)[0].cache_hits, None);
        assert_eq!(rates(&disk("/a", &[]), &disk("/a", &[1; 9]), 1.0)[0].cache_hits, None);
    }

    #[test]
    fn disks_are_sorted_and_filtered() {
        let one = |target: &str, reads: f64, bytes: f64, ms: u64| Rates {
            target: target.to_owned(),
            reads,
            read_bytes: bytes,
            p99: Some(Duration::from_millis(ms)),
            ..Rates::default()
        };
        let all = vec![one("/b", 1.0, 9.0, 5), one("/a", 3.0, 1.0, 2), one("/c", 2.0, 2.0, 9)];
        let arranged = |order: Order, filter: &str| {
            let mut rates = all.clone();
            arrange(&mut rates, order, filter);
            rates.into_iter().map(|one| one.target).collect::<String>()
        };
        assert_eq!(arranged(Order::Requests, ""), "/a/c/b");
        assert_eq!(arranged(Order::Bytes, ""), "/b/c/a");
        assert_eq!(arranged(Order::Latency, ""), "/c/b/a");
        assert_eq!(arranged(Order::Target, ""), "/a/b/c");
        assert_eq!(arranged(Order::Target, "b"), "/b");
    }
}
