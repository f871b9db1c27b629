use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use super::*;

fn receive(socket: &UnixDatagram) -> String {
    let mut bytes = [0; 256];
    let len = socket.recv(&mut bytes).expect("a message");
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

#[test]
fn a_path_socket_hears_ready_and_stopping() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("notify");
    let server = UnixDatagram::bind(&path).expect("bind");
    let notify = Notify::to(Some(path.as_os_str()));
    notify.ready("serving\nEVIL=1");
    notify.stopping("bye");
    let ready = receive(&server);
    assert!(ready.starts_with("READY=1\nMAINPID="), "{ready}");
    assert!(ready.ends_with("STATUS=serving EVIL=1"), "{ready}");
    assert_eq!(receive(&server), "STOPPING=1\nSTATUS=bye");
}

#[test]
fn an_abstract_socket_hears_status() {
    let name = format!("ringdisk-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("address");
    let server = UnixDatagram::bind_addr(&address).expect("bind");
    Notify::to(Some(OsStr::new(&format!("@{name}")))).status("halted");
    assert_eq!(receive(&server), "STATUS=halted");
}

#[test]
fn what_is_asked_for_is_one_line_and_no_descriptor_of_others_is_forgotten() {
    let long = "\u{e9}".repeat(TEXT_BYTES_MAX);
    let line = Word::Status.message(1, &long).expect("a message");
    assert!(line.len() <= "STATUS=".len() + TEXT_BYTES_MAX && line.ends_with('\u{e9}'));
    let evil = "x\nFDSTORE=1\rMAINPID=1\u{85}y";
    for word in [Word::Ready, Word::Status, Word::Stopping, Word::InUse] {
        let message = word.message(7, evil).expect("a message");
        let last = message.lines().last().expect("a line");
        assert_eq!(last, "STATUS=x FDSTORE=1 MAINPID=1 y");
        assert_eq!(Word::of(word.letter()), Some(word));
    }
    assert_eq!(Word::of(b'x'), None);
    let forget = |name| Word::Forget.message(7, name);
    assert_eq!(
        forget("ringdisk-fuse-0").as_deref(),
        Some("FDSTOREREMOVE=1\nFDNAME=ringdisk-fuse-0")
    );
    for name in ["", "other", "ringdisk-\nMAINPID=1", "ringdisk-a:b", "ringdisk-a b"] {
        assert_eq!(forget(name), None);
    }
}

#[test]
fn a_helper_whose_process_is_gone_says_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("notify");
    let server = UnixDatagram::bind(&path).expect("bind");
    server.set_nonblocking(true).expect("a flag");
    // Not our parent.
    let other = Some(std::process::id());
    Notify { other, ..Notify::to(Some(path.as_os_str())) }.ready("x");
    assert!(server.recv(&mut [0; 64]).is_err());
    let other = Some(parent_id());
    Notify { other, ..Notify::to(Some(path.as_os_str())) }.ready("x");
    let main = format!("READY=1\nMAINPID={}\nSTATUS=x", parent_id());
    assert_eq!(receive(&server), main);
}

#[test]
fn nobody_and_rubbish_are_ignored() {
    for name in [None, Some(""), Some("@"), Some("vsock:2:1"), Some("/nowhere/socket")] {
        Notify::to(name.map(OsStr::new)).ready("x");
    }
    assert!(Notify::to(None).store("x", rustix::stdio::stdin()).is_err());
    assert!(Notify::to(None).barrier().is_err());
}
