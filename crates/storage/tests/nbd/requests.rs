//! Requests to a server that behaves.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use ringdisk_nbd_protocol::numbers::export_flags;
use ringdisk_nbd_protocol::options::BlockSizes;
use ringdisk_nbd_protocol::request::Style;
use ringdisk_ring::{Errno, IoBuf};
use ringdisk_storage::{Allocation, ErrorKind, NbdOptions};

use crate::server::{Act, FLAGS, Offer, Server};
use crate::{bytes, on_ring, pattern};

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

#[test]
fn every_style_reads_back_what_was_written() {
    for style in STYLES {
        let server = Server::new(Offer { style, ..Offer::default() });
        let storage = server.open();
        on_ring(|ring| async move {
            for (offset, len) in [(0, 512), (4096, 100_000), (700_001, 33), (1 << 19, 1 << 19)] {
                let written = pattern(len, offset);
                let offset = offset as u64;
                assert_eq!(storage.write(&ring, offset, &written).await, Ok(len), "{style:?}");
                let read = IoBuf::new(len, 4096);
                assert_eq!(storage.read(&ring, offset, &read).await, Ok(len), "{style:?}");
                assert_eq!(read.to_vec(), written.to_vec(), "{style:?}");
            }
            assert_eq!(storage.flush(&ring).await, Ok(()));
            assert_eq!(storage.write_zeroes(&ring, 4096, 4096, true, true).await, Ok(()));
            assert_eq!(storage.discard(&ring, 8192, 4096).await, Ok(()));
            let read = pattern(8192, 1);
            assert_eq!(storage.read(&ring, 4096, &read).await, Ok(8192));
            assert!(read.is_zero());
        });
    }
}

#[test]
fn many_requests_at_once_go_over_one_connection() {
    let server = Server::new(Offer::default());
    let storage = server.open();
    on_ring(|ring| async move {
        let (storage, ring) = (&storage, &ring);
        // More than there are slots.
        let all = (0..600usize).map(|at| async move {
            let (offset, written) = (at as u64 * 1024, pattern(1024, at));
            assert_eq!(storage.write(ring, offset, &written).await, Ok(1024));
            let read = IoBuf::new(1024, 1);
            assert_eq!(storage.read(ring, offset, &read).await, Ok(1024));
            assert_eq!(read.to_vec(), bytes(1024, at));
        });
        join_all(all).await;
    });
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn the_end_of_an_export_is_that_of_a_device() {
    let server = Server::new(Offer::default());
    let storage = server.open();
    assert_eq!(storage.len(), 1 << 20);
    on_ring(|ring| async move {
        let end = storage.len();
        let buf = pattern(4096, 3);
        assert_eq!(storage.read(&ring, end - 100, &buf).await, Ok(100));
        assert_eq!(storage.read(&ring, end, &buf).await, Ok(0));
        assert_eq!(storage.write(&ring, end, &buf).await, Err(Errno::NOSPC));
        assert_eq!(storage.write(&ring, end - 100, &buf).await, Ok(100));
        assert_eq!(storage.set_len(&ring, end + 1).await, Err(Errno::OPNOTSUPP));
        assert_eq!(storage.write_zeroes(&ring, end, 1, true, true).await, Err(Errno::NOSPC));
        assert_eq!(storage.read(&ring, u64::MAX - 10, &buf).await, Err(Errno::INVAL));
        assert_eq!(storage.allocation(&ring, end, 10).await, Ok((Allocation::Hole, 0)));
    });
}

#[test]
fn large_blocks_are_read_and_changed_in_whole() {
    let blocks = Some(BlockSizes { minimum: 4096, preferred: 4096, maximum: 65536 });
    let is_whole = |it: u64| it.is_multiple_of(4096);
    let server = Server::scripted(Offer { blocks, ..Offer::default() }, move |_, request| {
        assert!(is_whole(request.offset) && is_whole(request.len) && request.len <= 1 << 30);
        Act::Serve
    });
    let storage = server.open();
    assert_eq!(storage.limits().offset_align, 4096);
    let model = on_ring(|ring| async move {
        let mut model = vec![0; 1 << 20];
        let (storage, ring) = (&storage, &ring);
        // Parts of one block at once: none is lost.
        join_all((0..64usize).map(|at| async move {
            assert_eq!(storage.write(ring, 100 + at as u64 * 60, &pattern(60, at)).await, Ok(60));
        }))
        .await;
        (0..64).for_each(|at| model[100 + at * 60..][..60].copy_from_slice(&bytes(60, at)));
        for (offset, len) in [(5000, 200_000), (300_000, 1), (4095, 2), (1_040_000, 8576)] {
            let written = pattern(len, offset);
            assert_eq!(storage.write(ring, offset as u64, &written).await, Ok(len));
            model[offset..offset + len].copy_from_slice(&written.to_vec());
        }
        assert_eq!(storage.write_zeroes(ring, 6000, 10_000, true, true).await, Ok(()));
        model[6000..16000].fill(0);
        for (offset, len) in [(0, 1 << 20), (1, 70_000), (4097, 3), (8191, 8193)] {
            let read = IoBuf::new(len, 1);
            assert_eq!(storage.read(ring, offset as u64, &read).await, Ok(len));
            assert!(read.to_vec() == model[offset..offset + len], "{offset} {len}");
        }
        model
    });
    assert!(*server.disk.lock().unwrap() == model);
}

#[test]
fn holes_are_told_by_block_status() {
    for style in [Style::Structured, Style::Extended] {
        for read_only in [true, false] {
            let server = Server::new(Offer { style, ..Offer::default() });
            server.disk.lock().unwrap()[8192..12288].fill(1);
            let options = NbdOptions { read_only, ..NbdOptions::default() };
            let storage = server.try_open(&options).unwrap();
            on_ring(|ring| async move {
                let (mut at, mut found) = (0, Vec::new());
                while at < storage.len() {
                    let left = storage.len() - at;
                    let (kind, len) = storage.allocation(&ring, at, left).await.unwrap();
                    match found.last_mut() {
                        Some((last, sum)) if *last == kind => *sum += len,
                        _ => found.push((kind, len)),
                    }
                    at += len;
                }
                let rest = (1 << 20) - 12288;
                let expected =
                    [(Allocation::Hole, 8192), (Allocation::Data, 4096), (Allocation::Hole, rest)];
                assert_eq!(found, expected, "{style:?} {read_only}");
            });
        }
    }
}

#[test]
fn without_commands_for_them_zeroes_are_written_and_discards_refused() {
    let flags = export_flags::HAS_FLAGS;
    let server = Server::new(Offer { flags, style: Style::Simple, ..Offer::default() });
    server.disk.lock().unwrap().fill(9);
    let storage = server.open();
    on_ring(|ring| async move {
        assert_eq!(storage.write_zeroes(&ring, 100, 70_000, true, true).await, Ok(()));
        let unsupported = Err(Errno::OPNOTSUPP);
        assert_eq!(storage.write_zeroes(&ring, 100, 70_000, true, false).await, unsupported);
        assert_eq!(storage.discard(&ring, 0, 4096).await, unsupported);
        assert_eq!(storage.flush(&ring).await, Ok(()));
        assert_eq!(storage.allocation(&ring, 0, 100).await, Ok((Allocation::Data, 100)));
        assert!(!storage.device_limits().can_discard);
    });
    let disk = server.disk.lock().unwrap();
    assert!(disk[100..70_100].iter().all(|byte| *byte == 0) && disk[99] == 9 && disk[70_100] == 9);
}

#[test]
fn an_export_that_is_read_only_is_opened_for_reading_only() {
    let server = Server::new(Offer { flags: FLAGS | export_flags::READ_ONLY, ..Offer::default() });
    let error = server.try_open(&NbdOptions::default()).expect_err("read-only");
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    let options = NbdOptions { read_only: true, ..NbdOptions::default() };
    let storage = server.try_open(&options).expect("for reading");
    on_ring(|ring| async move {
        assert_eq!(storage.write(&ring, 0, &pattern(10, 0)).await, Err(Errno::ROFS));
    });
}

/// Reads and writes on several threads, each with a ring of its own.
fn from_threads(server: &Server, threads: usize) {
    let storage = Arc::new(server.open());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let storage = Arc::clone(&storage);
            scope.spawn(move || {
                on_ring(|ring| async move {
                    let (storage, ring) = (&*storage, &ring);
                    join_all((0..8usize).map(|task| async move {
                        let place = thread * 8 + task;
                        let offset = place as u64 * 8192;
                        for round in 0..50 {
                            let written = pattern(4096, place + round);
                            assert_eq!(storage.write(ring, offset, &written).await, Ok(4096));
                            let read = IoBuf::new(4096, 4096);
                            assert_eq!(storage.read(ring, offset, &read).await, Ok(4096));
                            assert_eq!(read.to_vec(), written.to_vec());
                        }
                    }))
                    .await;
                });
            });
        }
    });
}

#[test]
fn rings_take_turns_where_there_can_be_one_connection() {
    let server = Server::new(Offer::default());
    from_threads(&server, 4);
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn each_ring_gets_a_connection_where_there_can_be_several() {
    let flags = FLAGS | export_flags::CAN_MULTI_CONN;
    let server = Server::scripted(Offer { flags, ..Offer::default() }, |_, _| {
        std::thread::sleep(Duration::from_micros(200));
        Act::Serve
    });
    from_threads(&server, 4);
    let count = server.connections.load(Ordering::SeqCst);
    assert!((2..=5).contains(&count), "{count}");
}

#[test]
fn a_ring_that_stands_still_keeps_no_connection() {
    let server = Server::new(Offer::default());
    let storage = Arc::new(server.open());
    let mut runtime = ringdisk_ring::Runtime::new(ringdisk_ring::Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(512, 512);
    assert_eq!(runtime.block_on(storage.read(&ring, 0, &buf)), Ok(512));
    let theirs = Arc::clone(&storage);
    std::thread::spawn(move || {
        on_ring(|ring| async move {
            assert_eq!(theirs.read(&ring, 0, &IoBuf::new(512, 512)).await, Ok(512));
        });
    })
    .join()
    .unwrap();
    assert_eq!(runtime.block_on(storage.read(&ring, 0, &buf)), Ok(512));
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
}

#[test]
fn a_request_that_is_given_up_leaves_the_connection_to_the_others() {
    let server = Server::scripted(Offer::default(), |_, request| {
        if request.offset == 4096 {
            std::thread::sleep(Duration::from_millis(50));
        }
        Act::Serve
    });
    let storage = server.open();
    on_ring(|ring| async move {
        let slow = IoBuf::new(512, 512);
        let given_up =
            ring.within(Duration::from_millis(5), storage.read(&ring, 4096, &slow)).await;
        assert!(given_up.is_err());
        for _ in 0..3 {
            assert_eq!(storage.read(&ring, 0, &IoBuf::new(512, 512)).await, Ok(512));
        }
    });
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
}
