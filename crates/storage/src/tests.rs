//! What only the inside can show. Real files and devices: `tests/storage`.

use std::future::Future;
use std::os::fd::AsFd;
use std::path::Path;

use ringdisk_ring::{Config, IoBuf, Runtime};

use crate::kinds::Zeroing;
use crate::{Limits, Lock, OpenOptions, Storage, open};

#[test]
fn storage_is_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Storage>();
}

#[test]
fn request_suits_when_offset_length_and_memory_are_aligned() {
    let limits =
        Limits { memory_align: 4, offset_align: 512, direct: true, ..Limits::byte_granular() };
    assert!(limits.suits(1024, 512, 8));
    assert!(!limits.suits(1000, 512, 8));
    assert!(!limits.suits(1024, 500, 8));
    assert!(!limits.suits(1024, 512, 6));
}

#[test]
fn last_part_of_a_block_without_a_buffered_descriptor_keeps_the_length() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 1000]).unwrap();
    let options = OpenOptions { direct: true, ..OpenOptions::default() };
    let mut file = open::open(&path, &options).unwrap();
    file.buffered_twin = None;
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(7, 1);
    buf.fill(2);
    runtime.block_on(async {
        assert_eq!(file.write(&ring, 900, &buf).await, Ok(7));
        assert_eq!(content(&path), [vec![1; 900], vec![2; 7], vec![1; 93]].concat());
        assert_eq!(file.write(&ring, 998, &buf).await, Ok(7));
        assert_eq!(file.write(&ring, 5000, &buf).await, Ok(7));
    });
    let expected =
        [vec![1; 900], vec![2; 7], vec![1; 91], vec![2; 7], vec![0; 3995], vec![2; 7]].concat();
    assert_eq!(content(&path), expected);
    assert_eq!(file.len(), 5007);
}

/// As with a device of which only the answer to the first hole tells that it makes none.
#[test]
fn a_hole_that_is_refused_unexpectedly_changes_nothing() {
    use ringdisk_testkit::mount::{FileSystem, Loop, scratch};
    use std::sync::atomic::Ordering;
    const LEN: usize = 1 << 20;
    if !ringdisk_testkit::limits::needs_root() {
        return;
    }
    let directory = scratch();
    let memory = FileSystem::ramfs(&directory.path().join("ramfs"));
    let below = memory.path().join("device");
    std::fs::write(&below, vec![1; LEN]).unwrap();
    let Some(device) = Loop::attach(&below, &[]) else { return };
    for direct in [false, true] {
        let options = OpenOptions { direct, ..OpenOptions::default() };
        let file = open::open(device.device(), &options).unwrap();
        assert!(file.refuses_holes.load(Ordering::Relaxed), "as /sys says");
        let mut runtime = Runtime::new(Config::default()).unwrap();
        let ring = runtime.ring().clone();
        let (buf, now) = (IoBuf::new(LEN, 4096), IoBuf::new(LEN, 4096));
        buf.fill(2);
        runtime.block_on(async {
            assert_eq!(file.write(&ring, 0, &buf).await, Ok(LEN));
            for (offset, len) in [(0, LEN as u64), (512, 8192), (100, 9000), (12_293, 70_000)] {
                file.refuses_holes.store(false, Ordering::Relaxed);
                let hole = file
                    .write_zeroes(&ring, offset, len, Zeroing { may_unmap: true, fallback: false })
                    .await;
                assert_eq!(hole, Err(ringdisk_ring::Errno::OPNOTSUPP), "{len} bytes at {offset}");
                assert!(file.refuses_holes.load(Ordering::Relaxed), "remembered");
                assert_eq!(file.read(&ring, 0, &now).await, Ok(LEN));
                assert!(now.to_vec() == vec![2; LEN], "{len} bytes at {offset}, direct: {direct}");
            }
        });
    }
}

fn content(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn dropped_future_of_a_change_keeps_the_image_locked() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 4096]).unwrap();
    let file = open::open(&path, &OpenOptions::default()).unwrap();
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(4096, 4096);
    runtime.block_on(async {
        let mut write = Box::pin(file.write(&ring, 0, &buf));
        std::future::poll_fn(|cx| {
            assert!(write.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        drop(write);
    });
    assert!(file.abandoned.load(std::sync::atomic::Ordering::Relaxed));
    // As the kernel, which still works on it.
    let kernel = file.owner.try_clone().unwrap();
    drop(file);
    let other = std::fs::File::open(&path).unwrap();
    assert!(!crate::lock::is_free(other.as_fd(), Lock::Exclusive, false));
    drop(kernel);
}

#[test]
fn end_of_a_storage_whose_locks_another_process_has_unlocks_nothing() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 4096]).unwrap();
    let storage = Storage::open(&path, &OpenOptions::default()).unwrap();
    let other = std::fs::File::open(&path).unwrap();
    let is_free = || crate::lock::is_free(other.as_fd(), Lock::Exclusive, false);
    let fd = storage.duplicate().unwrap().unwrap();
    // One that was adopted is not ours alone until that is said.
    let new = Storage::adopt(fd, "new", &OpenOptions::default()).unwrap();
    drop(new);
    assert!(!is_free());
    let kept = storage.duplicate().unwrap().unwrap();
    storage.share_locks(true);
    drop(storage);
    assert!(!is_free());
    drop(kept);
    assert!(is_free());
}

#[test]
fn of_flushes_that_run_at_once_none_succeeds_after_one_has_failed() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 4096]).unwrap();
    let file = open::open(&path, &OpenOptions::default()).unwrap();
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut flush = Box::pin(file.flush(&ring));
        std::future::poll_fn(|cx| {
            assert!(flush.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        // The kernel has told the other one.
        let errno = ringdisk_ring::Errno::IO;
        file.flush_failed.store(errno.raw_os_error(), std::sync::atomic::Ordering::Relaxed);
        assert_eq!(flush.await, Err(errno));
    });
}

#[test]
fn second_descriptor_has_the_lock_and_stands_in_nobodys_way() {
    use crate::lock::is_free;
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 1000]).unwrap();
    let options = OpenOptions { direct: true, ..OpenOptions::default() };
    let other = std::fs::File::open(&path).unwrap();
    let may_others = |lock| is_free(other.as_fd(), lock, true);
    let storage = Storage::open(&path, &options).unwrap();
    let file = storage.file().unwrap();
    assert!(file.buffered_twin.is_some());
    // As if the first one had been closed.
    file.held().release(file.borrow());
    assert!(!may_others(Lock::Auto));
    file.held().copy_to(file.borrow());

    // Our own second descriptor is nobody else: neither here, …
    storage.set_lock(Lock::Inactive).unwrap();
    assert!(may_others(Lock::Auto));
    storage.set_lock(Lock::Auto).unwrap();
    assert!(!may_others(Lock::Auto));
    // … nor for the same file in another mode, …
    let reader = OpenOptions { read_only: true, ..options.clone() };
    let again = storage.reopen(&reader).unwrap().unwrap();
    storage.reclaim(&again).unwrap();
    drop(again);
    assert!(!may_others(Lock::Auto));
    // … nor for a process that goes on with the descriptor.
    let fd = storage.duplicate().unwrap().unwrap();
    storage.share_locks(true);
    let new = Storage::adopt(fd, "new", &options).unwrap();
    assert!(new.file().unwrap().limits.direct);
    drop(storage);
    assert!(!may_others(Lock::Auto));
    new.share_locks(false);
    new.set_lock(Lock::Inactive).unwrap();
    assert!(may_others(Lock::Auto));
    new.set_lock(Lock::Auto).unwrap();
    assert!(!may_others(Lock::Auto));
    drop(new);
    assert!(may_others(Lock::Auto));
}

#[test]
fn who_waits_is_seen_by_others_only_and_excludes_nobody() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 4096]).unwrap();
    let waits = OpenOptions { lock: Lock::Inactive, read_only: true, ..OpenOptions::default() };
    let has = Storage::open(&path, &OpenOptions::default()).unwrap();
    let waiting = Storage::open(&path, &waits).unwrap();
    assert!(!has.is_wanted());
    waiting.want(true);
    assert!(has.is_wanted() && !waiting.is_wanted());
    has.set_lock(Lock::Inactive).unwrap();
    has.set_lock(Lock::Auto).unwrap();
    waiting.want(false);
    assert!(!has.is_wanted());
    waiting.want(true);
    drop(waiting);
    assert!(!has.is_wanted(), "who is gone does not wait");
}

#[test]
fn lock_that_is_refused_leaves_the_old_one() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, [1; 4096]).unwrap();
    let options = |lock| OpenOptions { read_only: true, lock, ..OpenOptions::default() };
    let one = Storage::open(&path, &options(Lock::Shared)).unwrap();
    let two = Storage::open(&path, &options(Lock::Shared)).unwrap();
    assert!(!one.may_lock(Lock::Exclusive));
    assert!(one.set_lock(Lock::Exclusive).is_err());
    // It still keeps writers out.
    drop(two);
    let writer = OpenOptions { lock: Lock::None, ..OpenOptions::default() };
    assert!(!Storage::open(&path, &writer).unwrap().may_lock(Lock::Exclusive));
    assert!(one.may_lock(Lock::Exclusive));
}
