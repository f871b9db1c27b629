//! Holds that are given up, at each moment.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use ringdisk_disk::{Cache, Disk, Format, ImageOptions, OverlayOptions, Source};
use ringdisk_ring::{Config, CpuList, Runtime};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process::{LIMIT, until};

use ringdisk_export::EndThread;

use super::super::{ThreadSetup, WorkerThread};
use super::*;
use crate::device::Device;
use crate::device::OnError;
use crate::signals::Signals;

/// A queue thread with a plain disk.
fn thread(path: &Path) -> WorkerThread {
    std::fs::write(path, vec![7; 65536]).expect("an image");
    let options =
        ImageOptions { format: Some(Format::Raw), cache: Cache::None, ..ImageOptions::default() };
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    let source = Source::Path(path.to_owned());
    let disk = runtime.block_on(async { Disk::open(&ring, source, &options).await }).expect("open");
    let signals = Arc::new(Signals::new(false).expect("an eventfd"));
    let device =
        Device::new(("disk", Arc::default()), "", 512, false, true, OnError::Report, signals);
    let setup = ThreadSetup {
        index: 0,
        cpus: CpuList::default(),
        disk,
        device: Arc::new(device),
        pins: None,
        restricted: false,
    };
    WorkerThread::start(setup).expect("a queue thread")
}

/// The thread does nothing until something comes.
fn busy(thread: &WorkerThread) -> Sender<()> {
    let (go, gone) = channel();
    drop(thread.ask(move |_| gone.recv()));
    go
}

/// A change of the disk begins, so nobody holds it.
fn changes(thread: &WorkerThread, overlay: &Path) -> bool {
    let (overlay, begun) = (overlay.to_owned(), Instant::now());
    let changed = thread.ask_task(|worker| async move {
        worker.disk.add_overlay(&worker.ring, overlay, OverlayOptions::default()).await.is_ok()
    });
    changed.wait(|| begun.elapsed() < LIMIT) == Ok(true)
}

fn ends(mut thread: WorkerThread) {
    thread.ask_to_stop();
    assert!(thread.join(Instant::now() + LIMIT));
}

#[test]
fn a_hold_that_comes_after_somebody_gave_up_ends_at_once() {
    let directory = scratch();
    let thread = thread(&directory.path().join("disk"));
    let go = busy(&thread);
    let asked = thread.ask_task_or(Worker::hold_disk, Worker::release_disk);
    assert!(asked.wait(|| false).is_err(), "it has answered");

    go.send(()).expect("it waits");

    assert!(changes(&thread, &directory.path().join("overlay")));
    ends(thread);
}

#[test]
fn a_hold_that_comes_as_somebody_gives_up_is_let_go() {
    let directory = scratch();
    let thread = thread(&directory.path().join("disk"));
    let asked = thread.ask_task_or(Worker::hold_disk, Worker::release_disk);
    let is_held = || thread.ask(|worker| worker.held.0.borrow().is_some()).wait(|| true);
    assert_eq!(until(LIMIT, || Some(is_held()).filter(|held| *held == Ok(true))), Some(Ok(true)));
    drop(asked);

    drop(thread.ask(|worker| worker.release_disk()));

    assert!(changes(&thread, &directory.path().join("overlay")));
    ends(thread);
}

#[test]
fn of_two_holds_the_later_one_counts_and_one_release_ends_both() {
    let directory = scratch();
    let thread = thread(&directory.path().join("disk"));
    let go = busy(&thread);
    let asked = [(); 2].map(|()| thread.ask_task_or(Worker::hold_disk, Worker::release_disk));

    go.send(()).expect("it waits");

    let answers = asked.map(|asked| asked.wait(|| true).expect("an answer").is_ok());
    assert!(answers[1], "{answers:?}");
    assert_eq!(thread.ask(|worker| worker.release_disk()).wait(|| true), Ok(()));
    assert!(changes(&thread, &directory.path().join("overlay")));
    ends(thread);
}
