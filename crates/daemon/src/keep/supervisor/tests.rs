use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use super::*;
use crate::keep::link::Named;
use crate::keep::succession::{self, Succession};

struct Nothing;

impl Held for Nothing {
    fn noun(&self) -> &'static str {
        "mount"
    }

    fn option(&self) -> &'static str {
        ""
    }

    fn disks(&self) -> usize {
        2
    }

    fn late_max(&self) -> usize {
        2
    }

    fn loss(&self) -> &'static str {
        ""
    }

    fn remedy(&self) -> &'static str {
        ""
    }

    fn end(&mut self, _parked: Named, _is_removed: bool) {}

    fn undo(&mut self) {}
}

fn supervisor() -> Supervisor<'static> {
    Supervisor {
        held: Box::leak(Box::new(Nothing)),
        directory: PathBuf::new(),
        closer: Closer::start().expect("a thread"),
        closers: closers(&Nothing).expect("threads"),
        has_refused: false,
        signals: Signals { wake: UnixStream::pair().expect("sockets").0, came: Vec::new() },
        manager: Notify::from_environment(),
        parked: vec![(String::from("x"), tempfile::tempfile().expect("file").into())],
        is_parked: false,
        pidfile_path: None,
        pidfile: None,
        background: None,
        is_upgrade: false,
        has_taken: false,
        is_given: false,
        rights: Vec::new(),
        is_ready: true,
        is_stopping: false,
        is_at_once: false,
        insist: Insist::default(),
        stops: false,
        serves_since: Some(Instant::now()),
        served: Duration::ZERO,
        restarts: VecDeque::new(),
        watch: None,
    }
}

const KILLED: i32 = 9;
/// As wait(2) has it: the code is in the second byte.
const CODE: i32 = 256;

#[test]
fn who_dies_is_replaced_and_who_ends_is_not() {
    let mut supervisor = supervisor();
    assert_eq!(supervisor.next(ExitStatus::from_raw(KILLED)), Next::Again);
    assert_eq!(supervisor.next(ExitStatus::from_raw(PANICKED * CODE)), Next::Again);
    assert_eq!(supervisor.next(ExitStatus::from_raw(0)), Next::End(0));
    assert_eq!(supervisor.next(ExitStatus::from_raw(12 * CODE)), Next::End(12));
}

#[test]
fn nobody_is_replaced_before_the_mount_is_ready_or_after_a_stop() {
    let stopping = Supervisor { stops: true, ..supervisor() };
    let starting = Supervisor { is_ready: false, ..supervisor() };
    for mut supervisor in [stopping, starting] {
        assert_eq!(supervisor.next(ExitStatus::from_raw(KILLED)), Next::GiveUp);
    }
}

#[test]
fn who_dies_too_often_is_given_up() {
    let mut supervisor = supervisor();
    let next = |supervisor: &mut Supervisor| supervisor.next(ExitStatus::from_raw(KILLED));
    assert!((0..RESTARTS_MAX).all(|_| next(&mut supervisor) == Next::Again));
    assert_eq!(next(&mut supervisor), Next::GiveUp);
    supervisor.serves_since = Instant::now().checked_sub(WINDOW + Duration::from_millis(1));
    assert_eq!(next(&mut supervisor), Next::Again);
}

#[test]
fn time_in_which_nobody_serves_does_not_count() {
    let mut supervisor = supervisor();
    let mut next = || {
        std::thread::sleep(Duration::from_millis(2));
        supervisor.serves_since = None;
        supervisor.next(ExitStatus::from_raw(KILLED))
    };
    assert!((0..RESTARTS_MAX).all(|_| next() == Next::Again));
    assert_eq!((next(), supervisor.served), (Next::GiveUp, Duration::ZERO));
}

#[test]
fn a_mount_that_is_parked_as_a_whole_takes_no_descriptor_any_more() {
    let mut supervisor = supervisor();
    let file = || vec![OwnedFd::from(tempfile::tempfile().expect("file"))];
    supervisor.hear("FDSTORE=1\nFDNAME=ringdisk-fuse-0\nFDPOLL=0", file()).expect("kept");
    supervisor.hear("BARRIER=1", file()).expect("closed");
    let ours: Vec<i32> = supervisor.parked.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
    for name in ["ringdisk-fuse-0", "ringdisk-fuse-1", "ringdisk-state"] {
        supervisor.hear(&format!("FDSTORE=1\nFDNAME={name}"), file()).expect("ignored");
    }
    let now: Vec<i32> = supervisor.parked.iter().map(|(_, fd)| fd.as_raw_fd()).collect();
    assert_eq!(now, ours);
}

#[test]
fn words_of_the_serving_process_are_taken_apart() {
    let mut supervisor = supervisor();
    supervisor.is_ready = false;
    let file = || vec![OwnedFd::from(tempfile::tempfile().expect("file"))];
    supervisor.hear("FDSTORE=1\nFDNAME=ringdisk-a\nFDPOLL=0", file()).expect("kept");
    supervisor.hear("FDSTORE=1\nFDNAME=ringdisk-a\nFDPOLL=0", file()).expect("replaced");
    supervisor.hear("BARRIER=1", file()).expect("closed");
    supervisor.hear("STATUS=READY=1", Vec::new()).expect("a status");
    supervisor.hear("FDSTORE=1\nFDNAME=ringdisk-a\nFDPOLL=0", Vec::new()).expect("too late");
    supervisor.hear("FDSTORE=1\nFDNAME=ringdisk-b\nFDPOLL=0", file()).expect("too late");
    assert_eq!((supervisor.parked.len(), supervisor.is_ready), (2, false));
    supervisor.hear("READY=1\nSTATUS=x", Vec::new()).expect("ready");
    assert!(supervisor.is_ready);
    supervisor.hear("STOPPING=1", Vec::new()).expect("stops");
    assert_eq!(supervisor.next(ExitStatus::from_raw(KILLED)), Next::GiveUp);
    supervisor.hear("X_RINGDISK_IN_USE=1\nSTATUS=x", Vec::new()).expect("in use");
    assert_eq!(supervisor.next(ExitStatus::from_raw(KILLED)), Next::Again);
    assert!(supervisor.is_stopping, "the next process stops too");
}

#[test]
fn after_the_start_descriptors_come_and_go_by_their_names_and_not_too_many() {
    let mut supervisor = supervisor();
    let file = || vec![OwnedFd::from(tempfile::tempfile().expect("file"))];
    supervisor.hear("BARRIER=1", file()).expect("closed");
    for name in ["x", "ringdisk-late-0-1", "ringdisk-late-0-2", "ringdisk-late-0-3"] {
        supervisor.hear(&format!("FDSTORE=1\nFDNAME={name}"), file()).expect("heard");
    }
    let names = |supervisor: &Supervisor<'_>| -> Vec<String> {
        supervisor.parked.iter().map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(names(&supervisor), ["x", "ringdisk-late-0-1", "ringdisk-late-0-2"]);
    for name in ["x", "ringdisk-late-0-1"] {
        supervisor.hear(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), Vec::new()).expect("heard");
    }
    assert_eq!(names(&supervisor), ["x", "ringdisk-late-0-2"]);
}

#[test]
fn after_the_start_no_name_becomes_another_one_or_several() {
    let mut supervisor = supervisor();
    let file = || vec![OwnedFd::from(tempfile::tempfile().expect("file"))];
    supervisor.hear("BARRIER=1", file()).expect("closed");
    let long = format!("ringdisk-late-0-{}", "1".repeat(40));
    for name in [
        "ringdisk-late-0-8:ringdisk-origin-0",
        "ringdisk-late-0-8:x",
        "ringdisk-late-2-8",
        "ringdisk-late-",
        "ringdisk-late-0",
        "ringdisk-late-0-",
        "ringdisk-late--8",
        "ringdisk-late-0-8-9",
        "ringdisk-late-0-+8",
        &long,
    ] {
        supervisor.hear(&format!("FDSTORE=1\nFDNAME={name}"), file()).expect("heard");
        assert_eq!(supervisor.parked.len(), 1, "{name}");
    }
}

/// A descriptor whose close waits: a TCP socket with SO_LINGER and bytes that its peer does not
/// take. Gives also what ends that.
fn lingers() -> (OwnedFd, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
    let ours = std::net::TcpStream::connect(listener.local_addr().expect("it has")).expect("room");
    let (theirs, _) = listener.accept().expect("it has connected");
    ours.set_nonblocking(true).expect("a setting");
    while io::Write::write(&mut &ours, &[0; 1 << 16]).is_ok() {}
    ours.set_nonblocking(false).expect("a setting");
    let linger = Some(Duration::from_secs(60));
    rustix::net::sockopt::set_socket_linger(&ours, linger).expect("a setting");
    (ours.into(), theirs)
}

#[test]
fn a_close_that_waits_counts_for_its_disk_and_stops_no_other() {
    let mut supervisor = supervisor();
    let file = || vec![OwnedFd::from(tempfile::tempfile().expect("file"))];
    supervisor.hear("BARRIER=1", file()).expect("closed");
    let mut peers = Vec::new();
    for number in 0..2 {
        let (ours, theirs) = lingers();
        peers.push(theirs);
        let name = format!("FDNAME=ringdisk-late-0-{number}");
        supervisor.hear(&format!("FDSTORE=1\n{name}"), vec![ours]).expect("heard");
        supervisor.hear(&format!("FDSTOREREMOVE=1\n{name}"), Vec::new()).expect("heard");
    }
    for name in ["ringdisk-late-0-9", "ringdisk-late-1-9"] {
        supervisor.hear(&format!("FDSTORE=1\nFDNAME={name}"), file()).expect("heard");
    }
    let names: Vec<&str> = supervisor.parked.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["x", "ringdisk-late-1-9"], "the first disk has no room");
    supervisor.hear("FDSTOREREMOVE=1\nFDNAME=ringdisk-late-1-9", Vec::new()).expect("heard");
    let is_closed = |_: &u32| supervisor.closers[1].waiting() == 0;
    let waits = || std::thread::sleep(Duration::from_millis(10));
    assert!((0..500).inspect(|_| waits()).any(|time| is_closed(&time)));
    drop(peers);
    let is_closed = |_: &u32| supervisor.closers[0].waiting() == 0;
    assert!((0..500).inspect(|_| waits()).any(|time| is_closed(&time)));
}

#[test]
fn a_server_that_has_taken_something_over_is_replaced_before_it_is_ready() {
    let mut supervisor = Supervisor { is_ready: false, ..supervisor() };
    supervisor.hear("X_RINGDISK_TOOK_OVER=1\nSTATUS=", Vec::new()).expect("heard");
    assert_eq!(supervisor.next(ExitStatus::from_raw(KILLED)), Next::Again);
}

#[test]
fn what_a_successor_has_claimed_is_not_gone_on_with() {
    let rights: Vec<Succession> = (0..2).map(|_| Succession::make().expect("made")).collect();
    let given = rights.iter().map(|right| right.try_clone().expect("a descriptor"));
    let named = |(disk, right): (usize, Succession)| (succession::name_of(disk), right.into());
    let parked = given.enumerate().map(named).collect();
    let mut supervisor = Supervisor { parked, rights: vec![0, 1], ..supervisor() };
    // The helper process is first, and then a successor; another server gets a new right.
    assert!(supervisor.goes_on());
    assert!(!rights[0].claim() && !rights[1].claim());
    let parked = |supervisor: &Supervisor, disk: usize| {
        let name = succession::name_of(disk);
        let (_, right) =
            supervisor.parked.iter().find(|(parked, _)| *parked == name).expect("there");
        Succession::of(right.try_clone().expect("a descriptor")).expect("an eventfd")
    };
    // A successor is first with one disk, then with both.
    assert!(parked(&supervisor, 0).claim());
    assert!(supervisor.goes_on());
    assert!(parked(&supervisor, 0).is_claimed() && !parked(&supervisor, 1).is_claimed());
    assert!(parked(&supervisor, 1).claim());
    assert!(!supervisor.goes_on() && supervisor.is_claimed_soon());
    // A server that was taken over gets no other right by taking this one away, or by giving one.
    supervisor.is_parked = true;
    supervisor
        .hear(&format!("FDSTOREREMOVE=1\nFDNAME={}", succession::name_of(0)), Vec::new())
        .expect("heard");
    let new = vec![OwnedFd::from(Succession::make().expect("made"))];
    supervisor.hear(&format!("FDSTORE=1\nFDNAME={}", succession::name_of(1)), new).expect("heard");
    assert!(!supervisor.goes_on());
}

#[test]
fn what_a_process_has_given_and_no_successor_has_claimed_is_gone_on_with() {
    let right = Succession::make().expect("made");
    let parked = vec![(succession::name_of(0), right.try_clone().expect("copied").into())];
    let mut supervisor = Supervisor { parked, rights: vec![0], ..supervisor() };
    supervisor.hear("X_RINGDISK_HANDED_OVER=1\nSTATUS=", Vec::new()).expect("heard");
    assert!(supervisor.is_given && !supervisor.is_claimed_soon() && supervisor.goes_on());
    assert!(!right.claim(), "a successor that comes later");
}

#[test]
fn what_was_not_taken_over_is_the_other_process_s() {
    let right = Succession::of_a_successor().expect("made");
    let parked = vec![(succession::name_of(0), right.try_clone().expect("copied").into())];
    let mut supervisor =
        Supervisor { parked, rights: vec![0], is_upgrade: true, is_ready: false, ..supervisor() };
    assert!(!supervisor.is_ours());
    supervisor.hear("X_RINGDISK_TOOK_OVER=1\nSTATUS=", Vec::new()).expect("heard");
    // Another disk was taken, and not this one.
    assert!(supervisor.is_ours() && !supervisor.goes_on());
    right.is_ours();
    assert!(supervisor.goes_on());
}
