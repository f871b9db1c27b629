//! `commit`, `rebase`, `info` and `measure`, next to qemu-img.

use std::fs;
use std::path::Path;

use ringdisk_testkit::images::{self, assert_clean, assert_same, qemu_io};
use ringdisk_testkit::mount::{scratch, text};
use serde_json::Value;

use crate::common::MIB;
use crate::common::tools::{qemu_img, ringdisk};

/// base.qcow2 <- middle.qcow2 <- top.qcow2, in a directory of its own.
fn chain(directory: &Path, options: &str) {
    let at = |name: &str| directory.join(name);
    fs::create_dir_all(directory).expect("mkdir");
    images::qcow2(&at("base.qcow2"), "8M", options);
    qemu_io(&at("base.qcow2"), "qcow2", &["write -P 1 0 4M"]);
    let over = |name: &str, below: &str, size: &str| {
        let mut words = vec!["create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2"];
        words.extend(if options.is_empty() { vec![] } else { vec!["-o", options] });
        words.extend([name, size]);
        qemu_img(directory, &words).ok();
    };
    over("middle.qcow2", "base.qcow2", "10M");
    qemu_io(
        &at("middle.qcow2"),
        "qcow2",
        &["write -P 2 1M 1M", "write -z 3M 512k", "write -P 2 9M 64k"],
    );
    over("top.qcow2", "middle.qcow2", "12M");
    qemu_io(
        &at("top.qcow2"),
        "qcow2",
        &["write -P 3 1536k 1M", "write -P 3 11M 64k", "discard 0 64k"],
    );
}

/// What the disk of an image holds.
fn contents(directory: &Path, image: &str) -> Vec<u8> {
    let out = directory.join("contents");
    qemu_img(directory, &["convert", "-f", "qcow2", "-O", "raw", image, text(&out)]).ok();
    let bytes = fs::read(&out).expect("read");
    fs::remove_file(&out).expect("remove");
    bytes
}

fn backing(directory: &Path, image: &str) -> Option<String> {
    let value = qemu_img(directory, &["info", "-U", "--output=json", image]).ok().json();
    value["backing-filename"].as_str().map(str::to_owned)
}

#[test]
fn every_commit_leaves_what_qemu_img_leaves() {
    for (options, cases) in
        [("", 12), ("extended_l2=on", 1), ("cluster_size=4k", 1), ("compat=0.10", 1)]
    {
        for words in [
            &["top.qcow2"][..],
            &["-f", "qcow2", "top.qcow2"],
            &["-d", "top.qcow2"],
            &["-b", "middle.qcow2", "top.qcow2"],
            &["-b", "base.qcow2", "top.qcow2"],
            &["-q", "top.qcow2"],
            &["-t", "none", "top.qcow2"],
            &["-t", "unsafe", "top.qcow2"],
            &["middle.qcow2"],
            &["base.qcow2"],
            &["-b", "nosuch.qcow2", "top.qcow2"],
            &["nosuch.qcow2"],
        ]
        .into_iter()
        .take(cases)
        {
            let directory = scratch();
            let (ours, theirs) = (directory.path().join("ours"), directory.path().join("theirs"));
            chain(&ours, options);
            chain(&theirs, options);
            let all = [&["commit"], words].concat();
            let our_end = ringdisk(&ours, &all);
            let their_end = qemu_img(&theirs, &all);
            let what = format!("{options} {words:?}");
            assert_eq!(our_end.code == 0, their_end.code == 0, "{what}: {}", our_end.err);
            assert_eq!(our_end.out, their_end.out, "{what}");
            // Of a deeper base the images between are no use any more, in both programs.
            for image in ["base.qcow2", "top.qcow2"] {
                assert_clean(&ours.join(image));
                assert!(contents(&ours, image) == contents(&theirs, image), "{what}: {image}");
                assert_eq!(backing(&ours, image), backing(&theirs, image), "{what}");
            }
        }
    }
}

#[test]
fn every_rebase_leaves_the_disk_as_it_was() {
    for words in [
        &["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"][..],
        &["-b", "base.qcow2", "-B", "qcow2", "top.qcow2"],
        &["-b", "", "top.qcow2"],
        &["-b", "other.img", "-F", "raw", "top.qcow2"],
        &["-b", "middle.qcow2", "-F", "qcow2", "top.qcow2"],
        &["-p", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"],
        &["-f", "qcow2", "-t", "writethrough", "-T", "writethrough", "-b", "", "top.qcow2"],
        &["-b", "", "middle.qcow2"],
    ] {
        let directory = scratch();
        let d = directory.path();
        chain(d, "");
        images::raw(&d.join("other.img"), 5 * MIB, 3);
        let image = *words.last().expect("words");
        let before = contents(d, image);
        let ran = ringdisk(d, &[&["rebase"], words].concat()).ok();
        assert!(contents(d, image) == before, "{words:?}");
        assert_clean(&d.join(image));
        let at = words.iter().position(|word| *word == "-b").expect("a backing file") + 1;
        let expected = Some(words[at].to_owned()).filter(|name| !name.is_empty());
        assert_eq!(backing(d, image), expected, "{words:?}");
        assert_eq!(words.contains(&"-p"), ran.out.contains("(100.00/100%)"), "{words:?}");
    }
}

#[test]
fn an_unsafe_rebase_changes_the_name_alone() {
    let directory = scratch();
    let d = directory.path();
    chain(d, "");
    for words in [
        &["-u", "-b", "nosuch.qcow2", "-F", "qcow2", "top.qcow2"][..],
        &["-u", "-b", "../elsewhere/x.img", "-F", "raw", "top.qcow2"],
        &["-u", "-b", "middle.qcow2", "-F", "qcow2", "top.qcow2"],
    ] {
        ringdisk(d, &[&["rebase"], words].concat()).ok();
        assert_eq!(backing(d, "top.qcow2").as_deref(), Some(words[2]));
    }
    assert_clean(&d.join("top.qcow2"));
    ringdisk(d, &["rebase", "-u", "-b", "", "top.qcow2"]).ok();
    assert_eq!(backing(d, "top.qcow2"), None);
    assert_clean(&d.join("top.qcow2"));
}

#[test]
fn a_rebase_that_makes_no_sense_changes_nothing() {
    let directory = scratch();
    let d = directory.path();
    chain(d, "");
    images::sparse(&d.join("r.img"), MIB);
    let before = fs::read(d.join("top.qcow2")).expect("read");
    for (words, text) in [
        (&["top.qcow2"][..], "new backing file is missing"),
        (&["-b", "base.qcow2", "top.qcow2"], "never guessed"),
        (&["-b", "nosuch", "-F", "raw", "top.qcow2"], "nosuch"),
        (&["-b", "base.qcow2", "-F", "vmdk", "top.qcow2"], "possible values"),
        (&["-b", "top.qcow2", "-F", "qcow2", "top.qcow2"], "its own backing file"),
        (&["-b", "a\nb", "-F", "raw", "top.qcow2"], "control character"),
        (&["-b", "json:{", "-F", "raw", "top.qcow2"], "json"),
        (&["-b", "", "-F", "raw", "top.qcow2"], "no backing file"),
        (&["-u", "-b", &"x".repeat(1024), "-F", "raw", "top.qcow2"], "1023"),
        (&["-b", "base.qcow2", "-F", "qcow2", "r.img"], ""),
        (&["-b", "base.qcow2", "-F", "qcow2", "-T", "none", "top.qcow2"], "cache"),
        (&["-b", "", "nosuch.qcow2"], "nosuch"),
    ] {
        let ran = ringdisk(d, &[&["rebase"], words].concat());
        assert!(matches!(ran.code, 2 | 3 | 6 | 11), "{words:?}: {} {}", ran.code, ran.err);
        assert!(ran.err.contains(text), "{words:?}: {}", ran.err);
        assert!(fs::read(d.join("top.qcow2")).expect("read") == before, "{words:?}");
    }
}

#[test]
fn an_image_whose_base_is_gone_can_be_shown_and_given_another() {
    let directory = scratch();
    let d = directory.path();
    chain(d, "");
    let before = contents(d, "top.qcow2");
    fs::rename(d.join("middle.qcow2"), d.join("moved.qcow2")).expect("rename");
    let info = ringdisk(d, &["info", "--json", "top.qcow2"]).ok().json();
    let theirs = qemu_img(d, &["info", "--output=json", "top.qcow2"]).ok().json();
    for key in ["backing-filename", "full-backing-filename", "virtual-size", "format"] {
        assert_eq!(info[key], theirs[key], "{key}");
    }
    let text = ringdisk(d, &["info", "top.qcow2"]).ok().out;
    assert!(text.contains("backing file: middle.qcow2\n"), "{text}");
    ringdisk(d, &["info", "--backing-chain", "top.qcow2"]).ends(3).says("middle.qcow2");
    ringdisk(d, &["map", "top.qcow2"]).ends(3);
    ringdisk(d, &["rebase", "-u", "-b", "moved.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    assert!(contents(d, "top.qcow2") == before);
}

#[test]
fn info_of_the_whole_chain_is_that_of_qemu_img() {
    let directory = scratch();
    let d = directory.path();
    chain(d, "");
    qemu_img(d, &["snapshot", "-c", "s", "middle.qcow2"]).ok();
    qemu_img(d, &["bitmap", "--add", "base.qcow2", "b"]).ok();
    let ours = ringdisk(d, &["info", "--backing-chain", "--json", "top.qcow2"]).ok().json();
    let theirs =
        qemu_img(d, &["info", "--backing-chain", "--output=json", "top.qcow2"]).ok().json();
    let list = |value: &Value| value.as_array().expect("a list").len();
    assert_eq!(list(&ours), 3);
    assert_eq!(list(&theirs), 3);
    for at in 0..3 {
        for (key, value) in theirs[at].as_object().expect("an object") {
            assert_eq!(ours[at].get(key), Some(value), "{at}: {key}");
        }
    }
    let human = ringdisk(d, &["info", "--backing-chain", "top.qcow2"]).ok().out;
    assert_eq!(human.matches("image: ").count(), 3, "{human}");
    for line in ["Child node '/file':", "    protocol type: file", "            name: b"] {
        assert!(human.lines().any(|each| each == line), "{line}: {human}");
    }
}

#[test]
fn measures_are_those_of_qemu_img() {
    let directory = scratch();
    let d = directory.path();
    chain(d, "");
    images::raw(&d.join("full.img"), 3 * MIB, 1);
    images::sparse(&d.join("empty.img"), 100 * MIB);
    qemu_img(d, &["bitmap", "--add", "base.qcow2", "b"]).ok();
    for words in [
        &["--size", "1G"][..],
        &["-O", "raw", "--size", "1G"],
        &["-O", "qcow2", "--size", "0"],
        &["-O", "qcow2", "--size", "1G"],
        &["-O", "qcow2", "--size", "64T"],
        &["-O", "qcow2", "-o", "cluster_size=4k", "--size", "1G"],
        &["-O", "qcow2", "-o", "cluster_size=2M,refcount_bits=64", "--size", "1T"],
        &["-O", "qcow2", "-o", "extended_l2=on", "--size", "10G"],
        &["-O", "qcow2", "-o", "preallocation=full", "--size", "1G"],
        &["-O", "qcow2", "-o", "preallocation=metadata", "--size", "1G"],
        &["-O", "qcow2", "base.qcow2"],
        &["-O", "raw", "base.qcow2"],
        &["-O", "qcow2", "top.qcow2"],
        &["-O", "qcow2", "-o", "compat=0.10", "base.qcow2"],
        &["-O", "qcow2", "-f", "raw", "full.img"],
        &["-O", "qcow2", "-f", "raw", "empty.img"],
        &["-O", "raw", "-f", "raw", "full.img"],
        &["-U", "-O", "qcow2", "top.qcow2"],
    ] {
        let human = [&["measure"], words].concat();
        let ours = ringdisk(d, &human).ok();
        let theirs = qemu_img(d, &human).ok();
        assert_eq!(ours.out, theirs.out, "{words:?}");
        let json = [&["measure", "--output=json"], words].concat();
        let (ours, theirs) = (ringdisk(d, &json).ok(), qemu_img(d, &json).ok());
        assert_eq!(ours.json(), theirs.json(), "{words:?}");
    }
    for words in [
        &["-O", "qcow2"][..],
        &["-O", "qcow2", "--size", "1G", "base.qcow2"],
        &["-O", "qcow2", "--size", "-1"],
        &["-O", "qcow2", "--size", "8E"],
        &["-O", "qcow2", "--size", "7E"],
        &["-O", "qcow2", "-o", "cluster_size=3k", "--size", "1G"],
        &["-O", "vmdk", "--size", "1G"],
        &["-O", "qcow2", "nosuch"],
    ] {
        let ran = ringdisk(d, &[&["measure"], words].concat());
        assert!(matches!(ran.code, 2 | 3), "{words:?}: {} {}", ran.code, ran.err);
        assert_ne!(qemu_img(d, &[&["measure"], words].concat()).code, 0, "{words:?}");
    }
}

#[test]
fn a_commit_into_raw_and_of_a_longer_overlay() {
    let directory = scratch();
    for who in ["ours", "theirs"] {
        let d = directory.path().join(who);
        fs::create_dir(&d).expect("mkdir");
        images::raw(&d.join("base.img"), 3 * MIB, 1);
        qemu_img(
            &d,
            &["create", "-q", "-f", "qcow2", "-b", "base.img", "-F", "raw", "o.qcow2", "5M"],
        )
        .ok();
        qemu_io(
            &d.join("o.qcow2"),
            "qcow2",
            &["write -P 9 1M 64k", "write -P 9 4M 64k", "write -z 2M 64k"],
        );
        let words = ["commit", "o.qcow2"];
        if who == "ours" {
            ringdisk(&d, &words).ok()
        } else {
            qemu_img(&d, &words).ok()
        };
    }
    let at = |who: &str| directory.path().join(who).join("base.img");
    assert_same(&at("ours"), &at("theirs"), "a base that grew");
}

#[test]
fn what_a_rebase_copies_lies_in_one_piece() {
    let directory = scratch();
    let run = |words: &[&str]| ringdisk(directory.path(), words).ok();
    images::raw(&directory.path().join("raw"), 64 << 20, 3);
    run(&["convert", "-f", "raw", "-O", "qcow2", "raw", "base"]);
    run(&["create", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top"]);
    run(&["rebase", "-b", "", "top"]);
    let check = qemu_img(directory.path(), &["check", "--output=json", "top"]).ok().json();
    let count = |key: &str| check[key].as_u64().unwrap_or(0);
    assert_eq!(count("allocated-clusters"), 1024, "{check}");
    assert!(count("fragmented-clusters") < 102, "{check}");
}
