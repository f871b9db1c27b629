//! Limits: connections, clients that stop, and the end.

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringdisk_disk::{Disk, ImageOptions};
use ringdisk_nbd::{CONNECTION_BYTES_MAX, Export, NamedDisk, NbdOptions};
use ringdisk_nbd_protocol::numbers::{command, errno, option, option_reply};
use ringdisk_nbd_protocol::options::InfoRequest;
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_testkit::process::{LIMIT, patient, until};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use crate::client::{Client, STYLES, Server, null, options, request};

const SIZE: u64 = 64 << 20;

#[test]
fn clients_above_the_limit_wait_without_a_greeting_until_one_has_gone() {
    let limited = NbdOptions { max_connections: 2, ..options(2) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    let (first, mut second) = (server.client(Style::Simple), server.client(Style::Simple));
    let mut third = server.connect();
    third.0.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let waits = std::io::Read::read(&mut third.0, &mut [0]).unwrap_err();
    assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock);
    third.0.set_read_timeout(Some(LIMIT)).unwrap();
    drop(first);
    third.greet();
    third.go("");
    for client in [&mut second, &mut third] {
        assert_eq!(client.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
    }
}

#[test]
fn connections_are_spread_over_the_threads() {
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], options(4));
    let mut clients: Vec<Client> = (0..4).map(|_| server.client(Style::Simple)).collect();
    for client in &mut clients {
        assert_eq!(client.call(Style::Simple, request(command::READ, 0, 512), &[]).error, 0);
    }
    let stats = server.export.as_ref().unwrap().stats();
    let reads: Vec<_> = stats.queues.iter().map(|queue| queue.reads).collect();
    assert_eq!(reads, [1, 1, 1, 1]);
}

#[test]
fn a_client_that_reads_no_replies_stalls_alone_and_takes_bounded_memory() {
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], options(1));
    let mut stalled = server.client(Style::Structured);
    stalled.0.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    // Reads of 1 MiB, until the server takes no more of them.
    let mut sent = 0;
    let bytes = request(command::READ, 0, 1 << 20).to_compact();
    while sent < 100_000 && std::io::Write::write_all(&mut stalled.0, &bytes).is_ok() {
        sent += 1;
    }
    assert!(sent < 100_000, "it takes requests for ever");
    let mut other = server.client(Style::Structured);
    for _ in 0..100 {
        let reply = other.call(Style::Structured, request(command::READ, 0, 4096), &[]);
        assert_eq!(reply.error, 0);
    }
    let in_flight = server.export.as_ref().unwrap().stats().total().in_flight_max;
    assert!(in_flight <= 128 + 1, "{in_flight}");
    const { assert!(CONNECTION_BYTES_MAX < 70 << 20) };
}

#[test]
fn what_a_client_asked_for_before_it_went_is_not_carried_out() {
    let server =
        Server::start(vec![NamedDisk::new("", null(Duration::from_millis(1)))], options(1));
    let mut gone = server.client(Style::Simple);
    // The server reads them at once, and has all but some in its memory when it stalls.
    gone.send(&request(command::READ, 0, 64 << 10).to_compact().repeat(5000));
    drop(gone);
    let export = server.export.as_ref().unwrap();
    let connections = export.connections_reader();
    assert!(until(LIMIT, || (connections() == 0).then_some(())).is_some());
    let reads = export.stats().total().reads;
    assert!(reads < 1000, "{reads}");
}

#[test]
fn a_client_that_goes_in_the_middle_disturbs_no_other() {
    let server = Server::of(null(Duration::from_millis(5)));
    let mut other = server.client(Style::Extended);
    for style in STYLES {
        for len in [0, 1, 20, 28, 40, 3000] {
            let mut client = server.client(style);
            let write = request(command::WRITE, 0, 65_536);
            let mut bytes = request(command::READ, 0, 4096).to_compact().to_vec();
            bytes.extend(write.to_compact());
            bytes.resize(3100, 1);
            client.send(&bytes[..len]);
            drop(client);
        }
    }
    let reply = other.call(Style::Extended, request(command::READ, 0, 4096), &[]);
    assert_eq!(reply.error, 0);
    let count = server.export.as_ref().unwrap().connections_reader();
    let one = until(patient(LIMIT), || (count() == 1).then_some(()));
    assert!(one.is_some(), "{} connections stay", count());
}

#[test]
fn the_end_answers_what_is_in_flight_and_refuses_the_rest() {
    let sim = SimStorage::new(SIZE, 1);
    sim.on(When::kind(OpKind::Write), Fault::Hold);
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let mut server = Server::start(vec![NamedDisk::new("", disk)], options(1));
    let style = Style::Structured;
    let mut client = server.client(style);
    client.start(style, Request { cookie: 1, ..request(command::WRITE, 0, 512) }, &[7; 512]);
    until(patient(LIMIT), || (sim.held().len() == 1).then_some(())).expect("a write");
    let export = server.export.take().unwrap();
    export.stop_handle().stop();
    let end = std::thread::spawn(move || export.wait().map(|_| ()).map_err(|e| e.to_string()));
    // It may take a moment until the end is seen; flushes before that are served.
    let refused = until(patient(LIMIT), || {
        client.start(style, Request { cookie: 2, ..request(command::FLUSH, 0, 0) }, &[]);
        let reply = client.reply_of(style, |_| 0);
        (reply.error != 0).then_some(reply)
    });
    assert_eq!(refused.expect("a refusal").error, errno::ESHUTDOWN);
    sim.clear_rules();
    sim.release_all();
    let reply = client.reply_of(style, |_| 0);
    assert_eq!((reply.cookie, reply.error), (1, 0));
    assert!(client.is_closed());
    assert_eq!(end.join().unwrap(), Ok(()));
    assert_eq!(sim.durable_image()[..512], [7; 512]);
}

#[test]
fn an_end_in_the_middle_of_a_load_keeps_what_was_answered() {
    for round in 0..5 {
        let sim = SimStorage::new(SIZE, round);
        let short = Duration::from_micros(200);
        sim.on(When::any(), Fault::DelayBetween(Duration::ZERO, short));
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        let mut server = Server::start(vec![NamedDisk::new("", disk)], options(2));
        let style = Style::Simple;
        let mut client = server.client(style);
        let writer = std::thread::spawn(move || {
            let mut answered = 0u64;
            loop {
                let write = request(command::WRITE, answered * 512, 512).to_compact();
                let bytes = [&write[..], &[answered as u8 | 1; 512]].concat();
                if std::io::Write::write_all(&mut client.0, &bytes).is_err() {
                    return answered;
                }
                let mut reply = [0; 16];
                if std::io::Read::read_exact(&mut client.0, &mut reply).is_err()
                    || reply[4..8] != [0; 4]
                {
                    return answered;
                }
                answered += 1;
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        server.stop().unwrap();
        let answered = writer.join().unwrap();
        let image = sim.durable_image();
        for number in 0..answered {
            assert_eq!(image[number as usize * 512], number as u8 | 1, "of {answered}");
        }
    }
}

#[test]
fn tcp_and_several_listeners_serve_the_same_disk() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let unix = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let disks = vec![NamedDisk::new("", null(Duration::ZERO))];
    let export = Export::start(disks, vec![tcp.into(), unix.into()], options(1)).unwrap();
    let stream = TcpStream::connect(address).unwrap();
    let stream = UnixStream::from(std::os::fd::OwnedFd::from(stream));
    let mut over_tcp = Client(stream);
    let mut over_unix = Client(UnixStream::connect(&path).unwrap());
    for client in [&mut over_tcp, &mut over_unix] {
        client.greet();
        client.go("");
        let reply = client.call(Style::Simple, request(command::READ, 4096, 1 << 20), &[]);
        assert_eq!(reply.error, 0);
    }
    drop(export);
    assert!(over_tcp.is_closed() && over_unix.is_closed());
}

#[test]
fn a_thousand_clients_of_which_fifty_come_at_once_are_served() {
    let limited = NbdOptions { max_connections: 8, ..options(2) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    let (begun, socket) = (Instant::now(), &server.socket);
    std::thread::scope(|scope| {
        for _ in 0..50 {
            scope.spawn(move || {
                for _ in 0..20 {
                    let mut client = Client::entered(socket, Style::Simple);
                    let read = request(command::READ, 0, 512);
                    assert_eq!(client.call(Style::Simple, read, &[]).error, 0);
                }
            });
        }
    });
    assert!(begun.elapsed() < patient(LIMIT));
}

#[test]
fn an_export_that_nobody_uses_ends() {
    let of = |idle_exit| {
        let options = NbdOptions { idle_exit: Some(idle_exit), ..options(2) };
        Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], options)
    };
    let is_stopped = |server: &Server| {
        let stop = server.export.as_ref().unwrap().stop_handle();
        until(LIMIT, || stop.is_stopped().then_some(())).is_some()
    };
    assert!(is_stopped(&of(Duration::from_millis(20))), "nobody came");
    let mut server = of(Duration::ZERO);
    let mut asking = server.connect();
    asking.greet();
    assert_eq!(asking.ask(option::LIST, &[]).len(), 2);
    drop(asking);
    let (first, second) = (server.client(Style::Simple), server.client(Style::Extended));
    drop(first);
    // It is served: one is left.
    let mut third = server.client(Style::Structured);
    let flushed = third.call(Style::Structured, request(command::FLUSH, 0, 0), &[]);
    assert_eq!(flushed.error, 0);
    assert!(!server.export.as_ref().unwrap().stop_handle().is_stopped());
    drop((second, third));
    assert!(is_stopped(&server), "all have gone");
    server.stop().unwrap();
}

#[test]
fn clients_that_say_nothing_take_no_place_from_those_that_wait() {
    let limit = Some(Duration::from_secs(600));
    let limited = NbdOptions { max_connections: 2, handshake_limit: limit, ..options(2) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    // One that is in its transmission phase stays, however silent it is.
    let mut first = server.client(Style::Simple);
    let silent: Vec<Client> = (0..4).map(|_| server.connect()).collect();
    let mut other = server.client(Style::Simple);
    assert_eq!(other.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
    assert_eq!(first.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
    drop(silent);
}

#[test]
fn a_client_that_was_greeted_waits_for_a_place_when_it_asks_for_the_disk() {
    // Longer than a handshake may take.
    let limit = Some(Duration::from_millis(300));
    let limited = NbdOptions { max_connections: 1, handshake_limit: limit, ..options(2) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    // Two greetings, on two threads, while nobody uses the disk.
    let (mut first, mut second) = (server.connect(), server.connect());
    first.greet();
    second.greet();
    first.go("");
    assert_eq!(first.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
    let mut data = Vec::new();
    InfoRequest { name: b"", wanted: Vec::new() }.push(&mut data);
    second.option(option::GO, &data);
    second.0.set_read_timeout(Some(Duration::from_millis(700))).unwrap();
    let waits = std::io::Read::read(&mut second.0, &mut [0]).unwrap_err();
    assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock);
    second.0.set_read_timeout(Some(LIMIT)).unwrap();
    drop(first);
    while second.option_reply(option::GO).kind != option_reply::ACK {}
    assert_eq!(second.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
}

/// Several wait on each thread, and often two go at once.
#[test]
fn all_that_wait_for_a_place_come_to_their_turn() {
    let limited = NbdOptions { max_connections: 2, ..options(2) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    for _ in 0..20 {
        let mut clients: Vec<Client> = (0..12).map(|_| server.connect()).collect();
        for client in &mut clients {
            client.greet();
        }
        std::thread::scope(|scope| {
            for mut client in clients {
                scope.spawn(move || {
                    client.go("");
                    let flush = request(command::FLUSH, 0, 0);
                    assert_eq!(client.call(Style::Simple, flush, &[]).error, 0);
                });
            }
        });
    }
}

/// Neither the places of clients on other threads nor the end wait for one that waits.
#[test]
fn an_end_does_not_wait_for_clients_that_wait_for_a_place() {
    let limited = NbdOptions { max_connections: 1, ..options(2) };
    let mut server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    let (mut first, mut second) = (server.connect(), server.connect());
    first.greet();
    second.greet();
    first.go("");
    let mut data = Vec::new();
    InfoRequest { name: b"", wanted: Vec::new() }.push(&mut data);
    second.option(option::GO, &data);
    let begun = Instant::now();
    server.stop().unwrap();
    assert!(begun.elapsed() < patient(Duration::from_secs(2)), "{:?}", begun.elapsed());
    assert!(first.is_closed() && second.is_closed());
}

/// So many connections that say nothing; none is refused.
fn silent(server: &Server, count: usize) -> Vec<UnixStream> {
    let connect = |_| {
        let socket = rustix::net::socket_with(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::NONBLOCK | rustix::net::SocketFlags::CLOEXEC,
            None,
        );
        let socket = socket.unwrap();
        let address = rustix::net::SocketAddrUnix::new(&server.socket).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        UnixStream::from(socket)
    };
    (0..count).map(connect).collect()
}

/// Those who say nothing at all are sent away ten times as fast as those who are slow.
#[test]
fn behind_a_thousand_that_say_nothing_a_client_comes_to_its_turn() {
    let limited = NbdOptions { max_connections: 32, ..options(2) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    let begun = Instant::now();
    let silent = silent(&server, 1000);
    let mut client = server.client(Style::Simple);
    assert_eq!(client.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
    assert!(begun.elapsed() < patient(LIMIT));
    drop(silent);
}

#[test]
fn many_clients_that_connect_at_once_are_not_refused() {
    let limited = NbdOptions { max_connections: 8, ..options(1) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    // More than a socket of the standard library lets wait.
    drop(silent(&server, 1000));
    let mut client = server.client(Style::Simple);
    assert_eq!(client.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
}
