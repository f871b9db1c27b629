//! What a process that was taken over hands to its successor (`serve --upgrade`).
//!
//! The handed is a real one, which this test got by asking as a successor does; it comes changed,
//! over the socket of the process itself.

use std::fs::{self, File};
use std::io::{IoSlice, IoSliceMut};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{Finished, Process, has};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketType, recvmsg, sendmsg, sockopt,
};
use serde_json::{Value, json};

use crate::common::serving::{Daemon, Place, ctl, serve_command, stats, successor_of};
use crate::takeover::agent::Agent;
use crate::takeover::out_of_reach::{Others, identity, with_data_file};

/// A successor gives up after the time that the slowest honest process may take: 40 s.
pub(crate) const SUCCESSOR_LIMIT: Duration = Duration::from_secs(60);

/// Words and descriptors.
pub(crate) struct Handed {
    pub(crate) words: Value,
    pub(crate) fds: Vec<OwnedFd>,
}

/// The role of each descriptor.
impl Handed {
    pub(crate) fn place(&self, role: &str) -> usize {
        let roles = self.words["roles"].as_array().expect("roles");
        roles.iter().position(|one| one == role || one.get(role).is_some()).expect("a descriptor")
    }

    fn disk(&self) -> Value {
        serde_json::from_str(self.words["disk"].as_str().expect("a disk")).expect("JSON")
    }

    fn change_disk(&mut self, change: impl FnOnce(&mut Value)) {
        let mut disk = self.disk();
        change(&mut disk);
        self.words["disk"] = json!(disk.to_string());
    }

    /// Another file as the image.
    pub(crate) fn with_image(&mut self, file: OwnedFd, id: (u64, u64), read_only: bool) {
        let place = self.place("Image");
        self.fds[place] = file;
        self.change_disk(|disk| {
            disk["layers"][0]["files"] = json!([[id.0, id.1, u64::from(read_only)]]);
            if read_only {
                disk["read-only"] = json!(true);
                disk["layers"][0]["writable"] = json!(false);
            }
        });
    }
}

/// The socket on which a process waits for its successor, and its name. The kernel knows it by the
/// name that it had before it listened, so it is told from the others by a connection that comes
/// there. Its flags are the process's, and stay as they are.
pub(crate) fn listener(agent: &Agent, path: PathBuf) -> (UnixListener, PathBuf) {
    let listens = |socket: &OwnedFd| {
        sockopt::socket_acceptconn(socket) == Ok(true)
            && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
    };
    let sockets = agent.all(|name| name.starts_with("socket:")).into_iter().filter(listens);
    let mut probe = UnixStream::connect(&path).expect("it listens");
    probe.write_all(b"probe").expect("it listens");
    for socket in sockets.map(UnixListener::from) {
        // Other processes look whether a server listens, and say nothing.
        while is_ready(&socket) {
            let (mut stream, _) = socket.accept().expect("it is ready");
            if stream.read(&mut [0; 5]).is_ok_and(|len| len == 5) {
                return (socket, path);
            }
        }
    }
    panic!("it waits for no successor");
}

fn is_ready(socket: &UnixListener) -> bool {
    let mut ready = [PollFd::new(socket, PollFlags::IN)];
    poll(&mut ready, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1)
}

/// Asks for the disk as a successor does, and lets it go on.
pub(crate) fn handed_of(path: &Path) -> Handed {
    let mut stream = UnixStream::connect(path).expect("it listens");
    stream.write_all(b"A\x02\0\0\0{}").expect("it listens");
    let mut numbers = [0; 8];
    stream.read_exact(&mut numbers).expect("a handed");
    let number = |at: usize| u32::from_le_bytes(numbers[at..at + 4].try_into().expect("four"));
    let (len, count) = (number(0) as usize, number(4) as usize);
    assert!(count < 253, "one lot");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC;
    recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut control, flags).expect("a lot");
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    let mut words = vec![0; len];
    stream.read_exact(&mut words).expect("words");
    assert_eq!(fds.len(), count);
    Handed { words: serde_json::from_slice(&words).expect("JSON"), fds }
}

fn send_lot(stream: &UnixStream, fds: &[OwnedFd]) {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    }
    let _ = sendmsg(stream, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL);
}

/// The stream on which a successor has asked.
pub(crate) fn asked(listener: &UnixListener) -> UnixStream {
    // Others look whether a process is there, and say nothing.
    let (mut stream, len) = loop {
        let (mut stream, _) = listener.accept().expect("it asks");
        let mut len = [0; 5];
        if stream.read_exact(&mut len).is_ok() {
            break (stream, len);
        }
    };
    let [ask, a, b, c, d] = len;
    assert_eq!(ask, b'A');
    let len = u32::from_le_bytes([a, b, c, d]) as usize;
    stream.read_exact(&mut vec![0; len]).expect("it asks");
    stream
}

/// As the process sends it.
pub(crate) fn send(mut stream: &UnixStream, words: &[u8], fds: &[OwnedFd]) {
    let count = |len: usize| u32::try_from(len).expect("few").to_le_bytes();
    let _ = stream.write_all(&[count(words.len()), count(fds.len())].concat());
    for lot in fds.chunks(253) {
        send_lot(stream, lot);
    }
    let _ = stream.write_all(words);
}

/// A process that was taken over, and what it would hand over.
struct Taken {
    place: Place,
    daemon: Daemon,
    agent: Agent,
    listener: UnixListener,
    /// Its name.
    path: PathBuf,
}

impl Taken {
    fn new() -> (Taken, Handed) {
        Taken::after("raw", |_| ())
    }

    /// * `change`: what a user does before.
    fn after(format: &'static str, change: impl FnOnce(&Place)) -> (Taken, Handed) {
        let place = Place::new(format);
        let daemon = place.start(&[]);
        change(&place);
        let agent = Agent::over(daemon.process.pid());
        let (listener, path) = listener(&agent, successor_of(&place.socket));
        agent.goes_on();
        let handed = handed_of(&path);
        let agent = Agent::over(daemon.process.pid());
        (Taken { place, daemon, agent, listener, path }, handed)
    }

    /// A successor, and the stream that it has asked on.
    fn successor(&self, words: &[&str]) -> (Process, UnixStream) {
        let socket = ["--upgrade", "--vhost-user-blk", text(&self.place.socket)];
        let words = [&self.place.words(), words, &socket].concat();
        let process = Process::spawn(&mut serve_command(&words));
        let stream = asked(&self.listener);
        (process, stream)
    }

    /// A successor gets this, and refuses it. The process that was taken over goes on.
    #[track_caller]
    fn refuses(&self, what: &str, give: impl FnOnce(&UnixStream)) -> Finished {
        let (process, stream) = self.successor(&[]);
        give(&stream);
        // It says nothing more, and never that it is ready.
        let mut word = [0];
        let said = (&stream).read(&mut word).unwrap_or(0);
        assert_eq!(said, 0, "{what} is taken: {}", process.output());
        let finished = process.finish(SUCCESSOR_LIMIT);
        let output = finished.output();
        assert!(finished.code().is_some_and(|code| code != 0), "{what}: {output}");
        assert!(!output.contains("panicked"), "{what}: {output}");
        assert!(finished.stderr.contains("ringdisk: error"), "{what}: {output}");
        finished
    }

    fn end(self) {
        self.agent.goes_on();
        assert!(stats(&self.place.socket)["size"].as_u64() > Some(0));
        self.daemon.stop(&[&self.place.socket]);
    }
}

/// Opened as an attacker in the sandbox can: a name for a file, which is no access to it.
fn name_only(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).expect("there")
}

pub(crate) fn read_only(path: &Path) -> OwnedFd {
    File::open(path).expect("there").into()
}

fn memory() -> OwnedFd {
    let memory = memfd_create(c"test", MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&memory, 8 << 20).expect("memory");
    memory
}

fn identity_of(file: &OwnedFd) -> (u64, u64) {
    let stat = rustix::fs::fstat(file).expect("a file");
    (stat.st_dev, stat.st_ino)
}

#[test]
fn another_file_as_the_image_is_not_served() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let (taken, _) = Taken::new();
    let secret = others.path("secret");
    let status = Path::new("/proc/self/status");
    let files: [(&str, OwnedFd, (u64, u64), bool); 3] = [
        ("a name of a secret", name_only(&secret), identity(&secret), false),
        ("a secret", read_only(&secret), identity(&secret), true),
        ("a file of the system", read_only(status), identity_of(&read_only(status)), true),
    ];
    for (what, file, id, is_read_only) in files {
        let mut handed = fresh(&taken);
        handed.with_image(file, id, is_read_only);
        taken.refuses(what, |stream| {
            send(stream, handed.words.to_string().as_bytes(), &handed.fds);
        });
        others.assert_same();
    }
    taken.end();
}

/// The predecessor has it open to write, and it lies where images of the command line may
/// lie.
#[test]
fn a_neighbour_as_the_image_is_not_served() {
    if !needs_root() {
        return;
    }
    let (taken, _) = Taken::new();
    let neighbour = taken.place.path("neighbour");
    fs::create_dir(taken.place.path("deep")).expect("mkdir");
    let deep = taken.place.path("deep").join("image");
    for path in [&neighbour, &deep] {
        fs::write(path, vec![7; 8 << 20]).expect("an image");
        let file = File::options().read(true).write(true).open(path).expect("there");
        let mut handed = fresh(&taken);
        handed.with_image(file.into(), identity(path), false);
        let finished = taken.refuses("a neighbour", |stream| {
            send(stream, handed.words.to_string().as_bytes(), &handed.fds);
        });
        assert!(finished.stderr.contains("--allow-path"), "{}", finished.output());
    }
    // The right image, which cannot be written by what is handed over.
    let mut handed = fresh(&taken);
    let image = taken.place.image.clone();
    handed.with_image(read_only(&image), identity(&image), false);
    taken.refuses("an image to read", |stream| {
        send(stream, handed.words.to_string().as_bytes(), &handed.fds);
    });
    taken.end();
}

/// An attacker who has taken the predecessor over does not let go of the disk.
#[test]
fn a_process_that_does_not_end_is_named_with_what_it_has() {
    if !needs_root() {
        return;
    }
    let (taken, _) = Taken::new();
    let handed = fresh(&taken);
    let (process, mut stream) = taken.successor(&[]);
    send(&stream, handed.words.to_string().as_bytes(), &handed.fds);
    drop(handed);
    let mut word = [0];
    stream.read_exact(&mut word).expect("it is ready");
    stream.write_all(b"G").expect("it goes");
    let Taken { place, daemon, agent, listener, .. } = taken;
    drop(listener);
    let pid = daemon.process.pid();
    // It is in its sandbox after 8 s.
    let new = Daemon { process };
    let said = || new.process.output().contains("it still has open").then_some(());
    ringdisk_testkit::process::until(SUCCESSOR_LIMIT, said)
        .unwrap_or_else(|| panic!("{}", new.process.output()));
    for part in [format!("(pid {pid})"), text(&place.image).to_owned()] {
        assert!(new.process.output().contains(&part), "{part}: {}", new.process.output());
    }
    drop(stream);
    agent.dies();
    daemon.kill();
    new.ready().stop(&[&place.socket]);
}

/// Another handed of the same process.
fn fresh(taken: &Taken) -> Handed {
    let pid = taken.daemon.process.pid();
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("it lives");
    let handed = handed_of(&taken.path);
    drop(Agent::over(taken.daemon.process.pid()));
    handed
}

#[test]
fn descriptors_that_are_not_what_they_are_called_are_refused() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let (taken, _) = Taken::new();
    // Closing one may wait for its other end.
    let network = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
    for role in ["Listener", "Call", "Error", "Region", "Log", "LogEvent", "Channel", "Inflight"] {
        let mut handed = fresh(&taken);
        let odd = network.as_fd().try_clone_to_owned().expect("a copy");
        let named = match role {
            "Call" | "Error" => json!({role: 0}),
            _ => json!(role),
        };
        let roles = handed.words["roles"].as_array_mut().expect("roles");
        match roles.iter().position(|one| *one == named) {
            Some(place) => handed.fds[place] = odd,
            None => {
                roles.push(named);
                handed.fds.push(odd);
            }
        }
        if role == "Region" {
            handed.words["regions"] =
                json!([{"guest_addr": 0, "user_addr": 0, "size": 4096, "mmap_offset": 0}]);
        }
        let finished = taken.refuses(role, |stream| {
            send(stream, handed.words.to_string().as_bytes(), &handed.fds);
        });
        assert!(finished.stderr.contains("is a network socket"), "{}", finished.output());
    }
    taken.end();
    others.assert_same();
}

#[test]
fn words_and_numbers_that_do_not_fit_are_refused() {
    if !needs_root() {
        return;
    }
    let (taken, handed) = Taken::new();
    let words = handed.words.to_string();
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let numbers = |words: u32, fds: u32| [words.to_le_bytes(), fds.to_le_bytes()].concat();
    let raw = |bytes: Vec<u8>| move |mut stream: &UnixStream| drop(stream.write_all(&bytes));
    taken.refuses("more words than possible", raw(numbers(u32::MAX - 7, 1)));
    taken.refuses("more descriptors than possible", raw(numbers(10, 100_000)));
    taken.refuses("no words", |stream| {
        drop((&mut &*stream).write_all(&numbers(100, 0)));
        drop(stream.shutdown(std::net::Shutdown::Write));
    });
    taken.refuses("fewer descriptors", |stream| send(stream, words.as_bytes(), &handed.fds[1..]));
    taken.refuses("none", |stream| send(stream, words.as_bytes(), &[]));
    taken.refuses("a lot with more than were said", |mut stream| {
        let _ = stream.write_all(&numbers(u32::try_from(words.len()).expect("few"), 1));
        send_lot(stream, &handed.fds);
        send_lot(stream, &handed.fds);
        let _ = stream.write_all(words.as_bytes());
    });
    taken.refuses("lots without descriptors", |mut stream| {
        let _ = stream.write_all(&numbers(u32::try_from(words.len()).expect("few"), 2));
        send_lot(stream, &[]);
        let _ = stream.write_all(words.as_bytes());
    });
    taken.refuses("rubbish", |stream| send(stream, &[0xff; 999], &handed.fds));
    taken.refuses("depth", |stream| send(stream, deep.as_bytes(), &handed.fds));
    for (at, value) in [
        ("/version", json!(2)),
        ("/log", json!([u64::MAX, u64::MAX])),
        (
            "/inflight",
            json!({"size": u64::MAX, "offset": 1, "queues": 65535, "queue_size": 65535,
                   "packed": true}),
        ),
        (
            "/regions",
            json!([{"guest_addr": u64::MAX, "user_addr": u64::MAX, "size": u64::MAX,
                    "mmap_offset": u64::MAX}]),
        ),
        (
            "/session",
            json!({"features": u64::MAX, "protocol_features": u64::MAX, "status": 255,
                   "regions": [[0, 1, 2]], "vrings": []}),
        ),
        ("/disk", json!("{}")),
    ] {
        let mut handed = fresh(&taken);
        *handed.words.pointer_mut(at).expect("a field") = value;
        let descriptor = match at {
            "/log" => Some("Log"),
            "/inflight" => Some("Inflight"),
            "/regions" => Some("Region"),
            "/session" => Some("Connection"),
            _ => None,
        };
        if let Some(role) = descriptor {
            handed.words["roles"].as_array_mut().expect("roles").push(json!(role));
            let fd = match role {
                "Connection" => UnixStream::pair().expect("sockets").0.into(),
                _ => memory(),
            };
            handed.fds.push(fd);
        }
        taken.refuses(at, |stream| send(stream, handed.words.to_string().as_bytes(), &handed.fds));
    }
    for (at, value) in [
        ("/layers", json!([])),
        ("/layers/0/files", json!([])),
        ("/layers/0/files/0/1", json!(1)),
        ("/layers/0/kind", json!({"qcow2": []})),
        ("/layers/0/kind", json!({"raw": [u64::MAX, u64::MAX]})),
    ] {
        let mut handed = fresh(&taken);
        handed.change_disk(|disk| *disk.pointer_mut(at).expect("a field") = value);
        taken.refuses(at, |stream| send(stream, handed.words.to_string().as_bytes(), &handed.fds));
    }
    taken.end();
}

/// It is told directories of others, and is confined to its own all the same.
#[test]
fn directories_that_are_named_are_not_the_successors() {
    if !needs_root() {
        return;
    }
    let others = Others::new();
    let (taken, _) = Taken::new();
    let mut handed = fresh(&taken);
    let elsewhere = others.path("memory");
    handed.change_disk(|disk| {
        disk["layers"][0]["directory"] = json!(text(&elsewhere));
        disk["layers"][0]["full-backing-name"] = json!(text(&others.path("secret")));
    });
    let (process, mut stream) = taken.successor(&[]);
    send(&stream, handed.words.to_string().as_bytes(), &handed.fds);
    drop(handed);
    let mut word = [0];
    stream.read_exact(&mut word).expect("it is ready");
    assert_eq!(&word, b"R");
    stream.write_all(b"G").expect("it goes");
    let Taken { place, daemon, agent, listener, .. } = taken;
    drop((listener, stream));
    agent.dies();
    daemon.kill();
    let new = Daemon { process }.ready();
    crate::common::confined::assert_confined(new.process.pid(), true);
    ctl(&place.socket, &["snapshot", text(&elsewhere.join("new"))]).ends(6);
    others.assert_same();
    assert!(fs::symlink_metadata(elsewhere.join("new")).is_err());
    new.stop(&[&place.socket]);
    others.assert_same();
}

#[test]
fn another_data_file_of_an_image_below_the_top_is_not_served() {
    if !(needs_root() && needs("qemu-img", has("qemu-img"))) {
        return;
    }
    let (taken, _) = Taken::after("qcow2", |place| {
        ctl(&place.socket, &["snapshot", text(&place.path("o.qcow2"))]).ok();
    });
    let [secret, evil, made] = ["secret", "evil", "made"].map(|name| taken.place.path(name));
    for path in [&secret, &evil] {
        fs::write(path, vec![7; 1 << 20]).expect("a file");
    }
    let mut handed = fresh(&taken);
    // It has its image open to write, from before the snapshot.
    let forged = with_data_file(&secret, &made);
    let image = File::options().write(true).open(&taken.place.image).expect("there");
    image.write_all_at(&forged, 0).expect("write");
    let (device, inode) = identity(&evil);
    handed.change_disk(|disk| {
        let layer = &mut disk["layers"][1];
        layer["data-name"] = layer["name"].clone();
        layer["files"].as_array_mut().expect("files").push(json!([device, inode, 1]));
    });
    handed.words["roles"].as_array_mut().expect("roles").push(json!("Image"));
    handed.fds.push(read_only(&evil));
    let finished = taken.refuses("another data file", |stream| {
        send(stream, handed.words.to_string().as_bytes(), &handed.fds);
    });
    assert!(finished.stderr.contains("another data file"), "{}", finished.output());
    taken.end();
}
