//! Sockets whose other end is slow, silent, greedy or gone.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

use zerocopy::IntoBytes;

use super::*;
use crate::BackChannel;

const SOON: Duration = Duration::from_millis(50);
const LONG: Duration = Duration::from_secs(10);

fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

fn pair() -> (UnixStream, Connection) {
    let (theirs, ours) = UnixStream::pair().unwrap();
    (theirs, Connection::new(ours.into()))
}

/// SET_FEATURES with a number.
fn message() -> Vec<u8> {
    [Header::request(2, 8, false).as_bytes(), 7u64.as_bytes()].concat()
}

fn next(connection: &mut Connection, timeout: Duration) -> Result<Received, Error> {
    connection.receive(eventfd().as_fd(), timeout, None)
}

fn payload(received: Received) -> (Vec<u8>, usize) {
    match received {
        Received::Message { payload, fds, .. } => (payload, fds.len()),
        other => panic!("{other:?}"),
    }
}

fn send_fds(socket: &UnixStream, bytes: &[u8], count: usize) {
    let fds: Vec<OwnedFd> = (0..count).map(|_| eventfd()).collect();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let flags = rustix::net::SendFlags::empty();
    let iov = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &iov, &mut control, flags).unwrap();
}

#[test]
fn messages_come_one_at_a_time() {
    let (mut theirs, mut connection) = pair();
    theirs.write_all(&[message(), message()].concat()).unwrap();
    for _ in 0..2 {
        assert_eq!(payload(next(&mut connection, LONG).unwrap()), (7u64.as_bytes().to_vec(), 0));
    }
    drop(theirs);
    assert!(matches!(next(&mut connection, LONG).unwrap(), Received::Closed));
}

#[test]
fn a_message_may_come_byte_by_byte() {
    let (mut theirs, mut connection) = pair();
    let sender = thread::spawn(move || {
        for byte in message() {
            theirs.write_all(&[byte]).unwrap();
            thread::sleep(Duration::from_millis(1));
        }
        theirs
    });
    assert_eq!(payload(next(&mut connection, LONG).unwrap()).0, 7u64.as_bytes());
    sender.join().unwrap();
}

#[test]
fn a_message_that_stops_in_the_middle_ends_the_connection_in_time() {
    for len in [1, 12, 19] {
        let (mut theirs, mut connection) = pair();
        theirs.write_all(&message()[..len]).unwrap();
        let error = next(&mut connection, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let name = if len < 12 { "header" } else { "SET_FEATURES" };
        assert_eq!(error.to_string(), format!("{name}: stopped in the middle of it"));
        drop(theirs);
    }
}

#[test]
fn drops_do_not_stretch_the_time_of_a_message() {
    let (mut theirs, mut connection) = pair();
    let sender = thread::spawn(move || {
        for byte in message() {
            if theirs.write_all(&[byte]).is_err() {
                break;
            }
            thread::sleep(SOON / 4);
        }
    });
    assert_eq!(next(&mut connection, SOON).unwrap_err().kind(), ErrorKind::TimedOut);
    drop(connection);
    sender.join().unwrap();
}

#[test]
fn silence_between_messages_has_no_end() {
    let (theirs, mut connection) = pair();
    let sender = thread::spawn(move || {
        thread::sleep(SOON * 4);
        (&theirs).write_all(&message()).unwrap();
        theirs
    });
    next(&mut connection, SOON).unwrap();
    sender.join().unwrap();
}

#[test]
fn silence_that_is_too_long_is_told_and_ends_nothing() {
    let (mut theirs, mut connection) = pair();
    let wake = eventfd();
    let mut listen = || connection.receive(wake.as_fd(), SOON * 2, Some(SOON));
    assert!(matches!(listen().unwrap(), Received::Silence));
    theirs.write_all(&message()).unwrap();
    assert_eq!(payload(listen().unwrap()).0, 7u64.as_bytes());
    // From its first byte on a message has its own time.
    theirs.write_all(&message()[..5]).unwrap();
    assert_eq!(listen().unwrap_err().kind(), ErrorKind::TimedOut);
}

#[test]
fn an_end_in_the_middle_is_an_error() {
    let (mut theirs, mut connection) = pair();
    theirs.write_all(&message()[..15]).unwrap();
    drop(theirs);
    let error = next(&mut connection, LONG).unwrap_err();
    assert_eq!(error.to_string(), "SET_FEATURES: the connection ended in the middle of it");
}

#[test]
fn a_payload_that_is_too_large_is_not_read() {
    for size in [u32::MAX, 4109] {
        let (mut theirs, mut connection) = pair();
        theirs.write_all(Header::request(24, size, false).as_bytes()).unwrap();
        let error = next(&mut connection, LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.to_string().starts_with(&format!("GET_CONFIG: payload of {size} bytes")));
    }
}

#[test]
fn descriptors_belong_to_their_message_and_are_close_on_exec() {
    let (mut theirs, mut connection) = pair();
    theirs.write_all(&message()).unwrap();
    send_fds(&theirs, &message(), 3);
    theirs.write_all(&message()).unwrap();
    assert_eq!(payload(next(&mut connection, LONG).unwrap()).1, 0);
    let Received::Message { fds, .. } = next(&mut connection, LONG).unwrap() else { panic!() };
    assert_eq!(fds.len(), 3);
    for fd in fds {
        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
    assert_eq!(payload(next(&mut connection, LONG).unwrap()).1, 0);
}

#[test]
fn too_many_descriptors_end_the_connection() {
    let (theirs, mut connection) = pair();
    send_fds(&theirs, &message(), FDS_MAX);
    assert_eq!(payload(next(&mut connection, LONG).unwrap()).1, FDS_MAX);
    send_fds(&theirs, &message(), FDS_MAX + 1);
    assert_eq!(next(&mut connection, LONG).unwrap_err().kind(), ErrorKind::Protocol);
    let (theirs, mut connection) = pair();
    send_fds(&theirs, &message()[..6], 20);
    send_fds(&theirs, &message()[6..], 20);
    assert_eq!(next(&mut connection, LONG).unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn waking_ends_the_waiting_and_loses_nothing() {
    let (mut theirs, mut connection) = pair();
    let wake = eventfd();
    theirs.write_all(&message()[..7]).unwrap();
    let sleeper = {
        let wake = wake.try_clone().unwrap();
        thread::spawn(move || {
            thread::sleep(SOON);
            rustix::io::write(&wake, &1u64.to_ne_bytes()).unwrap();
        })
    };
    assert!(matches!(connection.receive(wake.as_fd(), LONG, None).unwrap(), Received::Woken));
    sleeper.join().unwrap();
    let mut connection = connection.into_socket().expect_err("in the middle of a message");
    rustix::io::read(&wake, &mut [0; 8]).unwrap();
    theirs.write_all(&message()[7..]).unwrap();
    assert_eq!(payload(connection.receive(wake.as_fd(), LONG, None).unwrap()).0, 7u64.as_bytes());
    connection.into_socket().expect("between messages");
}

#[test]
fn a_reply_arrives_with_its_descriptor() {
    let (theirs, connection) = pair();
    let reply = Reply::new(31, &[5; 24]).with_fd(eventfd());
    connection.send(&reply, LONG).unwrap();
    let mut theirs = Connection::new(theirs.into());
    // A front end sees what we would refuse: a reply. The socket does not care.
    assert_eq!(payload(next(&mut theirs, LONG).unwrap()), (vec![5; 24], 1));
}

#[test]
fn a_front_end_that_takes_no_replies_loses_its_connection() {
    let (theirs, connection) = pair();
    let reply = Reply::new(24, &[0; PAYLOAD_BYTES_MAX]);
    let error = (0..10_000).find_map(|_| connection.send(&reply, SOON).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    drop(theirs);
    assert_eq!(connection.send(&reply, SOON).unwrap_err().kind(), ErrorKind::System);
}

#[test]
fn a_large_reply_waits_for_a_slow_reader() {
    let (mut theirs, connection) = pair();
    let reply = Reply::new(24, &[9; PAYLOAD_BYTES_MAX]);
    let count = 200;
    let reader = thread::spawn(move || {
        let mut bytes = vec![0; count * (HEADER_BYTES + PAYLOAD_BYTES_MAX)];
        theirs.read_exact(&mut bytes).unwrap();
        bytes.iter().filter(|byte| **byte == 9).count()
    });
    for _ in 0..count {
        connection.send(&reply, LONG).unwrap();
    }
    assert_eq!(reader.join().unwrap(), count * PAYLOAD_BYTES_MAX);
}

#[test]
fn changes_of_configuration_space_never_block_and_the_last_one_arrives() {
    let (mut theirs, ours) = UnixStream::pair().unwrap();
    let mut channel = BackChannel::new(ours.into());
    let full = (0..100_000).position(|_| !channel.config_changed().unwrap()).expect("it fills");
    assert!(!channel.config_changed().unwrap());
    let mut bytes = vec![0; full * HEADER_BYTES];
    theirs.read_exact(&mut bytes).unwrap();
    assert!(channel.push().unwrap());
    assert!(channel.push().unwrap());
    let mut last = [0; HEADER_BYTES];
    theirs.read_exact(&mut last).unwrap();
    assert_eq!(last, *[2u32, 1, 0].as_bytes());
    theirs.set_nonblocking(true).unwrap();
    assert!(theirs.read(&mut last).is_err(), "only one more");
    drop(theirs);
    assert!(channel.config_changed().is_err());
}
