//! Counters for people: at the end (`--stats`) and on SIGUSR1.
//!
//! Promises: pure formatting; nothing is divided by zero, so a mount that served nothing has
//! numbers too.

mod summary;

use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Format, Layer};
use ringdisk_fuse::{Histogram, QueueStats, Stats};
use ringdisk_vhost::export::{Acceleration, Engine, Health, QueueInKernel, State};
use serde_json::{Value, json};

use crate::size::{human_size, human_time};
use crate::terminal::visible;

pub use summary::summary;

/// What a mount did since it was ready.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The image, for the heading.
    pub name: String,
    /// Since the disk is served.
    pub elapsed: Duration,
    /// The counters of its queues.
    pub stats: Stats,
    /// Of a disk for a virtual machine: how its device is.
    pub device: Option<Health>,
    /// And how it is with the host kernel.
    pub accel: Option<Acceleration>,
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

/// A rate as a whole number.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Never negative.
fn whole(rate: f64) -> u64 {
    rate.round() as u64
}

/// CPU time of one request, microseconds.
fn cpu_us(queue: &QueueStats) -> f64 {
    per(queue.cpu_ns, queue.requests) / 1e3
}

/// Latencies, from the arrival of a request to its answer.
fn percentiles(latency: &Histogram) -> String {
    /// What is shown: the name, and the part of all requests that was at most that slow.
    const SHOWN: [(&str, f64); 5] =
        [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)];
    if latency.count() == 0 {
        return String::from("no requests yet");
    }
    let each = SHOWN.map(|(name, part)| format!("{name} {}", human_time(latency.percentile(part))));
    each.join(", ")
}

impl Report {
    /// Reads and writes that queue threads have served.
    pub fn reads_and_writes(&self) -> u64 {
        let total = self.stats.total();
        total.reads + total.writes
    }

    /// All that was served, here and by the host kernel. Latencies, CPU time and what guests were
    /// told are those of queue threads.
    pub fn total(&self) -> QueueStats {
        let mut total = self.stats.total();
        for queue in self.accel.iter().flat_map(|accel| &accel.queues) {
            let stats = &queue.stats;
            total.requests += queue.requests();
            total.reads += stats.reads;
            total.writes += stats.writes;
            total.read_bytes += stats.read_bytes;
            total.write_bytes += stats.write_bytes;
            total.errors += stats.errors + stats.unsupported;
            total.in_flight += u64::from(stats.in_flight);
        }
        total
    }

    /// Requests that the host kernel has answered.
    fn by_kernel(&self) -> u64 {
        self.accel.iter().flat_map(|accel| &accel.queues).map(QueueInKernel::requests).sum()
    }

    /// Requests that the guest got an I/O error for, from us or from the host kernel.
    pub fn io_errors(&self, device: &Health) -> u64 {
        let queues = self.accel.iter().flat_map(|accel| &accel.queues);
        device.io_errors + queues.map(|queue| queue.stats.errors).sum::<u64>()
    }

    /// The same for programs; times in nanoseconds.
    pub fn to_json(&self) -> Value {
        let queues: Vec<Value> = self.stats.queues.iter().map(queue_json).collect();
        let mut value = json!({
            "name": self.name,
            "elapsed-ns": u64::try_from(self.elapsed.as_nanos()).unwrap_or(u64::MAX),
            "total": queue_json(&self.total()),
            "queues": queues,
        });
        if let Some(device) = &self.device {
            value["device"] = device_json(device);
            value["device"]["io-errors"] = json!(self.io_errors(device));
        }
        if let Some(accel) = &self.accel {
            value["accel"] = accel_json(accel);
        }
        value
    }
}

fn accel_json(accel: &Acceleration) -> Value {
    let queues: Vec<Value> = accel
        .queues
        .iter()
        .map(|QueueInKernel { stats: queue, worker }| {
            json!({
                "state": state_name(queue.state),
                "in-kernel": queue.state != State::Idle,
                "worker": worker,
                "in-flight": queue.in_flight,
                "reads": queue.reads,
                "writes": queue.writes,
                "flushes": queue.flushes,
                "discards": queue.discards,
                "write-zeroes": queue.write_zeroes,
                "get-ids": queue.get_ids,
                "read-bytes": queue.read_bytes,
                "write-bytes": queue.write_bytes,
                "errors": queue.errors,
                "unsupported": queue.unsupported,
                "rounds": queue.rounds,
                "batches": queue.batches,
                "bounced": queue.bounced,
                "bounce-waits": queue.bounce_waits,
                "bios": queue.bios,
                "kiocbs": queue.kiocbs,
                "starved": queue.starved,
                "orphans": queue.orphans,
                "broken": queue.broken,
            })
        })
        .collect();
    json!({
        "on": accel.on,
        "reason": accel.obstacle,
        "engine": engine_name(accel.engine),
        "engine-in-force": accel.engine_in_force.map(engine_name),
        "workers": accel.workers.iter().map(|worker| worker.tid).collect::<Vec<_>>(),
        "queues": queues,
    })
}

/// As options spell it.
fn engine_name(engine: Engine) -> &'static str {
    match engine {
        Engine::Default => "auto",
        Engine::Kiocb => "kiocb",
        Engine::Bio => "bio",
    }
}

/// What the kernel does with a virtqueue; `idle`: it is on its queue thread, or does not run.
fn state_name(state: State) -> &'static str {
    match state {
        State::Idle => "idle",
        State::Running => "running",
        State::Broken => "broken",
        State::Draining => "draining",
        _ => "unknown",
    }
}

fn device_json(device: &Health) -> Value {
    json!({
        "io-errors": device.io_errors,
        "image-errors": device.image_errors,
        "refused": device.refused,
        "breaks": device.breaks,
        "needs-reset": device.broken_reason.is_some(),
        "broken-reason": device.broken_reason,
    })
}

fn queue_json(queue: &QueueStats) -> Value {
    let latency =
        |part| u64::try_from(queue.latency.percentile(part).as_nanos()).unwrap_or(u64::MAX);
    json!({
        "requests": queue.requests,
        "reads": queue.reads,
        "writes": queue.writes,
        "read-bytes": queue.read_bytes,
        "write-bytes": queue.write_bytes,
        "errors": queue.errors,
        "zero-copy": queue.zero_copy,
        "kicks": queue.kicks,
        "calls": queue.calls,
        "in-flight": queue.in_flight,
        "in-flight-max": queue.in_flight_max,
        "cpu-ns": queue.cpu_ns,
        "latency-ns": {
            "p50": latency(0.5),
            "p90": latency(0.9),
            "p99": latency(0.99),
            "p99.9": latency(0.999),
            "max": latency(1.0),
        },
        "ring": {
            "enters": queue.enters,
            "sqes": queue.sqes,
            "cqes": queue.cqes,
            "sleeps": queue.sleeps,
            "polls-paid": queue.polls_paid,
            "naps": queue.naps,
            "polls-missed": queue.polls_missed,
            "fixed": queue.fixed,
            "queue-full": queue.queue_full,
            "eagain": queue.eagain,
        },
    })
}

/// Part of the requests of a mount that found the tables of a layer in memory. From the number of
/// requests, as counting look-ups would cost each of them; a request that meets two tables that are
/// not there counts twice.
fn hit_rate(loads: u64, requests: u64) -> f64 {
    if requests == 0 { 1.0 } else { (1.0 - per(loads, requests)).max(0.0) }
}

/// What is known about a layer, for programs.
///
/// * `requests`: reads and writes that the mount has served.
pub fn layer_json(layer: &Layer, requests: u64) -> Value {
    let cache = layer.qcow2().map(|image| {
        let counters = image.cache_counters();
        json!({
            "loads": counters.loads,
            "hit-rate": hit_rate(counters.loads, requests),
            "evictions": counters.evictions,
            "dirty": counters.dirty,
            "capacity-bytes": counters.capacity_bytes.0,
        })
    });
    json!({
        "filename": layer.name().to_string_lossy(),
        "format": layer.format().map(Format::name),
        "size": layer.size().0,
        "metadata-cache": cache,
        "name-lost": layer.lost_name(),
    })
}

impl Report {
    /// The text, with what the metadata caches did.
    ///
    /// * `fault`: why the disk takes no more changes.
    pub fn with_layers(&self, layers: &[Arc<Layer>], fault: Option<&str>) -> String {
        let mut text = self.to_string();
        if let Some(fault) = fault {
            let _ = write!(text, "\n  fault    {}", visible(fault));
        }
        for lost in layers.iter().filter_map(|layer| layer.lost_name()) {
            let _ = write!(text, "\n  warning  {}", visible(&lost));
        }
        let requests = self.reads_and_writes();
        for layer in layers {
            let Some(image) = layer.qcow2() else { continue };
            let counters = image.cache_counters();
            let _ = write!(
                text,
                "\n  metadata {}: about {:.2} % hits, {} tables loaded, {} pushed out, {} to be \
                 written, {} at most",
                visible(&layer.name().to_string_lossy()),
                100.0 * hit_rate(counters.loads, requests),
                counters.loads,
                counters.evictions,
                counters.dirty,
                human_size(counters.capacity_bytes.0),
            );
        }
        text
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, here) = (self.total(), self.stats.total());
        let of = if self.by_kernel() > 0 { " (those of queue threads)" } else { "" };
        let seconds = self.elapsed.as_secs_f64();
        writeln!(f, "ringdisk: {} after {seconds:.1} s", self.name)?;
        for (what, count, bytes) in
            [("reads ", total.reads, total.read_bytes), ("writes", total.writes, total.write_bytes)]
        {
            writeln!(
                f,
                "  {what}   {count} ({} IOPS), {} ({}/s)",
                whole(ratio(count, seconds)),
                human_size(bytes),
                human_size(whole(ratio(bytes, seconds))),
            )?;
        }
        writeln!(f, "  requests {}, {} answered with an error", total.requests, total.errors)?;
        writeln!(f, "  latency  {}", percentiles(&total.latency) + of)?;
        let depth = self.stats.queues.iter().map(|queue| queue.in_flight_max).max().unwrap_or(0);
        writeln!(f, "  depth    {} in flight, at most {depth} in one queue", total.in_flight)?;
        if let Some(device) = &self.device {
            write_device(f, device, self.io_errors(device), &total)?;
        }
        if let Some(accel) = &self.accel {
            write_accel(f, accel)?;
        }
        write!(f, "  CPU      {:.2} us per request{of}", cpu_us(&here))?;
        self.stats.queues.iter().try_for_each(|queue| write_queue(f, queue))
    }
}

/// The lines of a device that a guest has.
fn write_device(
    f: &mut fmt::Formatter<'_>,
    device: &Health,
    io_errors: u64,
    total: &QueueStats,
) -> fmt::Result {
    let Health { image_errors, refused, breaks, broken_reason, .. } = device;
    writeln!(f, "  guest    {} kicks, {} calls", total.kicks, total.calls)?;
    writeln!(
        f,
        "  device   {io_errors} requests answered with an I/O error; {image_errors} errors of the \
         image, {refused} requests refused"
    )?;
    match broken_reason {
        Some(reason) => writeln!(f, "  device   NEEDS A RESET by its driver: {}", visible(reason)),
        None if *breaks > 0 => writeln!(f, "  device   needed a reset {breaks} times, not now"),
        None => Ok(()),
    }
}

/// The lines of virtqueues in the host kernel.
fn write_accel(f: &mut fmt::Formatter<'_>, accel: &Acceleration) -> fmt::Result {
    let sum = |count: fn(&QueueInKernel) -> u64| accel.queues.iter().map(count).sum::<u64>();
    let done = format!(
        "{} reads, {} writes, {} errors so far",
        sum(|queue| queue.stats.reads),
        sum(|queue| queue.stats.writes),
        sum(|queue| queue.stats.errors)
    );
    let threads = accel.workers.len();
    let engine = accel.engine_in_force.map_or("no disk", engine_name);
    match (accel.on, &accel.obstacle) {
        (true, _) => {
            writeln!(f, "  kernel   serves the virtqueues ({threads} threads, {engine}): {done}")
        }
        (false, Some(why)) => writeln!(f, "  kernel   does not serve, since {}", visible(why)),
        (false, None) => writeln!(f, "  kernel   ready; {done}"),
    }
}

/// The lines of one queue.
fn write_queue(f: &mut fmt::Formatter<'_>, queue: &QueueStats) -> fmt::Result {
    let place = queue.cpu.map_or_else(|| String::from("any CPU"), |cpu| format!("CPU {cpu}"));
    write!(
        f,
        "\n  queue {} on {place}: {} requests ({} reads {}, {} writes {}), {} errors, depth {}",
        queue.thread,
        queue.requests,
        queue.reads,
        human_size(queue.read_bytes),
        queue.writes,
        human_size(queue.write_bytes),
        queue.errors,
        queue.in_flight_max,
    )?;
    write!(
        f,
        "\n    CPU {:.2} us per request; latency {}",
        cpu_us(queue),
        percentiles(&queue.latency),
    )?;
    write!(
        f,
        "\n    ring: {} enters ({:.2} per request), {} SQEs, {} CQEs, {} sleeps, \
         polls {} paid {} missed, {} naps, {} full, {} EAGAIN, {} fixed",
        queue.enters,
        per(queue.enters, queue.requests),
        queue.sqes,
        queue.cqes,
        queue.sleeps,
        queue.polls_paid,
        queue.polls_missed,
        queue.naps,
        queue.queue_full,
        queue.eagain,
        queue.fixed,
    )
}

#[cfg(test)]
mod tests;
