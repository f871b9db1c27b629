//! Long changes that run at once on one chain.

use ringdisk_qcow2::Bytes;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::Ring;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::sim::SimStorage;
use tempfile::TempDir;

use super::mirroring::{BACKGROUND, BLOCKING, Running, simulated, target};
use super::{SIZE, SOME, image, opened, overlay};
use crate::tests::load::Load;
use crate::tests::{assert_same, directory, read_steps, run};
use crate::{
    BackupOptions, BackupSync, CommitOptions, Disk, Error, ErrorKind, MirrorEnd, OverlayOptions,
    Progress, StreamOptions,
};

/// The layer between, into the one at the bottom.
const BELOW: CommitOptions = CommitOptions { top: 1, base: 2, keep_top: false };

/// A chain of three: the name of the top one, and what the disk holds.
fn three(directory: &tempfile::TempDir) -> (&'static str, Vec<u8>) {
    let mut bytes = image(directory, "base.qcow2", "qcow2", 1);
    overlay(directory, "mid.qcow2", ("base.qcow2", "qcow2"), &mut bytes, 2);
    overlay(directory, "top.qcow2", ("mid.qcow2", "qcow2"), &mut bytes, 3);
    ("top.qcow2", bytes)
}

/// A chain of six, `0.qcow2` at the bottom; what the disk `5.qcow2` holds.
fn six(directory: &tempfile::TempDir) -> Vec<u8> {
    let mut bytes = image(directory, "0.qcow2", "qcow2", 1);
    for at in 1..6 {
        let (name, below) = (format!("{at}.qcow2"), format!("{}.qcow2", at - 1));
        overlay(directory, &name, (&below, "qcow2"), &mut bytes, at + 1);
    }
    bytes
}

const fn merge(top: usize, base: usize) -> CommitOptions {
    CommitOptions { top, base, keep_top: false }
}

/// A commit or a stream that runs as a task.
struct Commit {
    progress: Arc<Progress>,
    ended: Rc<RefCell<Option<Result<(), Error>>>>,
}

/// What is begun as a [`Commit`].
#[derive(Clone, Copy, Debug)]
enum Merge {
    Commit(CommitOptions),
    /// A stream down to this layer.
    Stream(usize),
}

impl Commit {
    fn start(ring: &Ring, disk: &Arc<Disk>, options: CommitOptions, is_paused: bool) -> Commit {
        Commit::of(ring, disk, Merge::Commit(options), is_paused)
    }

    fn of(ring: &Ring, disk: &Arc<Disk>, merge: Merge, is_paused: bool) -> Commit {
        let progress = Arc::new(Progress::new());
        if is_paused {
            progress.pause();
        }
        let commit = Commit { progress, ended: Rc::default() };
        let (disk, ring_too) = (Arc::clone(disk), ring.clone());
        let (progress, slot) = (Arc::clone(&commit.progress), Rc::clone(&commit.ended));
        ring.spawn(async move {
            let end = match merge {
                Merge::Commit(options) => disk.commit(&ring_too, options, &progress).await,
                Merge::Stream(base) => {
                    disk.stream(&ring_too, StreamOptions { base: Some(base) }, &progress).await
                }
            };
            *slot.borrow_mut() = Some(end);
        });
        commit
    }

    /// Waits until it copies.
    async fn begun(&self, ring: &Ring) {
        while self.progress.total() == Bytes::ZERO {
            ring.sleep(Duration::from_millis(1)).await;
        }
    }

    async fn end(&self, ring: &Ring) -> Result<(), Error> {
        loop {
            if let Some(result) = self.ended.borrow_mut().take() {
                return result;
            }
            ring.sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Either is there first; the switch-over waits for the end of the commit.
#[test]
fn a_commit_below_the_top_runs_beside_a_mirror_which_switches_over_afterwards() {
    for (mirror_is_first, options) in
        [(true, BACKGROUND), (false, BACKGROUND), (true, BLOCKING), (false, BLOCKING)]
    {
        let directory = directory();
        let (top, mut bytes) = three(&directory);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let target = target(&ring, &directory, "copy.qcow2", SIZE).await;
            let load = Load::start(&disk, &bytes, 111);
            let (commit, mirror) = if mirror_is_first {
                let mirror = Running::start(&ring, &disk, target, options);
                assert!(mirror.control.ready().await);
                (Commit::start(&ring, &disk, BELOW, true), mirror)
            } else {
                let commit = Commit::start(&ring, &disk, BELOW, true);
                commit.begun(&ring).await;
                (commit, Running::start(&ring, &disk, target, options))
            };
            commit.begun(&ring).await;
            assert!(mirror.control.ready().await);
            load.progress(&ring, SOME).await;
            mirror.control.complete(true).expect("it can switch over");
            load.progress(&ring, SOME).await;
            assert!(!mirror.is_over(), "it waits for the commit");
            assert_eq!(disk.layers().len(), 3);
            commit.progress.resume();
            commit.end(&ring).await.expect("the commit");
            assert_eq!(mirror.end(&ring).await.expect("the mirror"), MirrorEnd::Pivoted);
            assert_eq!(disk.layers().len(), 1);
            load.progress(&ring, SOME).await;
            super::finish(&ring, &directory, disk, load, "copy.qcow2", &mut bytes).await;
        });
    }
}

/// What clients write while the commit ends, is cancelled or fails is in the copy.
#[test]
fn a_mirror_stays_in_step_over_the_end_of_a_commit_below_the_top() {
    for is_cancelled in [false, true] {
        let directory = directory();
        let (top, mut bytes) = three(&directory);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, sim) = simulated(SIZE);
            let load = Load::start(&disk, &bytes, 112);
            let mirror = Running::start(&ring, &disk, target, BACKGROUND);
            for _ in 0..3 {
                let commit = Commit::start(&ring, &disk, BELOW, false);
                commit.begun(&ring).await;
                if is_cancelled {
                    commit.progress.cancel();
                }
                assert_eq!(commit.end(&ring).await.is_err(), is_cancelled);
                load.progress(&ring, SOME).await;
                if !is_cancelled {
                    break;
                }
            }
            assert_eq!(disk.layers().len(), if is_cancelled { 3 } else { 2 });
            assert!(mirror.control.ready().await);
            let known = load.halt(&ring).await;
            mirror.control.complete(false).expect("complete");
            assert_eq!(mirror.end(&ring).await.expect("the mirror"), MirrorEnd::Copied);
            let copy = Disk::from_storage(sim.storage(), &Default::default());
            let copied = read_steps(&ring, &copy, 1 << 20).await;
            assert_same(&copied[..known.len()], &known);
            bytes.copy_from_slice(&copied);
            let load = Load::start(&disk, &bytes, 113);
            super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
        });
    }
}

/// Whether the one named first begins or ends first, and whether the first and the second one end
/// by themselves. Two for each case, each of them in one of three cases; all with
/// `RINGDISK_FULL=1`.
fn endings(case: usize) -> Vec<(bool, bool, bool)> {
    let all = [
        (true, true, true),
        (false, true, true),
        (true, false, true),
        (false, false, true),
        (true, true, false),
        (false, true, false),
    ];
    let of_case = all.into_iter().enumerate().filter(|(at, _)| full() || at % 3 == case % 3);
    of_case.map(|(_, ending)| ending).collect()
}

/// Ends the load, and looks at the disk and at all six images.
async fn finish_six(
    ring: &Ring,
    directory: &TempDir,
    disk: Arc<Disk>,
    load: Load,
    bytes: &mut [u8],
) {
    super::finish(ring, directory, disk, load, "5.qcow2", bytes).await;
    for at in 0..6 {
        let name = format!("{at}.qcow2");
        crate::tests::qemu_img(directory, &["check", "-q", "-f", "qcow2", &name]);
    }
}

/// The header of the base of the upper one is changed by the lower one where they are next to each
/// other. Either ends first, by itself or given up.
#[test]
fn two_commits_below_the_top_run_at_once_where_their_layers_are_apart() {
    let pairs =
        [(merge(1, 2), merge(3, 4)), (merge(1, 2), merge(4, 5)), (merge(1, 3), merge(4, 5))];
    for (case, (upper, lower)) in pairs.into_iter().enumerate() {
        for (upper_is_first, first_ends, second_ends) in endings(case) {
            let directory = directory();
            let mut bytes = six(&directory);
            run(async |ring| {
                let disk = opened(&ring, &directory, "5.qcow2").await;
                let load = Load::start(&disk, &bytes, 116);
                let commits = [upper, lower].map(|it| Commit::start(&ring, &disk, it, true));
                for commit in &commits {
                    commit.begun(&ring).await;
                }
                let [one, other] = &commits;
                let both = if upper_is_first { [one, other] } else { [other, one] };
                let mut layers = 6;
                let counts = [upper, lower].map(|it| it.base - it.top);
                for (place, (commit, ends)) in
                    both.into_iter().zip([first_ends, second_ends]).enumerate()
                {
                    load.progress(&ring, SOME).await;
                    match ends {
                        true => commit.progress.resume(),
                        false => commit.progress.cancel(),
                    }
                    let end = commit.end(&ring).await;
                    assert_eq!(end.is_ok(), ends, "{end:?}");
                    layers -=
                        counts[usize::from((place == 0) != upper_is_first)] * usize::from(ends);
                    assert_eq!(disk.layers().len(), layers);
                    let writable = disk.layers().iter().filter(|it| it.is_writable).count();
                    assert_eq!(writable, 2 - place, "the top, and the base of the one that runs");
                    load.progress(&ring, SOME).await;
                }
                assert_eq!(disk.fault(), None);
                finish_six(&ring, &directory, disk, load, &mut bytes).await;
            });
        }
    }
}

/// The header of the base of the stream is changed by the commit where they are next to each other.
/// Either begins and ends first, by itself or given up; the disk grows meanwhile.
#[test]
fn a_stream_runs_beside_a_commit_of_layers_below_its_base() {
    let pairs = [(2, merge(3, 4)), (2, merge(4, 5)), (1, merge(2, 3)), (3, merge(4, 5))];
    for (case, (base, below)) in pairs.into_iter().enumerate() {
        for (stream_is_first, first_ends, second_ends) in endings(case) {
            let directory = directory();
            let mut bytes = six(&directory);
            run(async |ring| {
                let disk = opened(&ring, &directory, "5.qcow2").await;
                let load = Load::start(&disk, &bytes, 118);
                let pair = [Merge::Stream(base), Merge::Commit(below)];
                let begun = if stream_is_first { [0, 1] } else { [1, 0] };
                let mut running = [None, None];
                for at in begun {
                    let job = Commit::of(&ring, &disk, pair[at], true);
                    job.begun(&ring).await;
                    running[at] = Some(job);
                }
                let mut layers = 6;
                for (at, ends) in begun.into_iter().zip([first_ends, second_ends]) {
                    let job = running[at].take().expect("it runs");
                    load.progress(&ring, SOME).await;
                    match ends {
                        true => job.progress.resume(),
                        false => job.progress.cancel(),
                    }
                    let end = job.end(&ring).await;
                    assert_eq!(end.is_ok(), ends, "{end:?}");
                    layers -= [base - 1, below.base - below.top][at] * usize::from(ends);
                    assert_eq!(disk.layers().len(), layers);
                    load.progress(&ring, SOME).await;
                }
                assert_eq!(disk.fault(), None);
                finish_six(&ring, &directory, disk, load, &mut bytes).await;
            });
        }
    }
}

/// A client makes the disk longer meanwhile: that is nothing to the base of a commit below.
#[test]
fn a_disk_grows_while_a_stream_runs_beside_a_commit() {
    let directory = directory();
    let bytes = six(&directory);
    run(async |ring| {
        let disk = opened(&ring, &directory, "5.qcow2").await;
        let stream = Commit::of(&ring, &disk, Merge::Stream(2), true);
        stream.begun(&ring).await;
        let commit = Commit::start(&ring, &disk, merge(3, 4), true);
        commit.begun(&ring).await;
        let lengths = || disk.layers().iter().map(|it| it.size()).collect::<Vec<_>>();
        let before = lengths();
        let longer = Bytes::of(bytes.len() + (1 << 20));
        assert_eq!(disk.grow(&ring, longer).await, Ok(()));
        assert_eq!((lengths()[0], &lengths()[1..]), (longer, &before[1..]));
        commit.progress.resume();
        commit.end(&ring).await.expect("the commit");
        stream.progress.resume();
        stream.end(&ring).await.expect("the stream");
        assert_eq!(disk.layers().len(), 4);
        let mut longer = bytes.clone();
        longer.resize(bytes.len() + (1 << 20), 0);
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &longer);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn streams_and_commits_whose_layers_overlap_are_refused() {
    let directory = directory();
    let mut bytes = six(&directory);
    run(async |ring| {
        let disk = opened(&ring, &directory, "5.qcow2").await;
        let load = Load::start(&disk, &bytes, 119);
        let progress = || Arc::new(Progress::new());
        let commit = Commit::start(&ring, &disk, merge(3, 4), true);
        commit.begun(&ring).await;
        for base in [Some(3), Some(4), Some(5), None] {
            let result = disk.stream(&ring, StreamOptions { base }, &progress()).await;
            assert_eq!(result.expect_err("busy").kind(), ErrorKind::Busy, "{base:?}");
        }
        commit.progress.cancel();
        commit.end(&ring).await.expect_err("given up");
        let stream = Commit::of(&ring, &disk, Merge::Stream(3), true);
        stream.begun(&ring).await;
        for options in [merge(0, 1), merge(1, 2), merge(2, 4), merge(3, 4), merge(3, 5)] {
            let result = disk.commit(&ring, options, &progress()).await;
            assert_eq!(result.expect_err("busy").kind(), ErrorKind::Busy, "{options:?}");
        }
        let other = StreamOptions { base: Some(2) };
        let result = disk.stream(&ring, other, &progress()).await;
        assert_eq!(result.expect_err("two streams").kind(), ErrorKind::Busy);
        stream.progress.resume();
        stream.end(&ring).await.expect("the stream");
        super::finish(&ring, &directory, disk, load, "5.qcow2", &mut bytes).await;
    });
}

/// Its snapshots are compared with the layers of the beginning.
#[test]
fn a_stream_of_an_image_with_internal_snapshots_runs_beside_no_commit() {
    let directory = directory();
    six(&directory);
    crate::tests::qemu_img(&directory, &["snapshot", "-c", "then", "5.qcow2"]);
    run(async |ring| {
        let disk = opened(&ring, &directory, "5.qcow2").await;
        let commit = Commit::start(&ring, &disk, merge(4, 5), true);
        commit.begun(&ring).await;
        let options = StreamOptions { base: Some(2) };
        let result = disk.stream(&ring, options, &Arc::new(Progress::new())).await;
        assert_eq!(result.expect_err("busy").kind(), ErrorKind::Busy);
        commit.progress.cancel();
        commit.end(&ring).await.expect_err("given up");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn commits_whose_layers_overlap_are_refused() {
    let directory = directory();
    let mut bytes = six(&directory);
    run(async |ring| {
        let disk = opened(&ring, &directory, "5.qcow2").await;
        let load = Load::start(&disk, &bytes, 117);
        let running = Commit::start(&ring, &disk, merge(2, 3), true);
        running.begun(&ring).await;
        for options in [merge(1, 2), merge(3, 4), merge(1, 5), merge(2, 3), merge(0, 1)] {
            let result = disk.commit(&ring, options, &Arc::new(Progress::new())).await;
            assert_eq!(result.expect_err("busy").kind(), ErrorKind::Busy, "{options:?}");
        }
        let other = Commit::start(&ring, &disk, merge(4, 5), true);
        other.begun(&ring).await;
        running.progress.resume();
        running.end(&ring).await.expect("the upper one");
        // 5, 4, 2, 1 and 0 are left: the lower one has moved up.
        let again = disk.commit(&ring, merge(2, 3), &Arc::new(Progress::new())).await;
        assert_eq!(again.expect_err("busy").kind(), ErrorKind::Busy);
        disk.commit(&ring, merge(1, 2), &Arc::new(Progress::new())).await.expect("4 into 2");
        other.progress.resume();
        other.end(&ring).await.expect("the lower one");
        assert_eq!(disk.layers().len(), 3);
        super::finish(&ring, &directory, disk, load, "5.qcow2", &mut bytes).await;
    });
}

#[test]
fn changes_whose_layers_overlap_are_refused() {
    let directory = directory();
    let (top, mut bytes) = three(&directory);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let load = Load::start(&disk, &bytes, 114);
        let commit = Commit::start(&ring, &disk, BELOW, true);
        commit.begun(&ring).await;
        let refused = |result: Result<(), Error>| {
            assert_eq!(result.expect_err("busy").kind(), ErrorKind::Busy);
        };
        let progress = || Arc::new(Progress::new());
        refused(disk.commit(&ring, BELOW, &progress()).await);
        refused(disk.commit(&ring, CommitOptions::TOP, &progress()).await);
        refused(disk.stream(&ring, StreamOptions { base: None }, &progress()).await);
        let over = directory.path().join("over.qcow2");
        refused(disk.add_overlay(&ring, over, OverlayOptions::default()).await);
        let (target, _) = simulated(SIZE);
        let mirror = Running::start(&ring, &disk, target, BACKGROUND);
        assert!(mirror.control.ready().await);
        let (other, _) = simulated(SIZE);
        let second = Running::start(&ring, &disk, other, BACKGROUND);
        assert_eq!(second.end(&ring).await.expect_err("two").kind(), ErrorKind::Busy);
        mirror.progress.cancel();
        assert_eq!(mirror.end(&ring).await.expect_err("it").kind(), ErrorKind::Cancelled);
        commit.progress.resume();
        commit.end(&ring).await.expect("the commit");
        super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
    });
}

/// A backup beside each other long change: of the instant all the same.
#[test]
fn a_backup_runs_beside_a_commit_a_stream_and_a_mirror() {
    for other in 0..4 {
        let directory = directory();
        let (top, mut bytes) = three(&directory);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, sim) = simulated(SIZE);
            let fleece = SimStorage::new(0, 9).storage();
            let options =
                BackupOptions { sync: BackupSync::Full, fleece, fleece_max: Bytes(1 << 30) };
            let then = bytes.clone();
            let backup = disk.begin_backup(&ring, target, options).await.expect("begun");
            let load = Load::start(&disk, &bytes, 115);
            load.progress(&ring, SOME).await;
            let (copy, _) = simulated(SIZE);
            let mirror = (other == 3).then(|| Running::start(&ring, &disk, copy, BACKGROUND));
            let progress = Arc::new(Progress::new());
            let mut name = top;
            match other {
                0 => disk.commit(&ring, BELOW, &progress).await.expect("a commit"),
                1 => {
                    disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("a commit");
                    name = "mid.qcow2";
                }
                2 => {
                    let all = StreamOptions { base: None };
                    disk.stream(&ring, all, &progress).await.expect("a stream");
                }
                _ => {}
            }
            if let Some(mirror) = &mirror {
                assert!(mirror.control.ready().await);
                mirror.control.complete(true).expect("it can switch over");
                load.progress(&ring, SOME).await;
                assert!(!mirror.is_over(), "it waits for the backup");
            }
            backup.run(&Progress::new()).await.expect("the backup");
            let copied = Disk::from_storage(sim.storage(), &Default::default());
            assert_same(&read_steps(&ring, &copied, 1 << 20).await, &then);
            match mirror {
                Some(mirror) => {
                    assert_eq!(mirror.end(&ring).await.expect("the mirror"), MirrorEnd::Pivoted);
                    let known = load.halt(&ring).await;
                    let now = read_steps(&ring, &disk, 1 << 20).await;
                    assert_same(&now[..known.len()], &known);
                }
                None => super::finish(&ring, &directory, disk, load, name, &mut bytes).await,
            }
        });
    }
}
