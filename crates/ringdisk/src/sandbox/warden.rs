//! The small process outside of a sandbox.
//!
//! Inside landlock nothing can be unmounted, and files can be removed only where all files of a directory can. So before a process is
//! confined it starts another one, tells it what will have to go at the end (one mount, and files by name and identity), and asks for
//! that when the end has come. Whoever has taken the serving process over can ask for nothing else.
//!
//! Promises: the warden serves nothing, opens no image and holds no descriptor of a mount or of a terminal; it ends with the serving
//! process, however that ends, and does nothing by itself. Signals to the group do not end it before that.
//!
//! One message (SOCK_SEQPACKET) tells what will have to go, fields ended by zero bytes; then each is one letter and, for a file, its
//! name; the answer is one letter and words for people.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use ringdisk_fuse::mount::{self, Remover, Unmount};
use ringdisk_fuse::{Error, ErrorKind};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, recv, send, shutdown,
    socketpair,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

use super::Named;

/// Set in the environment of the warden; its value is the pid of the process that it is for.
const MARK: &str = "RINGDISK_WARDEN_OF";
/// Longest message, bytes: the mountpoint and three names of 4096 bytes at most, with their numbers.
const MESSAGE_BYTES_MAX: usize = 20 << 10;

const NORMAL: u8 = b'N';
const LAZY: u8 = b'L';
const FORCE: u8 = b'F';
const ABORT: u8 = b'A';
const UNLINK: u8 = b'R';
const DONE: u8 = b'D';
const BUSY: u8 = b'B';
const REFUSED: u8 = b'E';

/// The serving process's end.
#[derive(Debug)]
pub(crate) struct Warden {
    line: Arc<Line>,
    child: Mutex<Child>,
}

/// One question at a time.
#[derive(Debug)]
struct Line(Mutex<OwnedFd>);

impl Line {
    /// Errors: the warden is gone.
    fn ask(&self, what: u8, name: &[u8]) -> io::Result<(u8, String)> {
        let socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let message = [&[what], name].concat();
        send(&*socket, &message, SendFlags::NOSIGNAL)?;
        let mut answer = vec![0; MESSAGE_BYTES_MAX];
        let len = receive(socket.as_fd(), &mut answer)?;
        match answer[..len].split_first() {
            Some((kind, words)) => Ok((*kind, String::from_utf8_lossy(words).into_owned())),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn receive(socket: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
    loop {
        match recv(&socket, &mut *into, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            received => return Ok(received?.0),
        }
    }
}

impl Remover for Line {
    fn remove(&self, how: Unmount) -> Result<(), Error> {
        let what = match how {
            Unmount::Normal => NORMAL,
            Unmount::Lazy => LAZY,
            Unmount::Force => FORCE,
        };
        match self.ask(what, &[]) {
            Ok((DONE, _)) => Ok(()),
            Ok((BUSY, words)) => Err(Error::new(ErrorKind::Busy, words)),
            Ok((_, words)) => Err(Error::new(ErrorKind::System, words)),
            Err(error) => {
                let what = "the process that removes the mount does not answer";
                Err(Error::new(ErrorKind::System, what).source(error))
            }
        }
    }

    fn abort(&self) -> bool {
        self.ask(ABORT, &[]).is_ok_and(|(answer, _)| answer == DONE)
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the warden")
    }
}

impl Warden {
    /// Starts one.
    ///
    /// * `mount`: mountpoint and number of the connection.
    /// * `files`: names with device and inode number.
    ///
    /// Errors: those of the system; without `/proc` it cannot be done.
    pub(super) fn start(mount: Option<(&Path, u32)>, files: &[Named]) -> io::Result<Warden> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        send(&ours, &duties(mount, files), SendFlags::NOSIGNAL)?;
        let child = Command::new("/proc/self/exe")
            .arg0("ringdisk-warden")
            .env_clear()
            .env(MARK, std::process::id().to_string())
            .current_dir("/")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Warden { line: Arc::new(Line(Mutex::new(ours))), child: Mutex::new(child) })
    }

    /// For the export.
    pub(super) fn remover(&self) -> Arc<dyn Remover> {
        Arc::clone(&self.line) as Arc<dyn Remover>
    }

    /// Removes a file that it was told of. Returns whether it is gone.
    pub(super) fn unlink(&self, path: &Path) -> bool {
        let answer = self.line.ask(UNLINK, path.as_os_str().as_bytes());
        answer.is_ok_and(|(answer, _)| answer == DONE)
    }

    /// Waits until it has ended.
    pub(super) fn end(&self) {
        let socket = self.line.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = shutdown(&*socket, Shutdown::Both);
        let _ = self.child.lock().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

/// The first message.
fn duties(mount: Option<(&Path, u32)>, files: &[Named]) -> Vec<u8> {
    let mut fields: Vec<Vec<u8>> = Vec::new();
    let (mountpoint, connection) = mount.unwrap_or((Path::new(""), 0));
    fields.push(mountpoint.as_os_str().as_bytes().to_vec());
    fields.push(connection.to_string().into_bytes());
    for (path, (device, inode)) in files {
        fields.push(path.as_os_str().as_bytes().to_vec());
        fields.push(device.to_string().into_bytes());
        fields.push(inode.to_string().into_bytes());
    }
    fields.join(&0)
}

/// What will have to go.
#[derive(Debug, Default, PartialEq, Eq)]
struct Duties {
    mount: Option<(PathBuf, u32)>,
    files: Vec<Named>,
}

impl Duties {
    /// `None`: not a message of ours.
    fn read(message: &[u8]) -> Option<Duties> {
        let path = |field: &[u8]| PathBuf::from(OsStr::from_bytes(field));
        let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse::<u64>().ok();
        let fields: Vec<&[u8]> = message.split(|byte| *byte == 0).collect();
        let (mount, files) = fields.split_first_chunk::<2>()?;
        let connection = u32::try_from(number(mount[1])?).ok()?;
        let mount = (!mount[0].is_empty()).then(|| (path(mount[0]), connection));
        let files = files
            .chunks(3)
            .map(|file| match file {
                [name, device, inode] => Some((path(name), (number(device)?, number(inode)?))),
                _ => None,
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Duties { mount, files })
    }

    /// Does what a message asks for.
    fn carry_out(&self, message: &[u8]) -> (u8, String) {
        let refused = || (REFUSED, String::from("not a duty of the warden"));
        let Some((what, name)) = message.split_first() else { return refused() };
        let how = match (*what, &self.mount) {
            (NORMAL, Some(_)) => Unmount::Normal,
            (LAZY, Some(_)) => Unmount::Lazy,
            (FORCE, Some(_)) => Unmount::Force,
            (ABORT, Some((_, connection))) => {
                let is_told = mount::abort(*connection);
                return (if is_told { DONE } else { REFUSED }, String::new());
            }
            (UNLINK, _) => {
                let name = Path::new(OsStr::from_bytes(name));
                let file = self.files.iter().find(|(path, _)| path == name);
                return file.map_or_else(refused, |(path, id)| unlink(path, *id));
            }
            _ => return refused(),
        };
        let Some((mountpoint, connection)) = &self.mount else { return refused() };
        match mount::remove(mountpoint, *connection, how) {
            Ok(()) => (DONE, String::new()),
            Err(error) if error.kind() == ErrorKind::Busy => (BUSY, error.to_string()),
            Err(error) => (REFUSED, error.to_string()),
        }
    }
}

/// Removes a file if its name still leads to it.
fn unlink(path: &Path, id: (u64, u64)) -> (u8, String) {
    let now = fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()));
    match now.and_then(|now| if now == id { fs::remove_file(path) } else { Ok(()) }) {
        Ok(()) => (DONE, String::new()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => (DONE, String::new()),
        Err(error) => (REFUSED, error.to_string()),
    }
}

/// Whether this process was started to be one.
pub(crate) fn is_warden() -> bool {
    let parent = std::os::unix::process::parent_id();
    std::env::var(MARK).is_ok_and(|pid| pid.parse() == Ok(parent))
        && fstat(rustix::stdio::stdin())
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
}

/// Is one, until the process that it is for has ended.
pub(crate) fn run() -> u8 {
    let _ = rustix::thread::set_name(c"ringdisk-warden");
    // Away from the terminal's signals; those that a service manager sends to all processes come all the same, and the end of the other
    // one is what counts.
    let _ = rustix::process::setsid();
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1] {
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let socket = rustix::stdio::stdin();
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let mut duties = None;
    loop {
        let len = match receive(socket, &mut message) {
            Ok(0) | Err(_) => return 0,
            Ok(len) => len,
        };
        let Some(duties) = &duties else {
            duties = Duties::read(&message[..len]);
            if duties.is_none() {
                return 1;
            }
            continue;
        };
        let (answer, words) = duties.carry_out(&message[..len]);
        let answer = [&[answer], words.as_bytes()].concat();
        if send(socket, &answer, SendFlags::NOSIGNAL).is_err() {
            return 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duties_arrive_as_they_were_told() {
        let files = vec![(PathBuf::from("/a b"), (1, 2)), (PathBuf::from("/c"), (3, u64::MAX))];
        let mount = Some((PathBuf::from("/mnt"), 77));
        let told = duties(mount.as_ref().map(|(path, number)| (path.as_path(), *number)), &files);
        assert_eq!(Duties::read(&told), Some(Duties { mount, files }));
        assert_eq!(Duties::read(&duties(None, &[])), Some(Duties::default()));
        assert_eq!(Duties::read(b"/mnt"), None);
        assert_eq!(Duties::read(b"/mnt\x001\x00/file"), None);
    }

    #[test]
    fn only_files_that_it_was_told_of_go() {
        let directory = tempfile::tempdir().expect("directory");
        let path = |name: &str| directory.path().join(name);
        for name in ["told", "replaced", "other"] {
            fs::write(path(name), name).expect("write");
        }
        let id = |name: &str| {
            let meta = fs::symlink_metadata(path(name)).expect("there");
            (meta.dev(), meta.ino())
        };
        let files = ["told", "replaced"].map(|name| (path(name), id(name))).to_vec();
        let duties = Duties { mount: None, files };
        fs::rename(path("other"), path("replaced")).expect("rename");
        fs::write(path("other"), "").expect("write");
        for name in ["told", "replaced", "other"] {
            let message = [b"R", path(name).as_os_str().as_bytes()].concat();
            let answer = duties.carry_out(&message).0;
            assert_eq!(answer, if name == "other" { REFUSED } else { DONE }, "{name}");
        }
        let left = ["told", "replaced", "other"].map(|name| path(name).exists());
        assert_eq!(left, [false, true, true]);
        for message in [&b"N"[..], b"L", b"F", b"A", b"", b"X", b"R"] {
            assert_eq!(duties.carry_out(message).0, REFUSED);
        }
    }
}
