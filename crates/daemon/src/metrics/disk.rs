//! The samples of one disk.
//!
//! Promises: pure. Bounds of the histogram are powers of two, where those of the counters lie, so
//! counts are exact.

use std::time::Duration;

use ringdisk_fuse::{Histogram, QueueStats};
use ringdisk_throttle::Waits;

use super::Sample;

/// Bounds of the histogram: 2^12 ns (4 µs) to 2^34 ns (17 s).
const BOUNDS: std::ops::RangeInclusive<u32> = 12..=34;

/// What is said of a disk beside its counters.
#[derive(Clone, Debug, Default)]
pub struct DiskFacts {
    /// The image.
    pub image: String,
    /// Where it is served.
    pub target: String,
    /// `mount`, `vhost-user-blk` or `nbd`.
    pub kind: &'static str,
    /// Its format.
    pub format: Option<&'static str>,
    /// Bytes.
    pub size: u64,
    /// All is well.
    pub is_healthy: bool,
    /// Since when it is served, since 1970.
    pub since: Duration,
    /// Clients over a socket; `None`: it is not served over one.
    pub clients: Option<usize>,
    /// How much requests waited for the limits.
    pub waits: Waits,
    /// Requests that a guest got an I/O error for; `None`: there is no guest.
    pub device_errors: Option<u64>,
    /// Jobs that have not ended.
    pub jobs: Vec<JobFacts>,
    /// Tables loaded, pushed out, and the most memory for them in bytes; of each image.
    pub caches: Vec<Cache>,
}

/// A job that has not ended.
#[derive(Clone, Debug, Default)]
pub struct JobFacts {
    /// Its name.
    pub id: String,
    /// What it does.
    pub kind: &'static str,
    /// How it is.
    pub state: &'static str,
    /// Bytes.
    pub done: u64,
    /// Bytes.
    pub total: u64,
    /// Bytes per second.
    pub rate: f64,
    /// Bytes per second; 0: no limit.
    pub speed: u64,
}

/// The cache of the tables of one image.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// The image.
    pub image: String,
    /// Tables that were read.
    pub loads: u64,
    /// Tables that were pushed out.
    pub evictions: u64,
    /// Bytes.
    pub capacity_bytes: u64,
}

#[allow(clippy::cast_precision_loss)] // A sample is a double.
fn number(count: u64) -> f64 {
    count as f64
}

/// The samples.
///
/// * `total`: counters of all queues.
pub fn samples(facts: &DiskFacts, total: &QueueStats) -> Vec<Sample> {
    let id = [("target", facts.target.as_str())];
    let mut all = Vec::with_capacity(48);
    let mut put = |name: &str, value: f64| all.push(Sample::new(name, &id, value));
    put("ringdisk_healthy", f64::from(u8::from(facts.is_healthy)));
    put("ringdisk_start_time_seconds", facts.since.as_secs_f64());
    put("ringdisk_size_bytes", number(facts.size));
    if let Some(clients) = facts.clients {
        put("ringdisk_clients", number(clients as u64));
    }
    put("ringdisk_requests_total", number(total.requests));
    put("ringdisk_reads_total", number(total.reads));
    put("ringdisk_writes_total", number(total.writes));
    put("ringdisk_read_bytes_total", number(total.read_bytes));
    put("ringdisk_written_bytes_total", number(total.write_bytes));
    let errors = total.errors.max(facts.device_errors.unwrap_or(0));
    put("ringdisk_request_errors_total", number(errors));
    put("ringdisk_requests_in_flight", number(total.in_flight));
    put("ringdisk_limit_waits_total", number(facts.waits.requests));
    put("ringdisk_limit_wait_seconds_total", facts.waits.time.as_secs_f64());
    put("ringdisk_limit_waiting_requests", number(facts.waits.now as u64));
    put("ringdisk_cpu_seconds_total", number(total.cpu_ns) / 1e9);
    let info = [
        ("target", facts.target.as_str()),
        ("image", &facts.image),
        ("kind", facts.kind),
        ("format", facts.format.unwrap_or("none")),
        ("version", env!("CARGO_PKG_VERSION")),
    ];
    all.push(Sample::new("ringdisk_disk_info", &info, 1.0));
    for job in &facts.jobs {
        let target = facts.target.as_str();
        let id = [("target", target), ("id", job.id.as_str()), ("kind", job.kind)];
        let info = [id[0], id[1], id[2], ("state", job.state)];
        all.push(Sample::new("ringdisk_job_info", &info, 1.0));
        let values = [
            ("ringdisk_job_done_bytes", number(job.done)),
            ("ringdisk_job_size_bytes", number(job.total)),
            ("ringdisk_job_bytes_per_second", job.rate),
            ("ringdisk_job_limit_bytes_per_second", number(job.speed)),
        ];
        all.extend(values.map(|(name, value)| Sample::new(name, &id, value)));
    }
    for cache in &facts.caches {
        let id = [("target", facts.target.as_str()), ("image", cache.image.as_str())];
        let values = [
            ("ringdisk_metadata_cache_loads_total", cache.loads),
            ("ringdisk_metadata_cache_evictions_total", cache.evictions),
            ("ringdisk_metadata_cache_capacity_bytes", cache.capacity_bytes),
        ];
        all.extend(values.map(|(name, value)| Sample::new(name, &id, number(value))));
    }
    histogram(&mut all, &facts.target, &total.latency);
    all
}

/// The samples of the histogram of latencies.
fn histogram(all: &mut Vec<Sample>, target: &str, latency: &Histogram) {
    const NAME: &str = "ringdisk_request_duration_seconds";
    let count = number(latency.count());
    let mut put = |suffix: &str, bound: Option<&str>, value: f64| {
        let labels = [("target", target), ("le", bound.unwrap_or_default())];
        let labels = if bound.is_some() { &labels[..] } else { &labels[..1] };
        let sample = Sample::new(NAME, labels, value);
        all.push(Sample { suffix: suffix.to_owned(), ..sample });
    };
    for power in BOUNDS {
        let bound = number(1 << power) / 1e9;
        put("_bucket", Some(&bound.to_string()), number(latency.below(power)));
    }
    put("_bucket", Some("+Inf"), count);
    put("_sum", None, latency.sum().as_secs_f64());
    put("_count", None, count);
}
