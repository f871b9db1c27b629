use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};

use super::*;

/// A state with a listener and a client that has sent a part of a request.
fn state() -> HandOverState {
    let directory = tempfile::tempdir().expect("a directory");
    let listener = UnixListener::bind(directory.path().join("socket")).expect("a socket");
    let (ours, _theirs) = UnixStream::pair().expect("a pair");
    let before = Before {
        export: String::from("a"),
        style: Style::Extended,
        contexts: vec![String::from("base:allocation")],
        unread: b"half a request".to_vec(),
    };
    let disk = HandOver { description: String::from("{}"), fds: vec![] };
    let clients = vec![Moved { socket: ours.into(), before }];
    let (disks, names) = (vec![(String::from("a"), disk)], vec![String::from("b")]);
    pack(vec![listener.into()], disks, names, clients).expect("packed")
}

#[test]
fn a_state_comes_back_as_it_was() {
    let Handed { disks, names, listeners, clients } = Handed::open(state()).expect("it is whole");
    assert_eq!((disks.len(), listeners.len(), clients.count()), (1, 1, 1));
    assert_eq!(names, ["b"]);
    assert_eq!((disks[0].0.as_str(), disks[0].1.description.as_str()), ("a", "{}"));
    let before = &clients.0[0].before;
    assert_eq!((before.export.as_str(), before.style), ("a", Style::Extended));
    assert_eq!(
        (&*before.contexts, &*before.unread),
        (&["base:allocation".into()][..], &b"half a request"[..])
    );
}

#[test]
fn what_does_not_hold_together_is_refused() {
    let refused = |state| Handed::open(state).expect_err("refused").to_string();
    for (from, to, why) in [
        ("\"version\":1", "\"version\":2", "its version is 2"),
        ("\"listeners\":1", "\"listeners\":2", "3 descriptors came, and it names others"),
        ("\"listeners\":1", "\"listeners\":18446744073709551615", "names others"),
        ("\"unread\":14", "\"unread\":15", "does not hold the bytes"),
        ("\"unread\":14", "\"unread\":99999999", "does not hold the bytes"),
        ("{", "", "not understood"),
    ] {
        let whole = state();
        let description = whole.description.replacen(from, to, 1);
        let error = refused(HandOverState { description, fds: whole.fds });
        assert!(error.contains(why), "{why}: {error}");
    }
    // Nothing ends a read of an event counter.
    let mut counter = state();
    counter.fds[2] = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("one");
    assert!(refused(counter).contains("does not hold the bytes"));
    for (place, why) in [(0, "no listening socket"), (1, "no connection")] {
        let mut other = state();
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a socket");
        other.fds[place] = match place {
            0 => tempfile::tempfile().expect("a file").into(),
            _ => tcp.into(),
        };
        let error = refused(other);
        assert!(error.contains(why), "{why}: {error}");
    }
}
