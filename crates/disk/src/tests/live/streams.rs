//! Streams while clients work on the disk.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::rc::Rc;
use std::sync::Arc;
use std::{cell::RefCell, time::Duration};

use ringdisk_ring::Ring;
use tempfile::TempDir;

use super::{SIZE, SOME, finish, image, opened, overlay, same_for_qemu};
use crate::tests::load::Load;
use crate::tests::{assert_same, directory, open, qemu_img, qemu_io, read_steps, reading, run};
use crate::{
    CommitOptions, Disk, Error, ErrorKind, Progress, ResizeOptions, SnapshotChange, StreamOptions,
};

const WHOLE: StreamOptions = StreamOptions { base: None };

/// How many layers QEMU finds.
fn layers_for_qemu(directory: &TempDir) -> usize {
    let chain = qemu_img(directory, &["info", "--backing-chain", "-f", "qcow2", "top.qcow2"]);
    chain.matches("virtual size").count()
}

/// The images of a chain of three; the top is made with these options. What the disk shows.
fn chain(directory: &TempDir, bottom: (&str, &str), options: &str) -> Vec<u8> {
    let mut bytes = image(directory, bottom.0, bottom.1, 1);
    overlay(directory, "mid.qcow2", bottom, &mut bytes, 2);
    let create = ["create", "-q", "-f", "qcow2", "-o", options, "-b", "mid.qcow2", "-F", "qcow2"];
    qemu_img(directory, &[&create[..], &["top.qcow2"]].concat());
    qemu_io(directory, "qcow2", "top.qcow2", &["write -P 3 3M 300000"]);
    bytes[3 << 20..(3 << 20) + 300_000].fill(3);
    bytes
}

/// Streams under clients; the images that are left show the same without the others.
fn stream(bottom: (&str, &str), options: &str, base: Option<usize>, seed: u64) {
    let directory = directory();
    let mut bytes = chain(&directory, bottom, options);
    let left = base.map_or(1, |base| 4 - base);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, seed);
        load.progress(&ring, SOME).await;
        let progress = Arc::new(Progress::new());
        disk.stream(&ring, StreamOptions { base }, &progress).await.expect("stream");
        assert_eq!(progress.done(), progress.total());
        assert_eq!(disk.layers().len(), left);
        if base != Some(1) {
            fs::remove_file(directory.path().join("mid.qcow2")).expect("nobody needs it");
        }
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
    assert_eq!(layers_for_qemu(&directory), left);
}

#[test]
fn a_whole_chain_is_streamed_under_clients() {
    stream(("base.raw", "raw"), "compat=1.1", None, 31);
    stream(("base.qcow2", "qcow2"), "compat=1.1,cluster_size=4096", None, 32);
}

#[test]
fn a_chain_is_streamed_down_to_a_base_under_clients() {
    stream(("base.raw", "raw"), "compat=1.1", Some(2), 33);
    stream(("base.qcow2", "qcow2"), "compat=1.1,cluster_size=2M", Some(2), 34);
    stream(("base.raw", "raw"), "compat=1.1", Some(1), 35);
}

/// Without a flag for zeroes, what hides the base is written.
#[test]
fn an_image_of_version_2_is_filled_under_clients() {
    stream(("base.raw", "raw"), "compat=0.10", None, 36);
    stream(("base.raw", "raw"), "compat=0.10", Some(2), 37);
}

#[test]
fn an_image_with_subclusters_is_filled_under_clients() {
    stream(("base.raw", "raw"), "extended_l2=on,cluster_size=128k", None, 38);
    stream(("base.raw", "raw"), "extended_l2=on,cluster_size=128k", Some(2), 39);
}

#[test]
fn an_image_with_an_external_data_file_is_filled_under_clients() {
    stream(("base.raw", "raw"), "data_file=top.data", None, 40);
}

/// What a short layer hides must stay hidden when it is gone.
#[test]
fn a_short_layer_hides_the_base_after_it_is_gone() {
    for options in ["compat=1.1", "compat=0.10"] {
        let directory = directory();
        let mut bytes = image(&directory, "base.qcow2", "qcow2", 1);
        overlay(&directory, "mid.qcow2", ("base.qcow2", "qcow2"), &mut bytes, 2);
        let short = (5 << 20) + 512;
        let size = short.to_string();
        qemu_img(&directory, &["resize", "-q", "--shrink", "-f", "qcow2", "mid.qcow2", &size]);
        let create = ["create", "-q", "-f", "qcow2", "-o", options, "-b", "mid.qcow2", "-F"];
        qemu_img(&directory, &[&create[..], &["qcow2", "top.qcow2", "24M"]].concat());
        bytes[short..].fill(0);
        run(async |ring| {
            let disk = opened(&ring, &directory, "top.qcow2").await;
            let load = Load::start(&disk, &bytes, 41);
            let progress = Arc::new(Progress::new());
            let options = StreamOptions { base: Some(2) };
            disk.stream(&ring, options, &progress).await.expect("stream");
            load.progress(&ring, SOME).await;
            finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
        });
    }
}

/// A stream that runs as a task.
type Running = Rc<RefCell<Option<Result<(), Error>>>>;

fn start(ring: &Ring, disk: &Arc<Disk>, base: Option<usize>, progress: &Arc<Progress>) -> Running {
    let (other, handle, shared) = (Arc::clone(disk), ring.clone(), Arc::clone(progress));
    let ended = Running::default();
    let slot = ended.clone();
    ring.spawn(async move {
        let result = other.stream(&handle, StreamOptions { base }, &shared).await;
        *slot.borrow_mut() = Some(result);
    });
    ended
}

async fn end_of(ring: &Ring, stream: &Running) -> Result<(), Error> {
    loop {
        if let Some(result) = stream.borrow_mut().take() {
            return result;
        }
        ring.sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_cancelled_stream_leaves_the_chain_at_every_step() {
    let directory = directory();
    let mut bytes = chain(&directory, ("base.raw", "raw"), "compat=1.1");
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 42);
        load.progress(&ring, SOME).await;
        let mut cancelled = 0;
        for step in 0..=8u64 {
            let progress = Arc::new(Progress::new());
            let running = start(&ring, &disk, None, &progress);
            while progress.done() < Bytes(step * (3 << 20)) && running.borrow().is_none() {
                ring.yield_now().await;
            }
            progress.cancel();
            match end_of(&ring, &running).await {
                // It was over before.
                Ok(()) => break,
                Err(error) => assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}"),
            }
            cancelled += 1;
            assert_eq!(disk.layers().len(), 3);
            load.progress(&ring, SOME / 4).await;
        }
        assert!(cancelled > 2, "{cancelled} streams were cancelled");
        load.progress(&ring, SOME).await;
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
}

#[test]
fn a_paused_stream_rests_and_goes_on() {
    let directory = directory();
    let mut bytes = chain(&directory, ("base.raw", "raw"), "compat=1.1");
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 43);
        let progress = Arc::new(Progress::new());
        progress.pause();
        let running = start(&ring, &disk, None, &progress);
        // Clients go on meanwhile.
        load.progress(&ring, SOME).await;
        assert_eq!(progress.done(), Bytes::ZERO);
        assert!(running.borrow().is_none());
        let error = disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await;
        assert_eq!(error.expect_err("busy").kind(), ErrorKind::Busy);
        progress.resume();
        end_of(&ring, &running).await.expect("stream");
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
    assert_eq!(layers_for_qemu(&directory), 1);
}

/// What the disk grows over must not show what the base has there.
#[test]
fn a_client_lengthens_the_disk_during_a_stream() {
    let directory = directory();
    let mut bytes = image(&directory, "base.qcow2", "qcow2", 1);
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2"];
    qemu_img(&directory, &[&create[..], &["mid.qcow2", "10M"]].concat());
    qemu_io(&directory, "qcow2", "mid.qcow2", &["write -P 2 0 8M"]);
    bytes[..8 << 20].fill(2);
    let create = ["create", "-q", "-f", "qcow2", "-b", "mid.qcow2", "-F", "qcow2"];
    qemu_img(&directory, &[&create[..], &["top.qcow2", "10M"]].concat());
    bytes.truncate(10 << 20);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let load = Load::start(&disk, &bytes, 44);
        let progress = Arc::new(Progress::new());
        progress.set_speed(4 << 20);
        let running = start(&ring, &disk, Some(2), &progress);
        while progress.done() == Bytes::ZERO {
            ring.yield_now().await;
        }
        assert_eq!(disk.grow(&ring, Bytes(20 << 20)).await, Ok(()));
        let error = disk.resize_with(&ring, Bytes(30 << 20), ResizeOptions::default()).await;
        assert_eq!(error.expect_err("busy").kind(), ErrorKind::Busy);
        assert!(running.borrow().is_none(), "the stream is under way");
        end_of(&ring, &running).await.expect("stream");
        bytes.resize(20 << 20, 0);
        finish(&ring, &directory, disk, load, "top.qcow2", &mut bytes).await;
    });
    assert_eq!(layers_for_qemu(&directory), 2);
}

#[test]
fn a_stream_is_refused_where_a_snapshot_would_show_other_bytes() {
    let directory = directory();
    let bytes = chain(&directory, ("base.raw", "raw"), "compat=1.1");
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        let create = SnapshotChange::Create("kept".to_owned());
        disk.snapshot(&ring, create).await.expect("snapshot");
        let error = disk.stream(&ring, WHOLE, &Arc::default()).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("'kept'"), "{error}");
        let base = StreamOptions { base: Some(2) };
        disk.stream(&ring, base, &Arc::default()).await.expect_err("refused too");
        assert_eq!(disk.layers().len(), 3);
        disk.snapshot(&ring, SnapshotChange::Delete("kept".to_owned())).await.expect("delete");
        disk.stream(&ring, WHOLE, &Arc::default()).await.expect("stream");
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &bytes);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    same_for_qemu(&directory, "top.qcow2", "qcow2", &bytes);
}

#[test]
fn a_stream_needs_a_layer_below_and_a_top_that_can_be_written() {
    let directory = directory();
    chain(&directory, ("base.raw", "raw"), "compat=1.1");
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        for base in [0, 3, usize::MAX] {
            let options = StreamOptions { base: Some(base) };
            let error = disk.stream(&ring, options, &Arc::default()).await.expect_err("no base");
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        }
        drop(disk);
        let disk = open(&ring, directory.path().join("top.qcow2"), &reading()).await.expect("open");
        let error = disk.stream(&ring, WHOLE, &Arc::default()).await.expect_err("read-only");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        drop(disk);
        let disk = opened(&ring, &directory, "base.raw").await;
        let error = disk.stream(&ring, WHOLE, &Arc::default()).await.expect_err("raw");
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    });
    assert_eq!(SIZE, 24 << 20);
}

/// Zeroes and holes below stay cheap.
#[test]
fn a_streamed_image_is_not_larger_than_its_data() {
    let directory = directory();
    qemu_img(&directory, &["create", "-q", "-f", "raw", "base.raw", "1G"]);
    qemu_io(&directory, "raw", "base.raw", &["write -P 5 700M 1M"]);
    let create = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.qcow2"];
    qemu_img(&directory, &create);
    run(async |ring| {
        let disk = opened(&ring, &directory, "top.qcow2").await;
        disk.stream(&ring, WHOLE, &Arc::default()).await.expect("stream");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
    let len = fs::metadata(directory.path().join("top.qcow2")).expect("metadata").len();
    assert!((1 << 20..2 << 20).contains(&len), "{len} bytes");
}
