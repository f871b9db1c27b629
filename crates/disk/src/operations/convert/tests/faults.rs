//! Sources and targets that fail, and the way out of them.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Ring;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::{fresh, noise};
use crate::operations::convert::{ConvertOptions, ConvertReport, convert};
use crate::tests::{assert_same, run};
use crate::{Disk, Errno, Error, ErrorKind, ImageOptions, Progress};

const SIZE: usize = 5 << 20;

fn places(range: Range<u64>) -> Range<GuestOffset> {
    GuestOffset(range.start)..GuestOffset(range.end)
}

fn disk(sim: &SimStorage) -> Arc<Disk> {
    Disk::from_storage(sim.storage(), &ImageOptions::default())
}

/// Source and target, both simulated.
fn pair() -> (SimStorage, SimStorage) {
    (SimStorage::from_image(&noise(SIZE), 1), SimStorage::new(SIZE as u64, 2))
}

async fn converted(
    ring: &Ring,
    source: &SimStorage,
    target: &SimStorage,
    options: &ConvertOptions,
) -> Result<ConvertReport, Error> {
    convert(ring, &[disk(source)], &disk(target), options, &Progress::new()).await
}

/// Starts a conversion; the cell has its result when it is done.
fn start(
    ring: &Ring,
    source: &SimStorage,
    target: &SimStorage,
    options: ConvertOptions,
    progress: &Arc<Progress>,
) -> Rc<RefCell<Option<Result<ConvertReport, Error>>>> {
    let cell = Rc::new(RefCell::new(None));
    let (result, handle) = (Rc::clone(&cell), ring.clone());
    let (source, target, progress) = (disk(source), disk(target), Arc::clone(progress));
    ring.spawn(async move {
        let done = convert(&handle, &[Arc::clone(&source)], &target, &options, &progress).await;
        *result.borrow_mut() = Some(done);
    });
    cell
}

/// Lets other tasks run until they wait.
async fn settle(ring: &Ring) {
    for _ in 0..200 {
        ring.yield_now().await;
    }
}

#[test]
fn a_source_that_cannot_be_read_ends_the_conversion_with_the_offset() {
    run(async |ring| {
        let (source, target) = pair();
        source.on(When::kind(OpKind::Read).at(3_000_000..3_000_001), Fault::Fail(Errno::IO));
        let error = converted(&ring, &source, &target, &fresh()).await.expect_err("bad source");
        assert_eq!(error.kind(), ErrorKind::Io);
        // The piece that holds the byte.
        assert!(error.to_string().contains(&(2u64 << 20).to_string()), "{error}");
    });
}

#[test]
fn what_cannot_be_read_is_salvaged_by_sectors() {
    run(async |ring| {
        for tasks in [1, 8] {
            let (source, target) = pair();
            // Parts of two sectors, a whole one at the border of two pieces, and the last bytes.
            let bad = [(1000..1030, 512..1536), (1048576..1048577, 1048576..1049088)];
            let end = SIZE as u64 - 1..SIZE as u64;
            for (range, _) in &bad {
                source.on(When::kind(OpKind::Read).at(range.clone()), Fault::Fail(Errno::IO));
            }
            source.on(When::kind(OpKind::Read).at(end.clone()), Fault::Fail(Errno::IO));
            let options = ConvertOptions { salvage: true, tasks, ..fresh() };
            let report = converted(&ring, &source, &target, &options).await.expect("salvage");
            let last = SIZE as u64 - 512..SIZE as u64;
            let lost = [bad[0].1.clone(), bad[1].1.clone(), last];
            assert_eq!(report.unreadable, lost.clone().map(places));
            assert_eq!(report.unreadable_bytes, Bytes(1024 + 512 + 512));
            let mut expected = noise(SIZE);
            for range in lost {
                let range =
                    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                expected[range].fill(0);
            }
            assert_same(&target.image(), &expected);
        }
    });
}

#[test]
fn salvage_of_a_dead_source_ends() {
    run(async |ring| {
        let (source, target) = pair();
        source.on(When::any(), Fault::Fail(Errno::IO));
        let options = ConvertOptions { salvage: true, ..fresh() };
        let report = converted(&ring, &source, &target, &options).await.expect("salvage");
        assert_eq!(report.unreadable, [places(0..SIZE as u64)]);
        assert_eq!(report.unreadable_bytes, Bytes::of(SIZE));
        assert_same(&target.image(), &vec![0; SIZE]);
    });
}

#[test]
fn a_target_that_is_full_ends_the_conversion_and_nothing_is_written_afterwards() {
    run(async |ring| {
        let (source, target) = pair();
        target.on(When::kind(OpKind::Write).skip(2), Fault::Fail(Errno::NOSPC));
        let options = ConvertOptions { out_of_order: true, ..fresh() };
        let error = converted(&ring, &source, &target, &options).await.expect_err("full");
        assert!(error.to_string().contains("cannot write"), "{error}");
        let count = target.count(OpKind::Write);
        settle(&ring).await;
        assert_eq!(target.count(OpKind::Write), count);
        assert_eq!(target.hanging() + target.held().len(), 0);
    });
}

#[test]
fn a_flush_that_fails_is_reported() {
    run(async |ring| {
        let (source, target) = pair();
        target.on(When::kind(OpKind::Flush), Fault::Fail(Errno::IO));
        let error = converted(&ring, &source, &target, &fresh()).await.expect_err("no flush");
        assert!(error.to_string().contains("flush"), "{error}");
    });
}

#[test]
fn a_conversion_that_is_cancelled_waits_for_what_it_began() {
    run(async |ring| {
        let (source, target) = pair();
        target.on(When::kind(OpKind::Write), Fault::Hold);
        let progress = Arc::new(Progress::new());
        let options = ConvertOptions { tasks: 2, ..fresh() };
        let result = start(&ring, &source, &target, options, &progress);
        settle(&ring).await;
        assert_eq!(target.held().len(), 2, "two pieces are under way");
        progress.cancel();
        settle(&ring).await;
        assert!(result.borrow().is_none(), "their writes are in flight");
        target.release_all();
        settle(&ring).await;
        let error = result.take().expect("it ended").expect_err("cancelled");
        assert!(error.to_string().contains("ended early"), "{error}");
        assert_eq!(target.count(OpKind::Write), 2);
    });
}

#[test]
fn writes_begin_in_order_and_several_are_in_flight() {
    run(async |ring| {
        let (source, target) = pair();
        let time = std::time::Duration::from_millis;
        source.on(When::kind(OpKind::Read), Fault::DelayBetween(time(0), time(5)));
        target.on(When::kind(OpKind::Write), Fault::DelayBetween(time(0), time(5)));
        converted(&ring, &source, &target, &fresh()).await.expect("convert");
        let writes: Vec<u64> = target
            .log()
            .into_iter()
            .filter(|record| record.kind == OpKind::Write)
            .map(|record| record.offset)
            .collect();
        assert_eq!(writes.len(), 5);
        assert!(writes.is_sorted(), "{writes:?}");
        assert_same(&target.image(), &noise(SIZE));
    });
}

#[test]
fn without_order_a_slow_piece_holds_nobody_up() {
    run(async |ring| {
        let (source, target) = pair();
        source.on(When::kind(OpKind::Read).at(0..1), Fault::Hold);
        let progress = Arc::new(Progress::new());
        let options = ConvertOptions { out_of_order: true, ..fresh() };
        let result = start(&ring, &source, &target, options, &progress);
        settle(&ring).await;
        assert_eq!(target.count(OpKind::Write), 4);
        source.release_all();
        settle(&ring).await;
        assert!(matches!(result.take(), Some(Ok(_))));
        assert_same(&target.image(), &noise(SIZE));
    });
}
