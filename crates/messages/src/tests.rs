use std::fs::File;

use rustix::io::{FdFlags, fcntl_getfd};

use super::*;

fn file() -> File {
    tempfile::tempfile().expect("a file")
}

fn packets() -> (OwnedFd, OwnedFd) {
    pair(SocketType::SEQPACKET).expect("sockets")
}

fn text(text: &[u8]) -> [IoSlice<'_>; 1] {
    [IoSlice::new(text)]
}

/// Descriptors of this process that lead to a pipe.
fn readers_gone(write: &OwnedFd) -> bool {
    rustix::io::write(write, b"x") == Err(Errno::PIPE)
}

#[test]
fn text_and_descriptors_arrive_in_order_and_close_on_exec() {
    let (ours, theirs) = packets();
    let files = [file(), file()];
    files[0].set_len(1).expect("a length");
    files[1].set_len(2).expect("a length");
    let sent = [files[0].as_fd(), files[1].as_fd()];
    let pieces = [IoSlice::new(b"ab"), IoSlice::new(b"c")];
    assert_eq!(send(&ours, &pieces, &sent, Wait::Never), Ok(3));
    let mut bytes = [0; 8];
    let message =
        receive(&theirs, &mut bytes, Wait::Never).and_then(Message::whole).expect("whole");
    assert_eq!(&bytes[..message.len], b"abc");
    let lengths: Vec<u64> = message
        .descriptors
        .into_iter()
        .map(|fd| {
            assert!(fcntl_getfd(&fd).expect("open").contains(FdFlags::CLOEXEC));
            File::from(fd).metadata().expect("stat").len()
        })
        .collect();
    assert_eq!(lengths, [1, 2]);
}

#[test]
fn nothing_and_the_end_are_told_apart() {
    let (ours, theirs) = packets();
    let mut bytes = [0; 8];
    assert_eq!(receive(&theirs, &mut bytes, Wait::Never).expect_err("nothing"), Errno::AGAIN);
    drop(ours);
    assert!(receive(&theirs, &mut bytes, Wait::Never).expect("the end").is_end());
    assert_eq!(send(&theirs, &text(b"x"), &[], Wait::Never), Err(Errno::PIPE));
}

#[test]
fn a_text_that_is_too_long_is_no_message_and_its_descriptors_are_closed() {
    let (ours, theirs) = packets();
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    send(&ours, &text(b"too long"), &[read.as_fd()], Wait::Never).expect("sent");
    drop(read);
    let mut bytes = [0; 3];
    let message = receive(&theirs, &mut bytes, Wait::Never).expect("received");
    assert!(message.is_cut);
    assert_eq!(message.whole().expect_err("cut"), Errno::MSGSIZE);
    assert!(readers_gone(&write));
}

#[test]
fn descriptors_that_nobody_wants_are_closed() {
    let (ours, theirs) = packets();
    let (read, write) = rustix::pipe::pipe().expect("a pipe");
    let wanted = file();
    send(&ours, &text(b"x"), &[wanted.as_fd(), read.as_fd()], Wait::Never).expect("sent");
    drop(read);
    let mut bytes = [0; 8];
    let one = receive(&theirs, &mut bytes, Wait::Never).expect("received").into_one();
    assert!(one.is_some() && readers_gone(&write));
}

#[test]
fn as_many_as_the_kernel_lets_through_arrive_and_no_more_are_sent() {
    let (ours, theirs) = packets();
    let file = file();
    let all = vec![file.as_fd(); DESCRIPTORS_MAX + 1];
    assert_eq!(send(&ours, &text(b"x"), &all, Wait::Never), Err(Errno::TOOBIG));
    send(&ours, &text(b"x"), &all[1..], Wait::Never).expect("sent");
    let mut bytes = [0; 8];
    let message =
        receive(&theirs, &mut bytes, Wait::Never).and_then(Message::whole).expect("whole");
    assert_eq!(message.descriptors.len(), DESCRIPTORS_MAX);
}

#[test]
fn of_a_stream_no_descriptor_comes_with_text_before_it() {
    let (ours, theirs) = pair(SocketType::STREAM).expect("sockets");
    let file = file();
    send(&ours, &text(b"first"), &[], Wait::Never).expect("sent");
    send(&ours, &text(b"second"), &[file.as_fd()], Wait::Never).expect("sent");
    send(&ours, &text(b"third"), &[file.as_fd()], Wait::Never).expect("sent");
    let mut bytes = [0; 64];
    let mut counts = Vec::new();
    while let Ok(message) = receive(&theirs, &mut bytes, Wait::Never) {
        counts.push((message.len, message.descriptors.len()));
    }
    let total: usize = counts.iter().map(|(len, _)| len).sum();
    assert_eq!((total, counts.iter().map(|(_, count)| count).sum::<usize>()), (16, 2));
    assert!(counts.iter().all(|(_, count)| *count <= 1), "{counts:?}");
}

#[test]
fn a_datagram_finds_its_address() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let server = std::os::unix::net::UnixDatagram::bind(&path).expect("bound");
    let client = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
    let address = SocketAddrUnix::new(&path).expect("an address");
    let file = file();
    send_to(&client, &address, &text(b"hi"), &[file.as_fd()], Wait::Never).expect("sent");
    let mut bytes = [0; 8];
    let message = receive(&server, &mut bytes, Wait::Never).expect("received");
    assert_eq!((&bytes[..message.len], message.descriptors.len()), (&b"hi"[..], 1));
}
