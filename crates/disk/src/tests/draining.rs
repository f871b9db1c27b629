//! Requests and changes that wait for each other, on storage that takes its time.

use ringdisk_qcow2::Bytes;
use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};
use rustix::time::{ClockId, clock_gettime};

use super::run;
use crate::{Disk, Errno, ImageOptions, ResizeOptions};

const LEN: u64 = 1 << 20;

fn disk() -> (SimStorage, Arc<Disk>) {
    let sim = SimStorage::new(LEN, 1);
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    (sim, disk)
}

/// Starts a read; the cell has its result when it is done.
fn read(ring: &Ring, disk: &Arc<Disk>, offset: u64) -> Rc<Cell<Option<Result<usize, Errno>>>> {
    let result = Rc::new(Cell::new(None));
    let (disk, handle, cell) = (Arc::clone(disk), ring.clone(), result.clone());
    ring.spawn(async move {
        cell.set(Some(disk.read(&handle, offset, &IoBuf::new(512, 512)).await));
    });
    result
}

async fn settle(ring: &Ring) {
    for _ in 0..50 {
        ring.yield_now().await;
    }
}

#[test]
fn a_change_waits_for_requests_and_later_requests_wait_for_it() {
    run(async |ring| {
        let (sim, disk) = disk();
        sim.on(When::kind(OpKind::Read).once(), Fault::Hold);
        let before = read(&ring, &disk, 0);
        settle(&ring).await;
        let changed = Rc::new(Cell::new(None));
        let (other, handle, cell) = (Arc::clone(&disk), ring.clone(), changed.clone());
        ring.spawn(async move { cell.set(Some(other.resize(&handle, Bytes(LEN / 2)).await)) });
        settle(&ring).await;
        let after = read(&ring, &disk, 4096);
        let outside = read(&ring, &disk, LEN - 512);
        settle(&ring).await;
        assert_eq!(changed.get(), None, "a request is in flight");
        assert_eq!((after.get(), outside.get()), (None, None), "a change is under way");
        assert_eq!(disk.size(), Bytes(LEN));
        sim.release_all();
        while outside.get().is_none() {
            ring.yield_now().await;
        }
        assert_eq!((before.get(), changed.get()), (Some(Ok(512)), Some(Ok(()))));
        // The later ones see the disk as it is after the change.
        assert_eq!((after.get(), outside.get()), (Some(Ok(512)), Some(Ok(0))));
    });
}

#[test]
fn a_change_that_is_given_up_opens_the_gate() {
    run(async |ring| {
        let (sim, disk) = disk();
        sim.on(When::kind(OpKind::Read).once(), Fault::Hold);
        let before = read(&ring, &disk, 0);
        settle(&ring).await;
        {
            let mut change = pin!(disk.resize(&ring, Bytes(LEN / 2)));
            std::future::poll_fn(|context| {
                assert!(change.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            let waiting = read(&ring, &disk, 0);
            settle(&ring).await;
            assert_eq!(waiting.get(), None);
        }
        let after = read(&ring, &disk, 0);
        settle(&ring).await;
        assert_eq!((before.get(), after.get()), (None, Some(Ok(512))));
        sim.release_all();
        settle(&ring).await;
        assert_eq!(before.get(), Some(Ok(512)));
        assert_eq!(disk.resize(&ring, Bytes(LEN / 2)).await, Ok(()));
    });
}

#[test]
fn a_resize_by_command_goes_on_when_its_caller_is_gone() {
    run(async |ring| {
        let (sim, disk) = disk();
        sim.on(When::kind(OpKind::SetLen).once(), Fault::Hold);
        {
            let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
            let mut change = pin!(disk.resize_with(&ring, Bytes(LEN / 2), options));
            std::future::poll_fn(|context| {
                assert!(change.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            settle(&ring).await;
        }
        settle(&ring).await;
        assert_eq!(sim.held().len(), 1, "the file is being cut");
        let waiting = read(&ring, &disk, 0);
        settle(&ring).await;
        assert_eq!(waiting.get(), None);
        sim.release_all();
        while waiting.get().is_none() {
            ring.yield_now().await;
        }
        assert_eq!((disk.size().0, sim.len()), (LEN / 2, LEN / 2));
    });
}

#[test]
fn a_request_that_is_dropped_counts_no_more() {
    run(async |ring| {
        let (sim, disk) = disk();
        sim.on(When::kind(OpKind::Read).once(), Fault::Hang);
        {
            let buf = IoBuf::new(512, 512);
            let mut hanging = pin!(disk.read(&ring, 0, &buf));
            std::future::poll_fn(|context| {
                assert!(hanging.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
        }
        assert_eq!(disk.resize(&ring, Bytes(LEN / 2)).await, Ok(()));
        assert_eq!(disk.size(), Bytes(LEN / 2));
    });
}

#[test]
fn a_view_keeps_changes_away() {
    run(async |ring| {
        let (_sim, disk) = disk();
        let view = disk.view().await;
        let mapped = view.map(&ring, 0, Bytes(512)).await.expect("map");
        let change =
            ring.within(std::time::Duration::from_millis(50), disk.resize(&ring, Bytes(512)));
        assert!(change.await.is_err(), "a view is held");
        drop(mapped);
        drop(view);
        assert_eq!(disk.resize(&ring, Bytes(512)).await, Ok(()));
    });
}

#[test]
fn entering_is_cheap() {
    // Generous: this is no release build.
    const NANOSECONDS_MAX: i128 = 1000;
    const ROUNDS: u32 = 200_000;
    run(async |_ring| {
        let (_sim, disk) = disk();
        // Of this thread alone: others of the machine may be in its way.
        let time = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        let start = time();
        for _ in 0..ROUNDS {
            let pass = disk.enter().await;
            assert_eq!(std::hint::black_box(&pass).layers.len(), 1);
        }
        let each = (time() - start) / i128::from(ROUNDS);
        println!("{each} ns for a request to enter and leave");
        assert!(each < NANOSECONDS_MAX, "{each} ns");
    });
}
