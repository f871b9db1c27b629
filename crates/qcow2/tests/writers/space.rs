//! Space that is on its way: who finds none waits for it, also while others always have requests in
//! flight.

use std::cell::Cell;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset, Nothing, Qcow2};
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, Loop, scratch};
use ringdisk_testkit::sim::{Fault, OpKind, When};

use super::common::runtime;
use super::live::{Base, Shared, buffer, writable};
use super::{CLUSTER, is_pending, live, on_stage};
use ringdisk_testkit::oracle::Below;

/// Clusters of images in real files.
const LARGE: u64 = 64 << 10;
/// Discards that are followed by a write.
const ROUNDS: u64 = 30;

/// Requests of which one is always in flight: the next begins before the last one ends.
struct Readers(Rc<Cell<bool>>);

impl Readers {
    fn new(ring: &Ring, image: &Shared) -> Readers {
        let goes_on = Rc::new(Cell::new(true));
        for _ in 0..4 {
            let (ring, image, goes_on) = (ring.clone(), image.clone(), goes_on.clone());
            let handle = ring.clone();
            ring.spawn(async move {
                let mut held = image.enter();
                while goes_on.get() {
                    let base = Base(Below::NOTHING);
                    live::read(&handle, &image, &base, 0, &mut [0; 512]).await.expect("a read");
                    handle.yield_now().await;
                    held = image.enter();
                }
                drop(held);
            });
        }
        Readers(goes_on)
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

async fn write(ring: &Ring, image: &Qcow2, offset: u64, len: u64, value: u8) -> Result<u64, Errno> {
    let data = vec![value; usize::try_from(len).expect("small")];
    let done = image.write(ring, GuestOffset(offset), &buffer(&data), &Nothing).await;
    done.map(|done| done as u64)
}

fn create(at: &Path, size: &str) {
    let mut command = Command::new("qemu-img");
    let status = command.args(["create", "-q", "-f", "qcow2"]).arg(at).arg(size).status();
    assert!(status.expect("qemu-img").success());
}

/// Fills an image up, then discards and writes again, with readers beside it.
fn fill_and_write_again(at: &Path) {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let storage = Arc::new(Storage::open(at, &Default::default()).expect("open"));
    runtime.block_on(async {
        let image = Qcow2::open(&ring, storage, &writable()).await.expect("a sound image");
        let image = Arc::new(image);
        let mut filled = 0;
        let full = loop {
            match write(&ring, &image, filled * LARGE, LARGE, 1).await {
                Ok(done) if done == LARGE => filled += 1,
                Ok(_) => {}
                Err(errno) => break errno,
            }
        };
        assert_eq!(full, Errno::NOSPC);
        assert!(filled > ROUNDS, "{filled}");
        let readers = Readers::new(&ring, &image);
        for round in 0..ROUNDS {
            let at = (1 + round) * LARGE;
            image.discard(&ring, GuestOffset(at), Bytes(LARGE), &Nothing).await.expect("a discard");
            assert_eq!(write(&ring, &image, at, LARGE, 2).await, Ok(LARGE), "round {round}");
        }
        drop(readers);
        for round in 0..ROUNDS {
            let mut bytes = [0; 16];
            let base = Base(Below::NOTHING);
            live::read(&ring, &image, &base, (1 + round) * LARGE, &mut bytes)
                .await
                .expect("a read");
            assert_eq!(bytes, [2; 16], "round {round}");
        }
        // Nothing is on its way: the disk is full, and that is said at once.
        assert_eq!(write(&ring, &image, (filled + 1) * LARGE, LARGE, 3).await, Err(Errno::NOSPC));
        image.close(&ring).await.expect("a close");
    });
}

#[test]
fn a_full_block_device_takes_what_was_discarded_before_while_readers_go_on() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let file = directory.path().join("device");
    std::fs::File::create(&file).expect("create").set_len(6 << 20).expect("length");
    let device = Loop::attach(&file, &[]).expect("a loop device");
    create(device.device(), "64M");
    fill_and_write_again(device.device());
}

#[test]
fn a_full_file_system_takes_what_was_discarded_before_while_readers_go_on() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let small = FileSystem::tmpfs(&directory.path().join("small"), 6 << 20);
    let path = small.path().join("disk.qcow2");
    create(&path, "64M");
    fill_and_write_again(&path);
}

#[test]
fn a_freed_cluster_is_used_again_where_the_file_cannot_grow() {
    // Full, or the user's quota is used up.
    for errno in [Errno::NOSPC, Errno::DQUOT] {
        a_freed_cluster_is_used_again_after(errno);
    }
}

fn a_freed_cluster_is_used_again_after(errno: Errno) {
    on_stage(|stage| async move {
        let end = stage.sim.image().len() as u64;
        let full = When::kind(OpKind::Write).at(end..u64::MAX);
        stage.sim.on(full, Fault::Fail(errno));
        let (ring, image) = (&stage.ring, &stage.image);
        assert_eq!(write(ring, image, 0, 512, 1).await, Err(errno));
        let readers = Readers::new(ring, image);
        for round in 0..5 {
            let (from, to) = ((100 + round) * CLUSTER, (101 + round) * CLUSTER);
            image
                .discard(ring, GuestOffset(from), Bytes(CLUSTER), &Nothing)
                .await
                .expect("a discard");
            assert_eq!(write(ring, image, to, 512, 1).await, Ok(512), "round {round}");
        }
        drop(readers);
        assert_eq!(write(ring, image, 0, 512, 1).await, Err(errno));
    });
}

#[test]
fn who_waits_for_space_hears_that_none_can_be_freed() {
    on_stage(|stage| async move {
        let end = stage.sim.image().len() as u64;
        stage.sim.on(When::kind(OpKind::Write).at(end..u64::MAX), Fault::Fail(Errno::NOSPC));
        let (ring, image) = (&stage.ring, &stage.image);
        image
            .discard(ring, GuestOffset(100 * CLUSTER), Bytes(CLUSTER), &Nothing)
            .await
            .expect("a discard");
        // What is to be free cannot be made durable.
        stage.sim.on(When::kind(OpKind::Flush), Fault::Fail(Errno::IO));
        assert_eq!(write(ring, image, 0, 512, 1).await, Err(Errno::NOSPC));
        assert_eq!(image.flush(ring).await, Err(Errno::IO));
    });
}

#[test]
fn who_waits_for_space_is_not_held_up_by_a_write_that_was_dropped() {
    on_stage(|stage| async move {
        let end = stage.sim.image().len() as u64;
        stage.sim.on(When::kind(OpKind::Write).at(end..u64::MAX), Fault::Fail(Errno::NOSPC));
        stage.sim.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let (ring, image) = (&stage.ring, &stage.image);
        let data = buffer(&[1; 512]);
        let mut write_in_place =
            Box::pin(image.write(ring, GuestOffset(100 * CLUSTER), &data, &Nothing));
        assert!(is_pending(&mut write_in_place).await, "it is held");
        drop(write_in_place);
        image
            .discard(ring, GuestOffset(100 * CLUSTER), Bytes(CLUSTER), &Nothing)
            .await
            .expect("a discard");
        // Its place never becomes free, since the write may still land there.
        assert_eq!(write(ring, image, 0, 512, 1).await, Err(Errno::NOSPC));
    });
}
