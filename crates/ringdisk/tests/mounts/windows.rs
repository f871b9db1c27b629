//! Parts of a disk: `--offset`, `--size`, `--partition`, on every format. Tables are made by
//! sfdisk; the kernel is asked for its numbers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ringdisk_testkit::images::{self, assert_clean, pattern, piece, qemu_io};
use ringdisk_testkit::limits::{needs_root, part_needs};
use ringdisk_testkit::mount::{Loop, scratch, text};
use ringdisk_testkit::process::{command, ok};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use serde_json::Value;

use crate::common::serving::Daemon;
use crate::common::tools::ringdisk;
use crate::common::{MIB, assert_refused, errno, open, patch, refused, serve, try_mount};

/// A GPT with three partitions that do not lie in the order of their numbers.
const GPT: &str = "label: gpt\n1 : start=2048, size=2048\n3 : start=4096, size=4096\n2 : \
    start=16384, size=32768\n";
/// An MBR with logical partitions; 3 is missing.
const MBR: &str = "label: dos\n1 : start=2048, size=2048\n2 : start=4096, size=40960, type=5\n4 : \
    start=49152, size=2048\n\
                   5 : start=6144, size=2048\n6 : start=10240, size=4096\n7 : start=16384, \
                   size=2048\n";

/// Writes a partition table to a file.
fn partitioned(disk: &Path, script: &str) {
    let directory = scratch();
    let written = directory.path().join("table");
    fs::write(&written, script).expect("a script");
    let line = format!("sfdisk -q {} < {}", text(disk), text(&written));
    ok(command(&["sh", "-c", &line]));
}

/// A raw image of 32 MiB with a table, and a pattern wherever the table is not.
fn raw_with(directory: &Path, script: &str) -> PathBuf {
    let image = directory.join("disk.img");
    images::raw(&image, 32 * MIB, 7);
    partitioned(&image, script);
    image
}

/// A qcow2 of 32 MiB with the same content.
fn qcow2_with(directory: &Path, script: &str) -> PathBuf {
    let raw = raw_with(directory, script);
    let image = directory.join("disk.qcow2");
    images::qemu_img(&["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&image)]);
    image
}

#[test]
fn an_offset_in_a_qcow2_is_a_place_on_its_disk() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    qemu_io(&image, "qcow2", &["write -P 0x11 0 1M", "write -P 0x22 1M 4M", "write -P 0x33 5M 1M"]);
    // Nobody says what it is.
    let disk = serve(&image, &["--offset", "1M", "--size", "4M"]);
    assert_eq!(fs::metadata(disk.path()).expect("stat").len(), 4 * MIB);
    assert!(piece(disk.path(), 0, 1 << 22).iter().all(|byte| *byte == 0x22));
    open(disk.path()).write_all_at(&[0x44; 1 << 20], 3 * MIB).expect("write");
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&image);
    let whole = images::reference(&image, "qcow2");
    for (at, len, byte) in [(0, 1, 0x11), (1, 3, 0x22), (4, 1, 0x44), (5, 1, 0x33), (6, 10, 0)] {
        let bytes = piece(&whole, at * MIB, len << 20);
        assert!(bytes.iter().all(|it| *it == byte), "{byte:#x} at {at} MiB");
    }
}

#[test]
fn a_file_system_in_a_partition_is_one_on_the_whole_disk() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = qcow2_with(directory.path(), GPT);
    fs::create_dir(directory.path().join("files")).expect("a directory");
    fs::write(directory.path().join("files/hello"), "from the partition").expect("write");
    let files = directory.path().join("files");
    let disk = serve(&image, &["--partition", "2"]);
    assert_eq!(fs::metadata(disk.path()).expect("stat").len(), 16 * MIB);
    ok(command(&["mkfs.ext4", "-q", "-F", "-d", text(&files), text(disk.path())]));
    let words = ["ctl", text(disk.path()), "stats", "--json"];
    let stats = ringdisk(directory.path(), &words).ok().json();
    assert_eq!(stats["window"]["offset"], 8 * MIB);
    assert_eq!(stats["size"], 16 * MIB);
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&image);
    let disk = serve(&image, &["--read-only"]);
    let place = format!("{}?offset={}", text(disk.path()), 8 * MIB);
    ok(command(&["e2fsck", "-fn", &place]));
    assert_eq!(ok(command(&["debugfs", "-R", "cat /hello", &place])).trim(), "from the partition");
    // All else is as it was: the table, the other partitions, the end.
    for (at, len) in [(MIB, 3 * MIB), (24 * MIB, 7 * MIB)] {
        let len = usize::try_from(len).expect("small");
        assert!(piece(disk.path(), at, len) == pattern(7, at, len), "at {at}");
    }
    let json = ok(command(&["sfdisk", "--json", text(disk.path())]));
    assert_eq!(json.matches("\"node\"").count(), 3, "{json}");
    ok(command(&["sfdisk", "--verify", text(disk.path())]));
}

/// First byte and size of each partition by its number, as sfdisk says.
fn of_sfdisk(image: &Path) -> BTreeMap<u32, (u64, u64)> {
    let json = ok(command(&["sfdisk", "--json", text(image)]));
    let table: Value = serde_json::from_str(&json).expect("JSON");
    let partitions = table["partitiontable"]["partitions"].as_array().expect("partitions");
    let each = partitions.iter().map(|each| {
        let node = each["node"].as_str().and_then(|node| node.strip_prefix(text(image)));
        let bytes = |key: &str| each[key].as_u64().expect("a number") * 512;
        (
            node.and_then(|node| node.parse().ok()).expect("a number"),
            (bytes("start"), bytes("size")),
        )
    });
    each.collect()
}

/// The same as the kernel says; nothing where it knows no partition tables. It has read them when
/// the device is there.
fn of_kernel(image: &Path) -> BTreeMap<u32, (u64, u64)> {
    let Some(device) = Loop::attach(image, &["--partscan", "--read-only"]) else {
        return BTreeMap::new();
    };
    let found = of_device(&device);
    let _ = part_needs("partition tables in the kernel", !found.is_empty());
    found
}

/// The same of a device.
fn of_device(device: &Loop) -> BTreeMap<u32, (u64, u64)> {
    let name = device.device().file_name().expect("a name").to_string_lossy().into_owned();
    let bytes = |number: u32, what: &str| -> Option<u64> {
        let path = format!("/sys/block/{name}/{name}p{number}/{what}");
        Some(fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()? * 512)
    };
    (1..=8).filter_map(|it| Some((it, (bytes(it, "start")?, bytes(it, "size")?)))).collect()
}

#[test]
fn partitions_have_the_numbers_and_places_that_others_give_them() {
    if !needs_root() {
        return;
    }
    for (script, extended, count) in [(GPT, None, 3), (MBR, Some(2), 6)] {
        let directory = scratch();
        let image = raw_with(directory.path(), script);
        let known = of_sfdisk(&image);
        assert_eq!(known.len(), count);
        let of_kernel = of_kernel(&image);
        // The kernel shows two sectors of an extended partition.
        let ours = known.iter().filter(|(number, _)| Some(**number) != extended);
        for (number, place) in ours {
            assert!(of_kernel.is_empty() || of_kernel.get(number) == Some(place), "{number}");
            let words = ["--read-only", "-f", "raw", "--partition", &number.to_string()];
            let disk = serve(&image, &words);
            assert_eq!(fs::metadata(disk.path()).expect("stat").len(), place.1, "{number}");
            assert!(piece(disk.path(), 0, 4096) == piece(&image, place.0, 4096), "{number}");
            assert_eq!(disk.stop().code(), Some(0));
        }
    }
}

#[test]
fn the_sectors_of_a_device_are_those_of_its_table() {
    if !needs_root() {
        return;
    }
    for label in ["label: gpt\n", "label: dos\n"] {
        let directory = scratch();
        let image = directory.path().join("disk.img");
        images::raw(&image, 32 * MIB, 7);
        let words = ["--sector-size", "4096", "--partscan"];
        let Some(device) = Loop::attach(&image, &words) else { return };
        partitioned(
            device.device(),
            &format!("{label}1 : start=512, size=1024\n2 : start=2048, size=512\n"),
        );
        ok(command(&["partx", "--update", text(device.device())]));
        let of_kernel = of_device(&device);
        let _ = part_needs("partition tables in the kernel", !of_kernel.is_empty());
        for (number, place) in [(1, (2 * MIB, 4 * MIB)), (2, (8 * MIB, 2 * MIB))] {
            assert!(
                of_kernel.is_empty() || of_kernel.get(&number) == Some(&place),
                "{of_kernel:?}"
            );
            let words = ["--read-only", "-f", "raw", "--partition", &number.to_string()];
            let disk = serve(device.device(), &words);
            assert_eq!(fs::metadata(disk.path()).expect("stat").len(), place.1, "{label}{number}");
            assert!(piece(disk.path(), 0, 4096) == pattern(7, place.0, 4096), "{label}{number}");
            assert_eq!(disk.stop().code(), Some(0));
        }
    }
}

#[test]
fn what_is_no_partition_is_refused_with_what_there_is() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = raw_with(directory.path(), MBR);
    let partition = |number: &str, words: &[&str]| {
        refused(&["-f", "raw", "--partition", number, text(&image)], words);
    };
    partition(
        "3",
        &["partition 3 of", "no such partition", "1 (1048576 bytes at 1048576)", "extended"],
    );
    partition(
        "2",
        &["extended partition, which only holds others", "5 (1048576 bytes at 3145728)"],
    );
    // The image loses its end, and with it partition 4.
    fs::File::options()
        .write(true)
        .open(&image)
        .and_then(|file| file.set_len(25 * MIB - 512))
        .expect("cut");
    partition("4", &["past the end of the disk at 26213888 bytes"]);
    // Partition 1 grows over the extended one.
    patch(&image, 446 + 12, &40_960_u32.to_le_bytes());
    partition("1", &["shares bytes with partition 2", "--offset"]);
    patch(&image, 0, &[0; 512]);
    partition("1", &["no partition table"]);
    let finished = try_mount(&["--offset", "1G", text(&image)], &directory.path().join("disk"));
    assert_refused(&finished, &["past the end of the disk"]);
}

#[test]
fn the_size_of_a_partition_is_fixed() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = qcow2_with(directory.path(), GPT);
    let disk = serve(&image, &["--partition", "2", "--resizable"]);
    let file = open(disk.path());
    // As without the option.
    for size in [20 * MIB, MIB] {
        assert_eq!(errno(file.set_len(size)), Some(Errno::PERM), "{size}");
    }
    assert_eq!(errno(file.write_at(&[1; 4096], 16 * MIB)), Some(Errno::NOSPC));
    let more = fallocate(&file, FallocateFlags::empty(), 16 * MIB, MIB);
    assert_eq!(more, Err(Errno::PERM));
    drop(file);
    let ran = ringdisk(directory.path(), &["ctl", text(disk.path()), "resize", "20M"]);
    assert_ne!(ran.code, 0);
    assert!(ran.err.contains("part of its image"), "{}", ran.err);
    let finished = disk.stop();
    assert_eq!(finished.code(), Some(0));
    assert!(finished.stderr.contains("--resizable change nothing"), "{}", finished.stderr);
}

#[test]
fn a_partition_is_served_to_virtual_machines_too() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = qcow2_with(directory.path(), GPT);
    let socket = directory.path().join("socket");
    let spec = format!("image={},socket={},partition=3", text(&image), text(&socket));
    let _daemon = Daemon::of(&mut crate::common::serving::serve_command(&["--disk", &spec]));
    let stats = ringdisk(directory.path(), &["ctl", text(&socket), "stats", "--json"]).ok().json();
    assert_eq!(
        (&stats["size"], &stats["window"]["offset"]),
        (&Value::from(2 * MIB), &Value::from(2 * MIB))
    );
}
