//! Images by every name that qemu-img takes, several at once and as they were at a snapshot: the
//! same words for both programs, the same bytes out of both.

use std::fs;
use std::path::Path;

use ringdisk_testkit::images::{self, qemu_io};
use ringdisk_testkit::mount::scratch;

use crate::common::MIB;
use crate::common::tools::{described, qemu_img, ringdisk};

/// `a.qcow2` with a snapshot, an overlay of it, and raw images of odd sizes.
fn images(d: &Path) {
    images::qcow2(&d.join("a.qcow2"), "4M", "");
    qemu_io(&d.join("a.qcow2"), "qcow2", &["write -P 1 0 1M"]);
    qemu_img(d, &["snapshot", "-c", "then", "a.qcow2"]).ok();
    qemu_io(&d.join("a.qcow2"), "qcow2", &["write -P 2 512k 1M", "write -z 0 64k"]);
    qemu_img(d, &["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    qemu_io(&d.join("top.qcow2"), "qcow2", &["write -P 3 2M 70000"]);
    images::raw(&d.join("r.img"), MIB, 7);
    images::raw(&d.join("odd.img"), 1000, 8);
    fs::copy(d.join("r.img"), d.join("with:colon,and comma")).expect("copy");
}

/// Words that both programs take: what comes out of `convert WORDS -O raw … out` is the same.
const SOURCES: [&[&str]; 18] = [
    &["file:a.qcow2"],
    &["file:with:colon,and comma"],
    &["--image-opts", "driver=qcow2,file.filename=a.qcow2"],
    &["--image-opts", "driver=qcow2,file.driver=file,file.filename=top.qcow2,cache.direct=off"],
    &["--image-opts", "driver=raw,file.filename=a.qcow2"],
    &["--image-opts", "driver=raw,offset=512,size=4096,file.filename=r.img"],
    &["--image-opts", "driver=raw,offset=1024,file.filename=r.img"],
    &["--image-opts", "driver=file,filename=with:colon,,and comma"],
    &["--image-opts", "driver=qcow2,backing=,file.filename=top.qcow2"],
    &[r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"top.qcow2"}}"#],
    &[r"json:{'driver':'qcow2','file':{'driver':'file','filename':'top.qcow2'}}"],
    &[r#"json:{"driver":"qcow2","backing":null,"file.filename":"top.qcow2"}"#],
    &[r#"json:{"driver":"raw","size":512,"file":{"driver":"file","filename":"r.img"}}"#],
    &[r#"json:{"file.filename":"a.qcow2","read-only":true,"discard":"unmap"}"#],
    &["odd.img", "a.qcow2", "r.img"],
    &["--image-opts", "driver=raw,file.filename=odd.img", "driver=qcow2,file.filename=top.qcow2"],
    &["-l", "then", "a.qcow2"],
    &["-l", "snapshot.id=1,snapshot.name=then", "--image-opts", "file.filename=a.qcow2"],
];

#[test]
fn every_name_leads_to_the_bytes_that_it_leads_qemu_img_to() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    for source in SOURCES {
        let with = |target| [&["convert", "-O", "raw"], source, &[target]].concat();
        ringdisk(d, &with("ours")).ok();
        qemu_img(d, &with("theirs")).ok();
        let read = |name: &str| fs::read(d.join(name)).expect("read");
        assert!(read("ours") == read("theirs"), "{source:?}");
    }
}

#[test]
fn several_sources_are_put_together_in_every_format() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    let sources = ["odd.img", "top.qcow2", "odd.img", "r.img"];
    qemu_img(d, &[&["convert", "-O", "raw"], &sources[..], &["theirs"]].concat()).ok();
    for words in [
        &["-O", "qcow2"][..],
        &["-O", "qcow2", "-c"],
        &["-O", "qcow2", "-c", "-o", "cluster_size=4k"],
        &["-O", "raw", "-C"],
        &["-O", "raw", "-W", "-m", "1"],
        &["-O", "raw", "-S", "0"],
    ] {
        ringdisk(d, &[&["convert"], words, &sources, &["ours"]].concat()).ok();
        let compared = qemu_img(d, &["compare", "-f", words[1], "-F", "raw", "ours", "theirs"]);
        assert_eq!(compared.code, 0, "{words:?}: {}", compared.out);
    }
    for (words, text) in [
        (&["-b", "r.img", "-F", "raw", "-O", "qcow2"][..], "Having a backing file for the target"),
        (&["-l", "then"], "No support for concatenating multiple snapshot"),
        (&["--bitmaps", "-O", "qcow2"], "Copying bitmaps only possible with single source"),
    ] {
        let refused = ringdisk(d, &[&["convert"], words, &["r.img", "a.qcow2", "x"]].concat());
        refused.ends(2).says(text);
    }
    assert!(!d.join("x").exists());
}

#[test]
fn a_copy_by_the_file_system_has_the_bytes_of_a_copy_by_us() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    for source in ["r.img", "top.qcow2", "a.qcow2", "odd.img"] {
        ringdisk(d, &["convert", "-O", "raw", "-C", source, "ours"]).ok();
        ringdisk(d, &["convert", "-O", "raw", source, "plain"]).ok();
        let read = |name: &str| fs::read(d.join(name)).expect("read");
        assert!(read("ours") == read("plain"), "{source}");
    }
    // Onto a target that has other bytes, and at an offset of its file.
    fs::write(d.join("there"), vec![9; 5 << 20]).expect("write");
    let target = "driver=raw,offset=1048576,size=4194304,file.filename=there";
    let words = ["convert", "-C", "-n", "--target-image-opts", "a.qcow2", target];
    ringdisk(d, &words).ok();
    ringdisk(d, &["convert", "-O", "raw", "a.qcow2", "plain"]).ok();
    let there = fs::read(d.join("there")).expect("read");
    let mib = usize::try_from(MIB).expect("size");
    assert!(there[..mib] == vec![9; mib] && there[mib..] == fs::read(d.join("plain")).unwrap());
}

#[test]
fn a_snapshot_is_measured_served_and_copied_with_the_size_that_it_had() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    qemu_img(d, &["convert", "-l", "then", "-O", "raw", "a.qcow2", "then"]).ok();
    let measure = ["measure", "-l", "then", "-O", "qcow2", "--output=json", "a.qcow2"];
    assert_eq!(ringdisk(d, &measure).ok().json(), qemu_img(d, &measure).ok().json());
    // qemu-img gives the bytes of then with the size of now.
    qemu_img(d, &["resize", "-q", "a.qcow2", "8M"]).ok();
    ringdisk(d, &["convert", "-l", "1", "-O", "qcow2", "a.qcow2", "ours"]).ok();
    assert_eq!(qemu_img(d, &["compare", "-s", "-f", "raw", "-F", "raw", "then", "then"]).code, 0);
    ringdisk(d, &["convert", "-O", "raw", "ours", "ours.raw"]).ok();
    assert!(fs::read(d.join("ours.raw")).unwrap() == fs::read(d.join("then")).unwrap());
    for words in
        [&["convert", "-l", "gone", "a.qcow2", "x"][..], &["measure", "-l", "2", "a.qcow2"]]
    {
        ringdisk(d, words).ends(3).says("Failed to load snapshot: Can't find snapshot");
    }
    ringdisk(d, &["convert", "-l", "then", "r.img", "x"]).ends(11).says("has no snapshots");
}

#[test]
fn what_a_description_says_counts_and_what_it_must_not_say_is_named() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    for (words, code, text) in [
        (&["info", "--image-opts", "a.qcow2"][..], 3, "Cannot find device='a.qcow2'"),
        (&["info", "--image-opts", "-f", "raw", "driver=raw"], 2, "cannot be used with"),
        (&["info", "--image-opts", "driver=qcow2,file.filename=a.qcow2,x=1"], 11, "'x'"),
        (&["info", "--image-opts", "driver=vmdk,file.filename=a.qcow2"], 11, "'vmdk'"),
        (&["info", "--image-opts", "driver=raw,file.filename=r.img,read-only=x"], 3, "read-only"),
        (&["info", "--image-opts", "driver=qcow2,size=512,file.filename=a.qcow2"], 11, "'size'"),
        (&["info", "--image-opts", "driver=raw,size=2M,file.filename=r.img"], 3, "'size'"),
        (
            &["info", "-f", "raw", "json:{'driver':'qcow2','file.filename':'a.qcow2'}"],
            3,
            "named as",
        ),
        (
            &["info", "json:{'driver':'qcow2','cache.other':true,'file.filename':'a'}"],
            11,
            "cache.other",
        ),
        (&["info", "json:{'driver'"], 3, "not valid JSON"),
        (&["info", "file:"], 3, "without a path"),
        (
            &["resize", "--image-opts", "driver=raw,file.filename=r.img,read-only=on", "2M"],
            6,
            "read-only",
        ),
        (
            &["convert", "--target-image-opts", "r.img", "driver=raw,file.filename=x"],
            2,
            "--no-create",
        ),
        (&["convert", "-C", "-c", "-O", "qcow2", "r.img", "x"], 2, "cannot be used with"),
        (&["convert", "-C", "-S", "4k", "r.img", "x"], 2, "cannot be used with"),
    ] {
        ringdisk(d, words).ends(code).says(text);
    }
    // Commands that write.
    let options = "driver=qcow2,file.filename=a.qcow2";
    for words in [
        &["snapshot", "--image-opts", "-c", "now", options][..],
        &["bitmap", "--image-opts", "--add", options, "b"],
        &["resize", "--image-opts", options, "0x800000"],
        &["check", "--image-opts", options],
        &["measure", "--image-opts", options],
        &["map", "--image-opts", options],
        &["compare", "--image-opts", options, "driver=file,filename=a.qcow2"],
    ] {
        let code = i32::from(words[0] == "compare");
        ringdisk(d, words).ends(code);
    }
    assert_eq!(described(d, "a.qcow2")["virtual-size"], 8 << 20);
    ringdisk(
        d,
        &["rebase", "-u", "--image-opts", "-b", "", "driver=qcow2,file.filename=top.qcow2"],
    )
    .ok();
    assert_eq!(described(d, "top.qcow2")["backing-filename"], serde_json::Value::Null);
    ringdisk(d, &["create", "-q", "file:x:y", "1M"]).ok();
    assert_eq!(d.join("x:y").metadata().expect("made").len(), MIB);
}

#[test]
fn of_options_that_are_given_twice_the_last_counts() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    ringdisk(d, &["create", "-q", "-f", "raw", "-f", "qcow2", "n.qcow2", "1M"]).ok();
    assert_eq!(described(d, "n.qcow2")["format"], "qcow2");
    ringdisk(d, &["convert", "-O", "raw", "-O", "qcow2", "-m", "1", "-m", "2", "r.img", "c"]).ok();
    assert_eq!(described(d, "c")["format"], "qcow2");
    let out = ringdisk(d, &["info", "--output=human", "--output=json", "-U", "-U", "r.img"]).ok();
    assert_eq!(out.json()["format"], "raw");
    ringdisk(d, &["resize", "-q", "--shrink", "-q", "-f", "qcow2", "-f", "raw", "r.img", "512k"])
        .ok();
}

#[test]
fn a_rebase_can_compress_and_can_read_what_is_in_use() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    images::raw(&d.join("old.img"), 4 * MIB, 3);
    // Data that is compressible and begins inside a cluster.
    qemu_io(&d.join("old.img"), "raw", &["write -P 5 0 2M", "write -z 0 4k", "write -P 6 3M 5000"]);
    images::sparse(&d.join("new.img"), 4 * MIB);
    for words in [&["-c"][..], &["-c", "-U"]] {
        let create = ["create", "-q", "-f", "qcow2", "-b", "old.img", "-F", "raw", "o.qcow2"];
        qemu_img(d, &create).ok();
        ringdisk(d, &[&["rebase"], words, &["-b", "new.img", "-F", "raw", "o.qcow2"]].concat())
            .ok();
        assert_eq!(qemu_img(d, &["compare", "o.qcow2", "old.img"]).code, 0);
        assert_eq!(qemu_img(d, &["check", "o.qcow2"]).code, 0);
        let map = ringdisk(d, &["map", "--json", "o.qcow2"]).ok().json();
        let first = map.as_array().expect("ranges").first().expect("one").clone();
        assert_eq!(first["compressed"], true, "{map}");
    }
    ringdisk(d, &["rebase", "-c", "-u", "-b", "", "o.qcow2"]).ends(2);
}

#[test]
fn a_data_file_is_kept_with_what_it_holds() {
    let directory = scratch();
    let d = directory.path();
    images(d);
    let before = fs::read(d.join("r.img")).expect("read");
    for (more, code, text) in [
        ("", 2, "'keep_data_file=on' requires 'preallocation=metadata'"),
        (",preallocation=full", 2, "'keep_data_file=on' requires"),
        (",data_file_raw=on,data_file=gone", 3, "gone"),
    ] {
        let options = format!("data_file=r.img,keep_data_file=on{more}");
        ringdisk(d, &["create", "-q", "-o", &options, "k.qcow2", "1M"]).ends(code).says(text);
        assert!(!d.join("k.qcow2").exists() && !d.join("gone").exists(), "{more}");
    }
    ringdisk(d, &["create", "-q", "-o", "keep_data_file=on", "k.qcow2", "1M"])
        .ends(2)
        .says("Must not use 'keep_data_file=on' without 'data_file'");
    for (more, size) in [("data_file_raw=on", "2M"), ("preallocation=metadata", "1M")] {
        fs::write(d.join("r.img"), &before).expect("write");
        let options = format!("data_file=r.img,keep_data_file=on,{more}");
        ringdisk(d, &["create", "-q", "-o", &options, "k.qcow2", size]).ok();
        let after = fs::read(d.join("r.img")).expect("read");
        assert!(after[..before.len()] == before, "{more}");
        assert_eq!(qemu_img(d, &["check", "k.qcow2"]).code, 0);
        fs::write(d.join("then"), &before).expect("write");
        assert_eq!(qemu_img(d, &["compare", "k.qcow2", "then"]).code, 0, "{more}");
    }
    let hinted = ["create", "-q", "-f", "raw", "-o", "extent_size_hint=2M", "h.img", "1M"];
    ringdisk(d, &hinted).ok();
    ringdisk(d, &["create", "-o", "extent_size_hint=8G", "h.qcow2", "1M"]).ends(2);
}
