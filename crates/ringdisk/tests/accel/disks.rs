//! Disks of each kind in the host kernel: what was written is on the disk itself, errors of the
//! disk are errors of the request and of nothing else, and a daemon that is killed while a slow
//! disk works loses nothing. To a block device a discard is a hint.

use std::ops::Range;
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{Discards, FrontEnd, Request, Vm, VmOptions};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::run;

use crate::common::accel::{
    REQUIRED, accel, accelerated_at, aligned, assert_by_kernel, becomes, counted, has_module, kills,
};
use crate::common::disks::{as_it_is, disk, in_memory};
use crate::common::program;
use crate::common::serving::{Daemon, Place, SIZE, load_of, meanwhile, options};

/// A load on a disk of zeroes. Gives how many requests went as bios, and how many as kiocbs; copies
/// of requests are neither.
///
/// * `requests`: of the load.
fn verified(place: &Place, engine: &str, requests: u64) -> (u64, u64) {
    // The blocks of tmpfs.
    let words = ["--accel-engine", engine, "--logical-block-size", "4096"];
    let (daemon, mut vm) = accelerated_at(place, &words);
    let mut load = load_of(30, Discards::Hint);
    load.run(&mut vm, requests);
    load.drain(&mut vm);
    load.read_all(&mut vm);
    let page = aligned(&mut vm, 1, 0, 64, &[7; 4096]);
    let shown = assert_by_kernel(place, requests / 2);
    assert_eq!(counted(&shown, "errors"), 0, "{shown}");
    drop(vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
    assert!(page == (0, images::piece(&place.image, 64 * 512, 4096)), "status {}", page.0);
    (counted(&shown, "bios"), counted(&shown, "kiocbs"))
}

#[test]
fn a_ram_disk_holds_what_was_written() {
    let Some(disk) = disk("memory") else { return };
    let place = &disk.place;
    let (bios, _) = verified(place, "auto", 1500);
    assert!(bios > 0, "bios are for block devices");
}

#[test]
fn a_ram_disk_by_kiocb_holds_what_was_written() {
    let Some(disk) = disk("memory") else { return };
    let place = &disk.place;
    let (bios, kiocbs) = verified(place, "kiocb", 1500);
    assert!(bios == 0 && kiocbs > 0);
}

#[test]
fn a_disk_that_ends_requests_by_interrupts_holds_what_was_written() {
    let Some(disk) = disk("quick") else { return };
    let place = &disk.place;
    let (bios, _) = verified(place, "bio", 1500);
    assert!(bios > 0);
}

#[test]
fn a_disk_that_ends_requests_by_interrupts_by_kiocb_holds_what_was_written() {
    let Some(disk) = disk("quick") else { return };
    let place = &disk.place;
    let (bios, kiocbs) = verified(place, "kiocb", 1500);
    assert!(bios == 0 && kiocbs > 0);
}

#[test]
fn a_slow_disk_holds_what_was_written() {
    let Some(disk) = disk("middle") else { return };
    let place = &disk.place;
    verified(place, "auto", 300);
}

#[test]
fn a_file_in_memory_holds_what_was_written() {
    if !has_module() {
        return;
    }
    let (_directory, image) = in_memory();
    images::sparse(&image, SIZE);
    let (bios, kiocbs) = verified(&Place::on(&image), "auto", 1500);
    assert!(bios == 0 && kiocbs > 0, "bios are for block devices");
}

#[test]
fn a_file_on_ext4_holds_what_was_written() {
    if !has_module() {
        return;
    }
    // In the scratch directory, which is on ext4 in that machine.
    let (bios, kiocbs) = verified(&Place::new("raw"), "auto", 1500);
    assert!(bios == 0 && kiocbs > 0);
}

/// Reads around sectors that cannot be read, many at once: those that touch one fail, the others do
/// not, and the kernel goes on. None ends where another one begins: the block layer may make one
/// request of two such, and when that fails, both have failed (docs/vhost-blk.md).
fn bad_sectors(name: &str, bad: Range<u64>) {
    let Some(disk) = as_it_is(name) else { return };
    let place = &disk.place;
    let (daemon, mut vm) = accelerated_at(place, &[]);
    let far = 8192;
    let bytes = images::pattern(3, 0, 4096);
    let fails = |sector: u64, len: usize| {
        let end = sector + len as u64 / 512;
        sector < bad.end && end > bad.start
    };
    let mut errors = 0;
    for round in 0..6 {
        assert_eq!(vm.status(0, Request::write(far, bytes.clone())), 0);
        let mut asked = Vec::new();
        for number in 0..16_u64 {
            let queue = usize::from(number % 2 == 1);
            let sectors = [1, 7, 31][usize::try_from((number + round) % 3).expect("small")];
            let len = sectors * 512;
            // Each reaches a little farther over the bad ones, from below and from above; every
            // fourth is elsewhere.
            let sector = match number % 4 {
                0 => far,
                _ => bad.start.saturating_sub(32) / 8 * 8 + number * 8 + round * 4,
            };
            let id = vm.queues[queue].add(&vm.ram, Request::read(sector, len)).expect("room");
            asked.push((queue, id, sector, len));
        }
        (0..2).for_each(|queue| vm.queues[queue].kick());
        for queue in 0..2 {
            for _ in 0..8 {
                let done = vm.queues[queue].wait(&vm.ram);
                let is_it =
                    |asked: &&(usize, u16, u64, usize)| (asked.0, asked.1) == (queue, done.id);
                let (_, _, sector, len) = *asked.iter().find(is_it).expect("it was asked");
                let fails = fails(sector, len);
                assert_eq!(done.status, u8::from(fails), "sector {sector}, {len} bytes");
                errors += u64::from(fails);
                if sector == far {
                    let known = len.min(bytes.len());
                    assert!(done.data[..known] == bytes[..known], "sector {sector}");
                }
            }
        }
    }
    let shown = assert_by_kernel(place, 80);
    assert!(errors > 10 && counted(&shown, "errors") == errors, "{errors} errors: {shown}");
    assert_eq!(shown["on"], true, "{shown}");
    assert_eq!(vm.run(1, Request::read(far, 4096)).data, bytes);
    assert_eq!(accel(place)["on"], true);
    drop(vm);
    let finished = daemon.stop(&[&place.socket]);
    // In lines of several requests each.
    let told = |line: &str| {
        let (count, _) =
            line.split_once(" requests failed for the guest with I/O errors in the")?;
        count.rsplit(' ').next()?.parse::<u64>().ok()
    };
    let all: u64 = finished.stderr.lines().filter_map(told).sum();
    assert_eq!(all, errors, "{}", finished.output());
    assert_eq!(images::piece(&place.image, far * 512, 4096), bytes);
}

#[test]
fn medium_errors_of_a_scsi_disk_are_errors_of_their_requests_alone() {
    bad_sectors("scsi", 200..250);
}

#[test]
fn bad_blocks_of_a_disk_are_errors_of_their_requests_alone() {
    bad_sectors("bad", 100..201);
}

#[test]
fn kills_while_a_slow_disk_works_lose_nothing() {
    let Some(disk) = disk("middle") else { return };
    let place = &disk.place;
    kills(place, if full() { 100 } else { 10 }, 60, 60_000, 31);
}

/// `ringdisk ctl`, which must end, whatever it says. Gives its exit code.
fn ends(place: &Place, words: &[&str], codes: &[i32]) -> i32 {
    let words = [&["ctl", text(&place.socket)], words].concat();
    let finished = run(Command::new(program()).args(&words));
    let code = finished.code().filter(|code| codes.contains(code));
    code.unwrap_or_else(|| panic!("{words:?}: {}", finished.output()))
}

#[test]
fn a_snapshot_that_meets_a_hand_over_of_many_virtqueues_ends_and_so_does_that() {
    let Some(disk) = disk("middle") else { return };
    let place = &disk.place;
    let words = ["--format", "raw", "--queues", "8", "--threads", "8", text(&place.image)];
    // Overlays are not beside the image, which is in /dev.
    let allowed = ["--allow-path", text(place.directory.path())];
    let daemon = Daemon::start(&place.socket, &[&words[..], &allowed, &REQUIRED].concat());
    let many = VmOptions { queues: 8, ..options(true) };
    let mut vm = Vm::started(FrontEnd::connect(&place.socket), many);
    becomes(place, true);
    let mut load = load_of(32, Discards::Hint);
    let rounds = if full() { 40 } else { 3 };
    let refused = meanwhile(&mut vm, &mut load, || {
        let mut refused = 0;
        for round in 0..rounds {
            let overlay = place.path(&format!("overlay{round}.qcow2"));
            ends(place, &["accel", "off"], &[0]);
            std::thread::scope(|scope| {
                // Each virtqueue is drained before it goes, which takes the disk's 30 ms: the
                // snapshot comes before, among or after them.
                let on = scope.spawn(|| ends(place, &["accel", "on"], &[0, 2]));
                std::thread::sleep(Duration::from_millis(60 * round));
                ends(place, &["snapshot", text(&overlay)], &[0]);
                refused += i32::from(on.join().expect("it ends") != 0);
            });
            assert_eq!(accel(place)["on"], false, "an overlay is above it");
            ends(place, &["commit", "--quiet"], &[0]);
            becomes(place, true);
        }
        refused
    });
    println!("of {rounds} hand-overs {refused} were refused, as there was an overlay already");
    load.read_all(&mut vm);
    let shown = accel(place);
    assert!(counted(&shown, "reads") > 0 && counted(&shown, "errors") == 0, "{shown}");
    drop(vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}
