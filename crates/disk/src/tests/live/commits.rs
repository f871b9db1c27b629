//! Commits while clients work on the disk.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;

use ringdisk_ring::Ring;

use super::{SOME, finish, image, opened, overlay, same_for_qemu};
use crate::tests::load::Load;
use crate::tests::{assert_same, directory, open, qemu_img, qemu_io, read_steps, reading, run};
use crate::{CommitOptions, Disk, ErrorKind, Progress, ResizeOptions, SnapshotChange};

/// Commits the top of a chain of three while clients write.
fn commit_top(bottom: (&str, &str), base: usize, seed: u64) {
    let directory = directory();
    let mut bytes = image(&directory, bottom.0, bottom.1, 1);
    overlay(&directory, "mid.qcow2", bottom, &mut bytes, 2);
    overlay(&directory, "top.qcow2", ("mid.qcow2", "qcow2"), &mut bytes, 3);
    let name = ["top.qcow2", "mid.qcow2", bottom.0][base];
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, seed);
        load.progress(&ring, SOME).await;
        let progress = Arc::new(Progress::new());
        let options = CommitOptions { top: 0, base, keep_top: false };
        disk.commit(&ring, options, &progress).await.expect("commit");
        assert_eq!(progress.done(), progress.total());
        assert_eq!(disk.layers().len(), 3 - base);
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, name, &mut bytes).await;
    });
    // Emptied: they show what the base has, also what was written to it since.
    for name in ["top.qcow2", "mid.qcow2"] {
        same_for_qemu(&directory, name, "qcow2", &bytes);
    }
}

#[test]
fn the_top_is_committed_to_a_qcow2_base_under_clients() {
    commit_top(("base.raw", "raw"), 1, 8);
}

#[test]
fn the_top_is_committed_through_the_chain_to_a_raw_base_under_clients() {
    commit_top(("base.raw", "raw"), 2, 9);
}

#[test]
fn the_top_is_committed_through_the_chain_to_a_qcow2_base_under_clients() {
    commit_top(("base.qcow2", "qcow2"), 2, 10);
}

#[test]
fn a_base_that_is_smaller_grows_first() {
    for (name, format) in [("base.raw", "raw"), ("base.qcow2", "qcow2")] {
        let directory = directory();
        let mut bytes = image(&directory, name, format, 1);
        overlay(&directory, "top.qcow2", (name, format), &mut bytes, 2);
        qemu_img(&directory, &["resize", "-q", "-f", "qcow2", "top.qcow2", "40M"]);
        qemu_io(&directory, "qcow2", "top.qcow2", &["write -P 9 30M 1M"]);
        bytes.resize(40 << 20, 0);
        bytes[30 << 20..31 << 20].fill(9);
        run(async |ring| {
            let disk = opened(&ring, &directory, "top.qcow2").await;
            let load = Load::start(&disk, &bytes, 11);
            load.progress(&ring, SOME).await;
            let progress = Arc::new(Progress::new());
            disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
            load.progress(&ring, SOME).await;
            finish(&ring, &directory, disk, load, name, &mut bytes).await;
        });
    }
}

#[test]
fn a_layer_in_the_middle_is_committed_under_clients() {
    for (top, base, left) in [(1, 2, 3), (1, 3, 2), (2, 3, 3)] {
        let directory = directory();
        let mut bytes = image(&directory, "base.qcow2", "qcow2", 1);
        overlay(&directory, "a.qcow2", ("base.qcow2", "qcow2"), &mut bytes, 2);
        overlay(&directory, "b.qcow2", ("a.qcow2", "qcow2"), &mut bytes, 3);
        overlay(&directory, "top.qcow2", ("b.qcow2", "qcow2"), &mut bytes, 4);
        run(async |ring| {
            let disk = opened(&ring, &directory, "top.qcow2").await;
            let load = Load::start(&disk, &bytes, 12);
            load.progress(&ring, SOME).await;
            let progress = Arc::new(Progress::new());
            let options = CommitOptions { top, base, keep_top: false };
            disk.commit(&ring, options, &progress).await.expect("commit");
            assert_eq!(disk.layers().len(), left);
            assert!(disk.layers()[1..].iter().all(|layer| !layer.is_writable()));
            load.progress(&ring, SOME).await;
            finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
        });
        let chain = qemu_img(&directory, &["info", "--backing-chain", "-f", "qcow2", "top.qcow2"]);
        assert_eq!(chain.matches("virtual size").count(), left, "{chain}");
        qemu_img(&directory, &["check", "-q", "-f", "qcow2", "base.qcow2"]);
    }
}

#[test]
fn a_short_layer_in_the_middle_hides_the_base_after_its_commit_too() {
    let directory = directory();
    let mut bytes = image(&directory, "base.qcow2", "qcow2", 1);
    overlay(&directory, "mid.qcow2", ("base.qcow2", "qcow2"), &mut bytes, 2);
    qemu_img(&directory, &["resize", "-q", "--shrink", "-f", "qcow2", "mid.qcow2", "5M"]);
    let create =
        ["create", "-q", "-f", "qcow2", "-b", "mid.qcow2", "-F", "qcow2", "top.qcow2", "24M"];
    qemu_img(&directory, &create);
    bytes[5 << 20..].fill(0);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
        let load = Load::start(&disk, &bytes, 13);
        let progress = Arc::new(Progress::new());
        let options = CommitOptions { top: 1, base: 2, keep_top: false };
        disk.commit(&ring, options, &progress).await.expect("commit");
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
}

#[test]
fn a_cancelled_commit_leaves_the_chain_and_can_be_made_again() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 14);
        load.progress(&ring, SOME).await;
        let progress = Arc::new(Progress::new());
        progress.cancel();
        let error = disk.commit(&ring, CommitOptions::TOP, &progress).await.expect_err("cancelled");
        assert_eq!(error.kind(), ErrorKind::Cancelled);
        assert_eq!(disk.layers().len(), 2);
        assert!(!disk.layers()[1].is_writable());
        load.progress(&ring, SOME).await;
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, "base.raw", &mut bytes).await;
    });
}

#[test]
fn other_changes_are_refused_during_a_commit() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let progress = Arc::new(Progress::new());
        let (other, handle, shared) = (Arc::clone(&disk), ring.clone(), Arc::clone(&progress));
        let done = std::rc::Rc::new(std::cell::Cell::new(false));
        let flag = done.clone();
        ring.spawn(async move {
            other.commit(&handle, CommitOptions::TOP, &shared).await.expect("commit");
            flag.set(true);
        });
        while progress.total() == Bytes::ZERO {
            ring.yield_now().await;
        }
        let error = disk.resize_with(&ring, Bytes(50 << 20), ResizeOptions::default()).await;
        assert_eq!(error.expect_err("busy").kind(), ErrorKind::Busy);
        let name = SnapshotChange::Create("s".to_owned());
        let error = disk.snapshot(&ring, name).await.expect_err("busy");
        assert_eq!(error.kind(), ErrorKind::Busy);
        while !done.get() {
            ring.yield_now().await;
        }
        assert_eq!(disk.resize(&ring, Bytes(50 << 20)).await, Ok(()));
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    bytes.resize(50 << 20, 0);
    same_for_qemu(&directory, "base.raw", "raw", &bytes);
}

/// A commit that runs as a task: whether it is over, and how it ended.
type Running = std::rc::Rc<std::cell::RefCell<Option<Result<(), crate::Error>>>>;

/// Starts a commit and waits until it copies.
async fn start_commit(ring: &Ring, disk: &Arc<Disk>, options: CommitOptions) -> Running {
    let progress = Arc::new(Progress::new());
    let (other, handle, shared) = (Arc::clone(disk), ring.clone(), Arc::clone(&progress));
    let ended = Running::default();
    let slot = ended.clone();
    ring.spawn(async move {
        let result = other.commit(&handle, options, &shared).await;
        *slot.borrow_mut() = Some(result);
    });
    while progress.total() == Bytes::ZERO && ended.borrow().is_none() {
        ring.yield_now().await;
    }
    ended
}

/// The result of a commit.
async fn end_of(ring: &Ring, commit: &Running) -> Result<(), crate::Error> {
    loop {
        if let Some(result) = commit.borrow_mut().take() {
            return result;
        }
        ring.yield_now().await;
    }
}

#[test]
fn clients_append_while_a_commit_copies() {
    for (name, format, options) in [
        ("base.raw", "raw", CommitOptions::TOP),
        ("base.qcow2", "qcow2", CommitOptions::TOP),
        ("base.qcow2", "qcow2", CommitOptions { top: 1, base: 2, keep_top: false }),
    ] {
        let directory = directory();
        let mut bytes = image(&directory, name, format, 1);
        overlay(&directory, "mid.qcow2", (name, format), &mut bytes, 2);
        let mut top = "mid.qcow2";
        if options.top > 0 {
            overlay(&directory, "top.qcow2", (top, "qcow2"), &mut bytes, 3);
            top = "top.qcow2";
        }
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let load = Load::start(&disk, &bytes, 16);
            let commit = start_commit(&ring, &disk, options).await;
            // Past the end, a gap between, until the commit is over and once more. Whole sectors:
            // the base may be raw and the top already when it grows, and QEMU rounds the size of a
            // raw image.
            let data = ringdisk_ring::IoBuf::new(140 * 512, 512);
            data.fill(0x5a);
            let mut appended = 0;
            while commit.borrow().is_none() || appended < 3 {
                let at = bytes.len() + 200 * 512;
                let end = at + data.len();
                assert_eq!(disk.grow(&ring, Bytes::of(end)).await, Ok(()));
                assert_eq!(disk.write(&ring, at as u64, &data).await, Ok(data.len()));
                bytes.resize(end, 0);
                bytes[at..].fill(0x5a);
                appended += 1;
            }
            end_of(&ring, &commit).await.expect("commit");
            bytes.resize(usize::try_from(disk.size()).expect("small"), 0);
            let last = if options.top > 0 { top } else { name };
            finish(&ring, &directory, disk, load, last, &mut bytes).await;
        });
    }
}

#[test]
fn a_client_changes_the_size_while_a_commit_copies() {
    for (name, format) in [("base.raw", "raw"), ("base.qcow2", "qcow2")] {
        // The last size of the disk.
        for sizes in [&[12 << 20][..], &[12 << 20, 20 << 20], &[40 << 20, 10 << 20, 30 << 20]] {
            let directory = directory();
            let mut bytes = image(&directory, name, format, 1);
            overlay(&directory, "top.qcow2", (name, format), &mut bytes, 2);
            run(async |ring| {
                let disk = opened(&ring, &directory, "top.qcow2").await;
                let load = Load::start(&disk, &bytes[..8 << 20], 17);
                let commit = start_commit(&ring, &disk, CommitOptions::TOP).await;
                for size in sizes {
                    assert_eq!(disk.resize(&ring, Bytes(*size)).await, Ok(()));
                    bytes.resize(usize::try_from(*size).expect("small"), 0);
                }
                end_of(&ring, &commit).await.expect("commit");
                assert_eq!(disk.size(), Bytes::of(bytes.len()));
                load.progress(&ring, SOME).await;
                finish(&ring, &directory, disk, load, name, &mut bytes).await;
            });
            // Whatever size the former top has: where it has something it is what the disk has.
            let shown = qemu_img(&directory, &["map", "-f", "qcow2", "top.qcow2"]);
            assert!(!shown.contains("top.qcow2"), "{shown}");
            same_for_qemu(&directory, "top.qcow2", "qcow2", &bytes);
        }
    }
}

#[test]
fn a_base_that_is_longer_is_cut_to_the_size_of_the_disk() {
    for (name, format) in [("base.raw", "raw"), ("base.qcow2", "qcow2")] {
        let directory = directory();
        let mut bytes = image(&directory, name, format, 1);
        overlay(&directory, "top.qcow2", (name, format), &mut bytes, 2);
        qemu_img(&directory, &["resize", "-q", "--shrink", "-f", "qcow2", "top.qcow2", "11M"]);
        bytes.truncate(11 << 20);
        run(async |ring| {
            let disk = opened(&ring, &directory, "top.qcow2").await;
            let load = Load::start(&disk, &bytes, 18);
            let progress = Arc::new(Progress::new());
            disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
            assert_eq!(disk.size(), Bytes(11 << 20));
            load.progress(&ring, SOME).await;
            // What was cut off does not come back.
            assert_eq!(disk.resize(&ring, Bytes(24 << 20)).await, Ok(()));
            load.progress(&ring, SOME).await;
            bytes.resize(24 << 20, 0);
            finish(&ring, &directory, disk, load, name, &mut bytes).await;
        });
    }
}

#[test]
fn a_longer_base_that_cannot_be_cut_is_refused_before_anything_is_changed() {
    let directory = directory();
    let old = image(&directory, "base.qcow2", "qcow2", 1);
    qemu_img(&directory, &["snapshot", "-c", "kept", "base.qcow2"]);
    let amend = ["amend", "-q", "-f", "qcow2", "-o", "compat=0.10", "base.qcow2"];
    qemu_img(&directory, &amend);
    let mut bytes = old.clone();
    overlay(&directory, "top.qcow2", ("base.qcow2", "qcow2"), &mut bytes, 2);
    qemu_img(&directory, &["resize", "-q", "--shrink", "-f", "qcow2", "top.qcow2", "11M"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let progress = Arc::new(Progress::new());
        let error = disk.commit(&ring, CommitOptions::TOP, &progress).await.expect_err("too long");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.message().contains("resize it to 25165824"), "{error}");
        // What the message says helps.
        assert_eq!(disk.resize(&ring, Bytes(24 << 20)).await, Ok(()));
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    bytes[11 << 20..].fill(0);
    same_for_qemu(&directory, "base.qcow2", "qcow2", &bytes);
    qemu_img(&directory, &["snapshot", "-a", "kept", "base.qcow2"]);
    same_for_qemu(&directory, "base.qcow2", "qcow2", &old);
}

#[test]
fn internal_snapshots_that_show_the_image_below_keep_it_from_being_committed_to() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "mid.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    qemu_img(&directory, &["snapshot", "-c", "old", "mid.qcow2"]);
    let old = bytes.clone();
    qemu_io(&directory, "qcow2", "mid.qcow2", &["write -P 6 0 20M"]);
    bytes[..20 << 20].fill(6);
    overlay(&directory, "top.qcow2", ("mid.qcow2", "qcow2"), &mut bytes, 3);
    let top_to_base = CommitOptions { top: 0, base: 2, keep_top: false };
    let middle = CommitOptions { top: 1, base: 2, keep_top: false };
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let progress = Arc::new(Progress::new());
        for options in [top_to_base, middle] {
            let error = disk.commit(&ring, options, &progress).await.expect_err("a snapshot");
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.message().contains("'old'"), "{error}");
            assert!(error.message().contains("mid.qcow2"), "{error}");
        }
        // Into the image that has it there is no harm.
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    same_for_qemu(&directory, "mid.qcow2", "qcow2", &bytes);
    qemu_img(&directory, &["snapshot", "-a", "old", "mid.qcow2"]);
    same_for_qemu(&directory, "mid.qcow2", "qcow2", &old);
}

#[test]
fn internal_snapshots_that_hold_all_themselves_are_kept_by_a_commit() {
    let directory = directory();
    let mut bytes = image(&directory, "base.raw", "raw", 1);
    overlay(&directory, "top.qcow2", ("base.raw", "raw"), &mut bytes, 2);
    qemu_io(&directory, "qcow2", "top.qcow2", &["write -P 6 0 20M", "write -z 20M 4M"]);
    bytes[..20 << 20].fill(6);
    bytes[20 << 20..].fill(0);
    qemu_img(&directory, &["snapshot", "-c", "old", "top.qcow2"]);
    let old = bytes.clone();
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 19);
        load.progress(&ring, SOME).await;
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, "base.raw", &mut bytes).await;
    });
    same_for_qemu(&directory, "top.qcow2", "qcow2", &bytes);
    qemu_img(&directory, &["snapshot", "-a", "old", "top.qcow2"]);
    same_for_qemu(&directory, "top.qcow2", "qcow2", &old);
}

#[test]
fn a_base_that_somebody_reads_is_not_written() {
    let directory = directory();
    let mut bytes = image(&directory, "base.qcow2", "qcow2", 1);
    overlay(&directory, "top.qcow2", ("base.qcow2", "qcow2"), &mut bytes, 2);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let path = directory.path().join("base.qcow2");
        let reader = open(&ring, &path, &reading()).await.expect("open");
        let progress = Arc::new(Progress::new());
        let error = disk.commit(&ring, CommitOptions::TOP, &progress).await.expect_err("locked");
        assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
        assert!(error.message().contains("base.qcow2"), "{error}");
        drop(reader);
        let load = Load::start(&disk, &bytes, 15);
        load.progress(&ring, SOME).await;
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("commit");
        finish(&ring, &directory, disk, load, "base.qcow2", &mut bytes).await;
    });
}
