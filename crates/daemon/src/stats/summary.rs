//! What a disk does, on one screen in plain words: `ringdisk ctl DISK stats`.
//!
//! Promises: pure; a server of another version, which leaves things out or lies, gives fewer lines
//! and no failure. Nothing in the text controls a terminal.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::{ratio, whole};
use crate::job_text;
use crate::size::{human_size, human_time};
use crate::terminal::visible;
use crate::timestamp::long_time;

/// The counters of a disk at one moment.
#[derive(Clone, Copy, Debug)]
struct Counts<'a>(&'a Value);

impl Counts<'_> {
    fn total(&self, key: &str) -> u64 {
        self.0["total"][key].as_u64().unwrap_or(0)
    }

    fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.0["elapsed-ns"].as_u64().unwrap_or(0))
    }

    fn latency(&self, key: &str) -> Option<Duration> {
        self.0["total"]["latency-ns"][key].as_u64().map(Duration::from_nanos)
    }

    fn text(&self, keys: &[&str]) -> Option<String> {
        let value = keys.iter().fold(self.0, |value, key| &value[*key]);
        value.as_str().map(visible)
    }
}

/// The text, without a line break at its end.
///
/// * `stats`: what the server says now.
/// * `before`: what it said some time before; `None`: rates since the start only.
/// * `users`: who uses a mount, each in words.
pub fn summary(stats: &Value, before: Option<&Value>, users: &[String]) -> String {
    let now = Counts(stats);
    let mut text = heading(now, stats);
    if let Some(before) = before {
        let before = Counts(before);
        let seconds = now.elapsed().saturating_sub(before.elapsed()).as_secs_f64();
        let since = |key: &str| now.total(key).saturating_sub(before.total(key));
        let _ = write!(text, "\n  now        {}", rates(since, seconds));
    }
    let all = |key: &str| now.total(key);
    let _ = write!(text, "\n  on average {}", rates(all, now.elapsed().as_secs_f64()));
    let _ = write!(
        text,
        "\n  so far     {} reads ({}), {} writes ({})",
        now.total("reads"),
        human_size(now.total("read-bytes")),
        now.total("writes"),
        human_size(now.total("write-bytes"))
    );
    let _ = write!(text, "\n  latency    {}", latencies(now));
    let _ = write!(text, "\n  in flight  {} requests now", now.total("in-flight"));
    let _ = write!(text, "\n  errors     {}", errors(now, stats));
    tables(&mut text, stats);
    let clients = users.iter().cloned().chain(clients(stats)).collect::<Vec<_>>();
    let clients = if clients.is_empty() { String::from("nobody") } else { clients.join(", ") };
    let _ = write!(text, "\n  used by    {clients}");
    for job in stats["jobs"].as_array().map(Vec::as_slice).unwrap_or_default() {
        if job["state"] != "concluded" && job["state"] != "moved" {
            let _ = write!(text, "\n  job        {}", job_text::line(job));
        }
    }
    trouble(&mut text, now, stats);
    text
}

/// The image, where it is served, and since when.
fn heading(now: Counts<'_>, stats: &Value) -> String {
    let mut text = now.text(&["name"]).unwrap_or_default();
    let format = now.text(&["serving", "format"]).unwrap_or_else(|| String::from("no image"));
    let size = stats["size"].as_u64().map(human_size).unwrap_or_default();
    let mode = if stats["read-only"].as_bool() == Some(true) { ", read-only" } else { "" };
    let _ = write!(text, " ({format}, {size}{mode})");
    if let Some(place) = now.text(&["serving", "where"]).filter(|place| !place.is_empty()) {
        let _ = write!(text, "\n  served     as {place}");
    } else {
        text.push_str("\n  served    ");
    }
    let _ = write!(text, " for {}", long_time(now.elapsed()));
    if let Some(pid) = stats["serving"]["pid"].as_u64() {
        let _ = write!(text, " by process {pid}");
    }
    text
}

/// Reads and writes in a second.
fn rates(count: impl Fn(&str) -> u64, seconds: f64) -> String {
    let rate = |key: &str| whole(ratio(count(key), seconds));
    format!(
        "{} reads/s ({}/s), {} writes/s ({}/s)",
        rate("reads"),
        human_size(rate("read-bytes")),
        rate("writes"),
        human_size(rate("write-bytes"))
    )
}

fn latencies(now: Counts<'_>) -> String {
    let shown = |key: &str| now.latency(key).map(human_time).unwrap_or_default();
    match now.latency("max") {
        None | Some(Duration::ZERO) => String::from("no requests yet"),
        Some(_) => format!(
            "p50 {} (half are faster), p99 {}, slowest {}",
            shown("p50"),
            shown("p99"),
            shown("max")
        ),
    }
}

fn errors(now: Counts<'_>, stats: &Value) -> String {
    let (failed, device) = (now.total("errors"), stats["device"]["io-errors"].as_u64());
    match (device.unwrap_or(0), failed) {
        (0, 0) => String::from("none"),
        (0, count) => format!("{count} requests answered with an error; the log says why"),
        (count, _) => format!("{count} requests answered with an I/O error; the log says why"),
    }
}

/// How the caches of tables of the images do.
fn tables(text: &mut String, stats: &Value) {
    let layers = stats["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    for layer in layers {
        let Some(rate) = layer["metadata-cache"]["hit-rate"].as_f64() else { continue };
        let name = layer["filename"].as_str().map(visible).unwrap_or_default();
        let _ = write!(
            text,
            "\n  cache      {:.2} % of the tables found in memory: {name}",
            rate * 100.0
        );
    }
}

/// Clients over a socket.
fn clients(stats: &Value) -> Vec<String> {
    let clients = stats["serving"]["clients"].as_array().map(Vec::as_slice).unwrap_or_default();
    clients
        .iter()
        .map(|client| match (client["address"].as_str(), client["pid"].as_u64()) {
            (Some(address), _) => visible(address),
            (None, Some(pid)) => format!("process {pid}"),
            (None, None) => String::from("a client"),
        })
        .collect()
}

/// What is wrong, or worth knowing, if anything is.
fn trouble(text: &mut String, now: Counts<'_>, stats: &Value) {
    let state = stats["serving"]["state"].as_str();
    if let Some(why) = now.text(&["serving", "why"]) {
        let _ = match state {
            Some("fault") => write!(text, "\n  fault    {why}"),
            Some("needs-reset") => {
                write!(text, "\n  device     NEEDS A RESET by its driver: {why}")
            }
            // Said below.
            Some("stopping") => Ok(()),
            _ => write!(text, "\n  attention  {why}"),
        };
    }
    if let Some(users) = now.text(&["in-use-by"]) {
        let _ = write!(text, "\n  stopping: still in use by {users}");
    }
    let layers = stats["layers"].as_array().map(Vec::as_slice).unwrap_or_default();
    for lost in layers.iter().filter_map(|layer| layer["name-lost"].as_str()) {
        let _ = write!(text, "\n  attention  {}", visible(lost));
    }
    match (stats["accel"]["on"].as_bool(), now.text(&["accel", "reason"])) {
        (Some(true), _) => text.push_str("\n  kernel     serves the virtqueues (--accel)"),
        (Some(false), Some(why)) => {
            let _ = write!(text, "\n  kernel     does not serve, since {why}");
        }
        _ => {}
    }
    let waited = stats["waited-for-limits"]["requests"].as_u64().unwrap_or(0);
    if let Some(limits) = now.text(&["limits"]).filter(|limits| limits != "none" || waited > 0) {
        let seconds = stats["waited-for-limits"]["seconds"].as_f64().unwrap_or(0.0);
        let time = human_time(Duration::try_from_secs_f64(seconds).unwrap_or_default());
        let _ =
            write!(text, "\n  limits: {limits}; {waited} requests waited for them, {time} in all");
    }
    if stats["copy-on-read"].as_bool() == Some(true) {
        text.push_str("\n  copy-on-read: reads are kept in the image on top");
    }
    if let Some(sandbox) = now.text(&["sandbox"]) {
        let _ = write!(text, "\n  sandbox: {sandbox}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stats(reads: u64, elapsed: u64) -> Value {
        json!({
            "name": "/srv/a.qcow2", "size": 1_u64 << 30, "read-only": false,
            "elapsed-ns": elapsed * 1_000_000_000,
            "total": {
                "reads": reads, "writes": 10, "read-bytes": reads * 4096, "write-bytes": 40960,
                "in-flight": 3, "errors": 2,
                "latency-ns": { "p50": 85_000, "p99": 1_200_000, "max": 15_000_000 },
            },
            "layers": [{ "filename": "/srv/a.qcow2", "metadata-cache": { "hit-rate": 0.998 } }],
            "serving": {
                "format": "qcow2", "where": "/srv/disk", "pid": 7, "why": null,
                "clients": [{ "pid": 9, "address": null }],
            },
        })
    }

    #[test]
    fn a_person_sees_on_one_screen_what_matters() {
        let text = summary(&stats(3000, 20), Some(&stats(1000, 10)), &[String::from("loop0")]);
        for part in [
            "/srv/a.qcow2 (qcow2, 1 GiB)",
            "served     as /srv/disk for 20s by process 7",
            "now        200 reads/s (800 KiB/s), 0 writes/s (0 B/s)",
            "on average 150 reads/s",
            "so far     3000 reads",
            "latency    p50 85.0 us (half are faster), p99 1.20 ms, slowest 15.0 ms",
            "in flight  3 requests",
            "errors     2 requests",
            "99.80 % of the tables",
            "used by    loop0, process 9",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.lines().count() <= 24 && text.lines().all(|line| line.len() <= 100), "{text}");
        assert!(!text.contains("enters") && !text.contains("SQE"), "{text}");
    }

    #[test]
    fn a_server_that_leaves_things_out_or_lies_is_no_failure() {
        for value in
            [json!(null), json!({}), json!({ "total": [], "layers": 7, "name": "a\u{1b}[2J" })]
        {
            let text = summary(&value, Some(&value), &[]);
            assert!(text.contains("0 reads/s") && !text.contains('\u{1b}'), "{text:?}");
            assert!(text.contains("nobody") && !text.contains("NaN"), "{text}");
        }
    }
}
