//! The kernel's switch is turned while mounts start: between our look at it and the kernel's INIT,
//! between INIT and its answer, between the answer and the rings. Each mount is served, by one
//! transport or the other, and soon.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_testkit::images::pattern;
use ringdisk_testkit::limits::{UringParameter, full, mount_at, needs_root};
use ringdisk_testkit::mount::Mounted;
use ringdisk_testkit::process::command;

use crate::common::{MIB, raw_image};

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Turns the switch until dropped; [`UringParameter`] puts it back.
struct Turning<'a>(&'a AtomicBool);

impl Drop for Turning<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Off and on, each for a time that grows and begins anew, so that every place of a start is met.
fn turn(stop: &AtomicBool) {
    let mut step = 0u64;
    while !stop.load(Ordering::Acquire) {
        let value = if step.is_multiple_of(2) { "N" } else { "Y" };
        std::fs::write(SWITCH, value).expect("the switch");
        step += 1;
        std::thread::sleep(Duration::from_micros(50 + step * 173 % 3000));
    }
}

/// 200 bytes from byte 4000.
fn read_200(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut out = vec![0; 200];
    File::open(path)?.read_exact_at(&mut out, 4000)?;
    Ok(out)
}

#[test]
fn mounts_that_start_while_the_switch_is_turned_all_serve() {
    if !needs_root() {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    let (directory, image) = raw_image(MIB, 1);
    let stop = AtomicBool::new(false);
    let mut over_rings = 0;
    let rounds = if full() { 400 } else { 50 };
    std::thread::scope(|scope| {
        scope.spawn(|| turn(&stop));
        let _turning = Turning(&stop);
        for round in 0..rounds {
            let path = directory.path().join(format!("disk{round}"));
            let mut words = command(&[&crate::common::program(), "-v", "mount", "-f", "raw"]);
            let disk = Mounted::from_command(words.arg(&image).arg(&path), &path);
            let bytes = read_200(&path).unwrap_or_else(|e| {
                let there = mount_at(&path);
                panic!("round {round}: {e}; {there:?}; it said: {}", disk.output())
            });
            assert_eq!(bytes, pattern(1, 4000, 200), "round {round}");
            let finished = disk.stop();
            let said = finished.output();
            assert_eq!((finished.code(), mount_at(&path)), (Some(0), None), "{round}: {said}");
            assert!(!said.contains("panicked"), "{said}");
            let is_over_rings = said.contains("requests travel over io_uring");
            let lines = said.lines().filter(|line| line.contains("served over /dev/fuse")).count();
            assert!(is_over_rings || lines == 1, "{round}: why not over io_uring? {said}");
            over_rings += usize::from(is_over_rings);
        }
    });
    eprintln!("{over_rings} of {rounds} over io_uring");
}
