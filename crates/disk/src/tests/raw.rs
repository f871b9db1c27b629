//! Raw images.

use ringdisk_qcow2::Bytes;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ringdisk_ring::IoBuf;
use ringdisk_storage::Storage;
use ringdisk_testkit::sim::SimStorage;

use super::{assert_same, buffer, directory, open, read_steps, reading, refusal, run};
use crate::{Cache, Disk, Errno, ErrorKind, Format, ImageOptions, NewSize, ResizeOptions, Source};

fn writing() -> ImageOptions {
    ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() }
}

/// Bytes that differ from place to place.
fn pattern(len: usize) -> Vec<u8> {
    let mut value = 1_u32;
    let mut next = || {
        value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (value >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn every_byte_is_read_and_written_whatever_the_size() {
    for size in [0, 1, 511, 512, 513, 1000, 4096, 100_001] {
        let directory = directory();
        let path = directory.path().join("a.img");
        fs::write(&path, pattern(size)).expect("write");
        run(async |ring| {
            let disk = open(&ring, &path, &writing()).await.expect("open");
            assert_eq!(disk.size(), Bytes::of(size));
            for step in [512, 1000, 1 << 20] {
                assert_same(&read_steps(&ring, &disk, step).await, &pattern(size));
            }
            let ones = buffer(&vec![1; size + 10]);
            assert_eq!(disk.write(&ring, 0, &ones).await, Ok(size));
            assert_eq!(disk.flush(&ring).await, Ok(()));
        });
        assert_same(&fs::read(&path).expect("read"), &vec![1; size]);
    }
}

#[test]
fn every_cache_mode_reads_and_writes() {
    for cache in
        [Cache::Writeback, Cache::None, Cache::Writethrough, Cache::DirectSync, Cache::Unsafe]
    {
        // Not in /tmp, which may be without O_DIRECT.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
        let path = directory.path().join("a.img");
        fs::write(&path, pattern(10_000)).expect("write");
        run(async |ring| {
            let options = ImageOptions { cache, ..writing() };
            let disk = open(&ring, &path, &options).await.expect("open");
            assert_eq!(disk.cache(), cache);
            assert_same(&read_steps(&ring, &disk, 777).await, &pattern(10_000));
            assert_eq!(disk.write(&ring, 777, &buffer(&[9; 3000])).await, Ok(3000));
            assert_eq!(disk.flush(&ring).await, Ok(()));
            assert_eq!(disk.size(), Bytes(10_000));
        });
        let mut expected = pattern(10_000);
        expected[777..3777].fill(9);
        assert_same(&fs::read(&path).expect("read"), &expected);
    }
}

#[test]
fn a_window_shows_its_part_only() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(10_000)).expect("write");
    let window = |window_offset, window_size| ImageOptions {
        window_offset,
        window_size,
        ..ImageOptions::default()
    };
    run(async |ring| {
        let disk = open(&ring, &path, &window(1000, Some(Bytes(2000)))).await.expect("open");
        assert_eq!(disk.size(), Bytes(2000));
        assert!(!disk.can_resize());
        assert_eq!(disk.resize(&ring, Bytes(100)).await, Err(Errno::OPNOTSUPP));
        assert_same(&read_steps(&ring, &disk, 512).await, &pattern(10_000)[1000..3000]);
        assert_eq!(disk.write(&ring, 1990, &buffer(&[7; 100])).await, Ok(10));
        drop(disk);
        let disk = open(&ring, &path, &window(3000, None)).await.expect("open");
        assert_eq!(disk.size(), Bytes(7000));
        assert_eq!(disk.resize(&ring, Bytes(1)).await, Ok(()));
    });
    let mut expected = pattern(3001);
    expected[2990..3000].fill(7);
    assert_same(&fs::read(&path).expect("read"), &expected);
    for options in [window(9000, None), window(0, Some(Bytes(4000))), window(1, Some(Bytes::MAX))] {
        let error = refusal(&path, &options);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.message().contains("3001 bytes"), "{error}");
    }
}

#[test]
fn a_hole_that_the_storage_refuses_changes_nothing() {
    let image = pattern(100_000);
    let sim = SimStorage::device(image.len() as u64, 1);
    sim.put(0, &image);
    sim.refuse_holes();
    let whole = ImageOptions::default();
    let window =
        ImageOptions { window_offset: 1000, window_size: Some(Bytes(90_000)), ..whole.clone() };
    run(async |ring| {
        for options in [whole, window] {
            let disk = Disk::from_storage(sim.storage(), &options);
            for (offset, len) in
                [(0, disk.size()), (100, Bytes(5000)), (4096, Bytes(8192)), (5, Bytes(10))]
            {
                let punched = disk.punch(&ring, offset, len).await;
                assert_eq!(punched, Err(Errno::OPNOTSUPP), "{len} bytes at {offset}");
            }
            assert_eq!(disk.punch(&ring, 0, Bytes::ZERO).await, Ok(()));
        }
        assert_same(&sim.image(), &image);
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        assert_eq!(disk.write_zeroes(&ring, 100, Bytes(5000), true).await, Ok(()));
    });
    let mut expected = image;
    expected[100..5100].fill(0);
    assert_same(&sim.image(), &expected);
}

#[test]
fn the_size_changes_and_watchers_hear_of_it() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(5000)).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &writing()).await.expect("open");
        assert!(disk.can_resize());
        let heard = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&heard);
        let watch = disk.watch_size(move |size| list.lock().expect("list").push(size));
        assert_eq!(disk.resize(&ring, Bytes(9000)).await, Ok(()));
        assert_eq!(disk.size(), Bytes(9000));
        let mut expected = pattern(5000);
        expected.resize(9000, 0);
        assert_same(&read_steps(&ring, &disk, 4096).await, &expected);
        assert_eq!(disk.resize(&ring, Bytes(700)).await, Ok(()));
        assert_eq!(disk.grow(&ring, Bytes(600)).await, Ok(()));
        assert_eq!(disk.size(), Bytes(700));
        assert_eq!(disk.grow(&ring, Bytes(800)).await, Ok(()));
        drop(watch);
        assert_eq!(disk.resize(&ring, Bytes::ZERO).await, Ok(()));
        assert_eq!(*heard.lock().expect("list"), [9000, 700, 800].map(Bytes));
        assert_eq!(disk.resize(&ring, Bytes::MAX).await, Err(Errno::FBIG));
        assert_eq!(disk.size(), Bytes::ZERO);
    });
    assert_eq!(fs::metadata(&path).expect("stat").len(), 0);
}

#[test]
fn concurrent_growth_ends_at_the_largest_size() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, b"").expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &writing()).await.expect("open");
        let running = std::rc::Rc::new(std::cell::Cell::new(0));
        let largest = Arc::new(AtomicU64::new(0));
        for size in [8000_u64, 4000, 12_000, 1, 12_000, 11_999] {
            let (disk, handle) = (Arc::clone(&disk), ring.clone());
            let (running, largest) = (running.clone(), Arc::clone(&largest));
            running.set(running.get() + 1);
            ring.spawn(async move {
                assert_eq!(disk.grow(&handle, Bytes(size)).await, Ok(()));
                assert!(disk.size() >= Bytes(size));
                largest.fetch_max(size, Ordering::Relaxed);
                running.set(running.get() - 1);
            });
        }
        while running.get() > 0 {
            ring.yield_now().await;
        }
        assert_eq!(disk.size(), Bytes(largest.load(Ordering::Relaxed)));
    });
    assert_eq!(fs::metadata(&path).expect("stat").len(), 12_000);
}

#[test]
fn holes_are_punched_and_zeroes_written() {
    let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("directory");
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(1 << 20)).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &writing()).await.expect("open");
        let before = disk.allocated_bytes();
        assert_eq!(disk.discard(&ring, 0, Bytes(65536)).await, Ok(()));
        assert_eq!(disk.punch(&ring, 65536, Bytes(65536)).await, Ok(()));
        assert_eq!(disk.write_zeroes(&ring, 131_072, Bytes(1000), true).await, Ok(()));
        assert_eq!(disk.write_zeroes(&ring, (1 << 20) - 10, Bytes(1000), false).await, Ok(()));
        assert_eq!(disk.discard(&ring, 2 << 20, Bytes(1000)).await, Ok(()));
        assert_eq!(disk.flush(&ring).await, Ok(()));
        assert!(disk.allocated_bytes() < before);
        assert_eq!(disk.size(), Bytes(1 << 20));
    });
    let mut expected = pattern(1 << 20);
    expected[..132_072].fill(0);
    expected[(1 << 20) - 10..].fill(0);
    assert_same(&fs::read(&path).expect("read"), &expected);
}

#[test]
fn a_read_only_disk_refuses_every_change() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(5000)).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &reading()).await.expect("open");
        assert!(disk.is_read_only());
        let buf = buffer(&[0; 512]);
        assert_eq!(disk.write(&ring, 0, &buf).await, Err(Errno::ROFS));
        assert_eq!(disk.discard(&ring, 0, Bytes(512)).await, Err(Errno::ROFS));
        assert_eq!(disk.punch(&ring, 0, Bytes(512)).await, Err(Errno::ROFS));
        assert_eq!(disk.write_zeroes(&ring, 0, Bytes(512), true).await, Err(Errno::ROFS));
        assert_eq!(disk.resize(&ring, Bytes::ZERO).await, Err(Errno::ROFS));
        assert_eq!(disk.flush(&ring).await, Ok(()));
        assert!(!disk.can_resize());
    });
    assert_same(&fs::read(&path).expect("read"), &pattern(5000));
}

#[test]
fn a_probed_image_keeps_its_format() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, vec![0; 4096]).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &ImageOptions::default()).await.expect("open");
        let reason = disk.protection_reason().expect("protected");
        assert!(reason.contains("--format raw") && reason.contains("a.img"));
        let refused = Err(Errno::PERM);
        let whole = buffer(&[b"QFI\xfb\0\0\0\x03".to_vec(), vec![0; 1016]].concat());
        assert_eq!(disk.write(&ring, 0, &whole).await, refused);
        // In pieces: only the last one makes the magic.
        assert_eq!(disk.write(&ring, 0, &buffer(b"QF")).await, Ok(2));
        assert_eq!(disk.write(&ring, 2, &buffer(b"I")).await, Ok(1));
        assert_eq!(disk.write(&ring, 3, &buffer(b"\xfb")).await, refused);
        assert_eq!(disk.write(&ring, 3, &buffer(b"x")).await, Ok(1));
        // A zero can be the last byte of a magic, too.
        assert_eq!(disk.write(&ring, 0, &buffer(b"QEDx")).await, Ok(4));
        assert_eq!(disk.write_zeroes(&ring, 3, Bytes(1), false).await, Err(Errno::PERM));
        assert_eq!(disk.punch(&ring, 3, Bytes(1)).await, Err(Errno::PERM));
        assert_eq!(disk.discard(&ring, 3, Bytes(1)).await, Err(Errno::PERM));
        // So can the last byte of the sector: a text that ends there.
        let text = [&b"#"[..], &[b'x'; 501], b"\nversion="].concat();
        assert_eq!(disk.write(&ring, 0, &buffer(&text)).await, Ok(511));
        assert_eq!(disk.write(&ring, 511, &buffer(b"1")).await, refused);
        assert_eq!(disk.write(&ring, 511, &buffer(b"7")).await, Ok(1));
        assert_eq!(disk.write_zeroes(&ring, 0, Bytes(4096), true).await, Ok(()));
        // Elsewhere, and what is no magic, is free.
        assert_eq!(disk.write(&ring, 512, &whole).await, Ok(1024));
        assert_eq!(disk.write(&ring, 0, &buffer(&[0xff; 600])).await, Ok(600));
    });
    let bytes = fs::read(&path).expect("read");
    assert_eq!(bytes[..600], [0xff; 600]);
    assert_eq!(bytes[512 + 600..], vec![0; 4096 - 1112]);
}

#[test]
fn two_halves_of_a_magic_at_once_do_not_get_through() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, vec![0; 4096]).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &ImageOptions::default()).await.expect("open");
        let halves = [(0_u64, &b"QF"[..]), (2, b"I\xfb")];
        let results = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        for (offset, bytes) in halves {
            let (disk, handle, results) = (Arc::clone(&disk), ring.clone(), results.clone());
            ring.spawn(async move {
                let result = disk.write(&handle, offset, &buffer(bytes)).await;
                results.borrow_mut().push(result);
            });
        }
        while results.borrow().len() < halves.len() {
            ring.yield_now().await;
        }
        let results = results.borrow();
        assert_eq!(results.iter().filter(|r| **r == Err(Errno::PERM)).count(), 1);
    });
}

#[test]
fn a_given_format_takes_every_write() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, vec![0; 4096]).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &writing()).await.expect("open");
        assert_eq!(disk.protection_reason(), None);
        assert_eq!(disk.write(&ring, 0, &buffer(b"QFI\xfb")).await, Ok(4));
    });
    assert_eq!(&fs::read(&path).expect("read")[..4], b"QFI\xfb");
}

#[test]
fn a_file_that_shrinks_in_use_reads_as_zeroes() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(100_000)).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &writing()).await.expect("open");
        let file = fs::OpenOptions::new().write(true).open(&path).expect("open");
        file.set_len(5000).expect("cut");
        let mut expected = pattern(5000);
        expected.resize(100_000, 0);
        assert_same(&read_steps(&ring, &disk, 4096).await, &expected);
        let status = disk.block_status(&ring, 50_000, Bytes(1000)).await.expect("status");
        assert!(status.len > Bytes::ZERO);
        assert_eq!(disk.write(&ring, 99_000, &buffer(&[3; 1000])).await, Ok(1000));
        assert_eq!(disk.punch(&ring, 50_000, Bytes(1000)).await, Ok(()));
    });
}

#[test]
fn an_inherited_descriptor_is_used_as_it_is() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(5000)).expect("write");
    let source = |write: bool| {
        let file = fs::OpenOptions::new().read(true).write(write).open(&path).expect("open");
        Source::Fd(file.into(), "fd 3".to_owned())
    };
    run(async |ring| {
        let disk = Disk::open(&ring, source(true), &writing()).await.expect("open");
        assert_same(&read_steps(&ring, &disk, 512).await, &pattern(5000));
        drop(disk);
        let error = Disk::open(&ring, source(false), &writing()).await.expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert!(error.message().contains("fd 3"), "{error}");
        let options = ImageOptions { auto_read_only: true, ..ImageOptions::default() };
        let disk = Disk::open(&ring, source(false), &options).await.expect("open");
        assert!(disk.is_read_only());
        assert!(disk.read_only_reason().is_some());
    });
}

#[test]
fn any_storage_can_be_a_raw_disk() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(5000)).expect("write");
    let storage = Storage::open(&path, &ringdisk_storage::OpenOptions::default()).expect("open");
    let storage = Arc::new(storage);
    run(async |ring| {
        let options = ImageOptions { window_offset: 1000, ..ImageOptions::default() };
        let disk = Disk::from_storage(Arc::clone(&storage), &options);
        assert_eq!(disk.size(), Bytes(4000));
        assert_same(&read_steps(&ring, &disk, 4096).await, &pattern(5000)[1000..]);
        assert_eq!(disk.write(&ring, 0, &IoBuf::new(100, 1)).await, Ok(100));
    });
}

#[test]
fn the_allocated_size_is_that_of_the_file() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(100_000)).expect("write");
    let blocks = fs::metadata(&path).expect("stat").blocks();
    run(async |ring| {
        let disk = open(&ring, &path, &reading()).await.expect("open");
        assert_eq!(disk.allocated_bytes(), Bytes(blocks * 512));
        assert_eq!(disk.request_align(), 1);
        assert!(disk.optimal_transfer() >= 512);
    });
}

#[test]
fn space_that_cannot_be_had_leaves_a_raw_disk_as_it_was() {
    use ringdisk_qcow2::Preallocation;
    use ringdisk_testkit::limits::{needs, needs_root};
    use ringdisk_testkit::mount::{FileSystem, text};
    let can = std::path::Path::new("/dev/loop-control").exists();
    if !(needs_root() && needs("loop devices", can)) {
        return;
    }
    let directory = directory();
    let device = directory.path().join("file-system");
    fs::File::create(&device).and_then(|file| file.set_len(16 << 20)).expect("a file");
    // A reservation that fails on it keeps what it has got so far, and makes the file longer.
    ringdisk_testkit::process::ok_words(&["mkfs.ext4", "-q", text(&device)]);
    let mounted = FileSystem::of(&device, &directory.path().join("mounted"), "loop");
    let path = mounted.path().join("a.img");
    fs::write(&path, pattern(5000)).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &writing()).await.expect("open");
        assert_eq!(disk.flush(&ring).await, Ok(()));
        assert_eq!(disk.allocate(&ring, 10_000, Bytes(64 << 20)).await, Err(Errno::NOSPC));
        for preallocation in [Preallocation::Falloc, Preallocation::Full] {
            let options = ResizeOptions { preallocation, ..ResizeOptions::default() };
            let error =
                disk.resize_with(&ring, Bytes(64 << 20), options).await.expect_err("no space");
            assert_eq!(error.errno(), Some(Errno::NOSPC));
        }
        assert_eq!(disk.size(), Bytes(5000));
        let after = fs::metadata(&path).expect("stat");
        // But for a block of the file system's own.
        assert!(after.len() == 5000 && after.blocks() * 512 < 16384, "{}", after.blocks());
        // What is there may be reserved: from where it was asked for, not before.
        assert_eq!(disk.allocate(&ring, 4 << 20, Bytes(1 << 20)).await, Ok(()));
        assert_eq!(disk.allocate(&ring, 4 << 20, Bytes(1 << 20)).await, Err(Errno::OPNOTSUPP));
        assert_eq!(disk.size(), Bytes(5 << 20));
        let taken = fs::metadata(&path).expect("stat").blocks() * 512;
        assert!((1 << 20..2 << 20).contains(&taken), "{taken}");
    });
}

#[test]
fn a_file_that_somebody_made_longer_is_not_cut_when_the_disk_grows() {
    let directory = directory();
    let path = directory.path().join("a.img");
    fs::write(&path, pattern(5000)).expect("write");
    run(async |ring| {
        let disk = open(&ring, &path, &writing()).await.expect("open");
        fs::File::options()
            .write(true)
            .open(&path)
            .and_then(|f| f.set_len(20_000))
            .expect("longer");
        assert_eq!(disk.resize(&ring, Bytes(9000)).await, Ok(()));
        assert_eq!(disk.size(), Bytes(9000));
        assert_eq!(fs::metadata(&path).expect("stat").len(), 20_000);
        assert_eq!(disk.resize(&ring, Bytes(30_000)).await, Ok(()));
    });
    assert_eq!(fs::metadata(&path).expect("stat").len(), 30_000);
}

#[test]
fn relative_sizes_count_from_the_size_when_their_turn_comes() {
    for format in [Format::Raw, Format::Qcow2] {
        let directory = directory();
        let name = format!("a.{format}");
        super::qemu_img(&directory, &["create", "-q", "-f", &format.to_string(), &name, "1M"]);
        run(async |ring| {
            let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
            let disk = open(&ring, directory.path().join(&name), &options).await.expect("open");
            let running = std::rc::Rc::new(std::cell::Cell::new(0));
            let start = |size: NewSize| {
                let (disk, handle, running) = (Arc::clone(&disk), ring.clone(), running.clone());
                running.set(running.get() + 1);
                ring.spawn(async move {
                    let shrink = ResizeOptions { shrink: true, ..ResizeOptions::default() };
                    let resized = disk.resize_with(&handle, size, shrink).await.expect("resize");
                    assert_eq!(size.apply(resized.before).expect("a size"), resized.after);
                    running.set(running.get() - 1);
                });
            };
            for _ in 0..5 {
                start(NewSize::Grow(Bytes(65536)));
                start(NewSize::Shrink(Bytes(4096)));
            }
            while running.get() > 0 {
                ring.yield_now().await;
            }
            assert_eq!(disk.size(), Bytes((1 << 20) + 5 * (65536 - 4096)), "{format}");
            let none =
                disk.resize_with(&ring, NewSize::Shrink(disk.size()), ResizeOptions::default());
            assert_eq!(none.await.expect_err("nothing left").kind(), ErrorKind::Invalid);
            let huge = disk.resize_with(&ring, NewSize::Grow(Bytes::MAX), ResizeOptions::default());
            assert_eq!(huge.await.expect_err("too large").kind(), ErrorKind::Invalid);
        });
    }
}
