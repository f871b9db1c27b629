//! Jobs as people see them: a line with a bar for each.
//!
//! Promises: pure; whatever a server says becomes text that controls no terminal.

use std::time::Duration;

use serde_json::{Value, json};

use crate::metrics::Sample;
use crate::size::human_size;
use crate::terminal::visible;
use crate::timestamp::long_time;

/// Characters of a bar.
const BAR: u64 = 20;

/// How far a job is, without its name: `[##########----------]  50 % of 2 GiB, 100 MiB/s, 10s
/// left`.
pub fn way(job: &Value) -> String {
    let number = |key: &str| job[key].as_u64().unwrap_or(0);
    let (done, total) = (number("done"), number("total"));
    let filled = match total {
        0 => 0,
        total => u64::try_from(u128::from(done.min(total)) * u128::from(BAR) / u128::from(total))
            .unwrap_or(0),
    };
    let percent = match total {
        0 => 0,
        total => u128::from(done.min(total)) * 100 / u128::from(total),
    };
    let bar: String = (0..BAR).map(|at| if at < filled { '#' } else { '-' }).collect();
    let mut text = format!("[{bar}] {percent:>3} % of {}", human_size(total));
    if number("rate") > 0 {
        text.push_str(&format!(", {}/s", human_size(number("rate"))));
    }
    if let Some(left) = job["estimate-seconds"].as_u64() {
        text.push_str(&format!(", {} left", long_time(Duration::from_secs(left))));
    }
    if number("speed") > 0 {
        text.push_str(&format!(" (limit {}/s)", human_size(number("speed"))));
    }
    text
}

/// A job in one line.
pub fn line(job: &Value) -> String {
    let text = |key: &str| job[key].as_str().map(visible).unwrap_or_default();
    let (id, state) = (text("id"), text("state"));
    let why = job["why"].as_str().map(|why| format!(": {}", visible(why))).unwrap_or_default();
    match (state.as_str(), job["exit"].as_u64()) {
        ("concluded", Some(0)) => format!("{id}  done  {}", text("what")),
        ("concluded", _) => format!("{id}  failed{why}  {}", text("what")),
        _ => format!("{id}  {state}{why}  {}  {}", way(job), text("what")),
    }
}

/// The jobs of several disks, a heading for each; empty without any.
///
/// * `lists`: answers to `job-list`.
pub fn lists(lists: &[Value]) -> String {
    let mut text = String::new();
    for list in lists {
        let jobs = list["jobs"].as_array().map(Vec::as_slice).unwrap_or_default();
        if jobs.is_empty() {
            continue;
        }
        text.push_str(&visible(list["target"].as_str().unwrap_or_default()));
        text.push('\n');
        jobs.iter().for_each(|job| text.push_str(&format!("  {}\n", line(job))));
    }
    text
}

/// The jobs that samples of disks tell of, for a table that is shown again and again.
pub fn of_samples(samples: &[Sample]) -> Vec<String> {
    let label = |sample: &Sample, name: &str| {
        let found = sample.labels.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone()).unwrap_or_default()
    };
    let infos = samples.iter().filter(|sample| sample.family == "ringdisk_job_info");
    infos
        .map(|info| {
            let (target, id) = (label(info, "target"), label(info, "id"));
            let is_its =
                |sample: &&Sample| label(sample, "target") == target && label(sample, "id") == id;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // `as` saturates.
            let value = |family: &str| {
                let its = samples.iter().filter(is_its);
                let found = its.into_iter().find(|sample| sample.family == family);
                found.map_or(0, |sample| sample.value as u64)
            };
            let job = json!({
                "done": value("ringdisk_job_done_bytes"),
                "total": value("ringdisk_job_size_bytes"),
                "rate": value("ringdisk_job_bytes_per_second"),
                "speed": value("ringdisk_job_limit_bytes_per_second"),
            });
            let (id, state) = (visible(&id), visible(&label(info, "state")));
            format!("{id} {state} {} {}", way(&job), visible(&target))
        })
        .collect()
}
