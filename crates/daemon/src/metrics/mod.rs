//! Metrics of disks in the text format of Prometheus.
//!
//! Promises: names and units follow the conventions of Prometheus (`_total`, `_seconds`, `_bytes`);
//! a text has each family once, with its help and type, whatever disks and processes its samples
//! come from; samples of another process are taken only where they belong to a family.
//!
//! Source: prometheus.io, "Exposition formats" and "Metric and label naming".

mod disk;
mod render;
mod server;

use serde_json::{Value, json};

pub use disk::{Cache, DiskFacts, JobFacts, samples};
pub use render::render;
pub use server::{Health, MetricsServer, Source};

/// The type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Only grows, while the process lives.
    Counter,
    /// Any value.
    Gauge,
    /// Counts below bounds, with a sum and a count.
    Histogram,
}

impl Type {
    fn word(self) -> &'static str {
        match self {
            Type::Counter => "counter",
            Type::Gauge => "gauge",
            Type::Histogram => "histogram",
        }
    }
}

/// A family of samples.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Type,
    /// What it says.
    pub help: &'static str,
}

const fn counter(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Type::Counter, help }
}

const fn gauge(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Type::Gauge, help }
}

/// All families, in the order of the text.
pub const FAMILIES: &[Family] = &[
    gauge(
        "ringdisk_up",
        "Whether the serving process answers (1), or only its socket is left (0).",
    ),
    gauge("ringdisk_disk_info", "Always 1; what is served, as labels."),
    gauge("ringdisk_healthy", "Whether the disk is served without a fault."),
    gauge("ringdisk_start_time_seconds", "Since when this process serves the disk, Unix time."),
    gauge("ringdisk_size_bytes", "Size of the disk."),
    gauge("ringdisk_clients", "Clients over a socket: NBD clients, or the virtual machine."),
    counter("ringdisk_requests_total", "Requests answered, of all kinds."),
    counter("ringdisk_reads_total", "Reads answered."),
    counter("ringdisk_writes_total", "Writes answered."),
    counter("ringdisk_read_bytes_total", "Bytes read by clients."),
    counter("ringdisk_written_bytes_total", "Bytes written by clients."),
    counter("ringdisk_request_errors_total", "Requests answered with an error."),
    gauge("ringdisk_requests_in_flight", "Requests that are being served now."),
    Family {
        name: "ringdisk_request_duration_seconds",
        kind: Type::Histogram,
        help: "Time from the arrival of a request to its answer; the sum is at most 1/16 too high.",
    },
    counter("ringdisk_limit_waits_total", "Requests that waited for a limit."),
    counter(
        "ringdisk_limit_wait_seconds_total",
        "Time that requests waited for a limit, added up.",
    ),
    gauge("ringdisk_limit_waiting_requests", "Requests that wait for a limit now."),
    gauge("ringdisk_job_info", "Always 1; a job that has not ended, its state as a label."),
    gauge("ringdisk_job_done_bytes", "What a job that has not ended has done so far."),
    gauge("ringdisk_job_size_bytes", "What it has to do in all; may grow while clients write."),
    gauge("ringdisk_job_bytes_per_second", "How fast it is."),
    gauge("ringdisk_job_limit_bytes_per_second", "Its speed limit; 0: none."),
    counter("ringdisk_cpu_seconds_total", "CPU time of the queue threads."),
    counter("ringdisk_metadata_cache_loads_total", "Tables that were read from the image."),
    counter("ringdisk_metadata_cache_evictions_total", "Tables that were pushed out of memory."),
    gauge("ringdisk_metadata_cache_capacity_bytes", "Most memory for tables of the image."),
];

/// One sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The name of its family.
    pub family: String,
    /// What a sample of a histogram adds to that: `_bucket`, `_sum` or `_count`; else empty.
    pub suffix: String,
    /// Names and values.
    pub labels: Vec<(String, String)>,
    /// The value.
    pub value: f64,
}

impl Sample {
    fn new(family: &str, labels: &[(&str, &str)], value: f64) -> Sample {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Sample { family: family.to_owned(), suffix: String::new(), labels: labels.collect(), value }
    }

    /// Whether the process behind a control socket answers.
    pub fn up(target: &str, is_up: bool) -> Sample {
        Sample::new("ringdisk_up", &[("target", target)], f64::from(u8::from(is_up)))
    }
}

/// For another process.
pub fn to_json(samples: &[Sample]) -> Value {
    let one = |sample: &Sample| json!([sample.family, sample.suffix, sample.labels, sample.value]);
    samples.iter().map(one).collect()
}

/// From another process; what is no sample of a family is left out.
pub fn from_json(value: &Value) -> Vec<Sample> {
    let one = |value: &Value| -> Option<Sample> {
        let (family, suffix): (String, String) =
            (value[0].as_str()?.to_owned(), value[1].as_str()?.to_owned());
        let known = FAMILIES.iter().find(|known| known.name == family)?;
        let fits = match known.kind {
            Type::Histogram => ["_bucket", "_sum", "_count"].contains(&suffix.as_str()),
            Type::Counter | Type::Gauge => suffix.is_empty(),
        };
        let labels = serde_json::from_value(value[2].clone()).ok()?;
        let value = value[3].as_f64()?;
        fits.then_some(Sample { family, suffix, labels, value })
    };
    value.as_array().map(Vec::as_slice).unwrap_or_default().iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests;
