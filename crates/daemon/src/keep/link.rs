//! The socket pair between a helper process that keeps a mount or disks and the server that it has
//! started, whose standard input is one end of it.
//!
//! Promises: no descriptor goes to any other process; everything received is close-on-exec; when
//! one of the two ends, however, the other sees the end of the socket. To the serving process go
//! the parked descriptors with their names (`FDNAMES=a:b`), in as many messages as it takes
//! (`MORE=1` before the last one), the first of all being the socket for its tasks, which the
//! helper process carries out, too; from it come those of sd_notify(3).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;

use ringdisk_messages::{Message, Wait};
use rustix::io::Errno;

use crate::failure::{Exit, Failure};
use crate::helper::inherited;
use crate::helper::start::{Role, take_socket};
use crate::notify::{Notify, watch as sign_of_life};

/// Set when a service manager listens to the helper process.
const MANAGED: &str = "RINGDISK_MANAGED";
/// Longest message, bytes: names of all descriptors, or a line about a mount with a long path.
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// Descriptors that go with one message, with names of 50 bytes.
const LOT: usize = 200;

/// The name of the socket for tasks.
const LINE: &str = "ringdisk-helper";

/// Descriptors with their names.
pub(super) type Named = Vec<(String, OwnedFd)>;

/// What came over the socket.
#[derive(Debug)]
pub(super) enum Received {
    /// Text and descriptors.
    Message(String, Vec<OwnedFd>),
    /// Nothing at the moment.
    Nothing,
    /// The other process is gone.
    End,
}

/// Whether a service manager waits for the end of this process, or of the one that keeps its mount.
pub fn is_managed() -> bool {
    ["NOTIFY_SOCKET", MANAGED].iter().any(|name| std::env::var_os(name).is_some())
}

/// Starts the program anew, with our own arguments, to serve. Gives our end of the socket, which
/// does not block.
///
/// * `directory`: where the arguments are to be understood.
/// * `parked`: what the process before it has left.
/// * `line`: its end of the line to its helper.
///
/// Errors: those of the system; without `/proc` it cannot be done.
pub(super) fn spawn(
    directory: &Path,
    parked: &[(String, OwnedFd)],
    line: Option<OwnedFd>,
) -> io::Result<(OwnedFd, Child)> {
    Role::Kept.start_again(|command, socket| {
        rustix::io::ioctl_fionbio(socket, true)?;
        command
            .current_dir(directory)
            // It talks to this process.
            .env_remove("NOTIFY_SOCKET")
            .env_remove("FDSTORE")
            .env_remove(sign_of_life::PID)
            .envs(is_managed().then_some((MANAGED, "1")));
        if sign_of_life::wanted().is_none() {
            command.env_remove(sign_of_life::USEC);
        }
        if let Some(line) = line {
            send(socket.as_fd(), &format!("FDNAMES={LINE}\nMORE=1"), &[line.as_fd()])?;
        }
        send_parked(socket.as_fd(), parked)
    })
}

/// Sends what is parked.
///
/// Errors: those of sendmsg(2).
fn send_parked(socket: BorrowedFd<'_>, parked: &[(String, OwnedFd)]) -> io::Result<()> {
    let mut lots = parked.chunks(LOT).peekable();
    loop {
        let lot = lots.next().unwrap_or_default();
        let names: Vec<&str> = lot.iter().map(|(name, _)| name.as_str()).collect();
        let descriptors: Vec<BorrowedFd<'_>> = lot.iter().map(|(_, fd)| fd.as_fd()).collect();
        let more = if lots.peek().is_some() { "\nMORE=1" } else { "" };
        send(socket, &format!("FDNAMES={}{more}", names.join(":")), &descriptors)?;
        if more.is_empty() {
            return Ok(());
        }
    }
}

/// Receives what is parked.
///
/// Errors: the other process is gone; those of recvmsg(2).
fn receive_parked(socket: BorrowedFd<'_>) -> io::Result<Named> {
    let mut parked = Named::new();
    loop {
        let Received::Message(text, descriptors) = receive(socket)? else {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        };
        let names = text.lines().next().and_then(|line| line.strip_prefix("FDNAMES="));
        let names = names.unwrap_or_default().split(':');
        parked.extend(names.map(str::to_owned).zip(descriptors));
        if !text.lines().any(|line| line == "MORE=1") {
            return Ok(parked);
        }
    }
}

/// Takes the socket for tasks out of what came from the helper process.
fn take_line(parked: &mut Named) {
    if let Some(at) = parked.iter().position(|(name, _)| name == LINE) {
        inherited::put(parked.remove(at).1);
    }
}

/// Takes the socket from standard input, and what is parked.
///
/// * `kept`: what that process keeps, for people.
///
/// Errors: those of the system; the process that keeps it is gone.
pub(super) fn enter(kept: &str) -> Result<(Notify, OwnedFd, Named), Failure> {
    let enter = || -> io::Result<_> {
        let socket = take_socket()?;
        let mut parked = receive_parked(socket.as_fd())?;
        take_line(&mut parked);
        Ok((Notify::over(socket.try_clone()?), socket, parked))
    };
    enter().map_err(|error| {
        Failure::system(
            format!("nothing is heard from the process that keeps the {kept}"),
            &error,
            Exit::General,
        )
    })
}

/// Calls `then` when the other process is gone.
pub(super) fn watch(socket: &OwnedFd, then: impl FnOnce() + Send + 'static) {
    let Ok(socket) = socket.try_clone() else { return };
    let watch = std::thread::Builder::new().name(String::from("holder")).stack_size(64 << 10);
    let _ = watch.spawn(move || {
        wait_for_end(&socket);
        then();
    });
}

/// Waits until the other process is gone.
fn wait_for_end(socket: &OwnedFd) {
    while !matches!(receive(socket.as_fd()), Ok(Received::End) | Err(_)) {}
}

/// Sends one message.
///
/// Errors: those of sendmsg(2).
pub(super) fn send(
    socket: BorrowedFd<'_>,
    text: &str,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let pieces = [IoSlice::new(text.as_bytes())];
    ringdisk_messages::send(socket, &pieces, descriptors, Wait::Forever)?;
    Ok(())
}

/// Receives one message.
///
/// Errors: EMFILE when descriptors were lost; those of recvmsg(2), but for a socket that does not
/// block and has nothing.
pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Received> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let message = loop {
        let received = ringdisk_messages::receive(socket, &mut bytes, Wait::Forever);
        match received.and_then(Message::whole) {
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::CONNRESET) => return Ok(Received::End),
            // No process of this version sends one, and the next one counts.
            Err(Errno::MSGSIZE) => tracing::warn!("a message that is too long is left out"),
            message => break message?,
        }
    };
    if message.is_end() {
        return Ok(Received::End);
    }
    let text = String::from_utf8_lossy(bytes.get(..message.len).unwrap_or_default()).into_owned();
    Ok(Received::Message(text, message.descriptors))
}

#[cfg(test)]
mod tests {
    use ringdisk_messages::pair;
    use rustix::net::SocketType;

    use super::*;

    fn sockets() -> (OwnedFd, OwnedFd) {
        pair(SocketType::SEQPACKET).expect("sockets")
    }

    #[test]
    fn descriptors_arrive_with_the_text_and_the_end_is_seen() {
        let (ours, theirs) = sockets();
        let file = tempfile::tempfile().expect("file");
        send(ours.as_fd(), "FDNAMES=a:b", &[file.as_fd(), file.as_fd()]).expect("send");
        drop(ours);
        let Received::Message(text, descriptors) = receive(theirs.as_fd()).expect("receive") else {
            panic!("no message");
        };
        assert_eq!((text.as_str(), descriptors.len()), ("FDNAMES=a:b", 2));
        assert!(matches!(receive(theirs.as_fd()).expect("receive"), Received::End));
        wait_for_end(&theirs);
    }

    #[test]
    fn as_many_as_there_are_arrive_with_their_names() {
        for count in [0, 1, LOT, 2 * LOT + 1] {
            let (ours, theirs) = sockets();
            let file = tempfile::tempfile().expect("file");
            let copy = || OwnedFd::from(file.try_clone().expect("a descriptor"));
            let parked: Named = (0..count).map(|number| (number.to_string(), copy())).collect();
            send_parked(ours.as_fd(), &parked).expect("room");
            let names = |parked: &Named| -> Vec<String> {
                parked.iter().map(|(name, _)| name.clone()).collect()
            };
            assert_eq!(names(&receive_parked(theirs.as_fd()).expect("all")), names(&parked));
        }
    }

    #[test]
    fn a_socket_that_does_not_block_says_that_there_is_nothing() {
        let (ours, _theirs) = sockets();
        rustix::io::ioctl_fionbio(&ours, true).expect("a setting");
        assert!(matches!(receive(ours.as_fd()).expect("receive"), Received::Nothing));
    }
}
