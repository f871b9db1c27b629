//! Upgrades under load: no request is lost, answered twice or answered with an error.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{is_root, needs};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{command, has, run};

use super::upgraded_mount::Taken;
use crate::common::confined::assert_confined;
use crate::common::serving::locked_while;
use crate::common::{MIB, open, read_direct};
use crate::keep::client::{get_on, judge, load};

/// Processes that have the mount one after the other.
const TIMES: u64 = 5;

/// A client that goes through the page cache of its own file and syncs now and then, while `what`
/// happens. What it has written is there at the end.
fn with_buffered_writer<T>(path: &Path, at: u64, what: impl FnOnce() -> T) -> T {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let file = open(path);
            let mut number = 0_u64;
            while !is_done.load(Ordering::Relaxed) {
                number += 1;
                file.write_all_at(&number.to_le_bytes().repeat(1000), at).expect("a write");
                let mut seen = [0; 8000];
                file.read_exact_at(&mut seen, at).expect("a read");
                assert!(seen[..] == number.to_le_bytes().repeat(1000)[..], "number {number}");
                if number.is_multiple_of(64) {
                    file.sync_data().expect("a flush");
                }
            }
            number
        });
        let result = what();
        is_done.store(true, Ordering::Relaxed);
        let number = writer.join().expect("it saw an error");
        let seen = read_direct(path, at, 4096);
        assert_eq!(seen[..8], number.to_le_bytes(), "the last number");
        result
    })
}

/// Upgrades again and again; every byte is compared while clients work, at the end, and once more
/// by a process that has seen nothing of it.
fn upgraded(image: &Path, format: &str, span: u64, depth: u64) {
    let mut disk = Taken::start(&["--format", format, text(image)]);
    let path: PathBuf = disk.path().to_owned();
    // The buffered writer has the last MiB.
    let (written, _tries) = locked_while(image, || {
        with_buffered_writer(&path, span, || {
            load(&path, span, depth, |done| {
                for turn in 0..TIMES {
                    get_on(done, depth * 8, || disk.process.output());
                    // The number of queues may change with the process.
                    let threads = (turn % 3 + 1).to_string();
                    disk.upgrade(&["--threads", &threads]);
                }
                get_on(done, depth * 8, || disk.process.output());
            })
        })
    });
    assert!(written.len() > 100, "only {} blocks", written.len());
    judge(&path, &written);
    assert_confined(disk.process.pid(), is_root());
    let _directory = disk.stop();
    let again = crate::common::serve(image, &["--read-only", "--format", format]);
    judge(again.path(), &written);
}

#[test]
fn a_raw_image_at_depth_16() {
    let directory = ringdisk_testkit::mount::scratch();
    let image = directory.path().join("disk.img");
    images::sparse(&image, 65 * MIB);
    upgraded(&image, "raw", 64 * MIB, 16);
}

#[test]
fn a_qcow2_image_that_grows_with_each_write_at_depth_4() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let directory = ringdisk_testkit::mount::scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "4G", "cluster_size=4k");
    upgraded(&image, "qcow2", (4 << 30) - MIB, 4);
    let check = run(command(&["qemu-img", "check", "-f", "qcow2", text(&image)]));
    assert_eq!(check.code(), Some(0), "{}", check.output());
}

#[test]
fn clients_see_a_short_pause() {
    let mut disk = Taken::start(&["--null", "1G"]);
    let file = open(disk.path());
    for _ in 0..3 {
        let (is_done, mut longest) = (AtomicBool::new(false), Duration::ZERO);
        std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| {
                disk.upgrade(&[]);
                is_done.store(true, Ordering::Relaxed);
            });
            while !is_done.load(Ordering::Relaxed) && !upgrade.is_finished() {
                let begun = Instant::now();
                file.read_exact_at(&mut [0; 4096], 0).expect("a read");
                longest = longest.max(begun.elapsed());
            }
            upgrade.join().expect("an upgrade");
        });
        println!("longest pause at depth 1: {longest:?}");
    }
    drop(file);
    drop(disk.stop());
}
