//! `ringdisk create` and `mount --create`, next to `qemu-img create`.

use std::fs;
use std::os::unix::fs::MetadataExt;

use ringdisk_testkit::mount::{Mounted, scratch};

use crate::common::tools::{described, names, qemu_img, ringdisk};

/// Every option of the format, and the two differ only in what the options say.
#[test]
fn every_option_makes_the_image_that_qemu_img_makes() {
    let directory = scratch();
    let d = directory.path();
    for (number, (options, size)) in [
        ("", "10M"),
        ("", "0"),
        ("", "1000"),
        ("", "5T"),
        ("cluster_size=512", "1M"),
        ("cluster_size=4k", "3M"),
        ("cluster_size=2M", "1G"),
        ("compat=0.10", "10M"),
        ("compat=1.1", "10M"),
        ("compat=v2", "10M"),
        ("compat=v3", "10M"),
        ("refcount_bits=1", "10M"),
        ("refcount_bits=64", "10M"),
        ("extended_l2=on", "10M"),
        ("extended_l2=on,cluster_size=128k", "10M"),
        ("compression_type=zstd", "10M"),
        ("compression_type=zlib", "10M"),
        ("lazy_refcounts=on", "10M"),
        ("lazy_refcounts=yes,compat=1.1", "10M"),
        ("preallocation=off", "10M"),
        ("preallocation=metadata", "10M"),
        ("preallocation=falloc", "10M"),
        ("preallocation=full", "3M"),
        ("preallocation=metadata,extended_l2=on", "10M"),
        ("preallocation=metadata,refcount_bits=8,cluster_size=1024", "3M"),
        ("data_file=NAME.raw", "10M"),
        ("data_file=NAME.raw,data_file_raw=on", "10M"),
        ("data_file=NAME.raw,preallocation=metadata", "10M"),
        ("data_file=NAME.raw,preallocation=full", "1M"),
    ]
    .into_iter()
    .enumerate()
    {
        let make = |run: &dyn Fn(&[&str]) -> crate::common::tools::Ran, name: &str| {
            let options = options.replace("NAME", name);
            let file = format!("{name}.qcow2");
            let mut words = vec!["create", "-f", "qcow2"];
            words.extend(if options.is_empty() { vec![] } else { vec!["-o", &options] });
            words.extend([file.as_str(), size]);
            run(&words).ok().out.replace(name, "NAME")
        };
        let (ours, theirs) = (format!("ours{number}"), format!("theirs{number}"));
        let our_line = make(&|words| ringdisk(d, words), &ours);
        let their_line = make(&|words| qemu_img(d, words), &theirs);
        assert_eq!(our_line, their_line, "{options}");
        let (our_file, their_file) = (format!("{ours}.qcow2"), format!("{theirs}.qcow2"));
        assert_eq!(described(d, &our_file), described(d, &their_file), "{options}");
        let check = |file: &str| {
            let mut value = qemu_img(d, &["check", "--output=json", file]).ok().json();
            // Where the tables lie is each program's own matter.
            let object = value.as_object_mut().expect("an object");
            object.remove("filename");
            object.remove("image-end-offset");
            value
        };
        assert_eq!(check(&our_file), check(&their_file), "{options}");
        let compared = qemu_img(d, &["compare", "-q", &our_file, &their_file]);
        assert_eq!(compared.code, 0, "{options}");
    }
}

#[test]
fn a_new_raw_image_is_as_long_and_as_prepared_as_asked_for() {
    let directory = scratch();
    let d = directory.path();
    for (options, size, full) in [
        (&[][..], "1M", false),
        (&[], "1000", false),
        (&[], "0", true),
        (&["-o", "preallocation=off"], "1M", false),
        (&["-o", "preallocation=falloc"], "1M", true),
        (&["-o", "preallocation=full"], "1M", true),
    ] {
        let words = |name| [&["create", "-f", "raw"], options, &[name, size]].concat();
        let ours = ringdisk(d, &words("ours")).ok().out;
        let theirs = qemu_img(d, &words("theirs")).ok().out;
        assert_eq!(ours.replace("ours", ""), theirs.replace("theirs", ""));
        let meta = |name: &str| {
            let meta = fs::metadata(d.join(name)).expect("made");
            (meta.len(), meta.mode())
        };
        assert_eq!(meta("ours"), meta("theirs"), "{options:?} {size}");
        let ours = fs::metadata(d.join("ours")).expect("made");
        assert_eq!(ours.blocks() >= ours.len() / 512, full, "{options:?} {size}");
    }
}

#[test]
fn an_overlay_has_the_size_of_its_backing_file_and_its_name() {
    let directory = scratch();
    let d = directory.path();
    fs::create_dir(d.join("sub")).expect("mkdir");
    qemu_img(d, &["create", "-f", "qcow2", "base.qcow2", "7M"]).ok();
    qemu_img(d, &["create", "-f", "raw", "sub/base.img", "3M"]).ok();
    for (number, words) in [
        &["-b", "base.qcow2", "-F", "qcow2", "FILE"][..],
        &["-b", "base.qcow2", "-F", "qcow2", "FILE", "9M"],
        &["-b", "sub/base.img", "-F", "raw", "FILE"],
        &["-o", "backing_file=base.qcow2,backing_fmt=qcow2", "FILE"],
        &["-u", "-b", "nowhere", "-F", "qcow2", "FILE", "1M"],
    ]
    .into_iter()
    .enumerate()
    {
        let (ours, theirs) = (format!("ours{number}"), format!("theirs{number}"));
        let with = |name: &str| -> Vec<String> {
            let rest = words.iter().map(|word| word.replace("FILE", name));
            ["create", "-f", "qcow2"].into_iter().map(str::to_owned).chain(rest).collect()
        };
        let (our_words, their_words) = (with(&ours), with(&theirs));
        let our_words: Vec<&str> = our_words.iter().map(String::as_str).collect();
        let their_words: Vec<&str> = their_words.iter().map(String::as_str).collect();
        let our_line = ringdisk(d, &our_words).ok().out;
        let their_line = qemu_img(d, &their_words).ok().out;
        assert_eq!(our_line.replace("ours", ""), their_line.replace("theirs", ""), "{words:?}");
        let info = |name: &str| {
            let value = qemu_img(d, &["info", "-U", "--output=json", name]).ok().json();
            let keys = ["virtual-size", "backing-filename", "backing-filename-format"];
            keys.map(|key| value.get(key).cloned())
        };
        assert_eq!(info(&ours), info(&theirs), "{words:?}");
    }
}

#[test]
fn a_backing_file_elsewhere_is_named_with_what_opening_needs() {
    let directory = scratch();
    let d = directory.path();
    fs::create_dir(d.join("sub")).expect("mkdir");
    qemu_img(d, &["create", "-f", "qcow2", "base.qcow2", "1M"]).ok();
    ringdisk(d, &["create", "-b", "../base.qcow2", "-F", "qcow2", "sub/o.qcow2"])
        .ok()
        .says("--allow-path");
    ringdisk(d, &["info", "sub/o.qcow2", "--allow-path", "."]).ok();
    qemu_img(d, &["check", "sub/o.qcow2"]).ok();
}

#[test]
fn the_format_is_that_of_the_name_where_none_is_given() {
    let directory = scratch();
    let d = directory.path();
    ringdisk(d, &["create", "-q", "a.qcow2", "1M"]).ok();
    ringdisk(d, &["create", "-q", "a.img", "1M"]).ok();
    ringdisk(d, &["create", "-q", "-b", "a.qcow2", "-F", "qcow2", "overlay"]).ok();
    let format = |name: &str| {
        let value = qemu_img(d, &["info", "--output=json", name]).ok().json();
        value["format"].as_str().map(str::to_owned)
    };
    assert_eq!(format("a.qcow2").as_deref(), Some("qcow2"));
    assert_eq!(format("a.img").as_deref(), Some("raw"));
    assert_eq!(format("overlay").as_deref(), Some("qcow2"));
}

#[test]
fn what_cannot_be_made_is_refused_and_leaves_nothing() {
    let directory = scratch();
    let d = directory.path();
    for (words, code, text) in [
        (&["a.qcow2"][..], 2, "size of the new image is missing"),
        (&["a.qcow2", "-1"], 2, "cannot be negative"),
        (&["a.qcow2", "9223372036854775808"], 2, "too large"),
        (&["a.qcow2", "9223372036854775807"], 2, "below 2^63"),
        (&["a.qcow2", "7E"], 3, "too large"),
        (&["a.qcow2", "8E"], 2, "too large"),
        (&["a.qcow2", "1Q"], 2, "unknown unit"),
        (&["a.qcow2", "1M", "2M"], 2, "unexpected argument"),
        (&["-o", "size=1M", "a.qcow2", "1M"], 2, "given twice"),
        (&["-o", "cluster_size=3k", "a.qcow2", "1M"], 2, "cluster"),
        (&["-o", "cluster_size=4M", "a.qcow2", "1M"], 2, "cluster"),
        (&["-o", "refcount_bits=3", "a.qcow2", "1M"], 2, "refcount"),
        (&["-o", "refcount_bits=8,compat=0.10", "a.qcow2", "1M"], 2, ""),
        (&["-o", "lazy_refcounts=on,compat=0.10", "a.qcow2", "1M"], 2, ""),
        (&["-o", "extended_l2=on,cluster_size=4k", "a.qcow2", "1M"], 2, ""),
        (&["-o", "compression_type=zstd,compat=0.10", "a.qcow2", "1M"], 2, ""),
        (&["-o", "data_file_raw=on", "a.qcow2", "1M"], 2, ""),
        (&["-o", "data_file=a.qcow2", "a.qcow2", "1M"], 5, ""),
        (&["-o", "encryption=on", "a.qcow2", "1M"], 11, "not supported"),
        (&["-o", "frob=1", "a.qcow2", "1M"], 2, "no option 'frob'"),
        (&["-f", "raw", "-o", "cluster_size=64k", "a.img", "1M"], 2, "no option 'cluster_size'"),
        (&["-f", "raw", "-b", "x", "-F", "raw", "a.img", "1M"], 2, "cannot have a backing file"),
        (&["-f", "vmdk", "a.vmdk", "1M"], 2, "possible values"),
        (&["-b", "nosuch", "a.qcow2", "1M"], 2, "never guessed"),
        (&["-b", "nosuch", "-F", "raw", "a.qcow2", "1M"], 3, "nosuch"),
        (&["-b", "json:{", "-F", "qcow2", "a.qcow2", "1M"], 3, "json"),
        (&["-b", "a\nb", "-F", "raw", "a.qcow2", "1M"], 2, "control character"),
        (&["-u", "-b", "nosuch", "-F", "raw", "a.qcow2"], 2, "size of the new image is missing"),
        (&["json:{}", "1M"], 2, "begins like a protocol"),
        (&["nbd:host", "1M"], 3, "needs a port"),
        (&["", "1M"], 2, "FILE"),
        (&["a\nb.qcow2", "1M"], 2, "control character"),
        (&["no/such/dir/a.qcow2", "1M"], 3, "No such file"),
        (&["/dev/null/x", "1M"], 3, ""),
        (&["..", "1M"], 3, ""),
        (&["1M"], 2, "size of the new image is missing"),
        (&[], 2, "name of the new image is missing"),
    ] {
        let ran = ringdisk(d, &[&["create"], words].concat());
        assert_eq!(ran.code, code, "{words:?}: {}", ran.err);
        assert!(ran.err.contains(text), "{words:?}: {}", ran.err);
        assert_eq!(names(d), Vec::<String>::new(), "{words:?}");
    }
}

#[test]
fn a_file_in_use_and_an_image_below_itself_are_left_alone() {
    let directory = scratch();
    let d = directory.path();
    ringdisk(d, &["create", "-q", "a.qcow2", "1M"]).ok();
    let before = fs::read(d.join("a.qcow2")).expect("read");
    ringdisk(d, &["create", "-b", "a.qcow2", "-F", "qcow2", "./a.qcow2"])
        .ends(2)
        .says("its own backing file");
    let image = d.join("a.qcow2");
    let mounted = Mounted::start(
        &crate::common::program(),
        &[image.as_os_str(), "--format".as_ref(), "raw".as_ref()],
    );
    ringdisk(d, &["create", "a.qcow2", "2M"]).ends(5);
    drop(mounted);
    assert_eq!(fs::read(d.join("a.qcow2")).expect("read"), before);
}

#[test]
fn help_lists_what_every_format_has() {
    let directory = scratch();
    let qcow2 = ringdisk(directory.path(), &["create", "-f", "qcow2", "-o", "help"]).ok().out;
    assert!(qcow2.contains("cluster_size") && qcow2.contains("refcount_bits"), "{qcow2}");
    let raw = ringdisk(directory.path(), &["create", "-f", "raw", "-o", "?"]).ok().out;
    assert!(raw.contains("preallocation") && !raw.contains("cluster_size"), "{raw}");
}

#[test]
fn a_mount_makes_the_image_of_its_name() {
    let directory = scratch();
    let d = directory.path();
    for (name, format, options) in [
        ("a.img", "raw", &[][..]),
        ("a.qcow2", "qcow2", &[]),
        ("b", "qcow2", &["-f", "qcow2", "-o", "cluster_size=4k,lazy_refcounts=on"]),
    ] {
        let image = d.join(name);
        let words: Vec<&str> =
            [options, &["--create", "3M", image.to_str().expect("text")]].concat();
        let mounted = Mounted::start(&crate::common::program(), &words);
        let len = fs::metadata(mounted.path()).expect("mounted").len();
        assert_eq!(len, 3 << 20);
        drop(mounted);
        let info = qemu_img(d, &["info", "--output=json", name]).ok().json();
        assert_eq!(info["format"], format);
        assert_eq!(info["virtual-size"], 3 << 20);
    }
    let info = qemu_img(d, &["info", "--output=json", "b"]).ok().json();
    assert_eq!(info["cluster-size"], 4096);
}

#[test]
fn a_mount_that_cannot_make_its_image_leaves_nothing() {
    let directory = scratch();
    let d = directory.path();
    for words in [
        &["mount", "--create", "1M", "-o", "cluster_size=3k", "a.qcow2", "disk"][..],
        &["mount", "--create", "1M", "-o", "backing_file=x,backing_fmt=raw", "a.qcow2", "disk"],
        &["mount", "--create", "1M", "-o", "help", "a.qcow2", "disk"],
        &["mount", "--create", "1M", "-o", "size=2M", "a.qcow2", "disk"],
        &["mount", "--create", "7E", "a.qcow2", "disk"],
        &["mount", "--create", "1M", "json:x", "disk"],
    ] {
        let ran = ringdisk(d, words);
        assert!(ran.code == 2 || ran.code == 3, "{words:?}: {} {}", ran.code, ran.err);
        assert_eq!(names(d), Vec::<String>::new(), "{words:?}");
    }
}
