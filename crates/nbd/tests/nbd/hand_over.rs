//! An export goes to a successor while clients use it: connections go on between two messages.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_disk::{Disk, Format, ImageOptions};
use ringdisk_nbd::{Export, Handed, NamedDisk, StopHandle};
use ringdisk_nbd_protocol::numbers::command;
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::process::LIMIT;

use super::client::{Client, STYLES, Server, data, null, options, raw, request};

/// The export goes to another one of this process, as a successor in another process takes it.
fn hand_over(server: &mut Server) {
    hand_over_during(server, |_| {});
}

/// The same.
///
/// * `meanwhile`: what happens while the export stands still.
fn hand_over_during(server: &mut Server, meanwhile: impl FnOnce(&StopHandle)) {
    let old = server.export.take().expect("it serves");
    let (handle, stop) = (old.hand_over_handle(), old.stop_handle());
    let waits = std::thread::spawn(move || old.wait().map(|_| ()));
    let (state, still) = handle.hand_over().expect("it stands still");
    meanwhile(&stop);
    let Handed { disks, listeners, clients, .. } = Handed::open(state).expect("a state");
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    let image = ImageOptions { format: Some(Format::Raw), ..ImageOptions::default() };
    let open = |(name, disk)| {
        let disk = runtime.block_on(Disk::open_handed(&ring, disk, &image)).expect("a disk");
        NamedDisk::new(name, disk)
    };
    let disks = disks.into_iter().map(open).collect();
    let mut new = Export::prepare(disks, listeners, clients, options(2)).expect("prepared");
    assert!(still.commit(), "it was in time");
    new.take_charge();
    new.release();
    waits.join().expect("no panic").expect("it has ended");
    server.export = Some(new);
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (seed.wrapping_mul(2_654_435_761) ^ (at / 7)) as u8).collect()
}

#[test]
fn halves_of_requests_go_along() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, _) = raw(&directory);
    let mut server = Server::start(vec![NamedDisk::new("a", disk)], options(2));
    for style in STYLES {
        for (len, sent) in
            [(4096, 10), (4096, 40), (4096, 2000), (1 << 20, 300), (1 << 20, 700_000)]
        {
            let mut client = server.client(style);
            client.call(style, request(command::FLUSH, 0, 0), &[]);
            let payload = pattern(sent as u64, len);
            let write = Request { cookie: 7, ..request(command::WRITE, 8192, len as u64) };
            let read = Request { cookie: 8, ..request(command::READ, 8192, len as u64) };
            let mut head = match style {
                Style::Simple | Style::Structured => write.to_compact().to_vec(),
                Style::Extended => write.to_extended().to_vec(),
            };
            head.extend(&payload);
            client.send(&head[..sent]);
            std::thread::sleep(Duration::from_millis(20));
            hand_over(&mut server);
            client.send(&head[sent..]);
            let reply = client.reply_of(style, |_| 0);
            assert_eq!((reply.cookie, reply.error), (7, 0), "{style:?}, {sent} of {len}");
            client.start(style, read, &[]);
            let reply = client.reply_of(style, |_| len);
            assert_eq!(reply.cookie, 8);
            assert!(data(&reply, 8192, len) == payload, "{style:?}, {sent} of {len}");
        }
    }
    server.stop().unwrap();
}

/// The clients are the successor's then, and the old process does not touch them.
#[test]
fn a_stop_in_the_middle_cuts_nobody_off() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, _) = raw(&directory);
    let mut server = Server::start(vec![NamedDisk::new("a", disk)], options(2));
    for style in STYLES {
        let mut client = server.client(style);
        client.call(style, request(command::FLUSH, 0, 0), &[]);
        hand_over_during(&mut server, |stop| {
            stop.stop();
            assert!(stop.is_stopped());
        });
        client.call(style, request(command::FLUSH, 0, 0), &[]);
    }
    server.stop().unwrap();
}

#[test]
fn clients_under_load_lose_nothing_and_hear_nothing_twice() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, path) = raw(&directory);
    let mut server = Server::start(vec![NamedDisk::new("a", disk)], options(2));
    let done = AtomicBool::new(false);
    let last = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..6u64)
            .map(|number| {
                let (style, done) = (STYLES[number as usize % 3], &done);
                let client = server.client(style);
                scope.spawn(move || load(client, style, number, done))
            })
            .collect();
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(60));
            hand_over(&mut server);
        }
        std::thread::sleep(Duration::from_millis(60));
        done.store(true, Ordering::Release);
        clients.into_iter().map(|client| client.join().expect("a client")).collect::<Vec<_>>()
    });
    let mut client = server.client(Style::Simple);
    for (number, round) in last.iter().enumerate() {
        assert!(*round > 10, "client {number} has made {round} rounds");
    }
    client.call(Style::Simple, request(command::FLUSH, 0, 0), &[]);
    server.stop().unwrap();
    let bytes = std::fs::read(path).unwrap();
    for (number, round) in last.into_iter().enumerate() {
        for slot in 0..DEPTH {
            let at = place(number as u64, slot) as usize;
            let (wanted, len) = (pattern(round * DEPTH + slot, BYTES), BYTES);
            assert!(bytes[at..at + len] == wanted, "client {number}, place {slot}");
        }
    }
}

/// Requests of a client in flight.
const DEPTH: u64 = 16;
/// Of a request.
const BYTES: usize = 128 << 10;

fn place(client: u64, slot: u64) -> u64 {
    (client * DEPTH + slot) * BYTES as u64
}

/// Writes and reads back, with many requests in flight. Gives the last round, whose data is on the
/// disk.
fn load(mut client: Client, style: Style, number: u64, done: &AtomicBool) -> u64 {
    for round in 1.. {
        for command in [command::WRITE, command::READ] {
            for slot in 0..DEPTH {
                let cookie = round * 1000 + slot;
                let request = request(command, place(number, slot), BYTES as u64);
                let payload = match command {
                    command::WRITE => pattern(round * DEPTH + slot, BYTES),
                    _ => Vec::new(),
                };
                client.start(style, Request { cookie, ..request }, &payload);
            }
            let mut seen = [false; DEPTH as usize];
            for _ in 0..DEPTH {
                let is_read = command == command::READ;
                let reply = client.reply_of(style, |_| if is_read { BYTES } else { 0 });
                let slot = reply.cookie - round * 1000;
                assert!(!std::mem::replace(&mut seen[slot as usize], true), "answered twice");
                assert_eq!(reply.error, 0, "{}", reply.text);
                if is_read {
                    let read = data(&reply, place(number, slot), BYTES);
                    assert!(read == pattern(round * DEPTH + slot, BYTES), "round {round}");
                }
            }
        }
        if done.load(Ordering::Acquire) {
            return round;
        }
    }
    unreachable!("rounds do not end");
}

#[test]
fn an_export_goes_on_when_its_successor_gives_up() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, _) = raw(&directory);
    let mut server = Server::start(vec![NamedDisk::new("a", disk)], options(2));
    let mut client = server.client(Style::Extended);
    let payload = pattern(3, 4096);
    let write = Request { cookie: 5, ..request(command::WRITE, 0, 4096) };
    let bytes = [&write.to_extended()[..], &payload].concat();
    client.send(&bytes[..100]);
    std::thread::sleep(Duration::from_millis(20));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            client.send(&bytes[100..]);
            assert_eq!(client.reply_of(Style::Extended, |_| 0).cookie, 5);
        });
        give_up(&mut server);
    });
}

/// A successor is asked for, and gives up: the export goes on, and ends later.
fn give_up(server: &mut Server) {
    let old = server.export.take().expect("it serves");
    let (handle, stop) = (old.hand_over_handle(), old.stop_handle());
    let waits = std::thread::spawn(move || old.wait().map(|_| ()));
    let (_state, still) = handle.hand_over().expect("it stands still");
    std::thread::sleep(Duration::from_millis(100));
    drop(still);
    std::thread::sleep(Duration::from_millis(500));
    stop.stop();
    waits.join().expect("no panic").expect("it has ended");
}

#[test]
fn a_client_that_takes_no_replies_does_not_keep_others_from_going() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, _) = raw(&directory);
    let mut server = Server::start(vec![NamedDisk::new("a", disk)], options(1));
    let mut deaf = server.client(Style::Simple);
    for _ in 0..64 {
        deaf.start(Style::Simple, request(command::READ, 0, 1 << 20), &[]);
    }
    let mut other = server.client(Style::Simple);
    hand_over(&mut server);
    other.call(Style::Simple, request(command::FLUSH, 0, 0), &[]);
    server.stop().unwrap();
}

#[test]
fn those_who_come_meanwhile_wait_for_the_successor() {
    let mut server = Server::of(null(Duration::ZERO));
    let old = server.export.take().expect("it serves");
    let (handle, stop) = (old.hand_over_handle(), old.stop_handle());
    let waits = std::thread::spawn(move || old.wait().map(|_| ()));
    let (_state, still) = handle.hand_over().expect("it stands still");
    let waiting = UnixStream::connect(&server.socket).expect("it listens");
    waiting.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(std::io::Read::read(&mut &waiting, &mut [0]).is_err(), "a greeting");
    waiting.set_read_timeout(Some(LIMIT)).unwrap();
    drop(still);
    assert_eq!(std::io::Read::read(&mut &waiting, &mut [0]).unwrap(), 1);
    stop.stop();
    waits.join().expect("no panic").expect("it has ended");
}
