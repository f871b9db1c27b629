//! Descriptors of front ends whose users would wait for another process: a pipe with a name on a
//! FUSE server that never answers, and what else has no type of its own. The disk goes on.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::model::{FrontEnd, Request, Vm, VmOptions, ask, bits, words};
use ringdisk_testkit::mount::scratch;
use rustix::fs::{Mode, OFlags, inotify, open};
use tempfile::TempDir;

use crate::common::{MIB, Served, serve, simulated};

/// Mounts FUSE on a file, answers INIT and nothing else, and unmounts when its input ends. The root
/// of the file system is a pipe.
const SERVER: &str = "
import ctypes, os, struct, sys
path = sys.argv[1].encode()
device = os.open('/dev/fuse', os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = b'fd=%d,rootmode=10000,user_id=0,group_id=0' % device
if libc.mount(b'silent', path, b'fuse', 6, options):
    sys.exit(os.strerror(ctypes.get_errno()))
init = os.read(device, 1 << 17)
body = struct.pack('<IIIIHHIIHHI28x', 7, 31, 65536, 0, 16, 12, 65536, 1, 0, 0, 0)
os.write(device, struct.pack('<IiQ', 16 + len(body), 0, struct.unpack_from('<Q', init, 8)[0]) + \
body)
print('mounted', flush=True)
sys.stdin.read()
libc.umount2(path, 2)
";

/// The server; its end ends every wait for it.
struct Silent {
    server: Child,
    directory: TempDir,
}

impl Silent {
    fn mounted() -> Silent {
        let directory = scratch();
        std::fs::write(Silent::path(directory.path()), "").expect("a mountpoint");
        let mut python = Command::new("python3");
        python.args(["-c", SERVER]).arg(Silent::path(directory.path()));
        python.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = python.spawn().expect("python3 (tests/tally needs it, too)");
        let mut line = String::new();
        let output = server.stdout.take().expect("a pipe");
        BufReader::new(output).read_line(&mut line).expect("a line");
        assert_eq!(line, "mounted\n");
        Silent { server, directory }
    }

    fn path(directory: &Path) -> std::path::PathBuf {
        directory.join("pipe")
    }

    /// The pipe. To open it asks the server nothing.
    fn pipe(&self) -> OwnedFd {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        open(Silent::path(self.directory.path()), flags, Mode::empty()).expect("a pipe")
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        drop(self.server.stdin.take());
        let _ = self.server.wait();
    }
}

fn front(served: &Served) -> FrontEnd {
    let mut front = served.front();
    let features = bits::P_DEVICE_STATE | bits::P_LOG_SHMFD | bits::P_INFLIGHT;
    assert!(front.send(ask::SET_PROTOCOL_FEATURES, 0, &words(&[features]), &[]));
    front
}

/// Messages that bring a descriptor, with what they say.
fn messages() -> Vec<(u32, Vec<u8>)> {
    let region = [0x1000, 4096, 0x1000, 0];
    let table = [&[1, 0, 0, 0, 0, 0, 0, 0][..], &words(&region)].concat();
    let direction = |number: u32| [number.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
    let area = [&words(&[4096, 0])[..], &[1, 0, 8, 0]].concat();
    vec![
        (ask::SET_MEM_TABLE, table),
        (ask::SET_LOG_BASE, words(&[4096, 0])),
        (ask::SET_INFLIGHT_FD, area),
        (ask::SET_DEVICE_STATE_FD, direction(0)),
        (ask::SET_DEVICE_STATE_FD, direction(1)),
        (ask::SET_VRING_CALL, words(&[0])),
    ]
}

fn works(served: &Served) {
    let mut vm = Vm::started(served.front(), VmOptions::default());
    assert_eq!(vm.status(0, Request::write(1, vec![4; 512])), 0);
}

/// Sends a message with a descriptor, for which the connection ends.
fn is_refused(served: &Served, request: u32, payload: &[u8], fd: BorrowedFd<'_>) {
    let mut front = front(served);
    assert!(front.send(request, 0, payload, &[fd]));
    front.expect_end();
    works(served);
}

#[test]
fn a_pipe_of_a_server_that_does_not_answer_stops_nobody() {
    if !needs_root() {
        return;
    }
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    // Gone before the export, which may wait for it.
    let silent = Silent::mounted();
    for (request, payload) in messages() {
        is_refused(&served, request, &payload, silent.pipe().as_fd());
    }
}

/// To look at such a one may wait for what it was given to watch, and to close it for the process
/// that has made it.
#[test]
fn what_has_no_type_and_is_no_eventfd_is_refused() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).expect("a watch");
    let set = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
    for fd in [watch, set.expect("a set")] {
        for (request, payload) in messages() {
            is_refused(&served, request, &payload, fd.as_fd());
        }
    }
}
