//! Sockets of front ends that take long to close: a Unix socket holds what was sent through it and
//! not received, and its last descriptor waits for the closing of that. Here that is a TCP socket
//! which closes when its other end likes (SO_LINGER), so no privilege is needed; a file on FUSE is
//! another one. The disk goes on, and so does every other one of the process.

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ringdisk_testkit::model::{FrontEnd, Request, Vm, VmOptions, ask, bits, words};
use ringdisk_testkit::process::patient;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::sockopt;

use crate::common::{MIB, Served, serve, simulated};

/// So long the closing of such a socket takes: longer than anything here waits.
const LINGER: Duration = Duration::from_secs(600);

/// A TCP socket whose closing waits for the one that listens, which takes nothing.
fn slow() -> (TcpStream, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let mut socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("connect");
    socket.set_nonblocking(true).expect("a flag");
    while socket.write(&[0; 65536]).is_ok() {}
    sockopt::set_socket_linger(&socket, Some(LINGER)).expect("an option");
    (socket, listener)
}

/// A Unix socket in which such a one waits; the other end is closed. (Nobody but it holds the one
/// that waits: the test would close that.)
fn loaded(slow: TcpStream) -> OwnedFd {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    assert!(FrontEnd::on(ours).send_raw(b"x", &[slow.as_fd()]));
    drop(slow);
    theirs.into()
}

/// Whether a new front end is served within a time that is much shorter than what closing takes.
fn works(served: &Served) {
    let begun = Instant::now();
    let mut vm = Vm::started(served.front(), VmOptions::default());
    assert_eq!(vm.status(0, Request::write(1, vec![4; 512])), 0);
    assert!(begun.elapsed() < patient(LINGER / 20));
}

/// A front end that has agreed on what is used here, and waits for no answer.
fn front(served: &Served) -> FrontEnd {
    let mut front = served.front();
    let features = bits::P_BACKEND_REQ | bits::P_DEVICE_STATE | bits::P_LOG_SHMFD;
    tell(&mut front, ask::SET_PROTOCOL_FEATURES, &words(&[features]), &[]);
    front
}

fn tell(front: &mut FrontEnd, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    assert!(front.send(request, 0, payload, fds));
}

/// Sends messages before the device reads any, so that it has the last descriptor of what comes
/// with them. Looks whether the next front end is served, and the export ends.
///
/// * `what`: has to send the socket that is slow, and to keep no descriptor of it.
fn leaves_it_well(what: impl FnOnce(&Served, TcpStream) -> FrontEnd) {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |options| options.held = true);
    let (slow, _listener) = slow();
    let mut front = what(&served, slow);
    front.socket().shutdown(Shutdown::Write).expect("an end");
    served.export.release();
    front.expect_end();
    works(&served);
    let begun = Instant::now();
    drop(served);
    assert!(begun.elapsed() < patient(LINGER / 20), "the export does not end");
}

#[test]
fn a_socket_in_place_of_an_eventfd_is_refused_and_closed_aside() {
    for request in [ask::SET_VRING_KICK, ask::SET_VRING_CALL, ask::SET_VRING_ERR, ask::SET_LOG_FD] {
        leaves_it_well(|served, slow| {
            let mut front = front(served);
            let payload = if request == ask::SET_LOG_FD { vec![] } else { vec![0; 8] };
            tell(&mut front, request, &payload, &[loaded(slow).as_fd()]);
            front
        });
    }
}

#[test]
fn the_back_channel_is_closed_aside() {
    for takes_its_place in [false, true] {
        leaves_it_well(|served, slow| {
            let mut front = front(served);
            tell(&mut front, ask::SET_BACKEND_REQ_FD, &[], &[loaded(slow).as_fd()]);
            let (other, _end) = UnixStream::pair().expect("sockets");
            (0..u8::from(takes_its_place)).for_each(|_| {
                tell(&mut front, ask::SET_BACKEND_REQ_FD, &[], &[other.as_fd()]);
            });
            front
        });
    }
}

#[test]
fn a_back_channel_that_was_not_agreed_on_is_closed_aside() {
    leaves_it_well(|served, slow| {
        let mut front = served.front();
        tell(&mut front, ask::SET_BACKEND_REQ_FD, &[], &[loaded(slow).as_fd()]);
        front
    });
}

#[test]
fn a_socket_for_the_state_is_closed_aside() {
    for direction in [0_u32, 1] {
        leaves_it_well(|served, slow| {
            let mut front = front(served);
            let payload = [direction.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
            tell(&mut front, ask::SET_DEVICE_STATE_FD, &payload, &[loaded(slow).as_fd()]);
            front
        });
    }
}

#[test]
fn what_a_connection_holds_that_nobody_receives_is_closed_aside() {
    leaves_it_well(|served, slow| {
        let mut front = front(served);
        // The first message ends the connection, the second is never read.
        let bad = [77_u32.to_ne_bytes(), 1_u32.to_ne_bytes(), u32::MAX.to_ne_bytes()].concat();
        assert!(front.send_raw(&bad, &[]));
        assert!(front.send_raw(b"x", &[slow.as_fd()]));
        front
    });
}

/// Nobody has accepted it when the listening socket is closed.
#[test]
fn what_waits_behind_another_front_end_is_closed_aside() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let first = Vm::started(served.front(), VmOptions::default());
    let mut second = served.front();
    let (slow, _listener) = slow();
    assert!(second.send_raw(b"x", &[slow.as_fd()]));
    drop((slow, second));
    let begun = Instant::now();
    drop(served);
    assert!(begun.elapsed() < patient(LINGER / 20), "the export does not end");
    drop(first);
}

/// Descriptors for which there is no room are closed by the kernel when a thread receives the
/// message, which never sees them.
#[test]
fn more_descriptors_than_any_message_has_are_closed_aside() {
    leaves_it_well(|served, slow| {
        let mut front = front(served);
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let mut fds = vec![event.as_fd(); 48];
        fds.push(slow.as_fd());
        assert!(front.send(ask::GET_FEATURES, 0, &[], &fds));
        front
    });
}

/// As many threads as there are wait for sockets that came before (`closing::THREADS_MAX`).
#[test]
fn a_front_end_sees_its_end_while_nobody_is_left_to_close_its_socket() {
    const THREADS: usize = 16;
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut front = front(&served);
    let mut listeners = Vec::new();
    // Each one takes the place of the one before, which is closed then.
    for _ in 0..=THREADS {
        let (slow, listener) = slow();
        listeners.push(listener);
        tell(&mut front, ask::SET_BACKEND_REQ_FD, &[], &[loaded(slow).as_fd()]);
    }
    // This message ends the connection: it is longer than any.
    let bad = [77_u32.to_ne_bytes(), 1_u32.to_ne_bytes(), u32::MAX.to_ne_bytes()].concat();
    assert!(front.send_raw(&bad, &[]));
    front.expect_end();
    works(&served);
}
