//! Comparisons, with `qemu-img compare` as the reference.

use std::fs;
use std::process::Command;

use ringdisk_qcow2::GuestOffset;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use tempfile::TempDir;

use super::{CompareOptions, Comparison, Difference, compare};
use crate::tests::{directory, open, qemu_img, qemu_io, reading, run};
use crate::{Disk, Errno, ImageOptions, Progress};

fn compared(directory: &TempDir, left: &str, right: &str, strict: bool) -> Comparison {
    run(async |ring| {
        let left = open(&ring, directory.path().join(left), &reading()).await.expect("open");
        let right = open(&ring, directory.path().join(right), &reading()).await.expect("open");
        let options = CompareOptions { strict };
        compare(&ring, &left, &right, options, &Progress::new()).await.expect("readable")
    })
}

/// What `qemu-img compare` prints for this answer.
fn words(answer: Comparison) -> String {
    match answer {
        Comparison::Identical { sizes_differ: false } => "Images are identical.\n".to_owned(),
        Comparison::Identical { sizes_differ: true } => {
            "Warning: Image size mismatch!\nImages are identical.\n".to_owned()
        }
        Comparison::Different(Difference::Size) => "Strict mode: Image size mismatch!\n".to_owned(),
        Comparison::Different(Difference::Status { offset }) => {
            format!("Strict mode: Offset {offset} block status mismatch!\n")
        }
        Comparison::Different(Difference::Content { offset }) => {
            format!("Content mismatch at offset {offset}!\n")
        }
    }
}

/// The answers of both, which must be the same.
fn agreed(directory: &TempDir, left: &str, right: &str, strict: bool) -> Comparison {
    let ours = compared(directory, left, right, strict);
    let mut command = Command::new("qemu-img");
    command.arg("compare").args(strict.then_some("-s")).args([left, right]);
    let output = command.current_dir(directory.path()).output().expect("qemu-img is needed");
    let theirs = String::from_utf8_lossy(&output.stdout).into_owned();
    // With a difference the warning about sizes does not matter.
    let (ours_words, is_same) = (words(ours), matches!(ours, Comparison::Identical { .. }));
    let theirs = match is_same {
        true => theirs,
        false => theirs.replace("Warning: Image size mismatch!\n", ""),
    };
    assert_eq!(ours_words, theirs, "{left} {right} strict: {strict}");
    assert_eq!(output.status.code(), Some(i32::from(!is_same)));
    ours
}

/// `a.raw` of 6 MiB with data and holes, and `b.qcow2` with the same bytes.
fn same(directory: &TempDir) {
    qemu_img(directory, &["create", "-q", "-f", "raw", "a.raw", "6M"]);
    qemu_io(directory, "raw", "a.raw", &["write -P 1 0 100k", "write -P 2 3M 1M"]);
    let cluster = "cluster_size=4k";
    qemu_img(directory, &["convert", "-O", "qcow2", "-o", cluster, "a.raw", "b.qcow2"]);
}

#[test]
fn images_with_the_same_bytes_are_identical() {
    let directory = directory();
    same(&directory);
    agreed(&directory, "a.raw", "b.qcow2", false);
    agreed(&directory, "a.raw", "a.raw", true);
    agreed(&directory, "b.qcow2", "b.qcow2", true);
    qemu_img(&directory, &["convert", "-c", "-O", "qcow2", "a.raw", "c.qcow2"]);
    agreed(&directory, "c.qcow2", "a.raw", false);
    agreed(&directory, "c.qcow2", "b.qcow2", false);
}

#[test]
fn the_first_sector_that_differs_is_named() {
    let directory = directory();
    same(&directory);
    let changes = [
        ("write -P 9 5M 1", 5 << 20),
        ("write -P 9 4000000 1", 4_000_000 / 512 * 512),
        ("write -P 9 3500000 600000", 3_500_000 / 512 * 512),
        ("write -P 9 1023 2", 512),
        ("write -z 511 1", 0),
    ];
    for (change, offset) in changes {
        qemu_io(&directory, "qcow2", "b.qcow2", &[change]);
        let offset = GuestOffset(offset);
        let expected = Comparison::Different(Difference::Content { offset });
        assert_eq!(agreed(&directory, "a.raw", "b.qcow2", false), expected, "{change}");
        assert_eq!(agreed(&directory, "b.qcow2", "a.raw", false), expected, "{change}");
    }
}

#[test]
fn a_longer_image_may_have_zeroes_behind_the_other() {
    let directory = directory();
    same(&directory);
    qemu_img(&directory, &["resize", "-q", "b.qcow2", "9M"]);
    let identical = Comparison::Identical { sizes_differ: true };
    assert_eq!(agreed(&directory, "a.raw", "b.qcow2", false), identical);
    assert_eq!(agreed(&directory, "b.qcow2", "a.raw", false), identical);
    let size = Comparison::Different(Difference::Size);
    assert_eq!(agreed(&directory, "a.raw", "b.qcow2", true), size);
    // Data that is zero.
    qemu_io(&directory, "qcow2", "b.qcow2", &["write -P 0 8M 64k"]);
    assert_eq!(agreed(&directory, "a.raw", "b.qcow2", false), identical);
    qemu_io(&directory, "qcow2", "b.qcow2", &["write -P 1 8400000 1"]);
    let offset = GuestOffset(8_400_000 / 512 * 512);
    let content = Comparison::Different(Difference::Content { offset });
    assert_eq!(agreed(&directory, "a.raw", "b.qcow2", false), content);
    assert_eq!(agreed(&directory, "b.qcow2", "a.raw", false), content);
}

#[test]
fn strict_wants_the_same_clusters_too() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "a.qcow2", "6M"]);
    qemu_img(&directory, &["create", "-q", "-f", "qcow2", "b.qcow2", "6M"]);
    // Data at the end too: QEMU counts it as a difference when a hole of one image goes on to its
    // end and that of the other does not.
    let data = ["write -P 1 1M 128k", "write -P 1 6080k 64k"];
    qemu_io(&directory, "qcow2", "a.qcow2", &data);
    qemu_io(&directory, "qcow2", "b.qcow2", &[data[0], data[1], "write -z 4M 64k"]);
    let identical = Comparison::Identical { sizes_differ: false };
    assert_eq!(agreed(&directory, "a.qcow2", "b.qcow2", false), identical);
    let status = Comparison::Different(Difference::Status { offset: GuestOffset(4 << 20) });
    assert_eq!(agreed(&directory, "a.qcow2", "b.qcow2", true), status);
    // Content before that counts first.
    qemu_io(&directory, "qcow2", "b.qcow2", &["write -P 2 1088k 512"]);
    let content = Comparison::Different(Difference::Content { offset: GuestOffset(1088 << 10) });
    assert_eq!(agreed(&directory, "a.qcow2", "b.qcow2", true), content);
}

#[test]
fn chains_are_compared_by_what_they_hold() {
    let directory = directory();
    same(&directory);
    let overlay = ["create", "-q", "-f", "qcow2", "-b", "a.raw", "-F", "raw", "top.qcow2"];
    qemu_img(&directory, &overlay);
    let identical = Comparison::Identical { sizes_differ: false };
    assert_eq!(agreed(&directory, "a.raw", "top.qcow2", false), identical);
    qemu_io(&directory, "qcow2", "top.qcow2", &["write -z 3M 64k"]);
    let content = Comparison::Different(Difference::Content { offset: GuestOffset(3 << 20) });
    assert_eq!(agreed(&directory, "a.raw", "top.qcow2", false), content);
}

#[test]
fn a_read_error_counts_unless_a_difference_comes_first() {
    run(async |ring| {
        let bytes = vec![5; 8 << 20];
        let (left, right) = (SimStorage::from_image(&bytes, 1), SimStorage::from_image(&bytes, 2));
        let bad = 5_000_000..5_000_001;
        right.on(When::kind(OpKind::Read).at(bad), Fault::Fail(Errno::IO));
        let [one, two] =
            [&left, &right].map(|sim| Disk::from_storage(sim.storage(), &ImageOptions::default()));
        let options = CompareOptions::default();
        let error = compare(&ring, &one, &two, options, &Progress::new()).await;
        let error = error.expect_err("it cannot be read");
        assert!(error.to_string().contains(&(4u64 << 20).to_string()), "{error}");
        left.put(2_000_000, &[6]);
        let answer = compare(&ring, &one, &two, options, &Progress::new()).await;
        let offset = GuestOffset(2_000_000 / 512 * 512);
        let content = Comparison::Different(Difference::Content { offset });
        assert_eq!(answer.expect("a difference"), content);
    });
}

#[test]
fn a_comparison_can_be_ended_early() {
    run(async |ring| {
        let disk =
            Disk::from_storage(SimStorage::new(1 << 30, 1).storage(), &ImageOptions::default());
        let progress = Progress::new();
        progress.cancel();
        let error = compare(&ring, &disk, &disk, CompareOptions::default(), &progress).await;
        assert!(error.expect_err("cancelled").to_string().contains("ended early"));
    });
}

#[test]
fn empty_images_are_identical() {
    let directory = directory();
    fs::write(directory.path().join("a"), []).expect("write");
    let identical = Comparison::Identical { sizes_differ: false };
    assert_eq!(compared(&directory, "a", "a", true), identical);
}
