//! What a server that was taken over makes of a user's word that names the target of a mirror: it
//! has that file or that server, once, while the command lasts, and nothing else.

use std::fs;
use std::io::IoSlice;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, Shutdown,
    SocketFlags, SocketType, recvmsg, send, shutdown, socketpair,
};

use crate::common::tools::ringdisk;
use crate::common::{MIB, program, raw_image};
use crate::takeover::agent::{Agent, give, order};
use crate::takeover::out_of_reach::identity;

/// What `ringdisk ctl` says on a pair of sockets, of which the server gets one (this test is the
/// user): the user's end, and the word.
fn word(said: &str) -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (kept, given) = pair.expect("sockets");
    send(&kept, said.as_bytes(), SendFlags::NOSIGNAL).expect("said");
    shutdown(&kept, Shutdown::Write).expect("nothing more is said");
    (kept, given)
}

/// The word for a file that is there.
fn target(path: &Path) -> (OwnedFd, OwnedFd) {
    let (device, inode) = identity(path);
    word(&format!("ringdisk: the target of a mirror is raw {device} {inode} {}", text(path)))
}

fn numbers(path: &Path) -> Vec<u8> {
    let (device, inode) = identity(path);
    format!("{device}\0{inode}").into_bytes()
}

/// The letter of the answer, and the descriptor that came with it.
fn answer(line: &OwnedFd) -> (u8, Option<OwnedFd>) {
    let mut ready = [PollFd::new(line, PollFlags::IN)];
    assert_eq!(poll(&mut ready, Some(&Timespec { tv_sec: 20, tv_nsec: 0 })), Ok(1), "no answer");
    let mut text = [0; 8192];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut pieces = [std::io::IoSliceMut::new(&mut text)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    recvmsg(line.as_fd(), &mut pieces, &mut control, flags).expect("an answer");
    let mut given = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut all) => all.next(),
        _ => None,
    });
    let fd = given.next();
    (text[0], fd)
}

/// Passes a word on.
fn hear(line: &OwnedFd, word: &OwnedFd) -> u8 {
    give(line, b"H", &[word.as_fd()]);
    answer(line).0
}

/// Has a file opened to be written.
fn opened(line: &OwnedFd, path: &Path) -> (u8, Option<OwnedFd>) {
    let order = [b"w", &numbers(path)[..]].concat();
    let pieces = [IoSlice::new(&order)];
    rustix::net::sendmsg(line, &pieces, &mut Default::default(), SendFlags::NOSIGNAL)
        .expect("sent");
    answer(line)
}

/// A disk in its sandbox, and a directory of others with files that are none of its business.
fn world() -> (Mounted, tempfile::TempDir, tempfile::TempDir) {
    let (directory, image) = raw_image(MIB, 1);
    let disk = Mounted::start(&program(), &["--format", "raw", text(&image)]);
    let place = scratch();
    for name in ["copy", "secret"] {
        images::raw(&place.path().join(name), MIB, 7);
    }
    (disk, directory, place)
}

#[test]
fn the_word_for_a_target_opens_that_file_and_no_other_one() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, place) = world();
    let [copy, secret, new] = ["copy", "secret", "new"].map(|name| place.path().join(name));
    let before = fs::read(&secret).expect("read");
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    assert_eq!(opened(&line, &copy).0, b'E', "nobody has named it");
    // Another file has the name by now than the user has seen; no file has it.
    let (kept, other) = word(&format!(
        "ringdisk: the target of a mirror is raw {} {} {}",
        identity(&secret).0,
        identity(&secret).1,
        text(&copy)
    ));
    assert_eq!(hear(&line, &other), b'E');
    drop(kept);
    // A link in its place is not followed.
    let link = place.path().join("link");
    std::os::unix::fs::symlink(&secret, &link).expect("a link");
    let (device, inode) = identity(&secret);
    let said = format!("ringdisk: the target of a mirror is raw {device} {inode} {}", text(&link));
    let (kept, linked) = word(&said);
    assert_eq!(hear(&line, &linked), b'E');
    drop(kept);
    assert_eq!((opened(&line, &copy).0, opened(&line, &secret).0), (b'E', b'E'));

    let (_kept, given) = target(&copy);
    assert_eq!(hear(&line, &given), b'D');
    let (letter, file) = opened(&line, &copy);
    assert_eq!(letter, b'D');
    let file = fs::File::from(file.expect("the file"));
    file.write_all_at(b"mine", 0).expect("it may be written");
    drop(file);
    assert_eq!(opened(&line, &secret).0, b'E', "another file");
    assert_eq!(hear(&line, &given), b'E', "the same word again");
    // It goes to no other name, is not removed, and nothing that is there is made anew.
    fs::rename(&copy, place.path().join("moved")).expect("rename");
    fs::rename(&secret, &copy).expect("rename");
    assert_eq!(opened(&line, &copy).0, b'E', "a file that has taken its name");
    fs::rename(&copy, &secret).expect("rename");
    fs::rename(place.path().join("moved"), &copy).expect("rename");
    let at = |name: &str| [&numbers(place.path())[..], b"\0", name.as_bytes()].concat();
    for name in ["copy", "secret", "link", "../secret", "a/b", ".", ".."] {
        assert_eq!(order(&line, b'o', &at(name)), Some(b'E'), "{name} is made");
    }
    for path in [&copy, &secret] {
        assert_eq!(order(&line, b'x', &numbers(path)), Some(b'E'), "{} goes", path.display());
    }
    assert!(copy.exists() && secret.exists() && !new.exists());
    assert_eq!(fs::read(&secret).expect("read"), before);

    // The mirror is over: so is the right to the file, and to its directory.
    assert_eq!(order(&line, b'z', &numbers(&copy)), Some(b'D'));
    assert_eq!(opened(&line, &copy).0, b'E', "it was given back");
    assert_eq!(order(&line, b'o', &at("new")), Some(b'E'), "nothing is made there any more");
    assert_eq!(hear(&line, &given), b'E', "the word was used");
    drop(line);
    agent.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
}

/// A server may keep a word that it got, in place of passing it on.
#[test]
fn a_word_for_a_target_that_was_kept_is_worth_nothing_when_the_command_is_over() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, place) = world();
    let copy = place.path().join("copy");
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    let (kept, given) = target(&copy);
    drop(kept);
    assert_eq!(hear(&line, &given), b'E', "the user waits no longer");
    assert_eq!(opened(&line, &copy).0, b'E');
    let server = place.path().join("nbd.sock");
    let listener = std::os::unix::net::UnixListener::bind(&server).expect("a socket");
    listener.set_nonblocking(true).expect("a setting");
    let at = format!("unix:{}", text(&server));
    let (kept, given) = word(&format!("ringdisk: a mirror goes to a server at\n{at}"));
    drop(kept);
    assert_eq!(hear(&line, &given), b'E', "the user waits no longer");
    assert_eq!(order(&line, b'O', at.as_bytes()), Some(b'E'));
    assert!(listener.accept().is_err(), "somebody has connected");
    drop(line);
    agent.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn the_word_for_a_server_connects_that_one_and_no_other_one() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, place) = world();
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    let [meant, other] = ["nbd.sock", "other.sock"].map(|name| {
        let path = place.path().join(name);
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        listener.set_nonblocking(true).expect("a setting");
        (path, listener)
    });
    let at = |path: &Path| format!("unix:{}", text(path));
    let connect = |path: &Path| order(&line, b'O', at(path).as_bytes());
    assert_eq!((connect(&meant.0), connect(&other.0)), (Some(b'E'), Some(b'E')));
    let (_kept, given) = word(&format!("ringdisk: a mirror goes to a server at\n{}", at(&meant.0)));
    assert_eq!(hear(&line, &given), b'D');
    assert_eq!((connect(&meant.0), connect(&other.0)), (Some(b'D'), Some(b'E')));
    assert_eq!(hear(&line, &given), b'E', "the same word again");
    assert!(meant.1.accept().is_ok() && other.1.accept().is_err());
    drop(line);
    agent.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
}

/// A target that is refused is held by nobody, so its file system can be unmounted, too.
#[test]
fn a_target_that_is_none_for_the_disk_cannot_be_had() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, place) = world();
    let large = place.path().join("large");
    images::raw(&large, 2 * MIB, 7);
    let words = ["mirror", "--existing", "-f", "raw", "--complete", text(&large)];
    let refused = ringdisk(Path::new("/"), &[&["ctl", disk.text()], &words[..]].concat());
    refused.ends(11).says("clients would see another size");
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    assert_eq!(opened(&line, &large).0, b'E', "the command was refused");
    drop(line);
    agent.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
}

/// A backup is like a mirror: its target is had on a user's word only, and given back at its end.
#[test]
fn after_a_backup_its_target_cannot_be_had_any_more_and_no_other_one_ever_could() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, place) = world();
    let [copy, secret] = ["copy", "secret"].map(|name| place.path().join(name));
    let at = Path::new("/");
    let backup = |words: &[&str]| ringdisk(at, &[&["ctl", disk.text(), "backup"], words].concat());
    backup(&["--existing", "-f", "raw", text(&copy)]).ok();
    let large = place.path().join("small");
    images::raw(&large, MIB / 2, 7);
    backup(&["--existing", "-f", "raw", text(&large)]).ends(3).says("as large");
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    for path in [&copy, &large, &secret] {
        assert_eq!(opened(&line, path).0, b'E', "{}", path.display());
    }
    drop(line);
    agent.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
    assert!(fs::read(&secret).expect("read").len() == usize::try_from(MIB).expect("small"));
}

/// The word for the target of a backup opens that file, and gives nothing beside it.
#[test]
fn the_word_for_the_target_of_a_backup_makes_no_name_in_its_directory() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, place) = world();
    let copy = place.path().join("copy");
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    let (device, inode) = identity(&copy);
    let said = format!("ringdisk: the target of a backup is raw {device} {inode} {}", text(&copy));
    let (_kept, given) = word(&said);
    assert_eq!(hear(&line, &given), b'D');
    assert_eq!(opened(&line, &copy).0, b'D');
    let at = |name: &str| [&numbers(place.path())[..], b"\0", name.as_bytes()].concat();
    assert_eq!(order(&line, b'o', &at("new")), Some(b'E'), "a name is made");
    assert_eq!(order(&line, b'x', &numbers(&copy)), Some(b'E'), "the target goes");
    assert!(copy.exists() && !place.path().join("new").exists());
    assert_eq!(order(&line, b'z', &numbers(&copy)), Some(b'D'));
    assert_eq!(opened(&line, &copy).0, b'E', "it was given back");
    drop(line);
    agent.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
}

/// The whole way: what `ringdisk ctl` says of a mirror in the background ends with the command.
#[test]
fn after_a_mirror_its_target_cannot_be_had_any_more() {
    if !needs_root() {
        return;
    }
    let (disk, _directory, place) = world();
    let copy = place.path().join("copy");
    let at = Path::new("/");
    let words = ["mirror", "--existing", "-f", "raw", "--name", "m", text(&copy)];
    ringdisk(at, &[&["ctl", disk.text()], &words[..]].concat()).ok();
    ringdisk(at, &["job", "cancel", disk.text(), "m"]).ok();
    ringdisk(at, &["job", "wait", disk.text(), "m"]).ok();
    // What the chain has no longer is given back before the next change.
    let agent = Agent::over(disk.pid());
    let line = agent.helper();
    assert_eq!(opened(&line, &copy).0, b'E', "the mirror is over");
    drop(line);
    agent.goes_on();
    assert_eq!(disk.stop().code(), Some(0));
}
