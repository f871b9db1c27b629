//! Thousands of NBD clients at once: those that say nothing, those that stop in the middle of their
//! handshakes, and more of those that use the disk than there may be.
//!
//! The crowd is one loop over sockets that do not block. 2000 clients, and 10,000 with
//! `RINGDISK_FULL`.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, patient, until};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::common::program;
use crate::common::serving::{Daemon, Place};

/// Clients that use the disk at once: the default of `--max-connections`.
const SERVED: usize = 64;
/// A client is served in this time, whatever others do.
const SOON: Duration = Duration::from_secs(1);
/// Bytes that the server reads and sends first.
const GREETING: usize = 18;
const NAMED: usize = 10;
const REPLY: usize = 16 + 4096;

fn count() -> usize {
    if std::env::var_os("RINGDISK_FULL").is_some() { 10_000 } else { 2000 }
}

/// Room for the sockets of the crowd in this process.
fn allow_files() {
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }).unwrap();
}

/// Flags (fixed, without zeroes), and EXPORT_NAME of the disk without a name.
fn enter() -> Vec<u8> {
    [&3u32.to_be_bytes()[..], b"IHAVEOPT", &1u32.to_be_bytes(), &[0; 4]].concat()
}

/// A read of 4 KiB.
fn read() -> Vec<u8> {
    [&0x2560_9513_u32.to_be_bytes()[..], &[0; 20], &4096u32.to_be_bytes()].concat()
}

#[derive(Clone)]
enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

impl Address {
    /// A client that waits for what it does.
    fn client(&self) -> Box<dyn Stream> {
        let limit = Some(LIMIT);
        match self {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).unwrap();
                stream.set_read_timeout(limit).unwrap();
                Box::new(stream)
            }
            Address::Tcp(address) => {
                let stream = TcpStream::connect(address).unwrap();
                stream.set_read_timeout(limit).unwrap();
                Box::new(stream)
            }
        }
    }

    /// A socket that begins to connect. `None`: the kernel holds no more of them now.
    fn begin(&self) -> Option<OwnedFd> {
        let family = match self {
            Address::Unix(_) => AddressFamily::UNIX,
            Address::Tcp(_) => AddressFamily::INET,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None).unwrap();
        let begun = match self {
            Address::Unix(path) => connect(&socket, &SocketAddrUnix::new(path).unwrap()),
            Address::Tcp(address) => connect(&socket, address),
        };
        match begun {
            Ok(()) | Err(Errno::INPROGRESS) => Some(socket),
            Err(Errno::AGAIN) => None,
            Err(errno) => panic!("connect: {errno}"),
        }
    }
}

/// A client that has entered, and what it takes to read.
struct Reader(Box<dyn Stream>);

impl Reader {
    fn entered(address: &Address) -> Reader {
        let mut reader = Reader(address.client());
        reader.0.read_exact(&mut [0; GREETING]).unwrap();
        reader.0.write_all(&enter()).unwrap();
        reader.0.read_exact(&mut [0; NAMED]).unwrap();
        reader
    }

    fn read(&mut self) {
        self.0.write_all(&read()).unwrap();
        self.0.read_exact(&mut [0; REPLY]).unwrap();
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Silent,
    /// Sends so many bytes of what a client begins with.
    Half(usize),
    /// Enters, reads, and stays.
    Full,
}

struct Member {
    kind: Kind,
    socket: Option<OwnedFd>,
    /// Bytes that the server has sent.
    heard: usize,
    /// The server has closed the connection.
    is_gone: bool,
}

struct Crowd {
    address: Address,
    members: Vec<Member>,
}

impl Crowd {
    fn new(address: &Address, kinds: impl Iterator<Item = Kind>) -> Crowd {
        let member = |kind| Member { kind, socket: None, heard: 0, is_gone: false };
        Crowd { address: address.clone(), members: kinds.map(member).collect() }
    }

    /// Connects those that are not, and lets all do what they do.
    fn turn(&mut self) {
        for member in self.members.iter_mut().filter(|one| one.socket.is_none() && !one.is_gone) {
            member.socket = self.address.begin();
            if member.socket.is_none() {
                break;
            }
        }
        let events = {
            let sockets = self.members.iter().enumerate();
            let sockets = sockets.filter_map(|(number, one)| Some((number, one.socket.as_ref()?)));
            let (numbers, mut fds): (Vec<_>, Vec<_>) =
                sockets.map(|(number, fd)| (number, PollFd::new(fd, PollFlags::IN))).unzip();
            let short = rustix::time::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
            poll(&mut fds, Some(&short)).unwrap();
            let ready = numbers.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
            ready.map(|(number, _)| number).collect::<Vec<_>>()
        };
        events.into_iter().for_each(|number| self.members[number].hear());
    }

    fn served(&self) -> usize {
        self.members.iter().filter(|one| one.heard == GREETING + NAMED + REPLY).count()
    }

    fn are_all_gone(&self) -> bool {
        self.members.iter().all(|one| one.is_gone)
    }
}

impl Member {
    fn hear(&mut self) {
        let Some(socket) = &self.socket else { return };
        let mut bytes = [0; 8192];
        let count = match rustix::io::read(socket, &mut bytes[..]) {
            Err(Errno::AGAIN) => return,
            Ok(count) if count > 0 => count,
            _ => {
                (self.socket, self.is_gone) = (None, true);
                return;
            }
        };
        self.heard += count;
        let answer = match (self.kind, self.heard) {
            (Kind::Half(len), GREETING) => enter()[..len].to_vec(),
            (Kind::Full, GREETING) => enter(),
            (Kind::Full, heard) if heard == GREETING + NAMED => read(),
            _ => return,
        };
        // It may have been sent away.
        let _ = rustix::io::write(socket, &answer);
    }
}

/// How long clients of good will take at worst while something happens: one that has entered
/// before, and new ones (where `new` says so).
fn worst_meanwhile(address: &Address, new: bool, what: impl FnOnce()) -> Duration {
    let mut resident = Reader::entered(address);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut worst = Duration::ZERO;
            while !is_over.load(Ordering::Acquire) {
                let begun = Instant::now();
                resident.read();
                worst = worst.max(begun.elapsed());
                if new {
                    let begun = Instant::now();
                    Reader::entered(address).read();
                    worst = worst.max(begun.elapsed());
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            worst
        });
        what();
        is_over.store(true, Ordering::Release);
        watching.join().unwrap()
    })
}

/// A number of `/proc/PID/status`.
fn status(server: &Daemon, key: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/{}/status", server.process.pid())).unwrap();
    let line = text.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn files(server: &Daemon) -> usize {
    fs::read_dir(format!("/proc/{}/fd", server.process.pid())).unwrap().count()
}

/// A server with so many open files (`SOFT:HARD`), and its two addresses.
fn served(place: &Place, limit: &str, words: &[&str]) -> (Daemon, [Address; 2]) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={limit}")).arg(program()).arg("serve").args(words);
    command.args(["-f", "raw", text(&place.image), "--nbd", text(&place.socket)]);
    command.arg("--nbd").arg(address.to_string()).env_remove("NOTIFY_SOCKET");
    let server = Daemon::of(command.env_remove("LISTEN_FDS"));
    (server, [Address::Unix(place.socket.clone()), Address::Tcp(address)])
}

/// All is as it was before the crowd came, and a client is served at once.
fn is_over(server: &Daemon, address: &Address, files_before: usize) {
    let as_before = until(LIMIT, || (files(server) <= files_before).then_some(()));
    assert!(as_before.is_some(), "{} of {files_before} descriptors", files(server));
    let begun = Instant::now();
    Reader::entered(address).read();
    assert!(begun.elapsed() < patient(SOON), "{:?}", begun.elapsed());
}

/// Lines of the log.
fn lines(server: &Daemon) -> Vec<String> {
    let output = server.process.output();
    output.lines().filter(|line| line.contains("warning")).map(String::from).collect()
}

#[test]
fn clients_are_served_beside_a_crowd_that_does_not_finish_its_handshakes() {
    allow_files();
    let place = Place::new("raw");
    // The limit of most systems for a process that asks for no more. The smaller crowd meets a
    // server that cannot: it has 768 places.
    let limit = if count() > 2000 { "1024:20000" } else { "1024:1024" };
    let (server, addresses) = served(&place, limit, &[]);
    let (before, resident) = (files(&server), status(&server, "VmRSS"));
    for address in &addresses {
        // Each part of the first words: 1 to 19 bytes of 20.
        let kind = |number| match number % 2 {
            0 => Kind::Silent,
            _ => Kind::Half(1 + number / 2 % 19),
        };
        let mut crowd = Crowd::new(address, (0..count()).map(kind));
        let begun = Instant::now();
        let worst = worst_meanwhile(address, true, || {
            while !crowd.are_all_gone() && begun.elapsed() < patient(Duration::from_secs(5)) {
                crowd.turn();
            }
        });
        assert!(worst < patient(SOON), "{worst:?}");
        drop(crowd);
        is_over(&server, address, before);
    }
    let grown = status(&server, "VmHWM") - resident;
    // A page of the words of each handshake, its task, and what the allocator keeps.
    assert!(grown < count().min(2064) * 16, "{grown} KiB");
    let lines = lines(&server);
    assert!(lines.len() <= 6, "{lines:#?}");
    let is_said = |line: &String| line.contains("NBD clients are connected, not all of them");
    assert!(lines.iter().any(is_said), "{lines:#?}");
    server.stop(&[&place.socket]);
}

#[test]
fn of_a_crowd_that_wants_the_disk_as_many_as_may_are_served() {
    allow_files();
    let place = Place::new("raw");
    let (server, addresses) = served(&place, "1024:20000", &[]);
    let before = files(&server);
    for address in &addresses {
        let mut crowd = Crowd::new(address, (0..count()).map(|_| Kind::Full));
        let worst = worst_meanwhile(address, false, || {
            let served = |count| {
                move |crowd: &mut Crowd| {
                    crowd.turn();
                    (crowd.served() == count).then_some(())
                }
            };
            let wait = |crowd: &mut Crowd, count| {
                let came = until(LIMIT, || served(count)(crowd));
                assert!(came.is_some(), "{} of {count} are served", crowd.served());
            };
            // One more place has the client that is watched.
            wait(&mut crowd, SERVED - 1);
            for _ in 0..20 {
                crowd.turn();
            }
            assert_eq!(crowd.served(), SERVED - 1);
            // Where ten go, the next ten come to their turn.
            let first = crowd.members.iter_mut();
            let first = first.filter(|one| one.heard == GREETING + NAMED + REPLY);
            first.take(10).for_each(|one| (one.socket, one.is_gone) = (None, true));
            wait(&mut crowd, SERVED + 9);
        });
        assert!(worst < patient(SOON), "{worst:?}");
        drop(crowd);
        is_over(&server, address, before);
    }
    let lines = lines(&server);
    assert!(lines.len() <= 6, "{lines:#?}");
    let is_said = |line: &String| line.contains("64 NBD clients are served (--max-connections)");
    assert!(lines.iter().any(is_said), "{lines:#?}");
    server.stop(&[&place.socket]);
}

/// What they wait for holds no operation of the ring that another one needs.
#[test]
fn more_clients_than_a_ring_has_operations_for_requests_are_served_by_one_thread() {
    allow_files();
    let place = Place::new("raw");
    let words = ["--threads", "1", "--max-connections", "1500"];
    let (server, [address, _]) = served(&place, "1024:20000", &words);
    let mut crowd = Crowd::new(&address, (0..1400).map(|_| Kind::Full));
    let all = until(LIMIT, || {
        crowd.turn();
        (crowd.served() == 1400).then_some(())
    });
    assert!(all.is_some(), "{} are served", crowd.served());
    let worst = worst_meanwhile(&address, true, || std::thread::sleep(Duration::from_millis(200)));
    assert!(worst < patient(SOON), "{worst:?}");
    drop(crowd);
    server.stop(&[&place.socket]);
}

#[test]
fn a_limit_of_open_files_that_is_too_low_for_the_connections_is_said_and_kept() {
    allow_files();
    let place = Place::new("raw");
    let words = ["--max-connections", "1000"];
    let (server, [address, _]) = served(&place, "256:256", &words);
    let said = "128 of 1000 NBD connections are possible with 256 open files";
    assert!(server.process.output().contains(said), "{}", server.process.output());
    let before = files(&server);
    let mut crowd = Crowd::new(&address, (0..300).map(|_| Kind::Full));
    let worst = worst_meanwhile(&address, false, || {
        for _ in 0..60 {
            crowd.turn();
        }
    });
    assert!(worst < patient(SOON), "{worst:?}");
    assert_eq!(crowd.served(), 127);
    // Its control socket has descriptors left.
    assert!(crate::common::serving::stats(Path::new(&place.socket))["total"].is_object());
    drop(crowd);
    is_over(&server, &address, before);
    server.stop(&[&place.socket]);
}
