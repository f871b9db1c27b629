//! `mount --passthrough`: the kernel reads and writes a raw image itself; everything else still
//! comes to us.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ringdisk_testkit::images::{pattern, piece, raw};
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{Mounted, STOP, scratch, text};
use ringdisk_testkit::process::{command, run, until};
use rustix::fs::{AtFlags, CWD, FallocateFlags, SeekFrom, StatxFlags, fallocate, seek, statx};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::common::tools::ringdisk;
use crate::common::{MIB, mount, open, refused, sample, serve, serve_raw};

const LEN: u64 = 4 * MIB;
const BYTES: usize = 4 << 20;

fn can() -> bool {
    needs_root() && needs("FUSE passthrough", crate::common::has_passthrough())
}

/// Reads and writes that came to us.
fn counted(disk: &Mounted) -> (u64, u64) {
    let stats = ringdisk(Path::new("/"), &["ctl", disk.text(), "stats", "--json"]).ok().json();
    let total = &stats["total"];
    (total["reads"].as_u64().expect("reads"), total["writes"].as_u64().expect("writes"))
}

#[test]
fn reads_and_writes_do_not_come_to_us_and_are_right() {
    if !can() {
        return;
    }
    for transport in ["dev", "auto"] {
        let disk = serve_raw(LEN, &["--passthrough", "--transport", transport]);
        let file = open(disk.mounted.path());
        let mut bytes = vec![0; BYTES];
        file.read_exact_at(&mut bytes, 0).expect("read");
        assert!(bytes == pattern(1, 0, BYTES));
        file.write_all_at(&pattern(2, 777, 100_001), 777).expect("write");
        file.sync_all().expect("flush");
        assert_eq!(piece(disk.mounted.path(), 777, 100_001), pattern(2, 777, 100_001));
        assert_eq!(piece(&disk.image, 777, 100_001), pattern(2, 777, 100_001));
        assert_eq!(counted(&disk.mounted), (0, 0), "{transport}");
        drop(file);
        assert_eq!(disk.mounted.stop().code(), Some(0));
    }
}

#[test]
fn a_mapping_is_one_with_the_image() {
    if !can() {
        return;
    }
    let disk = serve_raw(LEN, &["--passthrough"]);
    let file = open(disk.mounted.path());
    crate::common::mapping::Mapping::new(&file, 65536).write(100, b"through a mapping");
    assert_eq!(piece(&disk.image, 100, 17), b"through a mapping");
}

#[test]
fn a_file_that_became_longer_shows_its_length() {
    if !can() {
        return;
    }
    let disk = serve_raw(LEN, &["--passthrough"]);
    let file = open(disk.mounted.path());
    file.write_all_at(b"beyond the end", LEN + 1000).expect("write");
    std::thread::sleep(std::time::Duration::from_millis(1200));
    assert_eq!(file.metadata().expect("stat").len(), LEN + 1014);
    assert_eq!(std::fs::metadata(&disk.image).expect("stat").len(), LEN + 1014);
    let status = ringdisk(Path::new("/"), &["ctl", disk.mounted.text(), "stats", "--json"]).ok();
    assert_eq!(status.json()["size"], LEN + 1014);
    // And the other way: from outside.
    ringdisk(Path::new("/"), &["ctl", disk.mounted.text(), "resize", "8M"]).ok();
    // The kernel is notified after the answer.
    let seen = || std::fs::metadata(disk.mounted.path()).expect("stat").len() == 8 * MIB;
    assert!(until(Duration::from_secs(5), || seen().then_some(())).is_some());
}

#[test]
fn a_read_only_mount_stays_read_only() {
    if !can() {
        return;
    }
    let disk = serve_raw(LEN, &["--passthrough", "--read-only"]);
    assert!(File::options().write(true).open(disk.mounted.path()).is_err());
    assert_eq!(piece(disk.mounted.path(), 5, 100), pattern(1, 5, 100));
}

#[test]
fn what_is_not_the_disk_as_it_is_cannot_be_passed_through() {
    if !needs_root() {
        return;
    }
    let (_directory, qcow2) = sample();
    refused(&["--passthrough", text(&qcow2)], &["no passthrough", "not raw"]);
    let directory = scratch();
    let image = directory.path().join("disk.img");
    raw(&image, LEN, 1);
    let with = |words: &[&str], why: &str| {
        let all = [words, &["--passthrough", text(&image)]].concat();
        refused(&all, &["no passthrough", why]);
    };
    with(&[], "nobody said that the image is raw");
    with(&["-f", "raw", "--offset", "4096"], "window");
    with(&["-f", "raw", "--size", "1M"], "window");
    with(&["-f", "raw", "--direct"], "--cache writeback");
    with(&["-f", "raw", "--cache", "writethrough"], "--cache writeback");
    with(&["-f", "raw", "--detect-zeroes", "on"], "zeroes");
}

#[test]
fn an_image_on_a_fuse_mount_cannot_be_passed_through() {
    if !can() {
        return;
    }
    let lower = mount(&["--null", "4M", "--read-zeroes"]);
    let directory = scratch();
    let mountpoint = directory.path().join("disk");
    std::fs::write(&mountpoint, "").expect("a mountpoint");
    // A FUSE file counts as stacked only when it is passed through itself, so this one works or
    // says why not.
    let finished = crate::common::try_mount(
        &["--passthrough", "--daemonize", "-f", "raw", lower.text()],
        &mountpoint,
    );
    match finished.code() {
        Some(0) => {
            assert_eq!(piece(&mountpoint, 4096, 512), [0; 512]);
            ringdisk(directory.path(), &["umount", text(&mountpoint)]).ok();
        }
        _ => crate::common::assert_refused(&finished, &["no passthrough"]),
    }
    let (_directory, image) = crate::common::raw_image(LEN, 1);
    let first = serve(&image, &["--passthrough", "-f", "raw"]);
    let second = crate::common::try_mount(
        &["--passthrough", "-f", "raw", "-U", "--read-only", first.text()],
        &mountpoint,
    );
    crate::common::assert_refused(&second, &["no passthrough", "stacked"]);
}

/// Clients go on with the image when its server is gone: nobody else may write to it until they
/// have closed it.
#[test]
fn an_image_stays_locked_as_long_as_clients_have_it_open() {
    if !can() {
        return;
    }
    for is_killed in [false, true] {
        let (directory, image) = crate::common::raw_image(LEN, 1);
        let mut disk = serve(&image, &["--passthrough", "-f", "raw"]);
        let file = open(disk.path());
        file.write_all_at(&[2; 4096], 0).expect("write");
        let writer = || {
            let write = ["-f", "raw", "-c", "write -q -P 9 0 4k", text(&image)];
            run(command(&[&["qemu-io"], &write[..]].concat())).code()
        };
        if is_killed {
            disk.process().signal(Signal::KILL);
        } else {
            ringdisk(directory.path(), &["ctl", disk.text(), "stop", "--force"]).ok();
        }
        assert!(disk.process().wait(STOP).is_some());
        drop(disk);
        assert_ne!(writer(), Some(0), "two write to the image");
        file.write_all_at(&[3; 4096], 0).expect("the kernel goes on");
        assert_eq!(piece(&image, 0, 1), [3]);
        drop(file);
        assert!(until(Duration::from_secs(10), || (writer() == Some(0)).then_some(())).is_some());
    }
    // A mapping needs no open file.
    let (_directory, image) = crate::common::raw_image(LEN, 1);
    let writer = || {
        let write = ["-f", "raw", "-c", "write -q -P 9 0 4k", text(&image)];
        run(command(&[&["qemu-io"], &write[..]].concat())).code()
    };
    let disk = serve(&image, &["--passthrough", "-f", "raw"]);
    let mapping = crate::common::mapping::Mapping::new(&open(disk.path()), 65536);
    disk.stop();
    assert_ne!(writer(), Some(0), "two write to the image");
    mapping.write(100, b"through a mapping");
    assert_eq!(piece(&image, 100, 7), b"through");
    drop(mapping);
    assert!(until(Duration::from_secs(10), || (writer() == Some(0)).then_some(())).is_some());
    // A mount whose process was killed has it, too, until another one is made in its place.
    let mut dead = serve(&image, &["--passthrough", "-f", "raw"]);
    dead.process().signal(Signal::KILL);
    assert!(dead.process().wait(STOP).is_some());
    assert_ne!(writer(), Some(0), "the dead mount is there");
    let again = Mounted::start_at(
        &crate::common::program(),
        &["--passthrough", "-f", "raw", text(&image)],
        dead.path(),
    );
    assert_eq!(piece(again.path(), 0, 1), [9]);
    assert_eq!(again.stop().code(), Some(0));
    // After a clean end it is free at once.
    let (_directory, image) = crate::common::raw_image(LEN, 1);
    for _ in 0..10 {
        let disk = serve(&image, &["--passthrough", "-f", "raw"]);
        assert_eq!(piece(disk.path(), 0, 100), pattern(1, 0, 100));
        assert_eq!(disk.stop().code(), Some(0));
    }
}

#[test]
fn it_is_for_root() {
    if !needs_root() {
        return;
    }
    let ran = ringdisk(Path::new("/"), &["mount", "--passthrough", "--null", "1M", "x"]);
    assert_eq!(ran.code, 2, "{}", ran.err);
}

/// A mount of an image of one MiB to which the kernel has appended 29 more, which the server has
/// not been asked about since.
fn appended() -> crate::common::Served {
    let disk = serve_raw(MIB, &["--passthrough"]);
    let mut appender = File::options().append(true).open(disk.mounted.path()).expect("open");
    appender.write_all(&pattern(3, 0, APPENDED)).expect("append");
    appender.sync_all().expect("flush");
    disk
}

const APPENDED: usize = 29 << 20;

/// What an [`appended`] image holds.
fn expected() -> Vec<u8> {
    [pattern(1, 0, 1 << 20), pattern(3, 0, APPENDED)].concat()
}

#[test]
fn zeroing_after_appends_cuts_nothing() {
    if !can() {
        return;
    }
    let disk = appended();
    let file = open(disk.mounted.path());
    fallocate(&file, FallocateFlags::ZERO_RANGE, 2 * MIB, MIB).expect("zeroes");
    let mut wanted = expected();
    wanted[2 << 20..3 << 20].fill(0);
    assert!(std::fs::read(&disk.image).expect("the image") == wanted);
    // Also where the range itself ends past the end.
    fallocate(&file, FallocateFlags::ZERO_RANGE, 29 * MIB, 2 * MIB).expect_err("not growable");
    assert_eq!(std::fs::metadata(&disk.image).expect("stat").len(), 30 * MIB);
}

#[test]
fn holes_are_punched_in_what_was_appended() {
    if !can() {
        return;
    }
    let disk = appended();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(open(disk.mounted.path()), punch, 20 * MIB, MIB).expect("punch");
    let mut wanted = expected();
    wanted[20 << 20..21 << 20].fill(0);
    assert!(std::fs::read(&disk.image).expect("the image") == wanted);
}

#[test]
fn data_is_found_in_what_was_appended() {
    if !can() {
        return;
    }
    let disk = appended();
    let file = open(disk.mounted.path());
    assert_eq!(seek(&file, SeekFrom::Data(20 * MIB)), Ok(20 * MIB));
    assert_eq!(seek(&file, SeekFrom::Hole(20 * MIB)), Ok(30 * MIB));
    assert_eq!(seek(&file, SeekFrom::Data(30 * MIB)), Err(Errno::NXIO));
}

#[test]
fn a_resize_counts_from_what_was_appended() {
    if !can() {
        return;
    }
    let ctl = |disk: &Mounted, words: &[&str]| {
        ringdisk(Path::new("/"), &[&["ctl", disk.text(), "resize"], words].concat())
    };
    let disk = appended();
    let refused = ctl(&disk.mounted, &["8M"]);
    assert_ne!(refused.code, 0);
    assert!(refused.err.contains("--shrink"), "{}", refused.err);
    assert!(std::fs::read(&disk.image).expect("the image") == expected());
    let disk = appended();
    ctl(&disk.mounted, &["+2M"]).ok();
    assert_eq!(std::fs::metadata(&disk.image).expect("stat").len(), 32 * MIB);
    let disk = appended();
    ctl(&disk.mounted, &["-2M", "--shrink"]).ok();
    assert!(std::fs::read(&disk.image).expect("the image") == expected()[..28 << 20]);
    let seen = || std::fs::metadata(disk.mounted.path()).expect("stat").len() == 28 * MIB;
    assert!(until(Duration::from_secs(5), || seen().then_some(())).is_some());
}

/// Appends numbered blocks through the mount until it is told to stop. Gives how many were
/// acknowledged.
fn append_blocks(path: &Path, stop: &AtomicBool, done: &AtomicU64) -> u64 {
    let mut file = File::options().append(true).open(path).expect("open");
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) && number < BLOCKS_MAX {
        number += 1;
        file.write_all(&number.to_le_bytes().repeat(64)).expect("append");
        done.store(number, Ordering::Relaxed);
    }
    number
}

/// Numbered blocks have 512 bytes.
const BLOCK: usize = 512;
/// 64 MiB: what a test reads again at most.
const BLOCKS_MAX: u64 = 128 << 10;

/// Appends beside `change`, which is called again and again; all that was acknowledged must be
/// there, in order.
fn nothing_appended_is_lost_beside(rounds: u32, change: impl Fn(&Mounted)) {
    let disk = serve_raw(0, &["--passthrough"]);
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let appended = std::thread::scope(|scope| {
        let appender = scope.spawn(|| append_blocks(disk.mounted.path(), &stop, &done));
        for _ in 0..rounds {
            let before = done.load(Ordering::Relaxed);
            change(&disk.mounted);
            while done.load(Ordering::Relaxed) < (before + 5).min(BLOCKS_MAX) {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
        appender.join().expect("the appender")
    });
    let bytes = std::fs::read(&disk.image).expect("the image");
    let blocks = bytes.chunks(BLOCK).filter(|block| block.iter().any(|byte| *byte != 0));
    let mut count = 0;
    for block in blocks {
        count += 1;
        assert!(block == u64::to_le_bytes(count).repeat(64), "block {count} of {appended}");
    }
    assert_eq!(count, appended);
}

#[test]
fn an_appender_beside_stat_loses_nothing() {
    if !can() {
        return;
    }
    nothing_appended_is_lost_beside(500, |disk| {
        let sync = AtFlags::STATX_FORCE_SYNC;
        statx(CWD, disk.path(), sync, StatxFlags::SIZE).expect("statx");
    });
}

#[test]
fn an_appender_beside_resizes_loses_nothing() {
    if !can() {
        return;
    }
    for mode in ["off", "falloc", "full"] {
        nothing_appended_is_lost_beside(6, |disk| {
            let words = ["ctl", disk.text(), "resize", "+64K", "--preallocation", mode];
            ringdisk(Path::new("/"), &words).ok();
        });
    }
}
