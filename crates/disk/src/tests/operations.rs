//! Commit and rebase as tools do them, against what `qemu-img` reads before and after.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_ring::Ring;
use tempfile::TempDir;

use super::{assert_same, directory, open, qemu_img, qemu_io, run};
use crate::operations::{Commit, Rebase, commit, rebase};
use crate::{Backing, Cause, Error, ErrorKind, Format, ImageOptions, Progress};

/// What QEMU reads from an image, which it finds clean.
fn bytes(directory: &TempDir, name: &str, format: &str) -> Vec<u8> {
    if format == "qcow2" {
        qemu_img(directory, &["check", "-q", "-f", "qcow2", name]);
    }
    qemu_img(directory, &["convert", "-f", format, "-O", "raw", name, "compare.out"]);
    fs::read(directory.path().join("compare.out")).expect("read")
}

/// `top.qcow2` over `mid.qcow2` over `base.raw`, each of another size and cluster size.
fn chain(directory: &TempDir) {
    qemu_img(directory, &["create", "-q", "-f", "raw", "base.raw", "10M"]);
    qemu_io(directory, "raw", "base.raw", &["write -P 1 0 9M"]);
    let create = |name: &str, backing: &str, format: &str, size: &str, options: &str| {
        qemu_img(
            directory,
            &[
                "create", "-q", "-f", "qcow2", "-o", options, "-b", backing, "-F", format, name,
                size,
            ],
        );
    };
    create("mid.qcow2", "base.raw", "raw", "12M", "cluster_size=4k");
    qemu_io(
        directory,
        "qcow2",
        "mid.qcow2",
        &["write -P 2 1M 300k", "write -P 2 11M 1M", "write -z 3M 1M"],
    );
    create("top.qcow2", "mid.qcow2", "qcow2", "14M", "extended_l2=on,cluster_size=128k");
    qemu_io(
        directory,
        "qcow2",
        "top.qcow2",
        &["write -P 3 1200k 300k", "write -P 3 13M 5k", "write -z 5M 1M"],
    );
}

async fn run_commit(
    ring: &Ring,
    directory: &TempDir,
    base: Option<&str>,
    keep: bool,
) -> Result<(), Error> {
    let disk = open(ring, directory.path().join("top.qcow2"), &ImageOptions::default()).await?;
    let job =
        Commit { base: base.map(|base| directory.path().join(base)), keep, ..Commit::default() };
    let result = commit(ring, &disk, &job, &Arc::new(Progress::new())).await;
    for _ in 0..10 {
        ring.yield_now().await;
    }
    result
}

#[test]
fn a_commit_moves_everything_down() {
    for (base, format, keep) in
        [(None, "qcow2", false), (None, "qcow2", true), (Some("base.raw"), "raw", false)]
    {
        let directory = directory();
        chain(&directory);
        let before = bytes(&directory, "top.qcow2", "qcow2");
        run(async |ring| run_commit(&ring, &directory, base, keep).await.expect("commit"));
        let name = base.unwrap_or("mid.qcow2");
        assert_same(&bytes(&directory, name, format), &before);
        let used = qemu_img(&directory, &["map", "-f", "qcow2", "top.qcow2"]);
        assert_same(&bytes(&directory, "top.qcow2", "qcow2"), &before);
        assert_eq!(used.contains("top.qcow2"), keep, "{used}");
        assert_eq!(used.contains("mid.qcow2"), base.is_none(), "{used}");
    }
}

#[test]
fn a_commit_without_a_base_or_to_a_stranger_is_refused() {
    let directory = directory();
    chain(&directory);
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "alone.qcow2", "1M"]);
    run(async |ring| {
        let error = run_commit(&ring, &directory, Some("alone.qcow2"), false).await;
        assert_eq!(error.expect_err("no base").kind(), ErrorKind::Invalid);
        let path = directory.path().join("alone.qcow2");
        let disk = open(&ring, &path, &ImageOptions::default()).await.expect("open");
        let error = commit(&ring, &disk, &Commit::default(), &Arc::new(Progress::new())).await;
        assert_eq!(error.expect_err("no base").kind(), ErrorKind::Invalid);
    });
}

fn backing(file: &str, format: Format) -> Option<Backing> {
    Some(Backing { file: file.as_bytes().to_vec(), format })
}

fn run_rebase(
    directory: &TempDir,
    backing: Option<Backing>,
    header_only: bool,
) -> Result<(), Error> {
    run(async |ring| {
        let path: PathBuf = directory.path().join("top.qcow2");
        let job = Rebase { backing, header_only, ..Rebase::default() };
        let progress = Arc::new(Progress::new());
        let result = rebase(&ring, path, &ImageOptions::default(), &job, &progress).await;
        for _ in 0..10 {
            ring.yield_now().await;
        }
        result
    })
}

#[test]
fn a_rebase_keeps_every_byte() {
    let directory = directory();
    for target in [backing("base.raw", Format::Raw), None, backing("other.raw", Format::Raw)] {
        chain(&directory);
        qemu_img(&directory, &["create", "-q", "-f", "raw", "other.raw", "13M"]);
        qemu_io(&directory, "raw", "other.raw", &["write -P 1 0 4M", "write -P 7 6M 7M"]);
        let before = bytes(&directory, "top.qcow2", "qcow2");
        run_rebase(&directory, target.clone(), false).expect("rebase");
        assert_same(&bytes(&directory, "top.qcow2", "qcow2"), &before);
        let info = qemu_img(&directory, &["info", "-f", "qcow2", "top.qcow2"]);
        let name = target.as_ref().map(|target| String::from_utf8_lossy(&target.file).into_owned());
        let expected =
            name.map_or("virtual size".to_owned(), |name| format!("backing file: {name}"));
        assert!(info.contains(&expected), "{info}");
        assert_eq!(info.contains("backing file"), target.is_some(), "{info}");
    }
}

#[test]
fn a_rebase_to_a_part_of_the_same_chain_copies_only_what_is_between() {
    let directory = directory();
    chain(&directory);
    run_rebase(&directory, backing("base.raw", Format::Raw), false).expect("rebase");
    let map = qemu_img(&directory, &["map", "-f", "qcow2", "top.qcow2"]);
    // Most of the disk is in the base still.
    assert!(map.contains("base.raw"), "{map}");
}

/// The same file is not the same backing file when the name says another part of it, another
/// format, or leaves out what is below.
#[test]
fn a_rebase_to_the_same_file_in_another_way_keeps_every_byte() {
    let directory = directory();
    let path = |name: &str| directory.path().join(name).display().to_string();
    let part = format!(
        r#"json:{{"driver":"raw","offset":2097152,"file":{{"driver":"file","filename":"{}"}}}}"#,
        path("base.raw")
    );
    let alone = format!(
        r#"json:{{"driver":"qcow2","backing":null,"file":{{"driver":"file","filename":"{}"}}}}"#,
        path("mid.qcow2")
    );
    for (target, format) in
        [(&*part, Format::Raw), (&*alone, Format::Qcow2), ("mid.qcow2", Format::Raw)]
    {
        chain(&directory);
        qemu_io(&directory, "raw", "base.raw", &["write -P 9 2M 1M", "write -P 8 5M 1M"]);
        // One more between, so that the new backing file is not right below the image.
        let create = ["create", "-q", "-f", "qcow2", "-b", "mid.qcow2", "-F", "qcow2"];
        qemu_img(&directory, &[&create[..], &["more.qcow2"]].concat());
        let header_only = ["rebase", "-u", "-b", "more.qcow2", "-F", "qcow2", "top.qcow2"];
        qemu_img(&directory, &header_only);
        let before = bytes(&directory, "top.qcow2", "qcow2");
        run_rebase(&directory, backing(target, format), false).expect("rebase");
        assert_same(&bytes(&directory, "top.qcow2", "qcow2"), &before);
    }
}

#[test]
fn an_unsafe_rebase_needs_no_chain_and_changes_the_header_only() {
    let directory = directory();
    chain(&directory);
    let before = bytes(&directory, "top.qcow2", "qcow2");
    fs::rename(directory.path().join("mid.qcow2"), directory.path().join("moved.qcow2"))
        .expect("rename");
    let error = run_rebase(&directory, backing("moved.qcow2", Format::Qcow2), false);
    let error = error.expect_err("the old chain is needed");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let Some(Cause::BackingFile { file, why, .. }) = error.cause() else { panic!("{error:?}") };
    assert_eq!((file.as_str(), why.as_str()), ("mid.qcow2", "No such file or directory"));
    run_rebase(&directory, backing("moved.qcow2", Format::Qcow2), true).expect("rebase");
    assert_same(&bytes(&directory, "top.qcow2", "qcow2"), &before);
}

#[test]
fn a_cancelled_job_leaves_the_image_as_it_reads() {
    let directory = directory();
    chain(&directory);
    let before = bytes(&directory, "top.qcow2", "qcow2");
    run(async |ring| {
        let progress = Arc::new(Progress::new());
        progress.cancel();
        let path = directory.path().join("top.qcow2");
        let options = ImageOptions::default();
        let job = Rebase { backing: None, header_only: false, ..Rebase::default() };
        let error = rebase(&ring, path.clone(), &options, &job, &progress).await;
        assert_eq!(error.expect_err("cancelled").kind(), ErrorKind::Cancelled);
        let disk = open(&ring, &path, &options).await.expect("open");
        let error = commit(&ring, &disk, &Commit::default(), &progress).await;
        assert_eq!(error.expect_err("cancelled").kind(), ErrorKind::Cancelled);
        for _ in 0..10 {
            ring.yield_now().await;
        }
    });
    assert_same(&bytes(&directory, "top.qcow2", "qcow2"), &before);
}
