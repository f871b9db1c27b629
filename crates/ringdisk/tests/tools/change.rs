//! `resize`, `snapshot` and `bitmap`, next to qemu-img: same results, same success.

use std::fs;
use std::path::Path;

use ringdisk_testkit::images::{self, assert_clean, assert_same, qemu_io};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use rustix::process::Signal;

use crate::common::tools::{described, interrupted, names, qemu_img, ringdisk};
use crate::common::{MIB, serve};

/// A qcow2 of 10 MiB with some content, twice.
fn twins(directory: &Path, options: &str) {
    for name in ["ours", "theirs"] {
        let image = directory.join(name);
        images::qcow2(&image, "10M", options);
        qemu_io(&image, "qcow2", &["write -P 1 0 1M", "write -P 2 9M 1M", "write -z 3M 64k"]);
    }
}

/// Both are sound, hold the same, and know the same about it.
fn assert_twins(directory: &Path, what: &str) {
    assert_clean(&directory.join("ours"));
    let compared =
        qemu_img(directory, &["compare", "-f", "qcow2", "-F", "qcow2", "ours", "theirs"]);
    assert_eq!(compared.code, 0, "{what}: {}", compared.out);
    // What is reserved but not written is data for one and a hole of the host's file for the other.
    if !what.contains("--preallocation") {
        assert_eq!(known(directory, "ours"), known(directory, "theirs"), "{what}");
    }
}

/// What qemu-img knows about an image: starts of runs, present, zero, data. (Not `compare -s`: that
/// also compares where contiguous runs end, so it finds a fault in a better layout.)
fn known(directory: &Path, image: &str) -> Vec<(u64, [bool; 3])> {
    let map = qemu_img(directory, &["map", "--output=json", "-f", "qcow2", image]).ok().json();
    let mut runs: Vec<(u64, [bool; 3])> = Vec::new();
    for entry in map.as_array().expect("a list") {
        let marks = ["present", "zero", "data"].map(|key| entry[key] == true);
        if runs.last().is_none_or(|(_, last)| *last != marks) {
            runs.push((entry["start"].as_u64().expect("a number"), marks));
        }
    }
    runs
}

#[test]
fn every_resize_gives_what_qemu_img_gives() {
    for options in ["", "extended_l2=on", "cluster_size=512", "compat=0.10", "data_file=NAME.raw"] {
        for words in [
            &["12M"][..],
            &["+3M"],
            &["+0"],
            &["1G"],
            &["--shrink", "5M"],
            &["--shrink", "0"],
            &["--shrink", "--", "-1M"],
            &["--shrink", "1536k"],
            &["--preallocation", "off", "12M"],
            &["--preallocation", "metadata", "12M"],
            &["--preallocation", "falloc", "12M"],
            &["--preallocation", "full", "12M"],
        ] {
            let directory = scratch();
            let d = directory.path();
            for name in ["ours", "theirs"] {
                let image = d.join(name);
                // qemu-img finds a data file by the directory that it runs in.
                let data = d.join(name).to_string_lossy().into_owned();
                images::qcow2(&image, "10M", &options.replace("NAME", &data));
                qemu_io(&image, "qcow2", &["write -P 1 0 1M", "write -P 2 9M 1M"]);
            }
            let run = |name: &'static str| -> Vec<&str> {
                let (last, first) = words.split_last().expect("words");
                let dashes = first.last() == Some(&"--");
                let first = if dashes { &first[..first.len() - 1] } else { first };
                let mut all = vec!["resize", "-f", "qcow2"];
                all.extend(first);
                all.extend(if dashes { vec!["--", name] } else { vec![name] });
                all.push(last);
                all
            };
            let what = format!("{options} {words:?}");
            let theirs = qemu_img(d, &run("theirs"));
            let ours = ringdisk(d, &run("ours"));
            assert_eq!(ours.code == 0, theirs.code == 0, "{what}: {} / {}", ours.err, theirs.err);
            assert_eq!(ours.out, theirs.out, "{what}");
            assert_eq!(described(d, "ours"), described(d, "theirs"), "{what}");
            assert_twins(d, &what);
        }
    }
}

#[test]
fn a_resize_that_makes_no_sense_changes_nothing() {
    let directory = scratch();
    let d = directory.path();
    twins(d, "");
    let before = fs::read(d.join("ours")).expect("read");
    for (words, code, text) in [
        (&["5M"][..], 2, "--shrink"),
        (&["--", "-1M"], 2, ""),
        (&["-1M"], 2, "--shrink"),
        (&["-11M"], 2, "cannot lose"),
        (&["8E"], 2, "too large"),
        (&["+9223372036854775807"], 2, "too large"),
        (&["7E"], 3, "too large"),
        (&["10485761"], 2, "512"),
        (&["x"], 2, "write a number"),
        (&[""], 2, ""),
        (&["--shrink", "--preallocation", "full", "5M"], 2, ""),
        (&["--preallocation", "some", "20M"], 2, "possible values"),
    ] {
        let (last, first) = words.split_last().expect("words");
        let ran = ringdisk(d, &[&["resize"], first, &["ours", last]].concat());
        assert_eq!(ran.code, code, "{words:?}: {}", ran.err);
        assert!(ran.err.contains(text), "{words:?}: {}", ran.err);
        assert!(fs::read(d.join("ours")).expect("read") == before, "{words:?}");
    }
    ringdisk(d, &["resize", "nosuch", "1M"]).ends(3);
    ringdisk(d, &["resize", "-q", "ours", "12M"]).ok();
}

#[test]
fn a_raw_image_is_resized_to_the_byte() {
    let directory = scratch();
    let d = directory.path();
    for name in ["ours", "theirs"] {
        images::raw(&d.join(name), 3 * MIB, 1);
    }
    for words in [
        &["5M"][..],
        &["+1000"],
        &["--shrink", "1M"],
        &["--preallocation", "falloc", "2M"],
        &["--preallocation", "full", "4M"],
    ] {
        let (last, first) = words.split_last().expect("words");
        let run = |name| [&["resize", "-f", "raw"], first, &[name, last]].concat();
        ringdisk(d, &run("ours")).ok();
        qemu_img(d, &run("theirs")).ok();
        assert_same(&d.join("ours"), &d.join("theirs"), &format!("{words:?}"));
    }
    ringdisk(d, &["resize", "-f", "raw", "ours", "1M"]).ends(2).says("--shrink");
    ringdisk(d, &["resize", "-f", "raw", "--preallocation", "metadata", "ours", "9M"]).ends(2);
}

#[test]
fn snapshots_are_made_applied_and_deleted_as_qemu_img_does() {
    for options in ["", "compat=0.10", "extended_l2=on", "cluster_size=4k", "refcount_bits=64"] {
        let directory = scratch();
        let d = directory.path();
        twins(d, options);
        let both = |words: &[&str]| {
            let with = |name| [&["snapshot"], words, &[name]].concat();
            let theirs = qemu_img(d, &with("theirs"));
            let ours = ringdisk(d, &with("ours"));
            assert_eq!(ours.code == 0, theirs.code == 0, "{words:?} {} / {}", ours.err, theirs.err);
            assert_twins(d, &format!("{options}: {words:?}"));
        };
        let write = |commands: &[&str]| {
            for name in ["ours", "theirs"] {
                qemu_io(&d.join(name), "qcow2", commands);
            }
        };
        both(&["-c", "first"]);
        write(&["write -P 3 0 2M", "write -P 4 5M 1M"]);
        both(&["-c", "second one"]);
        write(&["write -P 5 512k 64k", "discard 5M 1M"]);
        both(&["-a", "first"]);
        write(&["write -P 6 9M 64k"]);
        both(&["-c", "größe"]);
        both(&["-a", "2"]);
        both(&["-d", "first"]);
        both(&["-d", "first"]);
        both(&["-a", "nosuch"]);
        both(&["-d", "größe"]);
        both(&["-a", "second one"]);
        both(&["-d", "second one"]);
        both(&["-l"]);
        assert_eq!(
            qemu_img(d, &["snapshot", "-l", "ours"]).out,
            qemu_img(d, &["snapshot", "-l", "theirs"]).out
        );
    }
}

#[test]
fn the_list_has_the_columns_of_qemu_img() {
    let directory = scratch();
    let d = directory.path();
    twins(d, "");
    assert_eq!(ringdisk(d, &["snapshot", "-l", "ours"]).ok().out, "");
    assert_eq!(ringdisk(d, &["snapshot", "ours"]).ok().out, "");
    ringdisk(d, &["snapshot", "-c", "one", "ours"]).ok();
    qemu_img(d, &["snapshot", "-c", "two", "ours"]).ok();
    let out = ringdisk(d, &["snapshot", "ours"]).ok().out;
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["Snapshot", "list:"]);
    assert_eq!(lines[1], ["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]);
    assert_eq!((lines[2][0], lines[2][1], lines[2][2], lines[2][3]), ("1", "one", "0", "B"));
    assert_eq!((lines[3][0], lines[3][1]), ("2", "two"));
    // QEMU lists ours.
    let theirs = qemu_img(d, &["snapshot", "-l", "ours"]).ok().out;
    assert!(theirs.contains("one") && theirs.contains("two"), "{theirs}");
    assert_eq!(ringdisk(d, &["snapshot", "-q", "-l", "ours"]).ok().out, "");
}

#[test]
fn names_of_snapshots_are_checked() {
    let directory = scratch();
    let d = directory.path();
    twins(d, "");
    let before = fs::read(d.join("ours")).expect("read");
    for (name, text) in
        [("", "empty"), ("a\nb", "control character"), (&"x".repeat(256), "255 is the most")]
    {
        ringdisk(d, &["snapshot", "-c", name, "ours"]).ends(2).says(text);
    }
    ringdisk(d, &["snapshot", "-c", "a", "-d", "b", "ours"]).ends(2);
    ringdisk(d, &["snapshot", "-U", "-c", "a", "ours"]).ends(2);
    assert!(fs::read(d.join("ours")).expect("read") == before);
    for name in ["..", "../x", "json:{}", " ", &"x".repeat(255)] {
        ringdisk(d, &["snapshot", "-c", name, "ours"]).ok();
        ringdisk(d, &["snapshot", "-d", name, "ours"]).ok();
    }
    assert_clean(&d.join("ours"));
    // A raw image has none to list, and cannot get one.
    images::sparse(&d.join("r.img"), MIB);
    assert_eq!(ringdisk(d, &["snapshot", "-l", "r.img"]).ok().out, "");
    ringdisk(d, &["snapshot", "-c", "a", "r.img"]).ends(11).says("no snapshots");
}

#[test]
fn bitmaps_become_what_qemu_img_makes_of_them() {
    let directory = scratch();
    let d = directory.path();
    twins(d, "");
    let write = |commands: &[&str]| {
        for name in ["ours", "theirs"] {
            qemu_io(&d.join(name), "qcow2", commands);
        }
    };
    let both = |words: &[&str]| {
        let with = |name: &'static str| -> Vec<&str> {
            [&["bitmap"], words]
                .concat()
                .iter()
                .map(|w| if *w == "FILE" { name } else { w })
                .collect()
        };
        let theirs = qemu_img(d, &with("theirs"));
        let ours = ringdisk(d, &with("ours"));
        assert_eq!(ours.code == 0, theirs.code == 0, "{words:?}: {} / {}", ours.err, theirs.err);
        assert_eq!(described(d, "ours"), described(d, "theirs"), "{words:?}");
        assert_twins(d, &format!("{words:?}"));
    };
    both(&["--add", "FILE", "one"]);
    both(&["--add", "FILE", "one"]);
    both(&["--add", "-g", "4k", "FILE", "two"]);
    both(&["--add", "--granularity", "1M", "--disable", "FILE", "three"]);
    write(&["write -P 7 2M 64k"]);
    both(&["--disable", "FILE", "one"]);
    both(&["--disable", "FILE", "one"]);
    both(&["--enable", "FILE", "one"]);
    both(&["--merge", "two", "FILE", "three"]);
    both(&["--merge", "nosuch", "FILE", "three"]);
    both(&["--clear", "FILE", "two"]);
    both(&["--clear", "--merge", "three", "FILE", "two"]);
    both(&["--remove", "FILE", "one"]);
    both(&["--remove", "FILE", "one"]);
    both(&["--add", "FILE", &"x".repeat(1023)]);
    // Older qemu-img cannot remove all at once.
    let listed = described(d, "theirs");
    let listed = listed["format-specific"]["data"]["bitmaps"].as_array().expect("a list").clone();
    for bitmap in &listed {
        qemu_img(d, &["bitmap", "--remove", "theirs", bitmap["name"].as_str().expect("text")]).ok();
    }
    ringdisk(d, &["bitmap", "--remove-all", "ours"]).ok();
    ringdisk(d, &["bitmap", "--remove-all", "ours"]).ok();
    assert_eq!(described(d, "ours"), described(d, "theirs"));
    assert_twins(d, "all removed");
}

#[test]
fn what_was_recorded_is_merged_from_another_image() {
    let directory = scratch();
    let d = directory.path();
    twins(d, "");
    for name in ["ours", "theirs"] {
        qemu_img(d, &["bitmap", "--add", "-g", "64k", name, "recorded"]).ok();
    }
    qemu_io(&d.join("theirs"), "qcow2", &["write -P 7 2M 64k", "write -P 7 8M 1M"]);
    let words =
        ["bitmap", "--merge", "recorded", "-b", "theirs", "-F", "qcow2", "ours", "recorded"];
    ringdisk(d, &words).ok();
    let words = ["bitmap", "--merge", "recorded", "-b", "ours", "ours", "recorded"];
    ringdisk(d, &words).ok();
    // The bits are seen through what QEMU exports about them.
    let dirty = |name: &str| {
        let driver = format!("driver=qcow2,file.filename={name}",);
        qemu_img(d, &["map", "--output=json", "--image-opts", &driver]).ok().out
    };
    assert!(!dirty("ours").is_empty());
    assert_clean(&d.join("ours"));
    assert_eq!(described(d, "ours"), described(d, "theirs"));
}

/// Damages the table of the only bitmap of an image, so that it cannot be read.
fn damage_the_bitmap(image: &Path) {
    const BITMAPS_EXTENSION: [u8; 4] = [0x23, 0x85, 0x28, 0x75];
    let mut bytes = fs::read(image).expect("read");
    let number = |bytes: &[u8], at: usize| {
        usize::try_from(u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8"))).expect("fits")
    };
    let extension = bytes[..4096].windows(4).position(|four| four == BITMAPS_EXTENSION);
    // Magic, length, number of bitmaps, reserved, size and offset of the directory, whose entry
    // begins with the table's offset.
    let directory = number(&bytes, extension.expect("the extension") + 24);
    let table = number(&bytes, directory);
    // Reserved bits.
    bytes[table + 7] |= 0x80;
    fs::write(image, bytes).expect("write");
}

#[test]
fn a_command_gives_each_warning_once() {
    let directory = scratch();
    let d = directory.path();
    images::qcow2(&d.join("ours"), "10M", "");
    ringdisk(d, &["bitmap", "--add", "ours", "recorded"]).ok();
    damage_the_bitmap(&d.join("ours"));
    let ran = ringdisk(d, &["resize", "ours", "20M"]).ok();
    assert_eq!(ran.err.matches("cannot record writes").count(), 1, "{}", ran.err);
}

#[test]
fn bitmaps_that_cannot_be_are_refused() {
    let directory = scratch();
    let d = directory.path();
    twins(d, "");
    images::qcow2(&d.join("old"), "1M", "compat=0.10");
    images::sparse(&d.join("r.img"), MIB);
    for words in [
        &["--add", "ours", ""][..],
        &["--add", "ours", "a\nb"],
        &["--add", "ours", &"x".repeat(1024)],
        &["--add", "-g", "3000", "ours", "a"],
        &["--add", "-g", "4G", "ours", "a"],
        &["--add", "-g", "-1", "ours", "a"],
        &["--add", "ours"],
        &["ours", "a"],
        &["--clear", "ours", "nosuch"],
        &["--add", "old", "a"],
        &["--add", "r.img", "a"],
        &["--add", "nosuch", "a"],
    ] {
        let ran = ringdisk(d, &[&["bitmap"], words].concat());
        assert!(matches!(ran.code, 2 | 3 | 11), "{words:?}: {} {}", ran.code, ran.err);
    }
    assert_twins(d, "refused");
    assert_eq!(names(d), ["old", "ours", "r.img", "theirs"]);
}

#[test]
fn an_image_in_use_is_left_alone_by_every_tool() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    twins(d, "");
    let disk = serve(&d.join("ours"), &[]);
    for (words, code) in [
        (&["resize", "ours", "20M"][..], 5),
        (&["snapshot", "-c", "a", "ours"], 5),
        (&["bitmap", "--add", "ours", "b"], 5),
        (&["create", "-f", "qcow2", "ours", "1M"], 5),
        (&["rebase", "-u", "-b", "", "ours"], 5),
        (&["check", "ours"], 1),
        (&["check", "-r", "all", "ours"], 1),
        (&["info", "ours"], 5),
        (&["info", "-U", "ours"], 0),
        (&["snapshot", "-l", "-U", "ours"], 0),
        (&["measure", "-U", "-O", "qcow2", "ours"], 0),
    ] {
        let ran = ringdisk(d, words);
        assert_eq!(ran.code, code, "{words:?}: {}", ran.err);
    }
    assert_eq!(disk.stop().code(), Some(0));
    assert_twins(d, "left alone");
}

#[test]
fn a_signal_during_create_leaves_nothing_of_a_file_that_was_there() {
    for format in ["qcow2", "raw"] {
        let directory = scratch();
        fs::write(directory.path().join("old"), "hello").expect("a file");
        let words = ["create", "-f", format, "-o", "preallocation=full", "old", "4G"];
        let ended = interrupted(directory.path(), &words, "old", MIB, Signal::INT);
        assert_eq!(ended.code(), None, "{format}: {}", ended.output());
        assert!(ended.stderr.contains("overwritten in part already"), "{}", ended.output());
        assert_eq!(names(directory.path()), Vec::<String>::new(), "{format}");
    }
}

#[test]
fn a_signal_during_resize_cuts_off_what_was_prepared() {
    for format in ["qcow2", "raw"] {
        let directory = scratch();
        ringdisk(directory.path(), &["create", "-f", format, "disk", "4M"]).ok();
        let before = directory.path().join("disk").metadata().expect("a file").len();
        let words = ["resize", "-f", format, "--preallocation=full", "disk", "4G"];
        let ended = interrupted(directory.path(), &words, "disk", 64 * MIB, Signal::INT);
        assert_eq!(ended.code(), None, "{format}: {}", ended.output());
        assert!(ended.stderr.contains("has its old size"), "{}", ended.output());
        assert_eq!(directory.path().join("disk").metadata().expect("a file").len(), before);
        let info = ringdisk(directory.path(), &["info", "--json", "-f", format, "disk"]).ok();
        assert_eq!(info.json()["virtual-size"], 4 * MIB, "{format}");
        if format == "qcow2" {
            assert_clean(&directory.path().join("disk"));
        }
    }
}

#[test]
fn sizes_and_modes_that_an_image_cannot_have_are_usage_errors() {
    let directory = scratch();
    let run = |words: &[&str]| ringdisk(directory.path(), words);
    run(&["create", "-f", "raw", "raw", "1M"]).ok();
    run(&["create", "-f", "qcow2", "qcow2", "1M"]).ok();
    run(&["resize", "-f", "raw", "--preallocation=metadata", "raw", "2M"])
        .ends(2)
        .says("raw image has no metadata");
    run(&["resize", "qcow2", "2000001"]).ends(2).says("not a multiple of 512");
    // What the user says is repeated; a backing file is counted in sectors.
    let line = run(&["create", "-f", "raw", "odd", "100000"]).ok().out;
    assert!(line.contains("size=100000"), "{line}");
    let mut over = vec!["create", "-f", "qcow2", "-b", "unaligned", "-F", "raw", "over"];
    std::fs::write(directory.path().join("unaligned"), vec![0; 100_000]).expect("a raw image");
    let line = run(&over).ok().out;
    assert_eq!(over.pop(), Some("over"));
    over.push("theirs");
    let theirs = qemu_img(directory.path(), &over).ok().out;
    assert_eq!(line.replace("over", ""), theirs.replace("theirs", ""));
    assert!(line.contains("size=100352"), "{line}");
    let map = run(&["map", "--json", "--start-offset", "2M", "qcow2"]).ok().json();
    let theirs = ["map", "--output=json", "-f", "qcow2", "--start-offset", "2M", "qcow2"];
    let theirs = qemu_img(directory.path(), &theirs);
    if theirs.code == 0 {
        assert_eq!(map.as_array().map(Vec::len), theirs.json().as_array().map(Vec::len));
    }
}

#[test]
fn a_broken_snapshot_table_is_repaired_as_by_qemu_img() {
    let word = |image: &Path, at: u64| {
        u64::from_be_bytes(images::piece(image, at, 8).try_into().expect("8 bytes"))
    };
    // Place in the first entry, what is written there, what is said, and the snapshots that are
    // left.
    let cases: [(u64, &[u8], &str, &[&str]); 2] = [
        (36, &5000_u32.to_be_bytes(), "extra data", &["one", "two"]),
        (7, &[7], "snapshot 1 (one) is removed", &["two"]),
    ];
    for (place, bytes, words, left) in cases {
        let directory = scratch();
        let image = directory.path().join("disk");
        images::qcow2(&image, "8M", "");
        qemu_io(&image, "qcow2", &["write -P 1 0 1M"]);
        qemu_img(directory.path(), &["snapshot", "-c", "one", "disk"]).ok();
        qemu_io(&image, "qcow2", &["write -P 2 512k 1M"]);
        qemu_img(directory.path(), &["snapshot", "-c", "two", "disk"]).ok();
        crate::common::patch(&image, word(&image, 64) + place, bytes);
        let before = ringdisk(directory.path(), &["check", "disk"]);
        assert_ne!(before.code, 0, "{}", before.err);
        let repair = ringdisk(directory.path(), &["check", "-r", "all", "disk"]);
        // What a snapshot had that is not found any more is kept until the user has looked.
        repair.ends(3).says(words).says("kept").says("--repair leaks");
        let theirs = qemu_img(directory.path(), &["check", "-f", "qcow2", "disk"]);
        assert_eq!(theirs.code, 3, "leaks alone: {}", theirs.out);
        ringdisk(directory.path(), &["check", "-r", "leaks", "disk"]).ok();
        ringdisk(directory.path(), &["check", "disk"]).ok();
        assert_clean(&image);
        let info = ringdisk(directory.path(), &["info", "--json", "disk"]).ok().json();
        let snapshots = info["snapshots"].as_array().map_or(0, Vec::len);
        assert!(snapshots >= 1 && snapshots <= left.len(), "{info}");
        qemu_io(&image, "qcow2", &["read -P 1 0 512k", "read -P 2 512k 1M"]);
    }
}

#[test]
fn a_check_knows_the_length_of_an_external_data_file() {
    let directory = scratch();
    let d = directory.path();
    images::qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        &format!("data_file={}", text(&d.join("data"))),
        text(&d.join("disk")),
        "8M",
    ]);
    qemu_io(&d.join("disk"), "qcow2", &["write -P 1 0 1M"]);
    ringdisk(d, &["check", "disk"]).ok();
    let data = fs::File::options().write(true).open(d.join("data")).expect("the data file");
    data.set_len(MIB / 2).expect("cut");
    for words in [&["check", "disk"][..], &["check", "-r", "all", "disk"]] {
        ringdisk(d, words).ends(2).says("past the end of the data file");
    }
    fs::remove_file(d.join("data")).expect("gone");
    ringdisk(d, &["check", "disk"]).ends(1).says("the external data file");
    assert_eq!(qemu_img(d, &["check", "-f", "qcow2", "disk"]).code, 1);
}

#[test]
fn man_pages_of_check_and_compare_have_codes_of_their_own() {
    let directory = scratch();
    ringdisk(directory.path(), &["man", "pages"]).ok();
    let status = |name: &str| {
        let page = fs::read_to_string(directory.path().join("pages").join(name)).expect("a page");
        page.split(".SH \"EXIT STATUS\"").nth(1).expect("the section").to_owned()
    };
    assert!(status("ringdisk-check.1").contains("63"));
    assert!(!status("ringdisk-compare.1").contains("io_uring"));
    assert!(status("ringdisk-create.1").contains("io_uring"));
}
