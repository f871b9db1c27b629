//! A process that serves a disk with `--keep` and was taken over: the memory and the descriptors
//! that it leaves to the next process, and its line to the process that keeps the disk.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_testkit::images::{self, pattern};
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::model::{FrontEnd, Request, Vm, VmOptions, bits};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process::{LIMIT, Process, has, until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::serving::ctl;
use crate::common::tools::child_of;
use crate::common::{MIB, program};
use crate::takeover::agent::{Agent, give};
use crate::takeover::memory::{EXPORT, HEAD, IMAGES, with_top};
use crate::takeover::out_of_reach::{Others, SECRET};

/// Processes that keep and serve a disk, and a machine that uses it.
struct Disk {
    directory: TempDir,
    socket: PathBuf,
    helper: Process,
    vm: Vm,
}

impl Disk {
    fn start() -> Disk {
        Disk::of(&mut Command::new(program()))
    }

    /// * `command`: what starts the program.
    fn of(command: &mut Command) -> Disk {
        let directory = scratch();
        let (image, socket) = (directory.path().join("disk.img"), directory.path().join("socket"));
        images::raw(&image, MIB, 1);
        command.args(["serve", "--keep", "--format", "raw", "--queues", "1"]);
        command.arg("--vhost-user-blk").arg(&socket).arg(&image);
        let helper = Process::spawn(command.env_remove("NOTIFY_SOCKET"));
        let options = VmOptions::default();
        let options = VmOptions {
            features: !bits::LOG_ALL & !bits::PACKED,
            protocol: options.protocol & !bits::P_INFLIGHT,
            queues: 1,
            size: 64,
            ..options
        };
        let mut vm = Vm::started(FrontEnd::connect(&socket), options);
        assert_eq!(vm.status(0, Request::flush()), 0, "{}", helper.output());
        Disk { directory, socket, helper, vm }
    }

    /// The process that serves, taken over.
    fn agent(&self) -> Agent {
        let server = until(LIMIT, || child_of(self.helper.pid()));
        Agent::over(server.unwrap_or_else(|| panic!("nobody serves: {}", self.helper.output())))
    }

    /// The next process has gone on, or has refused to and everything has ended.
    fn settles(&mut self) -> bool {
        let settled = until(LIMIT, || match self.helper.ended() {
            Some(_) => Some(false),
            None => (ctl(&self.socket, &["stats"]).code == 0).then_some(true),
        });
        let output = self.helper.output();
        assert!(!output.contains("panicked"), "{output}");
        settled.unwrap_or_else(|| panic!("neither served nor ended: {output}"))
    }

    /// The machine uses the disk as before.
    #[track_caller]
    fn goes_on(&mut self) {
        let read = self.vm.run(0, Request::read(8, 4096));
        assert_eq!(read.data, pattern(1, 4096, 4096), "{}", self.helper.output());
        assert_eq!(self.vm.status(0, Request::flush()), 0);
    }

    /// It has ended, with words. Gives the directory of its image.
    #[track_caller]
    fn has_ended(mut self, words: &str) -> TempDir {
        assert!(!self.settles(), "it is served: {}", self.helper.output());
        self.vm.front.expect_end();
        let finished = self.helper.finish(LIMIT);
        assert!(finished.code().is_some_and(|code| code != 0), "{}", finished.output());
        assert!(finished.stderr.contains(words), "no '{words}': {}", finished.output());
        self.directory
    }

    fn stop(self) {
        self.helper.signal(Signal::TERM);
        let finished = self.helper.finish(LIMIT);
        let output = finished.output();
        assert!(finished.code() == Some(0) && !output.contains("panicked"), "{output}");
        assert!(!self.socket.exists(), "its socket is left");
    }
}

#[test]
fn a_secret_that_is_named_as_the_image_on_top_of_a_disk_is_not_served() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    for name in ["secret", "empty", "memory/file", "bound/disk.img"] {
        let disk = Disk::start();
        let agent = disk.agent();
        IMAGES.forge(&agent.memory(), |state| with_top(state, &others.path(name), "raw"));
        agent.dies();
        disk.has_ended("as the image on top");
        others.assert_same();
    }
}

#[test]
fn an_image_of_somebody_else_beside_a_kept_disk_is_not_written() {
    if !needs_root() {
        return;
    }
    let disk = Disk::start();
    let neighbour = disk.directory.path().join("neighbour");
    fs::write(&neighbour, [SECRET, &[0; 4096]].concat()).expect("an image");
    let before = fs::read(&neighbour).expect("an image");
    let agent = disk.agent();
    IMAGES.forge(&agent.memory(), |state| {
        with_top(state, &neighbour, "raw");
        state["mark"] = json!("0123456789abcdef0123456789abcdef");
        state["tops"] = json!([]);
    });
    agent.dies();
    let _directory = disk.has_ended("was not made for this disk");
    assert_eq!(fs::read(&neighbour).expect("an image"), before);
}

/// What is written to a state.
type Lie = (&'static str, Value);

/// What a process says of its export is judged as what a front end says: the next process may
/// refuse it, and it may spoil its own disk.
#[test]
fn what_is_said_of_the_export_of_a_kept_disk_reaches_nothing_else() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let huge = json!(u64::MAX);
    let lies: [Lie; 14] = [
        ("/version", json!(2)),
        ("/roles", json!([])),
        ("/roles/0", json!("Image")),
        ("/kept/numbers", json!([])),
        ("/kept/numbers/0", json!(77_777)),
        ("/kept/retired", json!([0, 1, 65_535])),
        ("/kept/pending", json!({ "request": 5, "flags": 9, "payload": vec![255; 296] })),
        ("/kept/pending", json!({ "request": 4_000_000_000_u32, "flags": 0, "payload": [1] })),
        ("/kept/reply", json!([1, 2, 3])),
        ("/regions/0/size", huge.clone()),
        ("/regions/0/mmap_offset", huge),
        ("/session/features", json!(u64::MAX)),
        ("/session/vrings/0/address", json!([u64::MAX, 1, 2, 3, 4])),
        ("/log", json!([u64::MAX, u64::MAX])),
    ];
    for (at, value) in lies {
        let mut disk = Disk::start();
        let agent = disk.agent();
        EXPORT.forge(&agent.export(), |state| match state.pointer_mut(at) {
            Some(place) => *place = value,
            None => panic!("no {at} in {state}"),
        });
        agent.dies();
        println!("{at}: {}", if disk.settles() { "served" } else { "ended" });
        disk.helper.signal(Signal::TERM);
        assert!(disk.helper.wait(LIMIT).is_some(), "{at}: {}", disk.helper.output());
        assert!(!disk.helper.output().contains("panicked"), "{at}: {}", disk.helper.output());
        others.assert_same();
    }
}

/// What was done to the memory.
type Wreck<'a> = &'a dyn Fn(&File);

#[test]
fn memory_of_a_kept_disk_that_was_cut_or_holds_rubbish_ends_it_with_words() {
    if !needs_root() {
        return;
    }
    let deep = [vec![b'['; 200_000], vec![b']'; 200_000]].concat();
    let both = |memory: &File, number: u64, text: &[u8]| {
        (0..2).for_each(|place| EXPORT.write(memory, place, number + place, text));
    };
    let wrecks: [(&str, Wreck<'_>); 5] = [
        ("is not all there", &|memory| memory.set_len(0).expect("cut")),
        ("is not all there", &|memory| memory.set_len(HEAD as u64).expect("cut")),
        ("is not all there", &|memory| both(memory, u64::MAX - 1, b"{}")),
        ("not understood", &|memory| both(memory, 1000, &deep)),
        ("is not all there", &|memory| {
            let head = [9, 9, u64::MAX].map(u64::to_ne_bytes).concat();
            for place in [EXPORT.first, EXPORT.first + EXPORT.bytes] {
                memory.write_all_at(&head, place).expect("written");
            }
        }),
    ];
    for (words, wreck) in wrecks {
        let disk = Disk::start();
        let agent = disk.agent();
        wreck(&agent.export());
        agent.dies();
        disk.has_ended(words);
    }
}

/// Gives a descriptor to be kept.
fn store(line: &OwnedFd, name: &str, fds: &[BorrowedFd<'_>]) {
    give(line, format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0").as_bytes(), fds);
}

#[test]
fn what_the_process_that_keeps_a_disk_is_told_changes_nothing_else() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let mut disk = Disk::start();
    let agent = disk.agent();
    let line = agent.helper_that_keeps(disk.helper.pid());
    let secret = File::open(others.path("secret")).expect("root may");
    let (pipe, _other_end) = rustix::pipe::pipe().expect("a pipe");
    for start in ["origin", "images", "export"] {
        store(&line, &format!("ringdisk-{start}-0"), &[secret.as_fd()]);
        store(&line, &format!("ringdisk-late-0-9:ringdisk-{start}-0"), &[secret.as_fd()]);
        let remove = format!("FDSTOREREMOVE=1\nFDNAME=ringdisk-{start}-0");
        give(&line, remove.as_bytes(), &[]);
    }
    for number in 0..300 {
        store(&line, &format!("ringdisk-late-0-{}", 1_000_000 + number), &[pipe.as_fd()]);
        store(&line, &format!("ringdisk-late-7-{number}"), &[pipe.as_fd(); 20]);
    }
    for text in [&b"\n\n=\n=1"[..], b"READY=1\nSTATUS=x", b"BARRIER=1", &[0xff; 9000]] {
        give(&line, text, &[]);
    }
    drop(line);
    agent.dies();
    disk.goes_on();
    others.assert_same();
    disk.stop();
}

/// Who says things without end keeps no signal from the process that serves.
#[test]
fn a_process_that_never_stops_talking_is_stopped_all_the_same() {
    if !needs_root() {
        return;
    }
    let disk = Disk::start();
    let server = child_of(disk.helper.pid()).expect("a process serves");
    let agent = disk.agent();
    let line = agent.helper_that_keeps(disk.helper.pid());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    give(&line, b"STATUS=and so on", &[]);
                }
            });
        }
        std::thread::sleep(Duration::from_millis(200));
        disk.helper.signal(Signal::TERM);
        let came = until(LIMIT, || has_pending(server, Signal::TERM).then_some(()));
        is_over.store(true, Ordering::Relaxed);
        assert!(came.is_some(), "the signal was not passed on: {}", disk.helper.output());
    });
    drop(line);
    agent.goes_on();
    let finished = disk.helper.finish(LIMIT);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

/// Whether a signal waits for a process that was stopped.
fn has_pending(pid: u32, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    let mask = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal.as_raw() - 1) != 0)
}

/// A descriptor whose close waits: a TCP socket with bytes that its peer does not take.
fn lingers() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let ours = TcpStream::connect(listener.local_addr().expect("it has")).expect("room");
    let (theirs, _) = listener.accept().expect("it has connected");
    ours.set_nonblocking(true).expect("a setting");
    // What is on its way may leave room once more.
    let is_full = || {
        while std::io::Write::write(&mut &ours, &[0; 1 << 16]).is_ok() {}
        let mut room = [PollFd::new(&ours, PollFlags::OUT)];
        poll(&mut room, Some(&Timespec { tv_sec: 0, tv_nsec: 200_000_000 })) == Ok(0)
    };
    while !is_full() {}
    ours.set_nonblocking(false).expect("a setting");
    let linger = Some(Duration::from_secs(60));
    rustix::net::sockopt::set_socket_linger(&ours, linger).expect("a setting");
    (ours.into(), theirs)
}

/// Descriptors of a process.
fn count(pid: u32) -> usize {
    fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")).map_or(0, Iterator::count)
}

/// The process that keeps the disk may have so many descriptors, and more come than that.
#[test]
fn descriptors_without_end_do_not_end_the_process_that_keeps_a_disk() {
    if !(needs_root() && needs("prlimit", has("prlimit"))) {
        return;
    }
    let mut command = Command::new("prlimit");
    let mut disk = Disk::of(command.arg("--nofile=500:500").arg(program()));
    let agent = disk.agent();
    let line = agent.helper_that_keeps(disk.helper.pid());
    let before = count(disk.helper.pid());
    let (waits, peer) = lingers();
    // What comes with other words is closed, one after the other; this one not here.
    let helper = Agent::over(disk.helper.pid());
    give(&line, b"STATUS=x", &[waits.as_fd()]);
    drop(waits);
    helper.goes_on();
    let (pipe, _other_end) = rustix::pipe::pipe().expect("a pipe");
    for _ in 0..4 {
        give(&line, b"STATUS=x", &[pipe.as_fd(); 200]);
    }
    let said = || disk.helper.output().contains("more descriptors than it may").then_some(());
    assert!(until(LIMIT, said).is_some(), "{}", disk.helper.output());
    drop(peer);
    let are_closed = || (count(disk.helper.pid()) <= before).then_some(());
    assert!(until(LIMIT, are_closed).is_some(), "{} are left", count(disk.helper.pid()));
    drop(line);
    agent.dies();
    disk.goes_on();
    disk.stop();
}
