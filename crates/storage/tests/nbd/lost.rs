//! Connections that are lost: requests wait for a new one, are repeated, or fail in time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use ringdisk_nbd_protocol::numbers::command;
use ringdisk_ring::{Errno, IoBuf};

use crate::server::{Act, Offer, Server, serve, shake_hands};
use crate::{bytes, on_ring, pattern};

#[test]
fn requests_without_an_answer_are_repeated_when_the_server_ended_the_connection() {
    // Every connection ends in the middle of its work.
    let count = Arc::new(AtomicUsize::new(0));
    let server = Server::scripted(Offer::default(), move |_, _| {
        if count.fetch_add(1, Ordering::SeqCst) % 10 == 9 { Act::Close } else { Act::Serve }
    });
    let storage = server.open();
    on_ring(|ring| async move {
        let (storage, ring) = (&storage, &ring);
        join_all((0..8usize).map(|place| async move {
            for round in 0..20 {
                let (offset, written) = (place as u64 * 8192, pattern(5000, place * 100 + round));
                assert_eq!(storage.write(ring, offset, &written).await, Ok(5000));
                let read = IoBuf::new(5000, 1);
                assert_eq!(storage.read(ring, offset, &read).await, Ok(5000));
                assert_eq!(read.to_vec(), bytes(5000, place * 100 + round));
            }
        }))
        .await;
    });
    assert!(server.connections.load(Ordering::SeqCst) > 10);
}

#[test]
fn a_server_that_closed_while_nothing_was_asked_is_connected_again() {
    let is_over = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&is_over);
    let server = Server::raw(move |number, mut stream| {
        let style = shake_hands(&mut stream, &Offer::default())?;
        if number == 0 {
            theirs.store(true, Ordering::SeqCst);
            return Ok(());
        }
        serve(&mut stream, style, &std::sync::Mutex::new(vec![5; 1 << 20]), |_| Act::Serve)
    });
    let storage = server.open();
    while !is_over.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
    on_ring(|ring| async move {
        let buf = IoBuf::new(4096, 4096);
        assert_eq!(storage.read(&ring, 0, &buf).await, Ok(4096));
        assert_eq!(buf.to_vec(), vec![5; 4096]);
    });
}

#[test]
fn requests_fail_when_the_time_is_over_and_work_when_the_server_is_back() {
    // The server is gone from the second connection on, until it is back.
    let is_back = Arc::new(AtomicBool::new(false));
    let theirs = Arc::clone(&is_back);
    let server = Server::raw(move |number, mut stream| {
        if number > 0 && !theirs.load(Ordering::SeqCst) {
            return Ok(());
        }
        let style = shake_hands(&mut stream, &Offer::default())?;
        let act = |request: &ringdisk_nbd_protocol::request::Request| match request.command {
            command::READ if number == 0 => Act::Close,
            _ => Act::Serve,
        };
        serve(&mut stream, style, &std::sync::Mutex::new(vec![5; 1 << 20]), act)
    });
    let limit = Duration::from_millis(300);
    let storage = server.open_for(limit);
    on_ring(|ring| async move {
        let buf = IoBuf::new(512, 512);
        let began = Instant::now();
        assert_eq!(storage.read(&ring, 0, &buf).await, Err(Errno::IO));
        let waited = began.elapsed();
        assert!((limit..Duration::from_secs(5)).contains(&waited), "{waited:?}");
        let began = Instant::now();
        assert_eq!(storage.read(&ring, 0, &buf).await, Err(Errno::IO));
        assert!(began.elapsed() < Duration::from_secs(1), "no second wait");
        is_back.store(true, Ordering::SeqCst);
        let began = Instant::now();
        while storage.read(&ring, 0, &buf).await.is_err() {
            assert!(began.elapsed() < Duration::from_secs(10), "the server is back");
            ring.sleep(Duration::from_millis(20)).await;
        }
    });
}

#[test]
fn a_server_that_comes_back_with_another_disk_is_not_used() {
    let server = Server::raw(|number, mut stream| {
        let size = if number == 0 { 1 << 20 } else { 1 << 19 };
        let style = shake_hands(&mut stream, &Offer { size, ..Offer::default() })?;
        serve(&mut stream, style, &std::sync::Mutex::new(vec![5; 1 << 20]), |_| Act::Close)
    });
    let storage = server.open_for(Duration::from_millis(100));
    on_ring(|ring| async move {
        let buf = IoBuf::new(512, 512);
        assert_eq!(storage.read(&ring, 0, &buf).await, Err(Errno::IO));
    });
}

#[test]
fn a_request_that_always_ends_the_connection_fails_in_the_end() {
    let server = Server::scripted(Offer::default(), |_, request| match request.offset {
        4096 => Act::Close,
        _ => Act::Serve,
    });
    let storage = server.open();
    on_ring(|ring| async move {
        let buf = IoBuf::new(512, 512);
        assert_eq!(storage.read(&ring, 4096, &buf).await, Err(Errno::IO));
        assert_eq!(storage.read(&ring, 0, &buf).await, Ok(512));
    });
}

#[test]
fn the_end_of_the_storage_ends_its_connection() {
    let ended = Arc::new(AtomicBool::new(false));
    let (said, is_over) = (Arc::new(AtomicBool::new(false)), Arc::clone(&ended));
    let good_bye = Arc::clone(&said);
    let server = Server::raw(move |_, mut stream| {
        let style = shake_hands(&mut stream, &Offer::default())?;
        let disk = std::sync::Mutex::new(vec![0; 1 << 20]);
        let served = serve(&mut stream, style, &disk, |request| {
            good_bye.fetch_or(request.command == command::DISCONNECT, Ordering::SeqCst);
            Act::Serve
        });
        is_over.store(true, Ordering::SeqCst);
        served
    });
    let storage = server.open();
    on_ring(|ring| async move {
        assert_eq!(storage.flush(&ring).await, Ok(()));
        drop(storage);
        // The task of the ring ends, too.
        ring.yield_now().await;
    });
    let began = Instant::now();
    while !ended.load(Ordering::SeqCst) {
        assert!(began.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(said.load(Ordering::SeqCst), "the client says good-bye");
}
