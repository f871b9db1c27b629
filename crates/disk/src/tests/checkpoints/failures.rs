//! Old data that cannot be kept: the checkpoint fails, clients do not.

use ringdisk_qcow2::Bytes;
use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::freeze;
use crate::tests::{buffer, run};
use crate::{
    Checkpoint, CheckpointEnd, CheckpointOptions, CheckpointState, Disk, Errno, ImageOptions,
};

const LEN: u64 = 1 << 20;
const GRANULE: u64 = 4 << 10;
/// As `BEHIND_MAX` of the checkpoint.
const BEHIND: u64 = 8 << 20;

/// A disk of ones, with a checkpoint: both storages, the disk and the checkpoint.
struct World {
    image: SimStorage,
    file: SimStorage,
    disk: Arc<Disk>,
    checkpoint: Arc<Checkpoint>,
}

impl World {
    async fn new(ring: &Ring, max: u64, limit: Duration) -> World {
        World::of(ring, LEN, max, limit).await
    }

    async fn of(ring: &Ring, len: u64, max: u64, limit: Duration) -> World {
        let image = SimStorage::from_image(&vec![1; usize::try_from(len).expect("small")], 1);
        let file = SimStorage::new(0, 2);
        let disk = Disk::from_storage(image.storage(), &ImageOptions::default());
        let mut options = CheckpointOptions::new(file.storage(), Bytes(max));
        options.copy_limit = limit;
        let checkpoint = freeze(ring, &disk, options).await.expect("a checkpoint");
        World { image, file, disk, checkpoint }
    }

    async fn usual(ring: &Ring) -> World {
        World::new(ring, LEN, Duration::from_secs(600)).await
    }

    /// Starts a write of 512 bytes; the cell has its result when it is done.
    fn write(&self, ring: &Ring, offset: u64) -> Rc<Cell<Option<Result<usize, Errno>>>> {
        let result = Rc::new(Cell::new(None));
        let (disk, handle, cell) = (Arc::clone(&self.disk), ring.clone(), Rc::clone(&result));
        ring.spawn(async move {
            cell.set(Some(disk.write(&handle, offset, &buffer(&[2; 512])).await));
        });
        result
    }

    /// The frozen state is all ones.
    async fn is_frozen(&self, ring: &Ring) -> bool {
        let buf = IoBuf::new(usize::try_from(LEN).expect("small"), 4096);
        let read = self.checkpoint.disk().read(ring, 0, &buf).await;
        assert_eq!(read, Ok(buf.len()));
        buf.to_vec().iter().all(|byte| *byte == 1)
    }

    /// The checkpoint has failed, and says this.
    async fn has_failed(&self, ring: &Ring, words: &str) {
        let state = self.checkpoint.over().await;
        let CheckpointState::Failed(reason) = &state else { panic!("{state:?}") };
        assert!(reason.contains(words), "{reason}");
        let read = self.checkpoint.disk().read(ring, 0, &IoBuf::new(512, 512)).await;
        assert_eq!(read, Err(Errno::IO));
        // Clients copy nothing any more.
        let copies = self.file.count(OpKind::Write);
        assert_eq!(self.disk.write(ring, LEN - 512, &buffer(&[9; 512])).await, Ok(512));
        assert_eq!(self.file.count(OpKind::Write), copies);
        self.checkpoint.end(ring, CheckpointEnd::Drop).await.expect("the end");
        assert_eq!(self.checkpoint.state(), state, "the reason stays");
    }
}

async fn settle(ring: &Ring) {
    for _ in 0..50 {
        ring.yield_now().await;
    }
}

#[test]
fn a_full_file_fails_the_checkpoint() {
    run(async |ring| {
        let world = World::new(&ring, 3 * GRANULE, Duration::from_secs(600)).await;
        for granule in [5, 0, 5, 15] {
            let at = granule * GRANULE + 1000;
            assert_eq!(world.disk.write(&ring, at, &buffer(&[2; 512])).await, Ok(512));
        }
        assert!(world.is_frozen(&ring).await);
        assert_eq!(world.checkpoint.fleeced_bytes(), Bytes(3 * GRANULE));
        assert_eq!(world.disk.write(&ring, GRANULE, &buffer(&[2; 512])).await, Ok(512));
        world.has_failed(&ring, "it may hold 12288 bytes").await;
        assert_eq!(world.image.image()[4096..4100], [2; 4]);
    });
}

#[test]
fn errors_of_the_file_fail_the_checkpoint_and_no_client() {
    for (errno, words) in [(Errno::NOSPC, "is full"), (Errno::IO, "could not be written")] {
        run(async |ring| {
            let world = World::usual(&ring).await;
            world.file.on(When::kind(OpKind::Write).once(), Fault::Fail(errno));
            assert_eq!(world.disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
            world.has_failed(&ring, words).await;
        });
    }
}

#[test]
fn old_data_that_cannot_be_read_fails_the_checkpoint_and_no_client() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.image.on(When::kind(OpKind::Read).once(), Fault::Fail(Errno::IO));
        assert_eq!(world.disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
        world.has_failed(&ring, "could not be read").await;
    });
}

#[test]
fn a_slow_file_fails_the_checkpoint_after_the_limit() {
    run(async |ring| {
        let world = World::new(&ring, LEN, Duration::from_millis(50)).await;
        world.file.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let (first, second) = (world.write(&ring, 0), world.write(&ring, 4096));
        while first.get().is_none() || second.get().is_none() {
            ring.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!((first.get(), second.get()), (Some(Ok(512)), Some(Ok(512))));
        world.has_failed(&ring, "took longer than 0.05 s").await;
        world.file.release_all();
    });
}

#[test]
fn a_write_waits_until_old_data_is_read() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.image.on(When::kind(OpKind::Read).once(), Fault::Hold);
        let first = world.write(&ring, 0);
        settle(&ring).await;
        let (second, other) = (world.write(&ring, 1024), world.write(&ring, GRANULE));
        settle(&ring).await;
        assert_eq!((first.get(), second.get(), other.get()), (None, None, Some(Ok(512))));
        assert_eq!(world.image.image()[0], 1, "nothing is overwritten yet");
        assert!(world.is_frozen(&ring).await);
        world.image.release_all();
        settle(&ring).await;
        assert_eq!((first.get(), second.get()), (Some(Ok(512)), Some(Ok(512))));
        assert!(world.is_frozen(&ring).await);
        // Once for each granule.
        assert_eq!(world.file.count(OpKind::Write), 2);
        assert_eq!(world.checkpoint.fleeced_bytes(), Bytes(2 * GRANULE));
    });
}

#[test]
fn a_reader_waits_for_the_file_and_no_writer_does() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.file.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let writes = [0, 1024, GRANULE].map(|at| world.write(&ring, at));
        settle(&ring).await;
        assert_eq!(writes.map(|write| write.get()), [Some(Ok(512)); 3]);
        let read = |offset: u64| {
            let (frozen, handle) = (Arc::clone(world.checkpoint.disk()), ring.clone());
            let result = Rc::new(Cell::new(None));
            let cell = Rc::clone(&result);
            ring.spawn(async move {
                let buf = IoBuf::new(512, 512);
                let read = frozen.read(&handle, offset, &buf).await;
                cell.set(Some((read, buf.to_vec().iter().all(|byte| *byte == 1))));
            });
            result
        };
        let (held, other) = (read(0), read(GRANULE));
        // The turn of the second comes after a while.
        while other.get().is_none() {
            ring.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!((held.get(), other.get()), (None, Some((Ok(512), true))));
        world.file.release_all();
        while held.get().is_none() {
            ring.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(held.get(), Some((Ok(512), true)));
        assert!(world.is_frozen(&ring).await);
    });
}

#[test]
fn what_is_on_its_way_to_the_file_is_bounded() {
    run(async |ring| {
        let (len, piece) = (BEHIND + (4 << 20), 1 << 20);
        let world = World::of(&ring, len, len, Duration::from_secs(600)).await;
        world.file.on(When::kind(OpKind::Write), Fault::Hold);
        let done = Rc::new(Cell::new(0u64));
        for at in (0..len).step_by(piece) {
            let (disk, handle, done) = (Arc::clone(&world.disk), ring.clone(), Rc::clone(&done));
            ring.spawn(async move {
                let written = disk.write(&handle, at, &buffer(&vec![2; piece])).await;
                assert_eq!(written, Ok(piece));
                done.set(done.get() + 1);
            });
            settle(&ring).await;
        }
        assert_eq!(done.get() * piece as u64, BEHIND);
        while done.get() * (piece as u64) < len {
            world.file.release_all();
            ring.sleep(Duration::from_millis(1)).await;
        }
        world.file.release_all();
        assert!(world.is_frozen(&ring).await);
        assert_eq!(world.checkpoint.fleeced_bytes(), Bytes(len));
    });
}

#[test]
fn a_thread_that_ends_before_old_data_is_in_the_file_fails_the_checkpoint() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.file.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let disk = Arc::clone(&world.disk);
        let thread = std::thread::spawn(move || {
            run(async |ring| {
                assert_eq!(disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
            });
        });
        thread.join().expect("it has written");
        world.has_failed(&ring, "the thread that kept old data has ended").await;
    });
}

#[test]
fn a_writer_that_is_dropped_lets_the_next_one_copy() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.image.on(When::kind(OpKind::Read).once(), Fault::Hold);
        let waiting = {
            let data = buffer(&[3; 512]);
            let mut write = pin!(world.disk.write(&ring, 0, &data));
            for _ in 0..20 {
                std::future::poll_fn(|context| {
                    assert!(write.as_mut().poll(context).is_pending());
                    Poll::Ready(())
                })
                .await;
                ring.yield_now().await;
            }
            let waiting = world.write(&ring, 1024);
            settle(&ring).await;
            assert_eq!(waiting.get(), None);
            waiting
        };
        settle(&ring).await;
        assert_eq!(waiting.get(), Some(Ok(512)));
        assert!(world.is_frozen(&ring).await);
        // The first read ends late.
        world.image.release_all();
        settle(&ring).await;
        assert!(world.is_frozen(&ring).await);
        assert_eq!(world.image.image()[0], 1, "the dropped write was not made");
    });
}

#[test]
fn a_read_that_is_overtaken_by_a_write_gives_the_frozen_bytes() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        // The reader's read of the disk ends after the client's write.
        world.image.on(When::kind(OpKind::Read).once(), Fault::Hold);
        let (frozen, handle) = (Arc::clone(world.checkpoint.disk()), ring.clone());
        let result = Rc::new(Cell::new(None));
        let cell = Rc::clone(&result);
        ring.spawn(async move {
            let buf = IoBuf::new(3 * 65_536, 4096);
            let read = frozen.read(&handle, 1000, &buf).await;
            cell.set(Some((read, buf.to_vec().iter().all(|byte| *byte == 1))));
        });
        settle(&ring).await;
        let writes = [world.write(&ring, GRANULE + 512), world.write(&ring, 3 * GRANULE)];
        settle(&ring).await;
        assert_eq!(writes.map(|write| write.get()), [Some(Ok(512)); 2]);
        assert_eq!(result.get(), None);
        world.image.release_all();
        settle(&ring).await;
        assert_eq!(result.get(), Some((Ok(3 * 65_536), true)));
    });
}

#[test]
fn a_read_during_which_the_checkpoint_fails_gives_nothing() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.image.on(When::kind(OpKind::Read).once(), Fault::Hold);
        let (frozen, handle) = (Arc::clone(world.checkpoint.disk()), ring.clone());
        let result = Rc::new(Cell::new(None));
        let cell = Rc::clone(&result);
        ring.spawn(async move {
            cell.set(Some(frozen.read(&handle, 0, &IoBuf::new(512, 512)).await));
        });
        settle(&ring).await;
        world.file.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::IO));
        assert_eq!(world.disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
        world.image.release_all();
        settle(&ring).await;
        assert_eq!(result.get(), Some(Err(Errno::IO)));
    });
}

#[test]
fn a_client_that_finds_no_space_gets_that_of_the_file() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        assert_eq!(world.disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
        world.image.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
        assert_eq!(world.disk.write(&ring, 4096, &buffer(&[2; 512])).await, Ok(512));
        world.has_failed(&ring, "found no space left").await;
        // Without a checkpoint it is the client's.
        world.image.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
        let write = world.disk.write(&ring, 4096, &buffer(&[2; 512])).await;
        assert_eq!(write, Err(Errno::NOSPC));
    });
}

#[test]
fn a_file_that_cannot_be_read_fails_the_reader_only() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        assert_eq!(world.disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
        world.file.on(When::kind(OpKind::Read).once(), Fault::Fail(Errno::IO));
        let frozen = world.checkpoint.disk();
        assert_eq!(frozen.read(&ring, 0, &IoBuf::new(512, 512)).await, Err(Errno::IO));
        assert!(world.is_frozen(&ring).await);
        assert_eq!(world.checkpoint.state(), CheckpointState::Running);
    });
}

#[test]
fn a_client_gets_the_space_of_a_file_that_found_none_itself() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        assert_eq!(world.disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
        settle(&ring).await;
        // Both are on one full file system, whichever finds out first.
        world.file.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
        world.image.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
        assert_eq!(world.disk.write(&ring, GRANULE, &buffer(&[2; 512])).await, Ok(512));
        settle(&ring).await;
        // Another request, which finds it out when the checkpoint has failed already.
        world.image.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
        assert_eq!(world.disk.write(&ring, 2 * GRANULE, &buffer(&[2; 512])).await, Ok(512));
        world.has_failed(&ring, "space").await;
    });
}

#[test]
fn a_reader_of_what_does_not_come_into_the_file_gets_an_error() {
    run(async |ring| {
        let world = World::of(&ring, LEN, LEN, Duration::from_millis(50)).await;
        world.file.on(When::kind(OpKind::Write).once(), Fault::Hold);
        assert_eq!(world.disk.write(&ring, 0, &buffer(&[2; 512])).await, Ok(512));
        assert_eq!(world.disk.write(&ring, LEN / 2, &buffer(&[2; 512])).await, Ok(512));
        let buf = IoBuf::new(512, 512);
        assert_eq!(world.checkpoint.disk().read(&ring, 0, &buf).await, Err(Errno::IO));
        world.has_failed(&ring, "took longer than 0.05 s").await;
        world.file.release_all();
    });
}
