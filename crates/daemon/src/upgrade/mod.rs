//! `ringdisk serve --upgrade`: a disk goes to a new process while a virtual machine uses it.
//!
//! Promises: at every moment exactly one of the two processes serves, or none; the old one goes on
//! as long as the new one has not said that everything is ready, and never again after that. The
//! guest sees a pause, nothing else. If the old one is killed when the new one has everything, the
//! new one serves; a kill at any other moment of the one whose turn it is leaves nobody, as a kill
//! always does, and requests in flight are in the memory of the front end then
//! (`ringdisk_guest::inflight`). Beside the control socket of a disk the old process listens on one
//! for its successor, open to our user and to root only; the new one takes a disk from these only,
//! since directories of sockets may be in /tmp, where anybody makes names.
//!
//! What is said: the new process connects and says [`ASK`] and what it would show to the guest
//! ([`Shown`]); the old one refuses if that is not what it shows itself, or else stands still and
//! sends the state; the new one prepares everything and says [`READY`]; the old one says [`GO`];
//! the new one serves. The old one removes its names and closes the socket: one that serves other
//! disks at once, one that has none left by its end, so that its pid file is free, too.

mod device;
pub mod link;
mod predecessor;
mod successor;

use std::os::unix::net::UnixStream;
use std::time::Duration;

pub use device::Shown;
pub use predecessor::SuccessorSocket;
use rustix::net::sockopt::socket_peercred;
pub use successor::{Lingering, Offer, Predecessor, ask};

use crate::control::registry::user;

/// The new process wants the disk. Who connects and says nothing only looks whether somebody is
/// there.
const ASK: u8 = b'A';
/// The new process has everything.
const READY: u8 = b'R';
/// The old process serves no longer.
const GO: u8 = b'G';
/// Each step takes so long at most; the guest stands still meanwhile.
const STEP: Duration = Duration::from_secs(8);

/// Whether a disk may be given to the process on the other side of a socket, or be taken from it.
fn is_trusted(stream: &UnixStream) -> bool {
    socket_peercred(stream).is_ok_and(|peer| may_have(peer.uid.as_raw()))
}

/// Our own user and root may have our disks.
fn may_have(peer: u32) -> bool {
    [0, user()].contains(&peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_but_our_user_and_root_gives_or_gets_a_disk() {
        let (ours, _theirs) = UnixStream::pair().expect("sockets");
        assert!(is_trusted(&ours));
        assert!(may_have(user()) && may_have(0));
        assert!(!may_have(user() + 1));
    }
}
