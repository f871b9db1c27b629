//! `--upgrade`: an export goes to a successor process while clients use it, a disk of a virtual
//! machine or those of NBD clients (`ringdisk serve`), or a mount (`ringdisk mount`).
//!
//! Promises: at every moment at most one of the two processes serves. The predecessor goes on as
//! long as the successor has not said that everything is ready, and never again after that. Clients
//! see a pause, nothing else. If the predecessor is killed when the successor has everything, the
//! successor serves; if at any other moment the process is killed that is about to serve, neither
//! serves. Beside the control socket of a disk the predecessor listens on a socket for its
//! successor, open to our user and to root only. The successor takes a disk only from a process of
//! these users, since directories of sockets may be in /tmp, where all users make names.
//!
//! The messages: the successor connects and sends [`ASK`] and what it would show to clients
//! ([`ClientView`]). The predecessor refuses if that differs from what it shows itself, or else
//! stands still and sends the state. The successor prepares everything and sends [`READY`]; the
//! predecessor sends [`GO`]; the successor serves. (Where a helper process would start another
//! server in place of a predecessor that is killed, the successor claims the right to go on first:
//! [`crate::keep::succession`].) The predecessor sends [`STOP`] if a stop was asked for meanwhile,
//! and [`FORCE`] too if that was to be the end at once. Then it removes its names and closes the
//! socket: at once where it serves other disks, else by its end, so that its pid file is free, too.

mod client_view;
pub mod link;
pub mod mount;
mod predecessor;
mod successor;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub use client_view::ClientView;
pub use predecessor::{DiskToHandOver, SuccessorSocket};
use ringdisk_export::{Error, HandOverState, HandedOver};
use ringdisk_vhost::export::HandOverHandle;
use rustix::net::sockopt::socket_peercred;
pub use successor::{Lingering, Offer, OldProcess, Predecessor, ask};

use crate::control::registry::user;
use crate::failure::{Exit, Failure};

/// The successor wants the disk. A process that connects and says nothing only looks whether it is
/// served.
const ASK: u8 = b'A';
/// The successor has everything.
const READY: u8 = b'R';
/// The predecessor serves no longer.
const GO: u8 = b'G';
/// After [`GO`]: the predecessor was told to stop meanwhile, and the successor has to.
const STOP: u8 = b'S';
/// After [`STOP`]: the end at once was asked for. Earlier versions do not know it, and stop.
const FORCE: u8 = b'F';
/// Each step takes so long at most; clients wait meanwhile.
const STEP: Duration = Duration::from_secs(8);

/// What is handed over, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A disk of a virtual machine.
    Disk,
    /// A mount.
    Mount,
    /// Disks of NBD clients.
    Nbd,
}

impl Kind {
    fn noun(self) -> &'static str {
        match self {
            Kind::Disk | Kind::Nbd => "disk",
            Kind::Mount => "mount",
        }
    }

    fn clients(self) -> &'static str {
        match self {
            Kind::Disk => "the guest",
            Kind::Mount => "its users",
            Kind::Nbd => "its clients",
        }
    }

    fn what_clients_see(self) -> &'static str {
        match self {
            Kind::Disk => "what the guest sees",
            Kind::Mount => "what its users see",
            Kind::Nbd => "what clients see",
        }
    }

    /// No process of ours hands over what is served there.
    fn no_predecessor(self, path: &Path) -> Failure {
        let name = path.display();
        match self {
            Kind::Disk | Kind::Nbd => {
                Failure::new(Exit::Mountpoint, format!("no ringdisk serves a disk at '{name}'"))
                    .hint("start without --upgrade")
            }
            Kind::Mount => {
                let text =
                    format!("no process of this user that serves '{name}' waits for a successor");
                Failure::new(Exit::Mountpoint, text).hint(
                    "it may be another user's, or of a version that cannot be upgraded: end it \
                     with `ringdisk umount` and mount the image anew",
                )
            }
        }
    }
}

/// An export that can be handed over.
pub trait HandsOver: Send + 'static {
    /// Makes it stand still and packs it. It goes on when the second value is dropped, and ends
    /// when that is committed.
    ///
    /// Errors: why that cannot be; it goes on.
    fn hand_over(&self) -> Result<(HandOverState, HandedOver), Error>;

    /// What it is.
    fn kind(&self) -> Kind;
}

impl HandsOver for ringdisk_nbd::HandOverHandle {
    fn hand_over(&self) -> Result<(HandOverState, HandedOver), Error> {
        ringdisk_nbd::HandOverHandle::hand_over(self)
    }

    fn kind(&self) -> Kind {
        Kind::Nbd
    }
}

impl HandsOver for HandOverHandle {
    fn hand_over(&self) -> Result<(HandOverState, HandedOver), Error> {
        HandOverHandle::hand_over(self)
    }

    fn kind(&self) -> Kind {
        Kind::Disk
    }
}

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
