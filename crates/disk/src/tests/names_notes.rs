//! The note at an image of the files that its header names: names that an attacker writes later,
//! inside of a sandbox, are not followed.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_testkit::limits::needs;

use super::{directory, open, qemu_img, run};
use crate::operations::{self, Rebase};
use crate::{Backing, Disk, ErrorKind, Format, ImageOptions, OverlayOptions, Progress};

/// As a server that is confined opens an image.
fn serving() -> ImageOptions {
    ImageOptions { format: Some(Format::Qcow2), note_names: true, ..ImageOptions::default() }
}

fn reading() -> ImageOptions {
    ImageOptions { read_only: true, note_names: false, ..serving() }
}

/// An attacker who controls a server writes another name of the same length into the image.
fn forge(image: &Path, name: &str, other: &str) {
    assert_eq!(name.len(), other.len());
    let header = &std::fs::read(image).expect("read")[..4096];
    let at = header.windows(name.len()).rposition(|part| part == name.as_bytes());
    let file = OpenOptions::new().write(true).open(image).expect("open");
    file.write_all_at(other.as_bytes(), at.expect("the name") as u64).expect("write");
}

/// An image of 1 MiB that was served, with a base or a data file of this name, and a neighbour of
/// the other name.
fn served(role: &str, name: &str, other: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = directory();
    for file in [name, other] {
        qemu_img(&directory, &["create", "-q", "-f", "raw", file, "1M"]);
    }
    let words: &[&str] = match role {
        "backing" => &["-b", name, "-F", "raw"],
        _ => &["-o", &format!("data_file={name},data_file_raw=on")],
    };
    let create = [&["create", "-q", "-f", "qcow2"], words, &["top.qcow2", "1M"]].concat();
    qemu_img(&directory, &create);
    let top = directory.path().join("top.qcow2");
    run(async |ring| {
        let disk = open(&ring, &top, &serving()).await.expect("open");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    (directory, top)
}

#[test]
fn a_name_that_was_written_into_a_served_image_is_not_followed_until_the_user_says_so() {
    for role in ["backing", "data"] {
        let (directory, top) = served(role, "mine.img", "your.img");
        forge(&top, "mine.img", "your.img");
        let your = directory.path().join("your.img");
        run(async |ring| {
            for options in [serving(), reading(), ImageOptions::default()] {
                let error = open(&ring, &top, &options).await.expect_err("it is another file");
                assert_eq!(error.kind(), ErrorKind::NotAllowed, "{role}");
                // The right to write that file is not needed.
                let remedy = if role == "data" { "--allow-path" } else { "ringdisk rebase -u -b" };
                for part in ["your.img", remedy] {
                    assert!(error.message().contains(part), "{role}: {error}");
                }
            }
            let allowed = ImageOptions { allow_paths: vec![your.clone()], ..serving() };
            // Who only looks does not change what counts.
            let looked = ImageOptions { read_only: true, note_names: false, ..allowed.clone() };
            drop(open(&ring, &top, &looked).await.expect("it is allowed"));
            open(&ring, &top, &serving()).await.expect_err("it is another file");
            drop(open(&ring, &top, &allowed).await.expect("it is allowed"));
            drop(open(&ring, &top, &serving()).await.expect("the user has said so once"));
        });
        // Back again: that one is the other one now.
        forge(&top, "your.img", "mine.img");
        run(async |ring| {
            open(&ring, &top, &serving()).await.expect_err("it is another file");
        });
    }
}

#[test]
fn a_raw_image_that_was_served_becomes_no_image_with_names() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "raw", "disk", "1M"]);
    qemu_img(&directory, &["create", "-q", "-f", "raw", "your.img", "1M"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", "your.img", "-F", "raw", "forged", "1M"];
    qemu_img(&directory, &create);
    let path = directory.path().join("disk");
    run(async |ring| {
        let probed = ImageOptions { note_names: true, ..ImageOptions::default() };
        drop(open(&ring, &path, &probed).await.expect("open"));
        let bytes = std::fs::read(directory.path().join("forged")).expect("read");
        let file = OpenOptions::new().write(true).open(&path).expect("open");
        file.write_all_at(&bytes, 0).expect("write");
        let error = open(&ring, &path, &probed).await.expect_err("it named nothing");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    });
}

#[test]
fn an_image_that_was_never_served_in_a_sandbox_has_no_note() {
    let (directory, top) = served("backing", "mine.img", "your.img");
    let create = ["create", "-q", "-f", "qcow2", "-b", "mine.img", "-F", "raw", "new.qcow2", "1M"];
    qemu_img(&directory, &create);
    let new = directory.path().join("new.qcow2");
    run(async |ring| {
        let plain = ImageOptions { note_names: false, ..serving() };
        drop(open(&ring, &new, &plain).await.expect("open"));
        drop(open(&ring, &new, &reading()).await.expect("open"));
    });
    forge(&new, "mine.img", "your.img");
    run(async |ring| {
        drop(open(&ring, &new, &serving()).await.expect("nobody was confined"));
        // A file that is replaced by another of its name is the user's matter.
        std::fs::copy(directory.path().join("your.img"), directory.path().join("copy"))
            .expect("copy");
        std::fs::rename(directory.path().join("copy"), directory.path().join("mine.img"))
            .expect("rename");
        drop(open(&ring, &top, &serving()).await.expect("the same name"));
    });
}

/// Opens the image as the next server does, and gives the number of its layers.
async fn layers(ring: &ringdisk_ring::Ring, path: &Path) -> usize {
    let disk = open(ring, path, &serving()).await.expect("nothing to ask");
    let layers = disk.layers().len();
    assert_eq!(disk.close(ring).await, Ok(()));
    layers
}

#[test]
fn changes_by_commands_go_into_the_note() {
    let (directory, top) = served("backing", "mine.img", "your.img");
    let path = |name: &str| directory.path().join(name);
    run(async |ring| {
        let progress = Arc::new(Progress::new());
        let commit = |top, base| crate::CommitOptions { top, base, keep_top: false };
        let disk = open(&ring, &top, &serving()).await.expect("open");
        for name in ["a.qcow2", "b.qcow2", "c.qcow2"] {
            disk.add_overlay(&ring, path(name), OverlayOptions::default()).await.expect(name);
        }
        // The one above the merged layers names another one: on top, and below it.
        disk.commit(&ring, commit(1, 2), &progress).await.expect("commit");
        disk.commit(&ring, commit(2, 3), &progress).await.expect("commit");
        let backing = Backing { file: b"a.qcow2".to_vec(), format: Format::Qcow2 };
        Disk::change_backing(&disk, &ring, Some(backing), &progress).await.expect("backing");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        assert_eq!(layers(&ring, &path("c.qcow2")).await, 3);
        // A tool that works while the image is not served.
        let rebase = Rebase {
            backing: Some(Backing { file: b"your.img".to_vec(), format: Format::Raw }),
            header_only: true,
            ..Rebase::default()
        };
        let options = ImageOptions::default();
        operations::rebase(&ring, top.clone(), &options, &rebase, &progress).await.expect("rebase");
        assert_eq!(layers(&ring, &top).await, 2);
    });
}

#[test]
fn a_header_is_not_changed_where_the_note_cannot_be() {
    let directory = directory();
    // One such name fits into the attributes of a file on ext4, two do not.
    let part = "(".repeat(200);
    std::fs::create_dir(directory.path().join(&part)).expect("mkdir");
    let name = format!("{part}/../{part}/../{part}/../{part}/../mine.img");
    let image = |file: &str| directory.path().join(file);
    qemu_img(&directory, &["create", "-q", "-f", "raw", "mine.img", "1M"]);
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-b", &name, "-F", "raw", "top", "1M"]);
    run(async |ring| {
        assert_eq!(layers(&ring, &image("top")).await, 2);
        let before = std::fs::read(image("top")).expect("read");
        let rebase = |file: &str| Rebase {
            backing: Some(Backing { file: file.as_bytes().to_vec(), format: Format::Raw }),
            header_only: true,
            ..Rebase::default()
        };
        let (options, progress) = (ImageOptions::default(), Arc::new(Progress::new()));
        let other = format!("./{name}");
        let rebased =
            operations::rebase(&ring, image("top"), &options, &rebase(&other), &progress).await;
        if !needs("a file system that keeps few attributes", rebased.is_err()) {
            return;
        }
        let error = rebased.expect_err("no note");
        assert!(error.message().contains("cannot note"), "{error}");
        assert_eq!(std::fs::read(image("top")).expect("read"), before);
        assert_eq!(layers(&ring, &image("top")).await, 2);
        operations::rebase(&ring, image("top"), &options, &rebase("mine.img"), &progress)
            .await
            .expect("a short one");
    });
}

#[test]
fn a_file_that_was_used_as_raw_is_no_qcow2_below_another() {
    let (directory, _top) = served("data", "mine.img", "your.img");
    let path = |name: &str| directory.path().join(name);
    // What a guest, or an attacker who controls a server, writes into it.
    let create = ["create", "-q", "-f", "qcow2", "-b", "your.img", "-F", "raw", "forged", "1M"];
    qemu_img(&directory, &create);
    let bytes = std::fs::read(path("forged")).expect("read");
    let file = OpenOptions::new().write(true).open(path("mine.img")).expect("open");
    file.write_all_at(&bytes, 0).expect("write");
    let create = ["create", "-q", "-f", "qcow2", "-b", "mine.img", "-F", "qcow2", "over", "1M"];
    qemu_img(&directory, &create);
    run(async |ring| {
        for options in [serving(), reading()] {
            let error = open(&ring, &path("over"), &options).await.expect_err("it is raw");
            assert_eq!(error.kind(), ErrorKind::UnknownFormat);
            assert!(error.message().contains("used as raw"), "{error}");
        }
        // By itself, as the user says, it is an image that names nothing.
        let error = open(&ring, &path("mine.img"), &serving()).await.expect_err("it named nothing");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
    });
}

#[test]
fn what_a_server_may_write_by_allow_path_is_noted_before() {
    let (directory, top) = served("backing", "mine.img", "your.img");
    let path = |name: &str| directory.path().join(name);
    for [name, base, format] in
        [["new.qcow2", "mine.img", "raw"], ["over.qcow2", "new.qcow2", "qcow2"]]
    {
        qemu_img(
            &directory,
            &["create", "-q", "-f", "qcow2", "-b", base, "-F", format, name, "1M"],
        );
    }
    run(async |ring| {
        // Of no chain yet: a command may have the image on top name it.
        let allowed = ImageOptions { allow_paths: vec![path("new.qcow2")], ..serving() };
        drop(open(&ring, &top, &allowed).await.expect("open"));
        drop(open(&ring, &path("over.qcow2"), &reading()).await.expect("as it was"));
        forge(&path("new.qcow2"), "mine.img", "your.img");
        let error = open(&ring, &path("over.qcow2"), &reading()).await.expect_err("another file");
        assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
        assert!(error.message().contains("did not name this file"), "{error}");
    });
}

#[test]
fn what_a_name_without_a_note_leads_to_names_only_what_is_allowed_too() {
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    for name in ["images", "overlays"] {
        std::fs::create_dir(path(name)).expect("mkdir");
    }
    for name in ["images/secret", "images/base", "overlays/base"] {
        qemu_img(&directory, &["create", "-q", "-f", "raw", name, "1M"]);
    }
    let create = |file: &str, option: &str, other: &str| {
        let other = path(other);
        let option = option.replace("OTHER", other.to_str().expect("text"));
        let words = ["create", "-q", "-f", "qcow2", "-o", &option, file, "1M"];
        qemu_img(&directory, &words);
    };
    let below = "backing_fmt=raw,backing_file=OTHER";
    // An image of another user, with names of its own.
    create("overlays/theirs", below, "images/secret");
    create("overlays/data", "data_file=OTHER", "images/secret");
    run(async |ring| {
        let allowed = |allow_paths: Vec<PathBuf>| ImageOptions { allow_paths, ..serving() };
        let known = allowed(vec![path("images")]);
        drop(open(&ring, &path("overlays/theirs"), &known).await.expect("theirs"));
        for other in ["overlays/theirs", "overlays/data"] {
            let _ = std::fs::remove_file(path("images/disk"));
            create("images/disk", below, "images/base");
            drop(open(&ring, &path("images/disk"), &serving()).await.expect("served"));
            // An attacker who controls a server writes this into the header; the note stays.
            let other = path(other);
            let other = other.to_str().expect("text");
            let image = path("images/disk");
            let image = image.to_str().expect("text");
            qemu_img(&directory, &["rebase", "-u", "-F", "qcow2", "-b", other, image]);
            for options in [serving(), reading()] {
                let options = ImageOptions { allow_paths: vec![path("overlays")], ..options };
                let opened = open(&ring, &path("images/disk"), &options).await;
                let error = opened.expect_err("a stranger");
                assert_eq!(error.kind(), ErrorKind::NotAllowed, "{error}");
                assert!(error.message().contains("by --allow-path only"), "{error}");
            }
            // The image of a kept mount, over which commands have put overlays there.
            let known = ImageOptions {
                allow_paths: vec![path("overlays")],
                known_paths: vec![path("images"), path("images/secret")],
                ..reading()
            };
            drop(open(&ring, &path("images/disk"), &known).await.expect("the user named it"));
            let both = allowed(vec![path("overlays"), path("images/secret")]);
            drop(open(&ring, &path("images/disk"), &both).await.expect("the user says so"));
        }
    });
}

#[test]
fn another_data_file_has_to_be_allowed_by_its_own_name() {
    let directory = directory();
    let path = |name: &str| directory.path().join(name);
    for name in ["mine", "theirs"] {
        qemu_img(&directory, &["create", "-q", "-f", "raw", name, "1M"]);
    }
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "-o", "data_file=mine", "disk", "1M"]);
    run(async |ring| {
        let allowed = |allow_paths: Vec<PathBuf>| ImageOptions { allow_paths, ..serving() };
        drop(open(&ring, &path("disk"), &serving()).await.expect("served"));
        qemu_img(&directory, &["amend", "-q", "-f", "qcow2", "-o", "data_file=theirs", "disk"]);
        let in_directory = allowed(vec![directory.path().to_owned()]);
        let error = open(&ring, &path("disk"), &in_directory).await.expect_err("another file");
        assert!(error.message().contains("--allow-path"), "{error}");
        let itself = allowed(vec![path("theirs")]);
        drop(open(&ring, &path("disk"), &itself).await.expect("the user says so"));
    });
}
