//! `convert` and `compare`, next to qemu-img: same bytes, same words, same exit codes.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use ringdisk_testkit::images::{self, allocated, assert_clean, qemu_io};
use ringdisk_testkit::mount::{Loop, scratch};
use rustix::process::Signal;

use crate::common::MIB;
use crate::common::tools::{described, interrupted, names, qemu_img, ringdisk};

/// Sources of every kind.
fn sources(d: &Path) {
    images::qcow2(&d.join("base.qcow2"), "6M", "");
    qemu_io(&d.join("base.qcow2"), "qcow2", &["write -P 1 0 3M"]);
    qemu_img(
        d,
        &["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2", "8M"],
    )
    .ok();
    qemu_io(
        &d.join("top.qcow2"),
        "qcow2",
        &["write -P 2 1M 512k", "write -z 2M 256k", "write -P 3 7M 100k"],
    );
    images::raw(&d.join("full.img"), 2 * MIB + 512, 7);
    images::sparse(&d.join("sparse.img"), 9 * MIB);
    let holes = fs::File::options().write(true).open(d.join("sparse.img")).expect("open");
    holes.write_all_at(&[5; 70_000], 4 * MIB).expect("write");
    images::qcow2(&d.join("extended.qcow2"), "4M", "extended_l2=on");
    qemu_io(&d.join("extended.qcow2"), "qcow2", &["write -P 4 2k 10k", "write -P 4 3M 64k"]);
    qemu_img(d, &["convert", "-c", "-O", "qcow2", "full.img", "packed.qcow2"]).ok();
}

const SOURCES: [&str; 5] =
    ["top.qcow2", "full.img", "sparse.img", "extended.qcow2", "packed.qcow2"];

/// The same bytes, as QEMU sees them.
#[track_caller]
fn assert_same_disk(d: &Path, one: &str, other: &str) {
    let ran = qemu_img(d, &["compare", one, other]);
    assert_eq!(ran.code, 0, "{one} {other}: {}{}", ran.out, ran.err);
}

#[test]
fn every_way_to_convert_gives_the_same_disk() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    for words in [
        &["-O", "qcow2"][..],
        &["-O", "raw"],
        &["-O", "qcow2", "-c"],
        &["-O", "qcow2", "-c", "-o", "compression_type=zstd"],
        &["-O", "qcow2", "-c", "-m", "4", "-W"],
        &["-O", "qcow2", "-c", "-o", "cluster_size=4k"],
        &["-O", "qcow2", "-m", "1"],
        &["-O", "qcow2", "-m", "16", "-W"],
        &["-O", "qcow2", "-S", "0"],
        &["-O", "raw", "-S", "0"],
        &["-O", "raw", "-S", "64k"],
        &["-O", "qcow2", "-o", "extended_l2=on,cluster_size=128k"],
        &["-O", "qcow2", "-o", "compat=0.10"],
        &["-O", "qcow2", "-o", "preallocation=metadata"],
        &["-O", "qcow2", "-o", "data_file=NAME.data,data_file_raw=on"],
        &["-O", "qcow2", "-T", "none", "-t", "none"],
        &["-O", "qcow2", "-t", "writethrough"],
        &["-O", "qcow2", "-U", "-q", "-p"],
        &["-O", "qcow2", "--salvage"],
    ] {
        for source in SOURCES {
            // qemu-img finds a data file by the directory that it runs in, which differs below.
            let name = d.join("copy").to_string_lossy().into_owned();
            let replaced: Vec<String> = words.iter().map(|w| w.replace("NAME", &name)).collect();
            let mut all = vec!["convert"];
            all.extend(replaced.iter().map(String::as_str));
            all.extend([source, "copy"]);
            ringdisk(d, &all).ok();
            let format = words[1];
            let compared = qemu_img(d, &["compare", "-F", format, source, "copy"]);
            assert_eq!(compared.code, 0, "{words:?} {source}: {}", compared.out);
            if format == "qcow2" {
                assert_clean(&d.join("copy"));
            }
        }
    }
}

#[test]
fn copies_are_as_small_as_those_of_qemu_img() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    for words in [
        &["-O", "qcow2"][..],
        &["-O", "raw"],
        &["-O", "qcow2", "-c"],
        &["-O", "qcow2", "-o", "cluster_size=4k"],
    ] {
        for source in SOURCES {
            let with = |target| [&["convert"], words, &[source, target]].concat();
            ringdisk(d, &with("ours")).ok();
            qemu_img(d, &with("theirs")).ok();
            let (ours, theirs) = (allocated(&d.join("ours")), allocated(&d.join("theirs")));
            // A few clusters of metadata, and other packers, make a little difference.
            assert!(
                ours <= theirs + theirs / 10 + (256 << 10),
                "{words:?} {source}: {ours} {theirs}"
            );
            assert_eq!(described(d, "ours"), described(d, "theirs"), "{words:?} {source}");
        }
    }
}

#[test]
fn there_and_back_again() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    ringdisk(d, &["convert", "full.img", "a.qcow2"]).ok();
    assert_eq!(described(d, "a.qcow2")["format"], "qcow2");
    ringdisk(d, &["convert", "-f", "qcow2", "a.qcow2", "b.img"]).ok();
    images::assert_same(&d.join("full.img"), &d.join("b.img"), "there and back");
    // Ours reads what QEMU packed, and QEMU what we packed.
    for kind in ["zlib", "zstd"] {
        let option = format!("compression_type={kind}");
        qemu_img(d, &["convert", "-c", "-O", "qcow2", "-o", &option, "full.img", "theirs.qcow2"])
            .ok();
        ringdisk(d, &["convert", "-c", "-o", &option, "full.img", "ours.qcow2"]).ok();
        ringdisk(d, &["compare", "theirs.qcow2", "ours.qcow2"]).ok();
        assert_same_disk(d, "theirs.qcow2", "ours.qcow2");
        assert_same_disk(d, "ours.qcow2", "full.img");
    }
}

#[test]
fn a_target_that_is_there_is_written_over() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    for (options, source) in [
        (&["-O", "qcow2"][..], "top.qcow2"),
        (&["-O", "raw"], "top.qcow2"),
        (&["-O", "qcow2"], "sparse.img"),
        (&["-O", "raw", "-S", "0"], "sparse.img"),
    ] {
        let format = options[1];
        for target in ["ours", "theirs"] {
            qemu_img(d, &["create", "-q", "-f", format, target, "12M"]).ok();
            qemu_io(&d.join(target), format, &["write -P 9 0 12M"]);
        }
        let with = |target| [&["convert", "-n"], options, &[source, target]].concat();
        ringdisk(d, &with("ours")).ok();
        qemu_img(d, &with("theirs")).ok();
        let compared =
            qemu_img(d, &["compare", "-s", "-f", format, "-F", format, "ours", "theirs"]);
        assert!(compared.code == 0 || compared.out.contains("block status"), "{}", compared.out);
        let compared = qemu_img(d, &["compare", "-f", format, "-F", format, "ours", "theirs"]);
        assert_eq!(compared.code, 0, "{options:?} {source}");
    }
    // A target that reads as zeroes need not be written with zeroes.
    qemu_img(d, &["create", "-q", "-f", "qcow2", "zero", "12M"]).ok();
    ringdisk(d, &["convert", "-n", "--target-is-zero", "-O", "qcow2", "sparse.img", "zero"]).ok();
    assert_same_disk(d, "sparse.img", "zero");
    assert!(allocated(&d.join("zero")) < MIB);
    images::sparse(&d.join("small.img"), MIB);
    ringdisk(d, &["convert", "-n", "-O", "raw", "full.img", "small.img"])
        .ends(3)
        .says("fewer than");
    ringdisk(d, &["convert", "-n", "full.img", "nosuch.img"]).ends(3);
}

#[test]
fn a_copy_over_a_backing_file_holds_only_what_differs() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    for target in ["ours", "theirs"] {
        let words =
            ["convert", "-O", "qcow2", "-B", "base.qcow2", "-F", "qcow2", "top.qcow2", target];
        let ran = if target == "ours" { ringdisk(d, &words) } else { qemu_img(d, &words) };
        ran.ok();
        assert_same_disk(d, "top.qcow2", target);
        assert_clean(&d.join(target));
    }
    assert_eq!(described(d, "ours"), described(d, "theirs"));
    let (ours, theirs) = (allocated(&d.join("ours")), allocated(&d.join("theirs")));
    assert!(ours <= theirs + (256 << 10), "{ours} {theirs}");
    ringdisk(
        d,
        &["convert", "-O", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2", "again"],
    )
    .ok();
    assert_same_disk(d, "top.qcow2", "again");
}

#[test]
fn bitmaps_are_copied_with_what_they_recorded() {
    let directory = scratch();
    let d = directory.path();
    images::qcow2(&d.join("a.qcow2"), "10M", "");
    for words in [&["-g", "64k", "a.qcow2", "on"][..], &["--disable", "a.qcow2", "off"]] {
        qemu_img(d, &[&["bitmap", "--add"], words].concat()).ok();
    }
    qemu_io(&d.join("a.qcow2"), "qcow2", &["write -P 1 1M 1M", "write -P 1 7M 64k"]);
    for target in ["ours.qcow2", "theirs.qcow2"] {
        let words = ["convert", "-O", "qcow2", "--bitmaps", "a.qcow2", target];
        let ran = if target == "ours.qcow2" { ringdisk(d, &words) } else { qemu_img(d, &words) };
        ran.ok();
        assert_clean(&d.join(target));
    }
    assert_eq!(described(d, "ours.qcow2"), described(d, "theirs.qcow2"));
    // A bitmap that cannot be trusted: flag "in use" of its directory entry.
    let bytes = fs::read(d.join("a.qcow2")).expect("read");
    let name = bytes.windows(5).rposition(|window| window == b"on\0\0\0").expect("the directory");
    let flags = u64::try_from(name).expect("small") - 24 + 12;
    crate::common::patch(&d.join("a.qcow2"), flags, &[0, 0, 0, 3]);
    ringdisk(d, &["convert", "-O", "qcow2", "--bitmaps", "a.qcow2", "x.qcow2"])
        .ends(3)
        .says("inconsistent");
    assert!(!d.join("x.qcow2").exists());
    let words =
        ["convert", "-O", "qcow2", "--bitmaps", "--skip-broken-bitmaps", "a.qcow2", "x.qcow2"];
    ringdisk(d, &words).ok().says("is left out");
    let info = described(d, "x.qcow2");
    let left = info["format-specific"]["data"]["bitmaps"].as_array().expect("a list");
    assert_eq!(left.len(), 1);
}

#[test]
fn what_cannot_be_read_becomes_zeroes_when_that_is_asked_for() {
    let directory = scratch();
    let d = directory.path();
    images::qcow2(&d.join("a.qcow2"), "4M", "");
    qemu_io(&d.join("a.qcow2"), "qcow2", &["write -P 1 0 4M"]);
    qemu_img(d, &["convert", "-O", "raw", "a.qcow2", "whole.img"]).ok();
    // The entry of the guest cluster at 1 MiB points between two clusters.
    let bytes = fs::read(d.join("a.qcow2")).expect("read");
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let l1 = usize::try_from(word(40)).expect("small");
    let l2 = word(l1) & 0x00ff_ffff_ffff_fe00;
    let entry = l2 + 16 * 8;
    crate::common::patch(&d.join("a.qcow2"), entry + 6, &[2]);
    ringdisk(d, &["convert", "-O", "raw", "a.qcow2", "ours.img"]).ends(3).says("1048576");
    assert!(!d.join("ours.img").exists());
    ringdisk(d, &["convert", "--salvage", "-O", "raw", "a.qcow2", "ours.img"])
        .ok()
        .says("65536 bytes at 1048576 could not be read");
    let mut expected = fs::read(d.join("whole.img")).expect("read");
    expected[1 << 20..(1 << 20) + 65536].fill(0);
    assert!(fs::read(d.join("ours.img")).expect("read") == expected);
    let words = ["compare", "a.qcow2", "whole.img"];
    assert_eq!(qemu_img(d, &words).code, ringdisk(d, &words).ends(3).says("1048576").code);
}

#[test]
fn what_makes_no_sense_is_refused_and_nothing_is_made() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    let before = names(d);
    for (words, text) in [
        (&["full.img"][..], "the target"),
        (&[], "the target"),
        (&["nosuch.img", "x"], "nosuch.img"),
        (&["-O", "vmdk", "full.img", "x"], "possible values"),
        (&["-c", "-O", "raw", "full.img", "x"], "cannot be compressed"),
        (&["-S", "100", "full.img", "x"], "multiple of 512"),
        (&["-S", "32M", "full.img", "x"], "up to 16M"),
        (&["-m", "0", "full.img", "x"], "1..=16"),
        (&["-m", "17", "full.img", "x"], "1..=16"),
        (&["--target-is-zero", "full.img", "x"], "--no-create"),
        (&["-n", "-o", "cluster_size=4k", "-O", "qcow2", "full.img", "x"], "no effect"),
        (&["-O", "qcow2", "-o", "cluster_size=3k", "full.img", "x"], "cluster"),
        (&["-O", "qcow2", "-o", "size=1M", "full.img", "x"], "size of the target"),
        (&["-O", "qcow2", "-o", "frob=1", "full.img", "x"], "no option"),
        (&["-O", "qcow2", "-B", "base.qcow2", "full.img", "x"], "never guessed"),
        (&["-O", "raw", "-B", "base.qcow2", "-F", "qcow2", "full.img", "x"], "cannot have"),
        (&["-O", "raw", "full.img", "full.img"], "is the source"),
        (&["-O", "qcow2", "top.qcow2", "base.qcow2"], "or below it"),
        (&["-O", "raw", "full.img", "json:x"], "begins like a protocol"),
        (&["-O", "raw", "full.img", ""], ""),
        (&["-O", "raw", "full.img", "a\nb"], "control character"),
        (&["-O", "raw", "full.img", "no/such/x"], "No such file"),
        (&["--bitmaps", "-O", "raw", "base.qcow2", "x"], "no bitmaps"),
        (&["--skip-broken-bitmaps", "-O", "qcow2", "base.qcow2", "x"], "--bitmaps"),
    ] {
        let ran = ringdisk(d, &[&["convert"], words].concat());
        assert!(matches!(ran.code, 2 | 3 | 11), "{words:?}: {} {}", ran.code, ran.err);
        assert!(ran.err.contains(text), "{words:?}: {}", ran.err);
        assert_eq!(names(d), before, "{words:?}");
    }
    assert_eq!(ringdisk(d, &["convert", "-O", "qcow2", "-o", "help"]).ok().err, "");
}

#[test]
fn the_progress_is_that_of_qemu_img() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    let out = ringdisk(d, &["convert", "-p", "-O", "qcow2", "full.img", "a"]).ok().out;
    assert!(out.starts_with("    (0.00/100%)\r"), "{out:?}");
    assert!(out.ends_with("    (100.00/100%)\n"), "{out:?}");
    assert_eq!(ringdisk(d, &["convert", "-p", "-q", "-O", "qcow2", "full.img", "a"]).ok().out, "");
    assert_eq!(ringdisk(d, &["convert", "-O", "qcow2", "full.img", "a"]).ok().out, "");
}

#[test]
fn a_signal_ends_a_copy_and_leaves_no_half_of_it() {
    let directory = scratch();
    let d = directory.path();
    images::raw(&d.join("big.img"), 192 * MIB, 1);
    let words = ["convert", "-c", "-m", "1", "big.img", "new.qcow2"];
    let finished = interrupted(d, &words, "new.qcow2", MIB, Signal::INT);
    assert_eq!(finished.status.signal(), Some(2), "{finished:?}");
    assert!(finished.stderr.contains("stopped by SIGINT"), "{finished:?}");
    assert!(!d.join("new.qcow2").exists());
    // A target that was there stays, sound.
    images::qcow2(&d.join("old.qcow2"), "200M", "");
    let len = d.join("old.qcow2").metadata().expect("a file").len() + MIB;
    let words = ["convert", "-n", "-c", "-m", "1", "-O", "qcow2", "big.img", "old.qcow2"];
    let finished = interrupted(d, &words, "old.qcow2", len, Signal::TERM);
    assert_eq!(finished.status.signal(), Some(15), "{finished:?}");
    assert!(finished.stderr.contains("incomplete"), "{finished:?}");
    assert_clean(&d.join("old.qcow2"));
}

#[test]
fn a_device_is_filled_and_read() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    images::raw(&d.join("device.img"), 8 * MIB, 99);
    let Some(device) = Loop::attach(&d.join("device.img"), &[]) else { return };
    let path = device.device().to_str().expect("text").to_owned();
    for (words, target) in [
        (&["convert", "-O", "raw", "top.qcow2", path.as_str()][..], "raw"),
        (&["convert", "-n", "-O", "raw", "sparse8", path.as_str()], "raw"),
        (&["convert", "-O", "qcow2", "full.img", path.as_str()], "qcow2"),
    ] {
        if words.contains(&"sparse8") {
            images::sparse(&d.join("sparse8"), 8 * MIB);
        }
        ringdisk(d, words).ok();
        let source = words[words.len() - 2];
        ringdisk(d, &["compare", "-F", target, source, &path]).ok();
    }
    images::sparse(&d.join("large.img"), 20 * MIB);
    ringdisk(d, &["convert", "-O", "raw", "large.img", &path]).ends(3).says("cannot hold");
}

#[test]
fn every_comparison_ends_as_that_of_qemu_img() {
    let directory = scratch();
    let d = directory.path();
    sources(d);
    qemu_img(d, &["convert", "-O", "raw", "top.qcow2", "same.img"]).ok();
    fs::copy(d.join("same.img"), d.join("other.img")).expect("copy");
    crate::common::patch(&d.join("other.img"), 5 * MIB + 700, &[1]);
    fs::copy(d.join("same.img"), d.join("longer.img")).expect("copy");
    let longer = fs::File::options().write(true).open(d.join("longer.img")).expect("open");
    longer.set_len(10 * MIB).expect("longer");
    fs::copy(d.join("longer.img"), d.join("tail.img")).expect("copy");
    crate::common::patch(&d.join("tail.img"), 9 * MIB, &[1]);
    for words in [
        &["top.qcow2", "same.img"][..],
        &["same.img", "top.qcow2"],
        &["top.qcow2", "other.img"],
        &["top.qcow2", "longer.img"],
        &["longer.img", "top.qcow2"],
        &["top.qcow2", "tail.img"],
        &["tail.img", "top.qcow2"],
        &["-s", "top.qcow2", "longer.img"],
        &["-s", "top.qcow2", "top.qcow2"],
        &["-q", "top.qcow2", "other.img"],
        &["-q", "top.qcow2", "longer.img"],
        &["-f", "raw", "-F", "raw", "same.img", "other.img"],
        &["-f", "raw", "top.qcow2", "same.img"],
        &["-f", "qcow2", "-F", "raw", "top.qcow2", "same.img"],
        &["-T", "none", "top.qcow2", "same.img"],
        &["-U", "top.qcow2", "same.img"],
        &["nosuch", "same.img"],
        &["top.qcow2", "nosuch"],
        &["-f", "qcow2", "same.img", "same.img"],
    ] {
        let all = [&["compare"], words].concat();
        let (ours, theirs) = (ringdisk(d, &all), qemu_img(d, &all));
        assert_eq!(ours.code, theirs.code, "{words:?}: {} / {}", ours.err, theirs.err);
        assert_eq!(ours.out, theirs.out, "{words:?}");
    }
    // Runs that reach the end of the disk differ from others for qemu-img, so its offset is
    // another.
    let words = ["compare", "-s", "top.qcow2", "other.img"];
    let out = ringdisk(d, &words).ends(1).out;
    assert_eq!(out, "Strict mode: Offset 2097152 block status mismatch!\n");
    qemu_img(d, &words).ends(1);
    // What is no command line at all has a code above 1 too.
    assert_eq!(ringdisk(d, &["compare", "top.qcow2"]).code, 2);
    assert_eq!(ringdisk(d, &["compare", "--frob", "a", "b"]).code, 2);
    let out = ringdisk(d, &["compare", "-p", "top.qcow2", "same.img"]).ok().out;
    assert!(out.contains("(100.00/100%)\n") && out.ends_with("Images are identical.\n"), "{out:?}");
}
