//! Disks of which another export is in charge: each goes to a successor by itself, with its
//! clients.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringdisk_export::SecondExport;
use ringdisk_nbd::{DiskHandle, Export, Handed, HandedClients, NamedDisk, NbdOptions};
use ringdisk_nbd_protocol::numbers::command;
use ringdisk_nbd_protocol::request::Style;

use ringdisk_testkit::process::LIMIT;

use super::client::{Client, Server, null, options, request};

const NAMES: [&str; 2] = ["a", "b"];

fn disks() -> Vec<NamedDisk> {
    NAMES.map(|name| NamedDisk::new(name, null(Duration::ZERO))).into()
}

fn start() -> (Server, [DiskHandle; 2]) {
    start_with(options(2))
}

fn start_with(options: NbdOptions) -> (Server, [DiskHandle; 2]) {
    let server = Server::start(disks(), NbdOptions { beside_another: true, ..options });
    let export = server.export.as_ref().expect("it serves");
    let handles = NAMES.map(|name| export.disk_handle(name));
    (server, handles)
}

fn client(server: &Server, name: &str) -> Client {
    let mut client = Client::to(&server.socket);
    client.greet();
    client.agree(Style::Extended);
    client.go(name);
    flush(&mut client);
    client
}

fn flush(client: &mut Client) {
    client.call(Style::Extended, request(command::FLUSH, 0, 0), &[]);
}

/// An export with all that disks hand over, which serves nobody yet.
fn successor(handles: &[DiskHandle]) -> Export {
    let (mut sockets, mut all) = (None, HandedClients::default());
    for handle in handles {
        let state = handle.stand_still().expect("it stands still").expect("clients");
        let Handed { disks, names, listeners, clients } = Handed::open(state).expect("a state");
        assert!(disks.is_empty(), "another export hands them over");
        assert_eq!((names, clients.count()), (NAMES.map(String::from).into(), 1));
        sockets.get_or_insert(listeners);
        all.extend(clients);
    }
    let options = NbdOptions { beside_another: true, ..options(2) };
    Export::prepare(disks(), sockets.expect("sockets"), all, options).expect("prepared")
}

#[test]
fn all_disks_go_with_their_clients_and_the_listening_sockets() {
    let (mut server, handles) = start();
    let mut clients = NAMES.map(|name| client(&server, name));
    let old = server.export.take().expect("it serves");
    let stop = old.stop_handle();
    let waits = std::thread::spawn(move || old.wait().map(|_| ()));
    let mut new = successor(&handles);
    handles.iter().for_each(SecondExport::moved);
    waits.join().expect("no panic").expect("it has ended");
    assert!(stop.has_moved());
    // What comes at the end of the process changes nothing.
    handles.iter().for_each(SecondExport::end);
    stop.stop();
    assert!(stop.has_moved());
    new.release();
    server.export = Some(new);
    clients.iter_mut().for_each(flush);
    drop(client(&server, "b"));
    server.stop().unwrap();
}

#[test]
fn one_disk_goes_and_the_other_one_stays_with_its_clients() {
    let (mut server, handles) = start();
    let [mut of_a, mut of_b] = NAMES.map(|name| client(&server, name));
    let mut new = successor(&handles);
    let [a, b] = &handles;
    a.moved();
    // Until it is clear what becomes of the other one it stands still.
    let mut waits = Client(of_b.0.try_clone().expect("a socket"));
    let flushed = std::thread::spawn(move || flush(&mut waits));
    std::thread::sleep(Duration::from_millis(100));
    assert!(!flushed.is_finished());
    b.go_on();
    flushed.join().expect("it goes on");
    new.leave_out("b", true);
    new.release();
    flush(&mut of_a);
    flush(&mut of_b);
    let mut later = client(&server, "b");
    new.stop_handle().stop();
    new.wait().expect("it was asked to end");
    let mut byte = [0];
    assert!(!matches!(std::io::Read::read(&mut of_a.0, &mut byte), Ok(1)), "its client is gone");
    flush(&mut of_b);
    flush(&mut later);
    server.stop().unwrap();
}

#[test]
fn clients_go_on_where_no_disk_is_taken_and_are_asked_for_again() {
    let (mut server, handles) = start();
    let mut clients = NAMES.map(|name| client(&server, name));
    for _ in 0..3 {
        drop(successor(&handles));
        // One that comes meanwhile waits.
        let waiting = UnixStream::connect(&server.socket).expect("it listens");
        waiting.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(std::io::Read::read(&mut &waiting, &mut [0]).is_err(), "a greeting");
        handles.iter().for_each(SecondExport::go_on);
        waiting.set_read_timeout(Some(LIMIT)).unwrap();
        assert_eq!(std::io::Read::read(&mut &waiting, &mut [0]).unwrap(), 1);
        clients.iter_mut().for_each(flush);
    }
    server.stop().unwrap();
}

#[test]
fn an_export_that_has_ended_hands_no_clients_over_and_keeps_no_disk_back() {
    let (mut server, handles) = start();
    let export = server.export.take().expect("it serves");
    export.stop_handle().stop();
    export.wait().expect("it was asked to end");
    for handle in &handles {
        assert!(handle.stand_still().expect("no error").is_none());
    }
}

#[test]
fn an_export_is_not_idle_while_its_disks_go_to_a_successor() {
    let idle_exit = Some(Duration::ZERO);
    let (mut server, handles) = start_with(NbdOptions { idle_exit, ..options(2) });
    let [a, b] = &handles;
    // Only the guest of one disk has come.
    a.client_came();
    let export = server.export.take().expect("it serves");
    let stop = export.stop_handle();
    let waits = std::thread::spawn(move || export.wait().map(|_| ()));
    for handle in &handles {
        handle.stand_still().expect("it stands still").expect("the listening sockets");
    }
    a.moved();
    a.client_gone();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!stop.is_stopped() && !waits.is_finished());
    b.moved();
    waits.join().expect("no panic").expect("it has ended");
    assert!(stop.has_moved() && !stop.is_stopped());
}
