//! fio writes, reads back and compares, with every engine, many clients and many threads.

use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::fio::Verify;
use ringdisk_testkit::images;
use ringdisk_testkit::limits::{full, needs, needs_root};
use ringdisk_testkit::mount::{FileSystem, Loop, Mounted, scratch, text};
use ringdisk_testkit::process::{has, ok_words};

use crate::common::tools::ringdisk;
use crate::common::{Aligned, MIB, open_direct, program, serve_raw};

/// One run: engine, client's O_DIRECT, jobs, and how the disk is served.
type Run = (&'static str, bool, u32, &'static [&'static str]);

fn check((engine, direct, jobs, args): Run) {
    let size_kib = if full() { 32 << 10 } else { 4 << 10 };
    let disk = serve_raw(u64::from(jobs * size_kib) << 10, args);
    let depth = if engine == "psync" || engine == "mmap" { 1 } else { 16 };
    let verify = Verify { engine, direct, jobs, depth, size_kib, ..Verify::default() };
    let (written, _) = verify.run(disk.mounted.path());
    assert!(written > 0, "{verify:?} on {args:?}");
    let finished = disk.mounted.stop();
    assert_eq!(finished.code(), Some(0), "{verify:?} on {args:?}: {}", finished.output());
}

/// Each pair of (engine, serving), (direct, jobs) and (threads, jobs) at least once.
const PAIRS: [Run; 12] = [
    ("libaio", true, 4, &["--threads", "4"]),
    ("libaio", true, 1, &["--threads", "1", "--direct"]),
    ("libaio", false, 1, &["--threads", "4", "--kernel-cache"]),
    ("io_uring", true, 4, &["--threads", "1"]),
    ("io_uring", true, 1, &["--threads", "4", "--direct"]),
    ("io_uring", false, 4, &["--threads", "4", "--kernel-cache"]),
    ("psync", true, 4, &["--threads", "4", "--direct"]),
    ("psync", false, 1, &["--threads", "1"]),
    ("psync", false, 4, &["--threads", "1", "--kernel-cache"]),
    ("mmap", false, 1, &["--threads", "4"]),
    ("mmap", false, 1, &["--threads", "1", "--kernel-cache"]),
    ("mmap", false, 1, &["--threads", "4", "--direct"]),
];

fn runs() -> Vec<Run> {
    if !full() {
        return PAIRS.to_vec();
    }
    const SERVINGS: [&[&str]; 8] = [
        &["--threads", "1"],
        &["--threads", "4"],
        &["--threads", "1", "--direct"],
        &["--threads", "4", "--direct"],
        &["--threads", "1", "--kernel-cache"],
        &["--threads", "4", "--kernel-cache"],
        &["--threads", "1", "--direct", "--kernel-cache"],
        &["--threads", "4", "--direct", "--kernel-cache"],
    ];
    let mut out = Vec::new();
    for engine in ["libaio", "io_uring", "psync", "mmap"] {
        for direct in [true, false] {
            for jobs in [1, 4] {
                // A mapping has no O_DIRECT; and fio's mmap engine forgets the offset of a job, so
                // that several jobs overwrite one another: files::coherence.rs has four writers of
                // mappings of its own.
                let possible = engine != "mmap" || !direct && jobs == 1;
                out.extend(
                    SERVINGS.iter().filter(|_| possible).map(|args| (engine, direct, jobs, *args)),
                );
            }
        }
    }
    out
}

fn run_engine(name: &str) {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    for run in runs().into_iter().filter(|run| run.0 == name) {
        check(run);
    }
}

#[test]
fn libaio_reads_back_what_it_wrote() {
    run_engine("libaio");
}

#[test]
fn io_uring_reads_back_what_it_wrote() {
    run_engine("io_uring");
}

#[test]
fn psync_reads_back_what_it_wrote() {
    run_engine("psync");
}

#[test]
fn mappings_read_back_what_they_wrote() {
    run_engine("mmap");
}

#[test]
fn requests_of_one_mebibyte_read_back() {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    let disk = serve_raw(64 * MIB, &["--threads", "2"]);
    let verify = Verify { blocks: "512k-2m", size_kib: 64 << 10, depth: 8, ..Verify::default() };
    verify.run(disk.mounted.path());
}

#[test]
fn small_and_odd_buffered_writes_read_back() {
    if !needs_root() {
        return;
    }
    use std::os::unix::fs::FileExt;
    let disk = serve_raw(MIB, &["--direct"]);
    let file = crate::common::open(disk.mounted.path());
    let mut model = images::pattern(1, 0, 1 << 20);
    for step in 1..400_u64 {
        let len = usize::try_from(step * 631 % 9_000 + 1).expect("small");
        let offset = usize::try_from(step * 7_919 * 13).expect("small") % (model.len() - len);
        let bytes = images::pattern(step, 0, len);
        file.write_all_at(&bytes, offset as u64).expect("write");
        model[offset..offset + len].copy_from_slice(&bytes);
    }
    file.sync_all().expect("fsync");
    assert!(std::fs::read(disk.mounted.path()).expect("read") == model);
    assert!(std::fs::read(&disk.image).expect("read") == model);
}

fn file_system(make: &[&str], check: &[&str], size: &str, extra: &[&str]) {
    let directory = scratch();
    let image = directory.path().join("disk.img");
    // Not "on": file systems write from memory of the kernel that Linux 7.3 cannot lend.
    let words = ["--create", size, "--threads", "2", "--zero-copy", "auto"];
    let args = [&words, extra, &[text(&image)]].concat();
    let disk = Mounted::start(&program(), &args);
    ok_words(&[make, &[disk.text()]].concat());
    // Large requests, after which "auto" would like to lend it.
    let file = open_direct(disk.path());
    let mut memory = Aligned::new(1 << 20);
    for at in 0..100 {
        file.read_exact_at(memory.bytes_mut(), at * MIB).expect("read");
    }
    drop(file);
    let Some(device) = Loop::attach(disk.path(), &["--direct-io=on"]) else { return };
    let mounted = FileSystem::of(device.device(), &directory.path().join("inside"), "rw");
    let (source, copy) = (directory.path().join("source"), mounted.path().join("copy"));
    images::raw(&source, 20 * MIB, 5);
    for name in ["copy", "second", "third"] {
        std::fs::copy(&source, mounted.path().join(name)).expect("copy into the file system");
    }
    std::fs::remove_file(mounted.path().join("second")).expect("remove");
    ok_words(&["sync", "-f", text(mounted.path())]);
    ok_words(&["fstrim", text(mounted.path())]);
    images::assert_same(&source, &copy, "inside the file system");
    mounted.unmount();
    drop(device);
    ok_words(&[check, &[disk.text()]].concat());
    let stats = ringdisk(Path::new("/"), &["ctl", disk.text(), "stats", "--json"]).ok().json();
    assert_eq!(stats["total"]["zero-copy"], 0, "root may hand the file to the kernel");
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    // The image itself, without us, holds the same.
    ok_words(&[check, &[text(&image)]].concat());
    let again = FileSystem::of(&image, &directory.path().join("inside"), "ro,loop");
    images::assert_same(&source, &again.path().join("third"), "without ringdisk");
}

#[test]
fn ext4_lives_on_a_loop_device_over_a_served_disk() {
    if !(needs_root() && needs("mkfs.ext4", has("mkfs.ext4"))) {
        return;
    }
    let (make, check) = (["mkfs.ext4", "-q", "-F"], ["e2fsck", "-f", "-n"]);
    file_system(&make, &check, "200M", &[]);
    file_system(&make, &check, "200M", &["--direct"]);
}

#[test]
fn xfs_lives_on_a_loop_device_over_a_served_disk() {
    if !(needs_root() && needs("mkfs.xfs", has("mkfs.xfs"))) {
        return;
    }
    file_system(&["mkfs.xfs", "-q", "-f"], &["xfs_repair", "-n", "-f"], "400M", &[]);
}
