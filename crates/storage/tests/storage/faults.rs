//! Full file systems, files that shrink, limits.

use ringdisk_storage::{Errno, OpenOptions, Preallocation};
use ringdisk_testkit::mount::{FileSystem, scratch};

use ringdisk_testkit::mount::Loop;

use crate::{DIRECT, block_on, buffer, file_system, image, loop_device, open, read, write};

#[test]
fn full_tmpfs_gives_a_short_write_then_no_space() {
    let directory = scratch();
    let memory = FileSystem::tmpfs(&directory.path().join("tmpfs"), 1 << 20);
    let storage = open(&image(memory.path(), "image", 64 << 20), &OpenOptions::default());
    block_on(|ring| async move {
        assert_eq!(write(&ring, &storage, 0, &vec![1; 2 << 20]).await, Ok(1 << 20));
        assert_eq!(write(&ring, &storage, 1 << 20, &[1; 4096]).await, Err(Errno::NOSPC));
        let zeroes = storage.write_zeroes(&ring, 1 << 20, 4096, false, true).await;
        assert_eq!(zeroes, Err(Errno::NOSPC));
        let space = storage.preallocate(&ring, 2 << 20, 4096, Preallocation::Falloc).await;
        assert_eq!(space, Err(Errno::NOSPC));
        assert_eq!(read(&ring, &storage, (1 << 20) - 4, 8).await, Ok(vec![1, 1, 1, 1, 0, 0, 0, 0]));
        // Space that comes back can be used.
        storage.discard(&ring, 0, 65536).await.unwrap();
        assert_eq!(write(&ring, &storage, 1 << 20, &[1; 4096]).await, Ok(4096));
    });
}

#[test]
fn full_ext4_with_direct_io_gives_no_space() {
    let Some((_directory, mounted)) = file_system("ext4", 16 << 20) else { return };
    let storage = open(&image(mounted.path(), "image", 64 << 20), &DIRECT);
    block_on(|ring| async move {
        let chunk = vec![7; 1 << 20];
        let mut offset = 0;
        let errno = loop {
            match write(&ring, &storage, offset, &chunk).await {
                Ok(done) => offset += done as u64,
                Err(errno) => break errno,
            }
        };
        assert_eq!(errno, Errno::NOSPC);
        assert!((1 << 20..16 << 20).contains(&offset), "{offset}");
        // What was reported as written is there.
        let last = read(&ring, &storage, offset - 4096, 4096).await;
        assert!(last == Ok(vec![7; 4096]));
        assert_eq!(storage.flush(&ring).await, Ok(()));
    });
}

#[test]
fn file_that_shrinks_reads_short_and_stays_usable() {
    for options in [OpenOptions::default(), DIRECT] {
        let directory = scratch();
        let path = image(directory.path(), "image", 1 << 20);
        let storage = open(&path, &options);
        let other = std::fs::File::options().write(true).open(&path).unwrap();
        block_on(|ring| async move {
            write(&ring, &storage, 0, &[1; 65536]).await.unwrap();
            other.set_len(10_001).unwrap();
            assert_eq!(read(&ring, &storage, 8192, 4096).await.map(|b| b.len()), Ok(1809));
            assert_eq!(storage.len(), 10_001);
            assert_eq!(read(&ring, &storage, 512 << 10, 4096).await, Ok(vec![]));
            other.set_len(5000).unwrap();
            // Part of a block that is partly gone: the file ends where the write ends.
            assert_eq!(write(&ring, &storage, 5100, &[2; 7]).await, Ok(7));
            assert_eq!(storage.refresh_len(), Ok(5107));
            let expected = [vec![1; 2], vec![0; 100], vec![2; 7]].concat();
            assert_eq!(read(&ring, &storage, 4998, 4096).await, Ok(expected));
        });
    }
}

#[test]
fn file_that_grows_is_seen_after_a_refresh() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let storage = open(&path, &OpenOptions::default());
    std::fs::File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    block_on(|ring| async move {
        assert_eq!(storage.len(), 4096);
        assert_eq!(read(&ring, &storage, 0, 16384).await.map(|bytes| bytes.len()), Ok(8192));
        assert_eq!(storage.refresh_len(), Ok(8192));
    });
}

#[test]
fn failing_device_gives_io_errors_as_they_are() {
    for options in [OpenOptions::default(), DIRECT] {
        let Some((device, directory)) = loop_device(4 << 20, &[]) else { return };
        let storage = open(device.device(), &options);
        // The device lost its second half.
        let backing = std::fs::File::options().write(true).open(directory.path().join("device"));
        backing.unwrap().set_len(2 << 20).unwrap();
        block_on(|ring| async move {
            assert_eq!(read(&ring, &storage, 3 << 20, 4096).await, Err(Errno::IO));
            let odd = buffer(&[0; 100], true);
            assert_eq!(storage.read(&ring, (3 << 20) + 1, &odd).await, Err(Errno::IO));
            assert_eq!(read(&ring, &storage, 0, 4096).await, Ok(vec![0; 4096]));
        });
    }
}

#[test]
fn flush_that_lost_pages_fails_for_ever() {
    let directory = scratch();
    let memory = FileSystem::tmpfs(&directory.path().join("tmpfs"), 1 << 20);
    let backing = image(memory.path(), "device", 8 << 20);
    let Some(device) = Loop::attach(&backing, &[]) else { return };
    let storage = open(device.device(), &OpenOptions::default());
    block_on(|ring| async move {
        // The page cache takes it, the device has no room for it.
        assert_eq!(write(&ring, &storage, 0, &vec![1; 4 << 20]).await, Ok(4 << 20));
        let first = storage.flush(&ring).await;
        assert!(matches!(first, Err(Errno::IO | Errno::NOSPC)), "{first:?}");
        assert_eq!(storage.flush(&ring).await, first);
        // Nor by another descriptor that takes its place.
        let again = storage.reopen(&OpenOptions::default()).expect("a file").expect("a descriptor");
        assert_eq!(again.flush(&ring).await, first);
    });
    drop(device);
}

#[test]
fn direct_flush_that_failed_is_not_forgotten() {
    let directory = scratch();
    let memory = FileSystem::tmpfs(&directory.path().join("tmpfs"), 1 << 20);
    let backing = image(memory.path(), "device", 8 << 20);
    let Some(lower) = Loop::attach(&backing, &[]) else { return };
    // Its backing is a device with a page cache, which loses what is flushed and says so once.
    let Some(upper) = Loop::attach(lower.device(), &[]) else { return };
    let storage = open(upper.device(), &DIRECT);
    block_on(|ring| async move {
        assert_eq!(write(&ring, &storage, 0, &vec![1; 4 << 20]).await, Ok(4 << 20));
        let first = storage.flush(&ring).await;
        assert!(matches!(first, Err(Errno::IO)), "{first:?}");
        for _ in 0..3 {
            assert_eq!(storage.flush(&ring).await, first);
        }
    });
    drop(upper);
    drop(lower);
}
