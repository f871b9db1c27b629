//! A user's word that images below the one on top may be written.
//!
//! The process that serves may not write them, and the helper process, which opens them for it,
//! cannot ask the user: it hears the process only, which may have been taken over. So `ringdisk
//! ctl`, which runs outside, makes a pair of sockets, says [`TEXT`] on one, and sends the other
//! with its command; the process passes it on. The kernel knows who made the pair, and nobody
//! inside can make one.
//!
//! Promises: the word counts as long as its giver has the other end open, which is until the
//! command is answered; it is root's, or that of the user of the process.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};

/// What is said.
const TEXT: &[u8] = b"ringdisk: images below may be written\n";

/// A user's word, and what the user keeps meanwhile.
///
/// Errors: those of socketpair(2).
pub fn give() -> io::Result<(OwnedFd, OwnedFd)> {
    let (kept, given) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    send(&kept, TEXT, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok((kept, given))
}

/// Whether a descriptor is such a word: not one of the sockets that the process which passes it on
/// has made itself, or somebody else.
///
/// * `server`: pid of the process that passes it on.
pub fn is_given(word: &OwnedFd, server: u32) -> bool {
    let is_user = sockopt::socket_peercred(word).is_ok_and(|peer| {
        let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
        let is_other = pid != server && pid != std::process::id();
        is_other && (peer.uid.is_root() || peer.uid == rustix::process::getuid())
    });
    if !is_user || sockopt::socket_type(word) != Ok(SocketType::SEQPACKET) {
        return false;
    }
    let mut said = [MaybeUninit::uninit(); TEXT.len() + 1];
    recv(word.as_fd(), &mut said, RecvFlags::DONTWAIT).is_ok_and(|((said, _), _)| &said[..] == TEXT)
}

/// Whether the giver still waits.
pub fn lasts(word: &OwnedFd) -> bool {
    let mut ready = [PollFd::new(word, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut ready, Some(&now)) == Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_lasts_as_long_as_its_giver_and_is_nobodys_own() {
        let (kept, given) = give().expect("sockets");
        assert!(lasts(&given));
        assert!(!is_given(&given, 0), "this process has made it itself");
        drop(kept);
        assert!(!lasts(&given));
        let file = tempfile::tempfile().expect("a file");
        assert!(!is_given(&file.into(), 0));
    }
}
