//! A service manager that keeps descriptors: a socket that takes them (sd_notify(3), `FDSTORE=1`),
//! and starts the process again with them (sd_listen_fds(3)).

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{pattern, piece};
use ringdisk_testkit::limits::{mount_at, needs, needs_root};
use ringdisk_testkit::mount::{Cleared, STOP, text, wait_for_requests};
use ringdisk_testkit::process::{Process, command, has, until};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::common::{MIB, open, program, raw_image};
use crate::keep::kept::child_of;

/// What a mount with two queues gives it.
const PARKED: [&str; 5] =
    ["ringdisk-alive", "ringdisk-fuse-0", "ringdisk-fuse-1", "ringdisk-origin", "ringdisk-state"];

/// The manager's side.
struct Manager {
    socket: UnixDatagram,
    name: String,
    kept: Vec<(String, OwnedFd)>,
    /// Name of a descriptor that it does not take, though it says nothing of that.
    deaf_to: Option<&'static str>,
    /// Everything that was said, without descriptors.
    said: Vec<String>,
}

impl Manager {
    fn new() -> Manager {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringdisk-manager-{}-{number}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a short name");
        let socket = UnixDatagram::bind_addr(&address).expect("a socket of its own");
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a setting");
        Manager {
            socket,
            name: format!("@{name}"),
            kept: Vec::new(),
            deaf_to: None,
            said: Vec::new(),
        }
    }

    /// Hears one message, if there is one. A descriptor that comes with anything but FDSTORE is
    /// closed.
    fn hear(&mut self) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut bytes = [0; 4096];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let Ok(message) = recvmsg(self.socket.as_fd(), &mut pieces, &mut control, flags) else {
            return;
        };
        let text = String::from_utf8_lossy(&bytes[..message.bytes]).into_owned();
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).map(str::to_owned);
        if text.contains("FDSTORE=1") {
            assert!(
                text.contains("FDPOLL=0"),
                "a manager that polls /dev/fuse is woken by every request"
            );
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                    let named = descriptors.map(|fd| (name.clone().expect("a name"), fd));
                    self.kept.extend(named.filter(|(name, _)| Some(name.as_str()) != self.deaf_to));
                }
            }
        } else if text.contains("FDSTOREREMOVE=1") {
            self.kept.retain(|(kept, _)| Some(kept) != name.as_ref());
        }
        self.said.push(text);
    }

    /// Hears until a process says `word`.
    fn wait_for(&mut self, word: &str, process: &Process) {
        let end = Instant::now() + Duration::from_secs(20);
        while !self.said.iter().any(|text| text.contains(word)) {
            assert!(Instant::now() < end, "no {word}: {:?} {}", self.said, process.output());
            self.hear();
        }
    }

    /// Starts the program as its main process, with what is kept.
    fn start(&mut self, image: &Path, path: &Path, room: usize) -> Process {
        self.said.clear();
        // Above those that it gets, so that none is lost when they take their places.
        let high: Vec<OwnedFd> = self
            .kept
            .iter()
            .map(|(_, fd)| rustix::io::fcntl_dupfd_cloexec(fd, 100).expect("a descriptor"))
            .collect();
        let raws: Vec<RawFd> = high.iter().map(AsRawFd::as_raw_fd).collect();
        let names: Vec<&str> = self.kept.iter().map(|(name, _)| name.as_str()).collect();
        // The pid is known after the fork only; the shell keeps it over exec.
        let mut command: Command =
            command(&["sh", "-c", "LISTEN_PID=$$ exec \"$0\" \"$@\"", &program()]);
        command
            .args([
                "mount",
                "--keep-mount",
                "--transport",
                "dev",
                "--threads",
                "2",
                "--format",
                "raw",
            ])
            .args([image, path])
            .env("NOTIFY_SOCKET", &self.name)
            .env("FDSTORE", room.to_string());
        if !raws.is_empty() {
            command
                .env("LISTEN_FDS", raws.len().to_string())
                .env("LISTEN_FDNAMES", names.join(":"));
        }
        // SAFETY: between fork and exec only dup2 is called, on numbers; nothing is allocated and
        // no lock taken.
        unsafe {
            command.pre_exec(move || {
                for (raw, place) in raws.iter().zip(3..) {
                    let from = std::mem::ManuallyDrop::new(OwnedFd::from_raw_fd(*raw));
                    let mut to = std::mem::ManuallyDrop::new(OwnedFd::from_raw_fd(place));
                    rustix::io::dup2(&*from, &mut to)?;
                }
                Ok(())
            });
        }
        Process::spawn(&mut command)
    }
}

#[test]
fn a_service_manager_keeps_the_mount_and_the_next_process_goes_on_with_it() {
    if !(needs_root() && needs("fio", has("fio"))) {
        return;
    }
    let (directory, image) = raw_image(4 * MIB, 1);
    let path = directory.path().join("disk");
    std::fs::write(&path, "").expect("a mountpoint");
    let _cleared = Cleared(path.clone());
    let mut manager = Manager::new();
    let mut process = manager.start(&image, &path, 16);
    manager.wait_for("READY=1", &process);
    let mut names: Vec<String> = manager.kept.iter().map(|(name, _)| name.clone()).collect();
    names.sort();
    assert_eq!(names, PARKED);
    assert_eq!(child_of(process.pid()), None, "the manager keeps it; there is no parent of ours");

    // In a process of its own: one that has the disk open cannot start the server of that disk,
    // since each fork closes its copy of the file, and a close asks the server.
    let file = format!("--filename={}", text(&path));
    let words = [
        "fio",
        "--name=load",
        &file,
        "--ioengine=libaio",
        "--direct=1",
        "--iodepth=16",
        "--rw=randwrite",
        "--bs=4k",
        "--size=4m",
        "--thread",
        "--loops=100000",
        "--time_based",
        "--runtime=8",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_backlog=32",
        "--verify_state_save=0",
    ];
    let mut fio = Process::spawn(&mut command(&words));
    let mut under_load = 0;
    for _ in 0..6 {
        std::thread::sleep(Duration::from_millis(500));
        process.signal(Signal::KILL);
        assert!(process.wait(STOP).is_some());
        let ended = fio.ended();
        assert!(ended.is_none_or(|status| status.success()), "{}", fio.output());
        under_load += u32::from(ended.is_none());
        // In another order than they came, as systemd gives them.
        manager.kept.reverse();
        process = manager.start(&image, &path, 16);
        manager.wait_for("READY=1", &process);
    }
    let finished = fio.finish(Duration::from_secs(60));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(under_load >= 3, "it had ended by then: {under_load}");
    let main = format!("MAINPID={}", process.pid());
    assert!(manager.said.iter().any(|said| said.contains(&main)), "{:?}", manager.said);

    process.signal(Signal::TERM);
    let status = until(STOP, || {
        manager.hear();
        process.ended()
    });
    assert_eq!(status.and_then(|status| status.code()), Some(0), "{}", process.output());
    let end = Instant::now() + STOP;
    while !manager.kept.is_empty() && Instant::now() < end {
        manager.hear();
    }
    assert_eq!((manager.kept.len(), mount_at(&path)), (0, None), "{:?}", manager.said);
}

/// A mount of a manager, whose serving process has just been killed.
fn killed(manager: &mut Manager) -> (TempDir, PathBuf, PathBuf, Cleared) {
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    std::fs::write(&path, "").expect("a mountpoint");
    let cleared = Cleared(path.clone());
    let mut process = manager.start(&image, &path, 16);
    manager.wait_for("READY=1", &process);
    process.signal(Signal::KILL);
    assert!(process.wait(STOP).is_some());
    (directory, image, path, cleared)
}

/// Waits until the process says that it goes on with a mount, which it does once it is ready.
fn goes_on(process: &Process) {
    let said = until(STOP, || process.output().contains("again: requests").then_some(()));
    assert_eq!(said, Some(()), "{}", process.output());
}

#[test]
fn a_mount_that_is_not_kept_as_a_whole_is_made_anew() {
    if !needs_root() {
        return;
    }
    for lost in ["ringdisk-fuse-1", "ringdisk-origin", "ringdisk-state"] {
        let mut manager = Manager::new();
        manager.deaf_to = Some(lost);
        let (_directory, image, path, _cleared) = killed(&mut manager);
        manager.deaf_to = None;
        let mut process = manager.start(&image, &path, 16);
        manager.wait_for("READY=1", &process);
        assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100), "{}", process.output());
        let mut names: Vec<_> = manager.kept.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, PARKED);
        // And this one is kept.
        process.signal(Signal::KILL);
        assert!(process.wait(STOP).is_some());
        process = manager.start(&image, &path, 16);
        manager.wait_for("READY=1", &process);
        goes_on(&process);
        process.signal(Signal::TERM);
        assert_eq!(process.wait(STOP).and_then(|status| status.code()), Some(0));
    }
}

#[test]
fn a_manager_with_less_room_than_before_goes_on_with_what_it_keeps() {
    if !needs_root() {
        return;
    }
    let mut manager = Manager::new();
    let (_directory, image, path, _cleared) = killed(&mut manager);
    let mut process = manager.start(&image, &path, 3);
    manager.wait_for("READY=1", &process);
    goes_on(&process);
    assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100));
    process.signal(Signal::TERM);
    assert_eq!(process.wait(STOP).and_then(|status| status.code()), Some(0));
}

#[test]
fn a_stop_while_the_next_process_of_a_manager_starts_is_a_clean_end() {
    if !needs_root() {
        return;
    }
    for delay_ms in [15, 30, 60, 120] {
        let mut manager = Manager::new();
        let (_directory, image, path, _cleared) = killed(&mut manager);
        let mut process = manager.start(&image, &path, 16);
        manager.wait_for("STATUS=", &process);
        std::thread::sleep(Duration::from_millis(delay_ms));
        process.signal(Signal::TERM);
        let status = until(STOP, || {
            manager.hear();
            process.ended()
        });
        assert_eq!(status.and_then(|status| status.code()), Some(0), "{}", process.output());
        assert_eq!(mount_at(&path), None);
    }
}

/// FNV-1a of a state and its number, as the program has it.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[test]
fn a_mount_of_another_version_is_refused_and_ends_with_its_manager() {
    if !needs_root() {
        return;
    }
    let mut manager = Manager::new();
    let (_directory, image, path, _cleared) = killed(&mut manager);
    // The first state is number 1, in the second place behind the record: number, checksum, length,
    // text.
    const STATE_AT: u64 = 4096 + (64 << 10);
    let (_, memory) = manager.kept.iter().find(|(name, _)| name == "ringdisk-state").expect("kept");
    let memory = std::fs::File::from(memory.try_clone().expect("clone"));
    let mut head = [0; 24];
    memory.read_exact_at(&mut head, STATE_AT).expect("a state");
    let len = u64::from_ne_bytes(head[16..].try_into().expect("eight"));
    let mut text = vec![0; usize::try_from(len).expect("short")];
    memory.read_exact_at(&mut text, STATE_AT + 24).expect("a state");
    let newer =
        String::from_utf8(text).expect("text").replacen("\"version\":1,", "\"version\":9,", 1);
    assert!(newer.contains("\"version\":9,"), "{newer}");
    let sum = checksum(&[&head[..8], newer.as_bytes()].concat());
    memory.write_all_at(newer.as_bytes(), STATE_AT + 24).expect("write");
    memory.write_all_at(&sum.to_ne_bytes(), STATE_AT + 8).expect("write");

    let mut process = manager.start(&image, &path, 16);
    let status = process.wait(STOP);
    assert_eq!(status.and_then(|status| status.code()), Some(11), "{}", process.output());
    assert!(process.output().contains("its version is 9"), "{}", process.output());
    let mut client = crate::keep::kept::reader(&path);
    wait_for_requests(&path, 1);
    assert_eq!(client.ended(), None, "it waits for a server");
    manager.kept.clear();
    assert!(client.wait(STOP).is_some_and(|status| !status.success()), "the client hangs");
    process = manager.start(&image, &path, 16);
    manager.wait_for("READY=1", &process);
    assert_eq!(piece(&path, 0, 100), pattern(1, 0, 100));
    process.signal(Signal::TERM);
    assert!(process.wait(STOP).is_some());
}

#[test]
fn a_service_manager_without_room_leaves_it_to_a_process_of_ours() {
    if !needs_root() {
        return;
    }
    let (directory, image) = raw_image(MIB, 1);
    let path = directory.path().join("disk");
    std::fs::write(&path, "").expect("a mountpoint");
    let _cleared = Cleared(path.clone());
    let mut manager = Manager::new();
    let mut process = manager.start(&image, &path, 3);
    manager.wait_for("READY=1", &process);
    assert!(process.output().contains("FileDescriptorStoreMax=5"), "{}", process.output());
    let main = format!("MAINPID={}", process.pid());
    assert!(manager.said.iter().any(|said| said.contains(&main)), "{:?}", manager.said);
    let server = child_of(process.pid()).expect("a process that serves");
    crate::keep::kept::kill(server, Signal::KILL);
    open(&path).write_all_at(b"kept", 0).expect("the next one serves");
    assert_eq!((piece(&path, 0, 4), manager.kept.len()), (b"kept".to_vec(), 0));
    assert_eq!(piece(&path, 4, 96), pattern(1, 4, 96));
    process.signal(Signal::TERM);
    assert_eq!(
        process.wait(STOP).and_then(|status| status.code()),
        Some(0),
        "{}",
        process.output()
    );
}
