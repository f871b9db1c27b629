//! SIGKILL of the serving process under load.

use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{descriptors, full, needs, needs_root};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{Process, command, has, run, until};
use ringdisk_testkit::sim::Prng;

use crate::common::MIB;
use crate::keep::client::{get_on, judge, load};
use crate::keep::kept::{Kept, PAUSE};

/// Kills in each run.
fn kills() -> u64 {
    if full() { 20 } else { 6 }
}

/// `depth` clients at once; the server is killed again and again; everything is compared while they
/// work, at the end, and once more by a process that has seen nothing of it.
///
/// * `span`: bytes of the disk that are written to.
fn killed_again_and_again(image: &Path, format: &str, span: u64, depth: u64) {
    let disk = Kept::start(&["--threads", "2", "--format", format, text(image)]);
    let path = disk.path();
    let mut prng = Prng::new(depth);
    let helper = disk.0.pid();
    disk.kill_server();
    // Its last words: from then on the new process gives its parent nothing more to hold.
    let again = || disk.0.output().contains("again: requests").then_some(());
    assert_eq!(until(Duration::from_secs(20), again), Some(()), "{}", disk.0.output());
    let of_helper = Some(descriptors(helper));
    let of_server = disk.server().map(descriptors);
    let written = load(&path, span, depth, |done| {
        for _ in 0..kills() {
            std::thread::sleep(PAUSE + Duration::from_millis(prng.below(100)));
            disk.kill_server();
            get_on(done, depth * 4, || disk.0.output());
        }
    });
    assert!(written.len() > 100, "only {} blocks", written.len());
    judge(&path, &written);
    assert_eq!(Some(descriptors(helper)), of_helper, "descriptors are lost with each kill");
    let now = disk.server().map(descriptors);
    // A few come with the first use of something.
    assert!(now <= of_server.map(|count| count + 4), "{of_server:?} have become {now:?}");
    disk.stop();
    let again = crate::common::serve(image, &["--read-only", "--format", format]);
    judge(again.path(), &written);
}

fn raw(depth: u64) {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::sparse(&image, 64 * MIB);
    killed_again_and_again(&image, "raw", 64 * MIB, depth);
    assert_eq!(std::fs::metadata(&image).expect("stat").len(), 64 * MIB);
}

fn qcow2(depth: u64, options: &str) {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    // So large that nearly every write needs new space, until the end: an overwrite is not what a
    // kill could lose.
    images::qcow2(&image, "8G", options);
    killed_again_and_again(&image, "qcow2", 8 << 30, depth);
    let check = run(command(&["qemu-img", "check", "-f", "qcow2", text(&image)]));
    assert!(matches!(check.code(), Some(0 | 3)), "{}", check.output());
}

#[test]
fn raw_at_depth_1() {
    raw(1);
}

#[test]
fn raw_at_depth_16() {
    raw(16);
}

#[test]
fn raw_at_depth_64() {
    raw(64);
}

#[test]
fn qcow2_at_depth_1() {
    qcow2(1, "cluster_size=4k");
}

#[test]
fn qcow2_at_depth_16() {
    qcow2(16, "cluster_size=4k");
}

#[test]
fn qcow2_at_depth_64() {
    qcow2(64, "");
}

#[test]
fn fio_sees_no_error_and_no_wrong_byte() {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::sparse(&image, 64 * MIB);
    let disk = Kept::raw(&image, &["--threads", "2"]);
    let file = format!("--filename={}", text(disk.0.path()));
    let words = [
        "fio",
        "--name=load",
        &file,
        "--ioengine=libaio",
        "--direct=1",
        "--iodepth=64",
        "--rw=randwrite",
        "--bsrange=4k-64k",
        "--blockalign=4k",
        "--size=32m",
        "--offset_increment=32m",
        "--numjobs=2",
        "--thread",
        "--loops=100000",
        "--time_based",
        "--runtime=12",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=128",
        "--verify_state_save=0",
    ];
    let fio = Process::spawn(&mut command(&words));
    for _ in 0..4 {
        std::thread::sleep(PAUSE);
        disk.kill_server();
    }
    let finished = fio.finish(Duration::from_secs(60));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    disk.stop();
}

/// A process that is being killed may still be made to read a request. (Entries that were never
/// used are what goes wrong: each round begins with a new process.)
#[test]
fn who_asks_at_the_moment_of_the_kill_gets_an_answer() {
    if !needs_root() {
        return;
    }
    let (_directory, image) = crate::common::raw_image(MIB, 1);
    for _ in 0..20 {
        let disk = Kept::raw(&image, &["--threads", "2"]);
        let path = disk.path();
        for _ in 0..4 {
            crate::keep::kept::kill(
                disk.server().expect("somebody serves"),
                rustix::process::Signal::KILL,
            );
            for _ in 0..3 {
                let file = std::fs::File::open(&path).expect("open");
                std::os::unix::fs::FileExt::read_exact_at(&file, &mut [0; 4096], 0).expect("read");
            }
        }
        disk.stop();
    }
}
