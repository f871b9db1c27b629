//! A service manager that hears the main process only, as systemd does by default: it looks at the
//! sender's pid.

use std::fs;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{Cleared, for_user, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, has, until};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, sockopt};
use rustix::process::Signal;

use crate::common::confined::{assert_confined, children};
use crate::common::{MIB, program, raw_image};
use crate::probe::modes::{NOBODY, as_nobody, datagram_sockets};

/// A message, and who has sent it.
pub(super) type Said = (u32, String);

pub(super) struct Manager {
    socket: UnixDatagram,
    name: String,
    pub(super) said: Vec<Said>,
    /// Descriptors that came along, with the name that they got.
    stored: Vec<String>,
}

impl Manager {
    fn of(socket: UnixDatagram, name: String) -> Manager {
        sockopt::set_socket_passcred(&socket, true).expect("a setting");
        socket.set_read_timeout(Some(Duration::from_millis(20))).expect("a setting");
        Manager { socket, name, said: Vec::new(), stored: Vec::new() }
    }

    /// With a name that is a file.
    fn at(path: &Path) -> Manager {
        let socket = UnixDatagram::bind(path).expect("bind");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        fs::set_permissions(path, mode).expect("for all");
        Manager::of(socket, text(path).to_owned())
    }

    /// With a name that is none.
    pub(super) fn named(name: &str) -> Manager {
        let name = format!("ringdisk-probe-{name}-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a short name");
        Manager::of(UnixDatagram::bind_addr(&address).expect("bind"), format!("@{name}"))
    }

    pub(super) fn hear(&mut self) {
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4), ScmCredentials(1))];
        let mut bytes = [0; 4096];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut pieces = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let Ok(message) = recvmsg(self.socket.as_fd(), &mut pieces, &mut control, flags) else {
            return;
        };
        let len = message.bytes;
        let (mut sender, mut descriptors) = (0, 0);
        for message in control.drain() {
            match message {
                RecvAncillaryMessage::ScmCredentials(it) => sender = it.pid.as_raw_nonzero().get(),
                RecvAncillaryMessage::ScmRights(all) => descriptors += all.count(),
                _ => {}
            }
        }
        let text = String::from_utf8_lossy(&bytes[..len]).into_owned();
        if text.contains("FDSTORE=1") {
            assert_eq!(descriptors, 1, "{text}");
            self.stored
                .extend(text.lines().find_map(|it| it.strip_prefix("FDNAME=")).map(str::to_owned));
        }
        let forgotten = text.strip_prefix("FDSTOREREMOVE=1\nFDNAME=");
        self.stored.retain(|name| Some(name.as_str()) != forgotten);
        self.said.push((sender.cast_unsigned(), text));
    }

    /// The first message with a word.
    pub(super) fn wait_for(&mut self, word: &str, process: &Process) -> Said {
        let found = until(LIMIT, || {
            self.hear();
            self.said.iter().find(|(_, text)| text.contains(word)).cloned()
        });
        found.unwrap_or_else(|| panic!("no {word}: {:?} {}", self.said, process.output()))
    }

    pub(super) fn start(&self, command: &mut Command) -> Process {
        Process::spawn(command.env("NOTIFY_SOCKET", &self.name).env_remove("LISTEN_FDS"))
    }

    /// The server says READY, serves without a way to say anything else to any process, and says
    /// STOPPING: all in its own name.
    fn follows(&mut self, mut process: Process) {
        let pid = process.pid();
        let (sender, ready) = self.wait_for("READY=1", &process);
        assert!(ready.contains(&format!("MAINPID={pid}\nSTATUS=")), "{ready}");
        assert_eq!(sender, pid, "a manager hears the main process only: {:?}", self.said);
        assert_confined(pid, true);
        assert_eq!(datagram_sockets(pid), [""; 0]);
        process.signal(Signal::TERM);
        assert_eq!(self.wait_for("STOPPING=1", &process).0, pid, "{:?}", self.said);
        // With what was forgotten: the manager reads on.
        let end = until(LIMIT, || {
            self.hear();
            process.ended()
        });
        assert_eq!(end.and_then(|it| it.code()), Some(0), "{}", process.output());
        until(LIMIT, || {
            self.hear();
            self.stored.is_empty().then_some(())
        });
        assert_eq!(self.stored, [""; 0], "kept for nobody: {:?}", self.said);
        assert!(self.said.iter().all(|(sender, _)| *sender == pid), "{:?}", self.said);
    }
}

#[test]
fn a_mount_has_no_datagram_socket_and_its_manager_hears_all() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let managers = [Manager::at(&directory.path().join("notify")), Manager::named("mount")];
    for mut manager in managers {
        for keep in [&[][..], &["--keep-mount", "--transport", "dev", "--threads", "1"]] {
            let (directory, image) = raw_image(MIB, 1);
            let path = directory.path().join("disk");
            let _cleared = Cleared(path.clone());
            let mut command = Command::new(program());
            command.args(["mount", "--format", "raw", "--sandbox", "on"]).args(keep);
            manager.said.clear();
            let process = manager.start(command.args([&image, &path]).env("FDSTORE", "16"));
            manager.follows(process);
        }
        let stored = |(_, text): &&Said| text.contains("FDNAME=ringdisk-state");
        assert_eq!(manager.said.iter().filter(stored).count(), 2, "kept, and then not");
    }
}

#[test]
fn a_served_disk_has_no_datagram_socket_and_its_manager_hears_all() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let managers = [Manager::at(&directory.path().join("notify")), Manager::named("serve")];
    for mut manager in managers {
        let mut command = Command::new(program());
        let socket = directory.path().join("socket");
        command.args(["serve", "--null", "1M", "--sandbox", "on", "--vhost-user-blk"]);
        let process = manager.start(command.arg(socket));
        manager.follows(process);
    }
}

#[test]
fn the_manager_of_an_ordinary_user_hears_from_the_process_that_it_is_ready_and_inside() {
    if !(needs_root() && needs("setpriv", has("setpriv"))) {
        return;
    }
    let (directory, program) = for_user(&program(), NOBODY);
    let socket = directory.path().join("socket");
    let managers = [Manager::at(&directory.path().join("notify")), Manager::named("user")];
    for mut manager in managers {
        ready_and_inside(&mut manager, &program, &socket);
    }
}

/// Serves as a user until all is as it should be.
fn ready_and_inside(manager: &mut Manager, program: &Path, socket: &Path) {
    let words = ["serve", "--null", "1M", "--sandbox", "on", "--vhost-user-blk"];
    let words = [&[text(program)], &words[..], &[text(socket)]].concat();
    let mut process = manager.start(&mut as_nobody(&words));
    let pid = process.pid();
    assert_eq!(manager.wait_for("READY=1", &process).0, pid);
    let helper = until(LIMIT, || children(pid).first().copied()).expect("a helper process");
    assert_confined_user(pid);
    // It closes its socket a moment after the word.
    let is_closed = || datagram_sockets(pid).is_empty().then_some(());
    assert_eq!(until(LIMIT, is_closed), Some(()), "{}", process.output());
    process.signal(Signal::TERM);
    // Heard by managers that hear all processes of a service.
    assert_eq!(manager.wait_for("STOPPING=1", &process).0, helper);
    assert_eq!(process.wait(LIMIT).and_then(|it| it.code()), Some(0), "{}", process.output());
}

/// It has a filter.
fn assert_confined_user(pid: u32) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    assert!(status.contains("Seccomp:\t2"), "{status}");
}

#[test]
fn a_mount_that_is_no_image_tells_its_manager_nothing() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("image");
    images::sparse(&image, MIB);
    let mut manager = Manager::named("refused");
    let mut command = Command::new(program());
    let process = manager.start(
        command.args(["mount", "--format", "qcow2"]).args([&image, &directory.path().join("disk")]),
    );
    assert_ne!(process.finish(LIMIT).code(), Some(0));
    manager.hear();
    assert_eq!(manager.said, []);
}
