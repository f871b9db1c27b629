use std::os::unix::net::UnixListener;

use super::*;

#[test]
fn a_stranger_that_listens_first_is_passed_over() {
    let directory = tempfile::tempdir().expect("a directory");
    let [none, first, second] = ["0", "1", "2"].map(|name| directory.path().join(name));
    let _listening = [&first, &second].map(|path| UnixListener::bind(path).expect("bind"));
    let places = [none, first, second];
    let named = |stream: &UnixStream, end| {
        let path = stream.peer_addr().expect("an address");
        path.as_pathname().is_some_and(|path| path.ends_with(end))
    };
    let stream = connect(&places, is_trusted).expect("ours");
    assert!(named(&stream, "1"));
    let is_second = |stream: &UnixStream| {
        let path = stream.peer_addr().expect("an address");
        path.as_pathname().is_some_and(|path| path.ends_with("2"))
    };
    let stream = connect(&places, is_second).expect("the second");
    assert!(named(&stream, "2"));
    assert!(connect(&places, |_| false).is_none());
}

#[test]
fn an_old_process_is_waited_for_until_it_lets_go_and_all_disks_share_the_time() {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let begun = Instant::now();
    let let_go = std::thread::spawn(move || drop(theirs));
    let mut old = Predecessor { stream: ours, jobs: Vec::new(), pid: None, stop: None };
    assert!(old.wait(begun).is_none() && old.stop().is_none());
    let_go.join().expect("it let go");
    let long_ago = Instant::now().checked_sub(STEP).expect("past");
    let pairs = [0; 3].map(|_| UnixStream::pair().expect("sockets"));
    for (ours, _theirs) in &pairs {
        let stream = ours.try_clone().expect("a copy");
        let pid = Some(std::process::id());
        let lingers = Predecessor { stream, jobs: Vec::new(), pid, stop: None }.wait(long_ago);
        assert_eq!(lingers.expect("it has not let go").pid, Some(std::process::id()));
    }
    assert!(begun.elapsed() < STEP / 2, "{:?}", begun.elapsed());
}

#[test]
fn a_stop_that_came_on_the_way_is_heard_before_the_end() {
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    theirs.write_all(&[STOP]).expect("room");
    drop(theirs);
    let mut old = Predecessor { stream: ours, jobs: Vec::new(), pid: None, stop: None };
    assert!(old.wait(Instant::now()).is_none());
    assert_eq!(old.stop(), Some(Stop::Clean));
}

#[test]
fn a_stop_at_once_that_came_on_the_way_is_one_here_too() {
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    theirs.write_all(&[STOP, FORCE]).expect("room");
    drop(theirs);
    let mut old = Predecessor { stream: ours, jobs: Vec::new(), pid: None, stop: None };
    assert!(old.wait(Instant::now()).is_none());
    assert_eq!(old.stop(), Some(Stop::AtOnce));
}

#[test]
fn the_time_in_which_the_old_process_still_serves_does_not_count() {
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    let begun = Instant::now();
    let flushes = std::thread::spawn(move || {
        std::thread::sleep(5 * POLL_INTERVAL);
        theirs.write_all(b"x").expect("room");
        theirs
    });
    let since = still_serves(&ours, begun + STEP);
    let answered = Instant::now();
    drop(flushes.join().expect("no panic"));
    assert!(since > begun && since <= answered, "{:?}", since - begun);
    // One that does not answer is waited for until the end.
    let (ours, _theirs) = UnixStream::pair().expect("sockets");
    let end = Instant::now() + 2 * POLL_INTERVAL;
    still_serves(&ours, end);
    assert!(Instant::now() >= end);
}

#[test]
fn a_process_that_lives_or_is_too_late_or_unknown_has_not_died() {
    let (ours, _theirs) = UnixStream::pair().expect("sockets");
    let old = Old::of(&ours);
    assert!(old.pidfd.is_some(), "this process");
    assert!(!old.died_while_it_stood_still());
    assert!(!Old { pidfd: None, pid: None, since: Instant::now() }.died_while_it_stood_still());
}

#[test]
fn a_process_that_was_killed_has_died_unless_it_may_have_gone_on_before() {
    let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
    let pid = rustix::process::Pid::from_child(&child);
    let pidfd = || pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
    let (now, long_ago) = (Instant::now(), Instant::now().checked_sub(STEP).expect("past"));
    let (old, late) = (pidfd(), pidfd());
    child.kill().expect("it runs");
    child.wait().expect("it was killed");
    assert!(Old { pidfd: Some(old), pid: None, since: now }.died_while_it_stood_still());
    assert!(!Old { pidfd: Some(late), pid: None, since: long_ago }.died_while_it_stood_still());
}

#[test]
fn what_a_process_that_lingers_has_open_is_told() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let other = tempfile::NamedTempFile::new().expect("a file");
    let identity = Storage::identity_of(&fs::metadata(file.path()).expect("there"));
    let lingering = Lingering { pid: Some(std::process::id()) };
    assert_eq!(lingering.has_open(&[identity]), [file.path().to_owned()]);
    drop(other);
    assert!(lingering.has_open(&[(0, 0)]).is_empty());
    assert!(Lingering { pid: None }.has_open(&[identity]).is_empty());
}
