//! A user's word that images below the one on top may be written, or named by others.
//!
//! The process that serves may not write them, and the helper process, which opens them for it,
//! cannot ask the user: it hears the process only, which may have been taken over. So `ringdisk
//! ctl`, which runs outside, makes a pair of sockets, says on one what it allows, and sends the
//! other with its command; the process passes it on. The kernel knows who made the pair, and nobody
//! inside can make one.
//!
//! Promises: the word counts as long as the user who gave it has the other end open, which is until
//! the command is answered; it is root's, or that of the user of the process. Of a job in the
//! background the process gets that end, too, and closes it at the end of the job; a process that
//! was taken over may keep such a word as long as it lives. A helper process hears a word about the
//! target of a mirror or a backup once: the target is held from then on, until the job has ended. A
//! successor that goes on with a mirror has a helper process of its own, which hears it again.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ringdisk_disk::Format;
use ringdisk_storage::NbdEndpoint;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair, sockopt,
};

/// What a user allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allows {
    /// Images below are written, and the notes of what images name are changed.
    Writing,
    /// The notes are changed, and nothing is written. With device and inode of a file that the user
    /// names in the command, and its format: an image may name it as that from now on.
    Notes(Option<((u64, u64), Format)>),
    /// This file is written, the target of a mirror, and may be on top of the disk afterwards, as
    /// this format. Absolute, with device and inode number.
    Target(PathBuf, (u64, u64), Format),
    /// This file is written, the target of a backup, and is of no disk afterwards. As above.
    Copy(PathBuf, (u64, u64), Format),
    /// The target of a mirror or a backup is an export of a server that listens there.
    Servers(Vec<NbdEndpoint>),
}

impl Allows {
    /// What is said.
    fn text(&self) -> Vec<u8> {
        match self {
            Allows::Writing => WRITING.into(),
            Allows::Notes(None) => NOTES.into(),
            Allows::Notes(Some(((device, inode), format))) => {
                format!("{NOTES} {device} {inode} {}", format.name()).into_bytes()
            }
            Allows::Target(path, id, format) => file_text(TARGET, path, *id, *format),
            Allows::Copy(path, id, format) => file_text(COPY, path, *id, *format),
            Allows::Servers(servers) => {
                let servers = servers.iter().map(|server| format!("\n{server}"));
                format!("{SERVERS}{}", servers.collect::<String>()).into_bytes()
            }
        }
    }

    /// Reads what was said.
    fn read(text: &[u8]) -> Option<Allows> {
        let allows = Allows::parse(text)?;
        Some(allows).filter(|allows| allows.text() == text)
    }

    /// The same, of words that may have been said in another way.
    fn parse(text: &[u8]) -> Option<Allows> {
        if let Some(rest) = text.strip_prefix(TARGET.as_bytes()) {
            return file_of(rest).map(|(path, id, format)| Allows::Target(path, id, format));
        }
        if let Some(rest) = text.strip_prefix(COPY.as_bytes()) {
            return file_of(rest).map(|(path, id, format)| Allows::Copy(path, id, format));
        }
        let text = std::str::from_utf8(text).ok()?;
        if text == WRITING {
            return Some(Allows::Writing);
        }
        if let Some(rest) = text.strip_prefix(SERVERS) {
            let servers = rest.split('\n').skip(1).map(|server| server.parse().ok());
            return Some(Allows::Servers(servers.collect::<Option<_>>()?));
        }
        let words: Vec<&str> = text.strip_prefix(NOTES)?.split(' ').skip(1).collect();
        let file = match words.as_slice() {
            [] => None,
            [device, inode, format] => {
                Some(((device.parse().ok()?, inode.parse().ok()?), format.parse().ok()?))
            }
            _ => return None,
        };
        Some(Allows::Notes(file))
    }
}

/// What is said of a file.
fn file_text(word: &str, path: &Path, (device, inode): (u64, u64), format: Format) -> Vec<u8> {
    let numbers = format!("{word} {} {device} {inode} ", format.name());
    [numbers.as_bytes(), path.as_os_str().as_bytes()].concat()
}

/// Reads what was said of a file, behind the word.
fn file_of(rest: &[u8]) -> Option<(PathBuf, (u64, u64), Format)> {
    let mut parts = rest.strip_prefix(b" ")?.splitn(4, |byte| *byte == b' ');
    let mut word = || std::str::from_utf8(parts.next()?).ok();
    let format = word()?.parse().ok()?;
    let id = (word()?.parse().ok()?, word()?.parse().ok()?);
    let path = PathBuf::from(OsStr::from_bytes(parts.next()?));
    path.is_absolute().then_some((path, id, format))
}

/// What is said for [`Allows::Writing`].
const WRITING: &str = "ringdisk: images below may be written";
/// What is said for [`Allows::Notes`], before the numbers.
const NOTES: &str = "ringdisk: names may be noted";

/// What is said for [`Allows::Target`], before numbers and path.
const TARGET: &str = "ringdisk: the target of a mirror is";
/// What is said for [`Allows::Copy`], before numbers and path.
const COPY: &str = "ringdisk: the target of a backup is";
/// What is said for [`Allows::Servers`], of a backup, too, before the endpoints.
const SERVERS: &str = "ringdisk: a mirror goes to a server at";

/// No time.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Longer than what is said, bytes: a path of 4096, or the addresses of a host. What is longer is
/// cut, and so no word.
const TEXT_BYTES_MAX: usize = 8 << 10;

/// A user's word, and what the user keeps meanwhile.
///
/// Errors: those of socketpair(2).
pub fn give(allows: &Allows) -> io::Result<(OwnedFd, OwnedFd)> {
    let (kept, given) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    send(&kept, &allows.text(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    // A process that gets both ends says nothing else with them.
    shutdown(&kept, Shutdown::Write)?;
    Ok((kept, given))
}

/// What a descriptor allows; `None`: it is no such word, but a socket that the process which passes
/// it on has made itself, say, or something else.
///
/// * `server`: pid of the process that passes it on.
pub fn given(word: &OwnedFd, server: u32) -> Option<Allows> {
    let peer = sockopt::socket_peercred(word).ok()?;
    let pid = peer.pid.as_raw_nonzero().get().cast_unsigned();
    let is_other = pid != server && pid != std::process::id();
    let is_user = is_other && (peer.uid.is_root() || peer.uid == rustix::process::getuid());
    if !is_user || sockopt::socket_type(word) != Ok(SocketType::SEQPACKET) {
        return None;
    }
    if !is_said(word) {
        return None;
    }
    let mut said = [MaybeUninit::uninit(); TEXT_BYTES_MAX];
    // It stays there for the helper process of a successor, which goes on with the job.
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let ((said, _), _) = recv(word.as_fd(), &mut said, flags).ok()?;
    Allows::read(said)
}

/// Whether nothing more can be said to it.
fn is_said(word: &OwnedFd) -> bool {
    let mut ready = [PollFd::new(word, PollFlags::RDHUP)];
    poll(&mut ready, Some(&NOW)) == Ok(1) && ready[0].revents().contains(PollFlags::RDHUP)
}

/// Whether the user who gave it still waits.
pub fn lasts(word: &OwnedFd) -> bool {
    // Its closing, which is told unasked. That nothing more is said is so from the beginning.
    poll(&mut [PollFd::new(word, PollFlags::empty())], Some(&NOW)) == Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_nothing_else() {
        let file = Some(((7, u64::MAX), Format::Qcow2));
        for allows in [Allows::Writing, Allows::Notes(None), Allows::Notes(file)] {
            assert_eq!(Allows::read(&allows.text()), Some(allows.clone()));
            for more in [" ", "\n", " 1", " 1 2", " 1 2 3", " 01 2 raw", " 1 2 raw 3"] {
                let text = [&allows.text(), more.as_bytes()].concat();
                assert_eq!(Allows::read(&text), None, "{}", text.escape_ascii());
            }
        }
        assert_eq!(Allows::read(b""), None);
        let servers = vec![
            NbdEndpoint::Unix("/run/an nbd".into()),
            NbdEndpoint::Tcp("[::1]:10809".parse().expect("an address")),
        ];
        let path = PathBuf::from("/srv/a copy\n 1 2");
        let target = Allows::Target(path.clone(), (7, u64::MAX), Format::Raw);
        let copy = Allows::Copy(path, (7, u64::MAX), Format::Raw);
        for allows in [target, copy, Allows::Servers(servers), Allows::Servers(Vec::new())] {
            assert_eq!(Allows::read(&allows.text()), Some(allows));
        }
        for text in [
            " raw 1 2 copy",
            " raw 1 2",
            " raw 01 2 /copy",
            "raw 1 2 /copy",
            " raw 1 2 ",
            " 1 2 /copy",
            " other 1 2 /copy",
            "",
        ] {
            for word in [TARGET, COPY] {
                assert_eq!(Allows::read(format!("{word}{text}").as_bytes()), None, "{text:?}");
            }
        }
        for text in ["\n", "\nnowhere", " [::1]:1", "\n[::1]:1\n", "\n[0::1]:1"] {
            assert_eq!(Allows::read(format!("{SERVERS}{text}").as_bytes()), None, "{text:?}");
        }
    }

    /// A process that gets both ends, and has taken what the user has said.
    #[test]
    fn nothing_else_is_said_with_the_sockets_of_a_user() {
        let (kept, word) = give(&Allows::Writing).expect("sockets");
        assert!(lasts(&word) && is_said(&word));
        let mut taken = [0; 64];
        recv(&word, &mut taken, RecvFlags::DONTWAIT).expect("what the user has said");
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = send(&kept, &Allows::Notes(None).text(), flags);
        assert_eq!(sent, Err(rustix::io::Errno::PIPE));
        assert!(lasts(&word));
        drop(kept);
        assert!(!lasts(&word));
        // One who can say more is nobody's word.
        let (_said, more) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .expect("sockets");
        assert!(!is_said(&more));
    }

    #[test]
    fn a_word_lasts_as_long_as_its_user_and_is_nobodys_own() {
        let (kept, word) = give(&Allows::Writing).expect("sockets");
        assert!(lasts(&word));
        assert_eq!(given(&word, 0), None, "this process has made it itself");
        drop(kept);
        assert!(!lasts(&word));
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(given(&file.into(), 0), None);
    }
}
