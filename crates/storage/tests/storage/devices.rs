//! Block devices (loop devices), with sectors of 512 and 4096 bytes.

use std::rc::Rc;
use std::sync::Arc;

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::{Allocation, Errno, ErrorKind, Kind, OpenOptions, Preallocation, Storage};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{FileSystem, Loop, scratch};
use ringdisk_testkit::process::ok_words;
use ringdisk_testkit::sim::Prng;
use tempfile::TempDir;

use crate::files::compare_with_model;
use crate::{DIRECT, block_on, buffer, image, loop_device, open, read, write};

const LEN: u64 = 2 << 20;

fn model_test(loop_options: &[&str], options: &OpenOptions, sector: u32) {
    let Some((device, _directory)) = loop_device(LEN, loop_options) else { return };
    let storage = open(device.device(), options);
    let align = if options.direct { sector } else { 1 };
    assert_eq!((storage.kind(), storage.len()), (Kind::BlockDevice, LEN));
    assert_eq!(storage.limits().offset_align, align);
    block_on(|ring| async move { compare_with_model(&ring, &storage, 7, 600).await });
}

#[test]
fn buffered_device_equals_the_model() {
    model_test(&[], &OpenOptions::default(), 512);
}

#[test]
fn direct_device_equals_the_model() {
    model_test(&["--direct-io=on"], &DIRECT, 512);
}

#[test]
fn direct_device_with_large_sectors_equals_the_model() {
    model_test(&["--sector-size", "4096"], &DIRECT, 4096);
}

#[test]
fn buffered_device_with_large_sectors_equals_the_model() {
    model_test(&["--sector-size", "4096"], &OpenOptions::default(), 4096);
}

#[test]
fn end_of_a_device_is_short_for_reads_and_no_space_for_writes() {
    let Some((device, _directory)) = loop_device(LEN, &[]) else { return };
    for options in [OpenOptions::default(), DIRECT] {
        let storage = open(device.device(), &options);
        block_on(|ring| async move {
            assert_eq!(read(&ring, &storage, LEN - 512, 4096).await.map(|b| b.len()), Ok(512));
            assert_eq!(read(&ring, &storage, LEN, 4096).await, Ok(vec![]));
            assert_eq!(write(&ring, &storage, LEN - 512, &[1; 1024]).await, Ok(512));
            assert_eq!(write(&ring, &storage, LEN, &[1; 512]).await, Err(Errno::NOSPC));
            assert_eq!(write(&ring, &storage, LEN + 5, &[1; 5]).await, Err(Errno::NOSPC));
            let zeroes = storage.write_zeroes(&ring, LEN - 512, 1024, true, true).await;
            assert_eq!(zeroes, Err(Errno::NOSPC));
            assert_eq!(storage.set_len(&ring, LEN).await, Ok(()));
            assert_eq!(storage.set_len(&ring, LEN * 2).await, Err(Errno::OPNOTSUPP));
            let space = storage.preallocate(&ring, 0, LEN, Preallocation::Falloc).await;
            assert_eq!(space, Ok(()));
            assert_eq!(storage.allocation(&ring, 512, 9).await, Ok((Allocation::Data, 9)));
            assert_eq!(storage.allocated_bytes(), LEN);
        });
    }
}

#[test]
fn discard_of_a_device_gives_space_back() {
    let Some((device, directory)) = loop_device(LEN, &[]) else { return };
    let storage = open(device.device(), &DIRECT);
    block_on(|ring| async move {
        write(&ring, &storage, 0, &vec![1; 1 << 20]).await.unwrap();
        storage.flush(&ring).await.unwrap();
        // The parts of sectors at both ends stay.
        storage.discard(&ring, 65536 - 1, 131_074).await.unwrap();
        assert_eq!(storage.discard(&ring, 100, 300).await, Ok(()));
        assert_eq!(read(&ring, &storage, 65535, 1).await, Ok(vec![1]));
        assert_eq!(read(&ring, &storage, 196_608, 1).await, Ok(vec![1]));
        let backing = open(&directory.path().join("device"), &OpenOptions::default());
        let hole = backing.allocation(&ring, 65536, 1 << 20).await;
        assert_eq!(hole, Ok((Allocation::Hole, 131_072)));
    });
}

/// A device that cannot zero by itself: the file below it is where no holes can be made.
///
/// What is dropped last comes last.
fn device_without_holes() -> Option<(Loop, FileSystem, TempDir)> {
    if !needs_root() {
        return None;
    }
    let directory = scratch();
    let memory = FileSystem::ramfs(&directory.path().join("ramfs"));
    let device = Loop::attach(&image(memory.path(), "device", LEN), &[])?;
    Some((device, memory, directory))
}

#[test]
fn a_hole_that_a_device_refuses_changes_nothing() {
    for options in [OpenOptions::default(), DIRECT] {
        let Some((device, memory, _directory)) = device_without_holes() else { return };
        let storage = open(device.device(), &options);
        block_on(|ring| async move {
            let mut bytes = vec![1; LEN as usize];
            write(&ring, &storage, 0, &bytes).await.expect("room");
            storage.flush(&ring).await.expect("flushed");
            // Not flushed: it may be in the page cache only.
            Prng::new(1).fill(&mut bytes);
            write(&ring, &storage, 0, &bytes).await.expect("room");
            for (offset, len) in
                [(0, LEN), (0, 4096), (512, 8192 - 512), (100, 5000), (12_293, 70_000), (5, 10)]
            {
                let hole = storage.write_zeroes(&ring, offset, len, true, false).await;
                assert_eq!(hole, Err(Errno::OPNOTSUPP), "{len} bytes at {offset}");
                let now = read(&ring, &storage, 0, LEN as usize).await.expect("read");
                assert!(now == bytes, "{len} bytes at {offset}, direct: {}", options.direct);
            }
            let zeroes = storage.write_zeroes(&ring, 100, 5000, true, true).await;
            assert_eq!(zeroes, Ok(()), "but zeroes are written where that is allowed");
            bytes[100..5100].fill(0);
            storage.flush(&ring).await.expect("flushed");
            assert!(std::fs::read(memory.path().join("device")).expect("the file below") == bytes);
        });
    }
}

#[test]
fn a_hole_in_a_device_reads_as_zeroes() {
    for (loop_options, options) in [
        (&[][..], OpenOptions::default()),
        (&["--direct-io=on"], DIRECT),
        (&["--sector-size", "4096"], DIRECT),
    ] {
        let Some((device, _directory)) = loop_device(LEN, loop_options) else { return };
        let storage = open(device.device(), &options);
        block_on(|ring| async move {
            let mut bytes = vec![0; LEN as usize];
            let mut prng = Prng::new(2);
            for round in 0..60 {
                if round % 10 == 0 {
                    prng.fill(&mut bytes);
                    write(&ring, &storage, 0, &bytes).await.expect("room");
                }
                let offset = prng.below(LEN - 20_000);
                let len = 1 + prng.below([600, 20_000][round % 2]);
                let hole = storage.write_zeroes(&ring, offset, len, true, false).await;
                assert_eq!(hole, Ok(()), "{len} bytes at {offset}");
                bytes[offset as usize..(offset + len) as usize].fill(0);
                let now = read(&ring, &storage, 0, LEN as usize).await.expect("read");
                assert!(now == bytes, "{len} bytes at {offset}, direct: {}", options.direct);
            }
        });
    }
}

#[test]
fn read_only_device_is_refused_for_writing() {
    let Some((device, _directory)) = loop_device(LEN, &["--read-only"]) else { return };
    let error = Storage::open(device.device(), &OpenOptions::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::ReadOnly | ErrorKind::PermissionDenied), "{error:?}");
    assert!(error.to_string().contains("--read-only"), "{error}");
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    assert!(open(device.device(), &options).is_read_only());
}

#[test]
fn device_that_changes_its_size_is_followed() {
    let Some((device, directory)) = loop_device(LEN, &[]) else { return };
    let storage = open(device.device(), &OpenOptions::default());
    let backing = std::fs::File::options().write(true).open(directory.path().join("device"));
    let backing = backing.unwrap();
    let path = device.device().to_str().unwrap();
    backing.set_len(LEN / 2).unwrap();
    ok_words(&["losetup", "--set-capacity", path]);
    block_on(|ring| async move {
        let rest = read(&ring, &storage, LEN / 2 - 512, 1024).await;
        assert_eq!(rest.map(|bytes| bytes.len()), Ok(512));
        assert_eq!(storage.len(), LEN / 2);
    });
}

/// One task's part: writes of random alignment into bytes that no other task touches.
async fn scribble(ring: &Ring, storage: &Storage, seed: u8) {
    let mut prng = Prng::new(u64::from(seed));
    // Stripes of 600 bytes: most blocks belong to several tasks.
    for round in 0..40 {
        let offset = (round * TASKS + u64::from(seed)) * 600;
        let first = prng.below(600) as usize;
        let bytes = [seed + 1; 600];
        assert_eq!(storage.write(ring, offset, &buffer(&bytes[..first], false)).await, Ok(first));
        let rest = buffer(&bytes[first..], prng.coin());
        let done = storage.write(ring, offset + first as u64, &rest).await;
        assert_eq!(done, Ok(600 - first));
    }
}

const TASKS: u64 = 12;

fn neighbours_test(storage: Storage) {
    let storage = Arc::new(storage);
    std::thread::scope(|scope| {
        for thread in 0..2u8 {
            let storage = Arc::clone(&storage);
            scope.spawn(move || {
                block_on(|ring| async move {
                    let left = Rc::new(std::cell::Cell::new(TASKS / 2));
                    for task in 0..6 {
                        let (ring_of_task, storage) = (ring.clone(), Arc::clone(&storage));
                        let left = Rc::clone(&left);
                        ring.spawn(async move {
                            scribble(&ring_of_task, &storage, thread * 6 + task).await;
                            left.set(left.get() - 1);
                        });
                    }
                    // Aligned writes beside them keep the fast path busy.
                    let aligned = IoBuf::new(4096, 4096);
                    aligned.fill(0xaa);
                    while left.get() > 0 {
                        storage.write(&ring, 1 << 20, &aligned).await.unwrap();
                        ring.sleep(std::time::Duration::from_micros(200)).await;
                    }
                });
            });
        }
    });
    block_on(|ring| async move {
        let all = read(&ring, &storage, 0, (40 * TASKS * 600) as usize).await.unwrap();
        for (place, stripe) in all.chunks(600).enumerate() {
            let task = u8::try_from(place as u64 % TASKS).unwrap();
            assert!(stripe.iter().all(|&byte| byte == task + 1), "stripe {place}");
        }
    });
}

#[test]
fn concurrent_writes_to_parts_of_one_sector_all_survive() {
    let Some((device, _directory)) = loop_device(LEN, &["--sector-size", "4096"]) else { return };
    neighbours_test(open(device.device(), &DIRECT));
}

#[test]
fn concurrent_writes_to_parts_of_one_block_of_a_growing_file_all_survive() {
    let directory = ringdisk_testkit::mount::scratch();
    neighbours_test(open(&crate::image(directory.path(), "image", 0), &DIRECT));
}
