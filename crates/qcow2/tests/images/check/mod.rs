//! Check and repair against `qemu-img check`: sound images of all shapes, images that are damaged
//! at random (seeds are printed), power cuts and failures while repairing; and a table of all
//! damage that one pointer can take.
//!
//! `RINGDISK_CHECK_IMAGES=N`: how many damaged images are compared with QEMU (120; ten times that
//! with `RINGDISK_FULL=1`). `RINGDISK_CHECK_SEED=N`: the first seed.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

mod agrees_with_qemu;
mod bitmaps;
mod bits;
mod converge;
mod crash;
mod damage;
mod dirty;
mod kept_by_repair;
mod limits;
mod refused;
mod repair;
mod shapes;
mod table;
mod written;

use std::path::Path;
use std::process::Command;

use ringdisk_qcow2::{CheckHooks, CheckOptions, CheckReport, Error, Repair, check};
use ringdisk_ring::Runtime;
use ringdisk_testkit::sim::SimStorage;

/// What QEMU says about an image.
#[derive(Debug)]
struct Theirs {
    /// Exit code of `qemu-img check`.
    code: i32,
    /// Its JSON, empty when it gave up.
    json: String,
    /// Everything else that it printed.
    log: String,
}

impl Theirs {
    fn of(path: &Path) -> Theirs {
        let output = Command::new("qemu-img")
            .args(["check", "-f", "qcow2", "--output=json"])
            .arg(path)
            // Where it looks for an external data file.
            .current_dir(path.parent().expect("a directory"))
            .output()
            .expect("qemu-img is needed for this test");
        Theirs {
            code: output.status.code().unwrap_or(-1),
            json: String::from_utf8_lossy(&output.stdout).into_owned(),
            log: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// A number of the JSON; QEMU leaves out those that are 0.
    fn number(&self, key: &str) -> u64 {
        let Some((_, rest)) = self.json.split_once(&format!("\"{key}\": ")) else { return 0 };
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().expect("a number")
    }
}

/// The numbers of ours that have a key in QEMU's JSON.
fn numbers(report: &CheckReport) -> [(&'static str, u64); 8] {
    [
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("check-errors", report.check_errors),
        ("image-end-offset", report.image_end_offset),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ]
}

/// Repairs what `sim` holds.
fn repair_on(
    runtime: &mut Runtime,
    sim: &SimStorage,
    repair: Repair,
) -> Result<CheckReport, Error> {
    let ring = runtime.ring().clone();
    let storage = sim.storage();
    let options = CheckOptions { repair };
    runtime.block_on(check(&ring, &storage, None, &options, CheckHooks::none()))
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Seeds of the damaged images: `count` of them, or what the environment says.
fn seeds(count: u64) -> std::ops::Range<u64> {
    let full = if std::env::var_os("RINGDISK_FULL").is_some() { 10 } else { 1 };
    let count = variable("RINGDISK_CHECK_IMAGES").unwrap_or(count * full);
    let first = variable("RINGDISK_CHECK_SEED").unwrap_or(1);
    first..first + count
}
