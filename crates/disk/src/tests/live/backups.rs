//! Backups while clients work on the disk: the target gets the bytes of one instant.

use ringdisk_qcow2::Bytes;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;
use ringdisk_testkit::process::{LIMIT, patient};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::mirroring::{simulated, source, target, until, writable};
use super::{SIZE, SOME, opened};
use crate::tests::load::Load;
use crate::tests::{assert_same, buffer, directory, qemu_img, read_steps, run};
use crate::{
    BackupOptions, BackupSync, CommitOptions, Disk, Errno, Error, ErrorKind, ImageOptions, OnError,
    OverlayOptions, Progress, StreamOptions,
};

fn options(sync: BackupSync) -> BackupOptions {
    BackupOptions { sync, fleece: SimStorage::new(0, 9).storage(), fleece_max: Bytes(1 << 30) }
}

/// A backup that runs as a task.
struct Running {
    progress: Arc<Progress>,
    ended: Rc<RefCell<Option<Result<(), Error>>>>,
}

impl Running {
    async fn start(
        ring: &Ring,
        disk: &Arc<Disk>,
        target: &Arc<Disk>,
        options: BackupOptions,
    ) -> Running {
        Running::with(ring, disk, target, options, Arc::default()).await
    }

    async fn with(
        ring: &Ring,
        disk: &Arc<Disk>,
        target: &Arc<Disk>,
        options: BackupOptions,
        progress: Arc<Progress>,
    ) -> Running {
        let backup = disk.begin_backup(ring, Arc::clone(target), options).await.expect("it begins");
        let running = Running { progress, ended: Rc::default() };
        let (progress, slot) = (Arc::clone(&running.progress), Rc::clone(&running.ended));
        ring.spawn(async move {
            let end = backup.run(&progress).await;
            *slot.borrow_mut() = Some(end);
        });
        running
    }

    async fn end(&self, ring: &Ring) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            if let Some(result) = self.ended.borrow_mut().take() {
                return result;
            }
            assert!(begun.elapsed() < patient(LIMIT), "it does not end");
            ring.sleep(Duration::from_millis(1)).await;
        }
    }
}

/// What a closed image holds.
async fn content(ring: &Ring, directory: &tempfile::TempDir, name: &str) -> Vec<u8> {
    let disk = writable(ring, directory, name).await;
    let bytes = read_steps(ring, &disk, 1 << 20).await;
    assert_eq!(disk.close(ring).await, Ok(()));
    bytes
}

/// Clients begin before the backup, at its instant, and go on; the target has what they had at the
/// instant.
fn under_clients(is_raw: bool, name: &str, seed: u64) {
    let directory = directory();
    let (top, mut bytes) = source(&directory, is_raw);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let load = Load::start(&disk, &bytes, seed);
        load.progress(&ring, SOME).await;
        let known = load.halt(&ring).await;
        bytes[..known.len()].copy_from_slice(&known);
        let target = target(&ring, &directory, name, SIZE).await;
        let progress = Arc::new(Progress::new());
        progress.pause();
        let backup =
            Running::with(&ring, &disk, &target, options(BackupSync::Full), progress).await;
        let load = Load::start(&disk, &bytes, seed + 1);
        load.progress(&ring, SOME).await;
        assert_eq!(backup.progress.done(), Bytes::ZERO, "it rests");
        backup.progress.resume();
        while backup.progress.done() < Bytes(SIZE as u64 / 2) {
            ring.yield_now().await;
        }
        backup.progress.pause();
        load.progress(&ring, SOME).await;
        backup.progress.resume();
        backup.end(&ring).await.expect("the backup");
        assert_eq!(backup.progress.done(), backup.progress.total());
        drop(target);
        assert_same(&content(&ring, &directory, name).await, &bytes);
        assert_eq!(disk.layers().len(), if is_raw { 1 } else { 2 });
        // Nothing of it is left: clients keep nothing any more, and what it would forbid goes.
        assert!(disk.graph().fleece.is_none());
        load.progress(&ring, SOME).await;
        super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
    });
    if name.ends_with("qcow2") {
        qemu_img(&directory, &["check", "-q", "-f", "qcow2", name]);
    }
}

#[test]
fn a_chain_is_backed_up_to_a_qcow2_image_under_clients() {
    under_clients(false, "copy.qcow2", 91);
}

#[test]
fn a_chain_is_backed_up_to_a_raw_image_under_clients() {
    under_clients(false, "copy.raw", 92);
}

#[test]
fn a_raw_disk_is_backed_up_under_clients() {
    under_clients(true, "copy.qcow2", 93);
    under_clients(true, "copy.raw", 94);
}

/// The instant is that of one moment among the requests of clients: what the kept state shows at
/// first is what comes, and what the target held before is gone.
#[test]
fn a_backup_in_the_middle_of_requests_is_of_one_moment() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let target = target(&ring, &directory, "copy.raw", SIZE + 4096).await;
        let junk = buffer(&vec![7; 1 << 20]);
        assert_eq!(target.write(&ring, 9 << 20, &junk).await, Ok(1 << 20));
        let load = Load::start(&disk, &bytes, 95);
        load.progress(&ring, SOME).await;
        let options = options(BackupSync::Full);
        let backup = disk.begin_backup(&ring, Arc::clone(&target), options).await.expect("begun");
        let then = read_steps(&ring, backup.frozen(), 1 << 20).await;
        load.progress(&ring, SOME).await;
        backup.run(&Progress::new()).await.expect("the backup");
        drop(target);
        let copied = content(&ring, &directory, "copy.raw").await;
        assert_same(&copied[..SIZE], &then);
        super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
    });
}

/// Bytes of the top only go to another overlay, also where the chain changes meanwhile.
#[test]
fn the_top_alone_is_backed_up_while_the_chain_changes() {
    for change in 0..4 {
        let directory = directory();
        let (top, mut bytes) = source(&directory, false);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let create =
                ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "copy.qcow2"];
            qemu_img(&directory, &create);
            let target = writable(&ring, &directory, "copy.qcow2").await;
            let progress = Arc::new(Progress::new());
            progress.pause();
            let backup =
                Running::with(&ring, &disk, &target, options(BackupSync::Top), progress).await;
            let then = bytes.clone();
            let load = Load::start(&disk, &bytes, 96);
            load.progress(&ring, SOME / 2).await;
            let over = directory.path().join("over.qcow2");
            let add = disk.add_overlay(&ring, over, OverlayOptions::default());
            let mut name = top;
            match change {
                0 => drop(add),
                1 => {
                    add.await.expect("an overlay");
                    name = "over.qcow2";
                }
                2 => {
                    drop(add);
                    let all = StreamOptions { base: None };
                    disk.stream(&ring, all, &Arc::default()).await.expect("a stream");
                }
                _ => {
                    add.await.expect("an overlay");
                    disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await.expect("commit");
                }
            }
            backup.progress.resume();
            backup.end(&ring).await.expect("the backup");
            drop(target);
            assert_same(&content(&ring, &directory, "copy.qcow2").await, &then);
            super::finish(&ring, &directory, disk, load, name, &mut bytes).await;
        });
        if change == 0 {
            let map = qemu_img(&directory, &["map", "--output=json", "copy.qcow2"]);
            assert!(map.contains("\"depth\": 1"), "not all of it was copied: {map}");
        }
    }
}

/// A full backup, then what a bitmap has recorded since goes to an overlay over that.
#[test]
fn what_a_bitmap_has_marked_goes_to_an_overlay_over_the_last_backup() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    qemu_img(&directory, &["bitmap", "--add", top, "since"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let full = target(&ring, &directory, "full.qcow2", SIZE).await;
        let backup = Running::start(&ring, &disk, &full, options(BackupSync::Full)).await;
        backup.end(&ring).await.expect("the backup");
        drop(full);
        let data = buffer(&vec![8; 3 << 20]);
        assert_eq!(disk.write(&ring, 5 << 20, &data).await, Ok(3 << 20));
        bytes[5 << 20..8 << 20].fill(8);
        disk.write_zeroes(&ring, 1 << 20, Bytes(2 << 20), true).await.expect("zeroes");
        bytes[1 << 20..3 << 20].fill(0);
        let create =
            ["create", "-q", "-f", "qcow2", "-b", "full.qcow2", "-F", "qcow2", "inc.qcow2"];
        qemu_img(&directory, &create);
        let load = Load::start(&disk, &bytes, 97);
        let before = load.halt(&ring).await;
        bytes[..before.len()].copy_from_slice(&before);
        let inc = writable(&ring, &directory, "inc.qcow2").await;
        let since = || options(BackupSync::Bitmap(String::from("since")));
        let backup = Running::start(&ring, &disk, &inc, since()).await;
        let load = Load::start(&disk, &bytes, 98);
        backup.end(&ring).await.expect("the backup");
        let total = backup.progress.total().0;
        assert!((5 << 20..SIZE as u64).contains(&total), "{total}");
        drop(inc);
        assert_same(&content(&ring, &directory, "inc.qcow2").await, &bytes);
        // The bitmap goes on, and one that is not there is none.
        let graph = disk.graph();
        assert!(graph.top_image().is_some_and(|image| image.bitmap_records("since")));
        drop(graph);
        let other = target(&ring, &directory, "other.qcow2", SIZE).await;
        let missing = options(BackupSync::Bitmap(String::from("none")));
        let error = disk.begin_backup(&ring, Arc::clone(&other), missing).await;
        assert_eq!(error.expect_err("no such bitmap").kind(), ErrorKind::Invalid);
        // The target is free again.
        let backup = Running::start(&ring, &disk, &other, options(BackupSync::Full)).await;
        backup.end(&ring).await.expect("the backup");
        super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
    });
}

/// The target fails at some write or the flush; clients see nothing of it.
fn target_fails(kind: OpKind, on_error: OnError, errno: Errno) {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let (target, sim) = simulated(SIZE);
        let skip = if kind == OpKind::Flush { 0 } else { 3 };
        sim.on(When::kind(kind).skip(skip).once(), Fault::Fail(errno));
        let progress = Arc::new(Progress::new());
        progress.set_on_error(on_error);
        let then = bytes.clone();
        let backup =
            Running::with(&ring, &disk, &target, options(BackupSync::Full), progress).await;
        let load = Load::start(&disk, &bytes, 99);
        load.progress(&ring, SOME).await;
        match on_error {
            OnError::Report => {
                let error = backup.end(&ring).await.expect_err("it fails");
                let text = error.to_string();
                assert!(text.contains("cannot write the target"), "{text}");
                assert!(text.contains("is incomplete"), "{text}");
            }
            OnError::Ignore => backup.end(&ring).await.expect("the backup"),
            OnError::Stop | OnError::StopWhenFull => {
                let begun = Instant::now();
                while backup.progress.paused().is_none() {
                    assert!(begun.elapsed() < patient(LIMIT), "it does not rest");
                    ring.sleep(Duration::from_millis(1)).await;
                }
                load.progress(&ring, SOME).await;
                backup.progress.resume();
                backup.end(&ring).await.expect("the backup");
            }
        }
        if on_error != OnError::Report {
            let copy = Disk::from_storage(sim.storage(), &ImageOptions::default());
            assert_same(&read_steps(&ring, &copy, 1 << 20).await, &then);
        }
        super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
    });
}

#[test]
fn errors_of_the_target_end_a_backup_or_have_it_rest() {
    target_fails(OpKind::Write, OnError::Report, Errno::IO);
    target_fails(OpKind::Flush, OnError::Report, Errno::IO);
    target_fails(OpKind::Write, OnError::Stop, Errno::IO);
    target_fails(OpKind::Flush, OnError::Stop, Errno::IO);
    target_fails(OpKind::Write, OnError::StopWhenFull, Errno::NOSPC);
    target_fails(OpKind::Write, OnError::Ignore, Errno::IO);
}

#[test]
fn an_error_of_the_disk_ends_a_backup() {
    run(async |ring| {
        let (disk, sim) = simulated(SIZE);
        let data = buffer(&vec![5; 4 << 20]);
        assert_eq!(disk.write(&ring, 0, &data).await, Ok(4 << 20));
        let (target, _) = simulated(SIZE);
        sim.on(When::kind(OpKind::Read).skip(2), Fault::Fail(Errno::IO));
        let progress = Arc::new(Progress::new());
        progress.set_on_error(OnError::Stop);
        let backup =
            Running::with(&ring, &disk, &target, options(BackupSync::Full), progress).await;
        let error = backup.end(&ring).await.expect_err("it fails");
        assert!(error.to_string().contains("cannot read the disk"), "{error}");
        assert!(disk.graph().fleece.is_none());
        sim.clear_rules();
        assert_eq!(disk.write(&ring, 0, &data).await, Ok(4 << 20));
    });
}

/// Old data finds no place any more: the backup fails, also one that rests, and no client does.
#[test]
fn a_backup_whose_old_data_cannot_be_kept_fails_and_clients_go_on() {
    for rests in [false, true] {
        let directory = directory();
        let (top, mut bytes) = source(&directory, false);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, _) = simulated(SIZE);
            let progress = Arc::new(Progress::new());
            progress.set_speed(64 << 10);
            if rests {
                progress.pause();
            }
            let small = BackupOptions { fleece_max: Bytes(256 << 10), ..options(BackupSync::Full) };
            let backup = Running::with(&ring, &disk, &target, small, progress).await;
            let load = Load::start(&disk, &bytes, 100);
            let error = backup.end(&ring).await.expect_err("it fails");
            assert_eq!(error.kind(), ErrorKind::Io);
            assert!(error.to_string().contains("the fleecing file is full"), "{error}");
            assert!(error.to_string().contains("is incomplete"), "{error}");
            load.progress(&ring, SOME).await;
            super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
        });
    }
}

#[test]
fn a_cancelled_backup_leaves_the_disk_at_every_step() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let load = Load::start(&disk, &bytes, 101);
        for step in 0..=8u64 {
            let target = target(&ring, &directory, &format!("{step}.qcow2"), SIZE).await;
            let progress = Arc::new(Progress::new());
            if step == 0 {
                progress.pause();
            }
            let backup =
                Running::with(&ring, &disk, &target, options(BackupSync::Full), progress).await;
            while backup.progress.done() < Bytes(step * (2 << 20)) {
                ring.yield_now().await;
            }
            backup.progress.cancel();
            let error = backup.end(&ring).await.expect_err("cancelled");
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
            assert!(error.to_string().contains("is incomplete"), "{error}");
            assert!(disk.graph().fleece.is_none());
        }
        disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await.expect("commit");
        super::finish(&ring, &directory, disk, load, "base.raw", &mut bytes).await;
    });
}

#[test]
fn a_backup_that_is_given_up_while_its_target_hangs_ends() {
    for kind in [OpKind::Write, OpKind::Flush] {
        let directory = directory();
        let (top, mut bytes) = source(&directory, false);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, sim) = simulated(SIZE);
            sim.on(When::kind(kind), Fault::Hang);
            let backup = Running::start(&ring, &disk, &target, options(BackupSync::Full)).await;
            let load = Load::start(&disk, &bytes, 102);
            until(&ring, || sim.hanging() > 0).await;
            load.progress(&ring, SOME / 2).await;
            backup.progress.cancel();
            let error = backup.end(&ring).await.expect_err("cancelled");
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
            load.progress(&ring, SOME / 2).await;
            super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
        });
    }
}

/// A hand-over ends the backup, whose instant is lost, and is not held up by it.
#[test]
fn a_backup_ends_when_the_disk_is_handed_over() {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let (target, _) = simulated(SIZE);
        let progress = Arc::new(Progress::new());
        progress.pause();
        let backup =
            Running::with(&ring, &disk, &target, options(BackupSync::Full), progress).await;
        disk.suspend_for_hand_over(vec![Arc::clone(&backup.progress)]);
        drop(disk.hand_over(&ring).await.expect("nothing is in the way"));
        let error = backup.end(&ring).await.expect_err("its instant is lost");
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("the point in time of the backup was lost"), "{error}");
        disk.resume(&ring).await.expect("it goes on here");
        let load = Load::start(&disk, &bytes, 103);
        load.progress(&ring, SOME).await;
        super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
    });
}

#[test]
fn targets_that_are_none_are_refused_and_a_disk_has_one_backup_at_a_time() {
    let directory = directory();
    let (top, _) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let refused = async |target: &Arc<Disk>, kind, words: &str| {
            let full = options(BackupSync::Full);
            let error = disk.begin_backup(&ring, Arc::clone(target), full).await;
            let error = error.expect_err("refused");
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
            assert!(disk.graph().fleece.is_none());
        };
        let small = target(&ring, &directory, "small.raw", SIZE - 512).await;
        refused(&small, ErrorKind::Invalid, "make the target as large").await;
        refused(&disk, ErrorKind::Invalid, "share the image").await;
        let sim = SimStorage::new(SIZE as u64, 1);
        let reading = ImageOptions { read_only: true, ..ImageOptions::default() };
        let locked = Disk::from_storage(sim.storage(), &reading);
        refused(&locked, ErrorKind::PermissionDenied, "for reading only").await;

        let (one, two) = (simulated(SIZE).0, simulated(SIZE).0);
        let full = || options(BackupSync::Full);
        let backup = disk.begin_backup(&ring, Arc::clone(&one), full()).await.expect("begun");
        let error = disk.begin_backup(&ring, Arc::clone(&two), full()).await;
        assert_eq!(error.expect_err("two").kind(), ErrorKind::Busy);
        let error = disk.begin_backup(&ring, Arc::clone(&one), full()).await;
        assert_eq!(error.expect_err("its target").kind(), ErrorKind::Busy);
        // Dropped before it ran.
        drop(backup);
        let begun = Instant::now();
        while disk.graph().fleece.is_some() {
            assert!(begun.elapsed() < patient(LIMIT), "it does not end");
            ring.sleep(Duration::from_millis(1)).await;
        }
        let backup = disk.begin_backup(&ring, two, full()).await.expect("the next one");
        backup.run(&Progress::new()).await.expect("the backup");
    });
}
