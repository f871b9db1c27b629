//! `kill -9` under load: the image stays sound, what was flushed is there, and it goes on.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_testkit::fio::{Verify, verdict};
use ringdisk_testkit::images;
use ringdisk_testkit::layout::{Guest, Layout};
use ringdisk_testkit::limits::{full, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, run, until};
use ringdisk_testkit::sim::Prng;
use rustix::process::Signal;

use crate::common::tools::ringdisk;
use crate::common::{MIB, open, serve};
use crate::crash::client::{Witness, work};

fn rounds() -> u64 {
    if full() { 40 } else { 4 }
}

/// Nothing worse than leaks, according to QEMU and to the second opinion.
fn assert_sound(image: &Path) {
    let finished = run(command(&["qemu-img", "check", "-f", "qcow2", text(image)]));
    assert!(matches!(finished.code(), Some(0 | 3)), "{}", finished.output());
    let layout = Layout::of(&std::fs::read(image).expect("readable")[..]);
    assert!(layout.is_sound(), "{layout}");
}

fn kill(mut disk: Mounted, after: Duration) {
    std::thread::sleep(after);
    disk.process().signal(Signal::KILL);
    // Once what it has given to the storage has ended.
    disk.process().wait(Duration::from_secs(60)).expect("a killed process ends");
}

/// Waits until both jobs of fio have the disk open (one that comes later finds the mountpoint
/// without a disk, and writes to that), and what was written is read back.
fn is_reading_back(load: &Process, disk: &Mounted) {
    let begun = until(LIMIT, || {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", load.pid())).ok()?;
        let links = descriptors.flatten().filter_map(|fd| fd.path().read_link().ok());
        let stats = ringdisk(Path::new("/"), &["ctl", disk.text(), "stats", "--json"]).ok().json();
        let reads = stats["total"]["reads"].as_u64().expect("reads");
        (links.filter(|link| link == disk.path()).count() >= 2 && reads > 0).then_some(())
    });
    assert!(begun.is_some(), "{}", load.output());
}

#[test]
fn killed_under_fio_the_image_stays_sound_and_goes_on() {
    if !(needs_root() && needs("fio", has("fio")) && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("image.qcow2");
    images::qcow2(&image, "64M", "");
    let mut prng = Prng::new(1);
    let (mut verified, mut said) = (0, String::new());
    for _ in 0..rounds() {
        let disk = serve(&image, &["--threads", "2"]);
        let words = [
            "fio",
            "--name=load",
            "--filename",
            disk.text(),
            "--ioengine=libaio",
            "--direct=1",
            "--iodepth=16",
            "--rw=randwrite",
            "--bsrange=4k-64k",
            "--blockalign=4k",
            // A part of the disk for each, where nobody else writes.
            "--size=30m",
            "--offset_increment=30m",
            "--fsync=20",
            "--time_based",
            "--runtime=60",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_backlog=16",
            "--verify_state_save=0",
            // Of two writes in flight to the same place either may come last.
            "--serialize_overlap=1",
            "--thread",
            "--numjobs=2",
        ];
        let load = Process::spawn(&mut command(&words));
        is_reading_back(&load, &disk);
        kill(disk, Duration::from_millis(200 + prng.below(700)));
        // It ends since the disk is gone, not since it has read something else than it had written.
        let finished = load.finish(Duration::from_secs(60));
        assert_ne!(finished.code(), Some(0), "{}", finished.output());
        let seen = verdict(&finished.output());
        assert!(!seen.is_wrong, "{}", finished.output());
        verified += u32::from(seen.has_read);
        said = finished.output();
        assert_sound(&image);
    }
    assert!(
        verified > 0,
        "fio has read nothing back in any round; in the last one it said: {said}"
    );
    let disk = serve(&image, &[]);
    Verify { size_kib: 16 << 10, ..Verify::default() }.run(disk.path());
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert_sound(&image);
}

#[test]
fn killed_at_any_time_every_flushed_byte_is_there() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let mut prng = Prng::new(2);
    for (round, options) in (0..rounds()).zip(
        [
            "cluster_size=4k",
            "",
            "lazy_refcounts=on,cluster_size=4k",
            "extended_l2=on,cluster_size=32k",
        ]
        .iter()
        .cycle(),
    ) {
        let directory = scratch();
        let image = directory.path().join("image.qcow2");
        images::qcow2(&image, "32M", options);
        let witness = Witness::new(32 * MIB, || 0);
        let disk = serve(&image, &["--threads", "2"]);
        // Open before the death, however late a thread gets to run.
        let files = [(); 4].map(|()| open(disk.path()));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for (thread, file) in (0..).zip(&files) {
                let (witness, stop) = (&witness, &stop);
                scope.spawn(move || {
                    work(file, witness, round * 10 + thread, u64::MAX, 2 * MIB, stop);
                });
            }
            kill(disk, Duration::from_millis(100 + prng.below(500)));
            stop.store(true, Ordering::Relaxed);
        });
        drop(files);
        if !options.contains("lazy") {
            assert_sound(&image);
        }
        // As the program sees it, which counts anew what a lazy image did not count.
        let disk = serve(&image, &[]);
        assert_eq!(disk.stop().code(), Some(0));
        assert_sound(&image);
        let bytes = std::fs::read(&image).expect("readable");
        let guest = Guest::active(&bytes[..], &bytes[..]).expect("a sound header");
        let seen =
            witness.oracle().judge_crash(|at, bytes| guest.read(at, bytes, &|_, out| out.fill(0)));
        seen.unwrap_or_else(|mismatch| panic!("round {round} ({options}): {mismatch}"));
    }
}
