//! Old data that cannot be kept: the checkpoint fails, clients do not.

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
const GRANULE: u64 = 64 << 10;

/// A disk of sixteen granules of ones, with a checkpoint: both storages, the disk and the
/// checkpoint.
struct World {
    image: SimStorage,
    file: SimStorage,
    disk: Arc<Disk>,
    checkpoint: Arc<Checkpoint>,
}

impl World {
    async fn new(ring: &Ring, max: u64, limit: Duration) -> World {
        let image = SimStorage::from_image(&[1; 1 << 20], 1);
        let file = SimStorage::new(0, 2);
        let disk = Disk::from_storage(image.storage(), &ImageOptions::default());
        let mut options = CheckpointOptions::new(file.storage(), max);
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
        assert_eq!(world.checkpoint.fleeced_bytes(), 3 * GRANULE);
        assert_eq!(world.disk.write(&ring, GRANULE, &buffer(&[2; 512])).await, Ok(512));
        world.has_failed(&ring, "it may hold 196608 bytes").await;
        assert_eq!(world.image.image()[65_536..65_540], [2; 4]);
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
fn a_write_waits_until_old_data_is_kept() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.file.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let first = world.write(&ring, 0);
        settle(&ring).await;
        let (second, other) = (world.write(&ring, 4096), world.write(&ring, GRANULE));
        settle(&ring).await;
        assert_eq!((first.get(), second.get(), other.get()), (None, None, Some(Ok(512))));
        assert_eq!(world.image.image()[0], 1, "nothing is overwritten yet");
        assert!(world.is_frozen(&ring).await);
        world.file.release_all();
        settle(&ring).await;
        assert_eq!((first.get(), second.get()), (Some(Ok(512)), Some(Ok(512))));
        assert!(world.is_frozen(&ring).await);
        // Once for each granule.
        assert_eq!(world.file.count(OpKind::Write), 2);
        assert_eq!(world.checkpoint.fleeced_bytes(), 2 * GRANULE);
    });
}

#[test]
fn a_writer_that_is_dropped_lets_the_next_one_copy() {
    run(async |ring| {
        let world = World::usual(&ring).await;
        world.file.on(When::kind(OpKind::Write).once(), Fault::Hold);
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
            let waiting = world.write(&ring, 4096);
            settle(&ring).await;
            assert_eq!(waiting.get(), None);
            waiting
        };
        settle(&ring).await;
        assert_eq!(waiting.get(), Some(Ok(512)));
        assert!(world.is_frozen(&ring).await);
        // The first copy arrives late, with the same data.
        world.file.release_all();
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
