//! Real mounts for tests: the program itself, loop devices, small file systems.
//!
//! Promises: whatever happens in the test, dropping a guard ends its process and removes its mount.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::connection;
use crate::limits::mount_at;
use crate::process::{Finished, Process, command, ok_words, patient, run, until};

/// How long a mount may take to answer on a busy machine.
const READY: Duration = Duration::from_secs(60);
/// How long a mount may be there without a word that it is ready: a pipe or a shell may have
/// swallowed the word.
const QUIET: Duration = Duration::from_secs(2);
/// How long a mount may take to go after SIGTERM. Nothing is as slow as that: it is the limit of a
/// test that hangs.
pub const STOP: Duration = Duration::from_secs(20);

/// A second signal that comes sooner than that counts as the first one.
pub const ECHO: Duration = Duration::from_millis(350);

/// A directory for images and mountpoints on a real file system, removed with all that is in it.
#[must_use]
pub fn scratch() -> TempDir {
    // Not under the system's temporary directory where that is memory: O_DIRECT and holes should be
    // real ones.
    let place = std::env::var_os("RINGDISK_TEST_DIR").unwrap_or_else(|| "/var/tmp".into());
    tempfile::Builder::new()
        .prefix("ringdisk-test-")
        .tempdir_in(place)
        .expect("a scratch directory")
}

/// Hears that a server is ready, as a service manager does: sd_notify(3) with an abstract socket,
/// which every user reaches.
#[derive(Debug)]
struct Ready {
    socket: UnixDatagram,
    name: String,
}

impl Ready {
    fn new() -> Ready {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringdisk-test-{}-{number}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a short name");
        let socket = UnixDatagram::bind_addr(&address).expect("a socket of its own");
        socket.set_nonblocking(true).expect("a setting of a socket");
        Ready { socket, name: format!("@{name}") }
    }

    fn heard(&self) -> bool {
        let mut text = [0; 512];
        self.socket.recv(&mut text).is_ok_and(|len| text[..len].starts_with(b"READY=1"))
    }
}

/// The program serving one image at one mountpoint.
#[derive(Debug)]
pub struct Mounted {
    process: Option<Process>,
    path: PathBuf,
    // Last: removed after the mount is gone.
    _directory: Option<TempDir>,
}

impl Mounted {
    /// `BINARY mount ARGS… MOUNTPOINT` on a new empty file; panics when it does not come up.
    #[must_use]
    pub fn start<S: AsRef<OsStr>>(binary: &str, args: &[S]) -> Mounted {
        let directory = scratch();
        let path = directory.path().join("disk");
        let mut mounted = Self::start_at(binary, args, &path);
        mounted._directory = Some(directory);
        mounted
    }

    /// The same at a path of the caller.
    #[must_use]
    pub fn start_at<S: AsRef<OsStr>>(binary: &str, args: &[S], path: &Path) -> Mounted {
        let mut command = Command::new(binary);
        command.arg("mount");
        // The whole suite runs on each transport that the kernel has.
        if let Ok(transport) = std::env::var("RINGDISK_TEST_TRANSPORT")
            && !args.iter().any(|arg| arg.as_ref() == "--transport")
        {
            command.args(["--transport", &transport]);
        }
        if let Ok(when) = std::env::var("RINGDISK_TEST_ZERO_COPY")
            && !args
                .iter()
                .any(|arg| ["--zero-copy", "--transport"].map(OsStr::new).contains(&arg.as_ref()))
        {
            command.args(["--zero-copy", &when]);
        }
        command.args(args).arg(path);
        Self::from_command(&mut command, path)
    }

    /// Starts any command that serves `path` in the foreground, and waits until it answers.
    #[must_use]
    pub fn from_command(command: &mut Command, path: &Path) -> Mounted {
        match Self::try_from_command(command, path) {
            Ok(mounted) => mounted,
            Err(finished) => panic!("{command:?}: {finished:?}"),
        }
    }

    /// The same; an `Err` when the command ends before anything is mounted.
    pub fn try_from_command(command: &mut Command, path: &Path) -> Result<Mounted, Finished> {
        // A dead mount on it is for the program to deal with.
        if mount_at(path).is_none() && !path.exists() {
            std::fs::write(path, "").expect("an empty file to mount on");
        }
        // Where a dead mount is replaced only the word tells the two apart: numbers of mounts are
        // used again.
        let is_replaced = mount_at(path).is_some();
        let ready = Ready::new();
        command.env("NOTIFY_SOCKET", &ready.name);
        let process = Process::spawn(command);
        let mut mounted =
            Mounted { process: Some(process), path: path.to_owned(), _directory: None };
        let mut seen = None;
        let ended = until(READY, || {
            if mounted.process().ended().is_some() {
                return Some(true);
            }
            mount_at(path)?;
            let since = *seen.get_or_insert_with(Instant::now);
            let is_quiet = !is_replaced && since.elapsed() > patient(QUIET);
            (ready.heard() || is_quiet).then_some(false)
        });
        match ended {
            Some(false) => Ok(mounted),
            Some(true) => Err(mounted.take().finish(READY)),
            None => panic!("{command:?}: no mount within {READY:?}: {}", mounted.output()),
        }
    }

    /// The served file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The served file as text.
    #[must_use]
    pub fn text(&self) -> &str {
        self.path.to_str().expect("a path of this test")
    }

    /// The serving process.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("not stopped yet")
    }

    /// Its id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("not stopped yet").pid()
    }

    /// What it printed so far.
    #[must_use]
    pub fn output(&self) -> String {
        self.process.as_ref().map(Process::output).unwrap_or_default()
    }

    /// Sends SIGTERM and expects the process and the mount to be gone within [`STOP`].
    pub fn stop(self) -> Finished {
        self.stop_by(Signal::TERM)
    }

    /// The same with another signal.
    pub fn stop_by(mut self, signal: Signal) -> Finished {
        self.process().signal(signal);
        self.finish()
    }

    /// Sends SIGTERM, and once more when the mount has lost its name: expects that its users are
    /// cut off, and all that [`Mounted::stop`] expects.
    pub fn force_stop(mut self) -> Finished {
        self.process().signal(Signal::TERM);
        let path = self.path.clone();
        let gone = until(STOP, || mount_at(&path).is_none().then_some(()));
        assert_eq!(gone, Some(()), "still there; it said: {}", self.output());
        // Sooner it would be the same signal.
        std::thread::sleep(ECHO);
        self.process().signal(Signal::TERM);
        self.finish()
    }

    /// Expects the process to end by itself, and the mount to be gone, within [`STOP`].
    pub fn finish(mut self) -> Finished {
        let finished = self.take().finish(STOP);
        assert_eq!(mount_at(&self.path), None, "left behind; it said: {}", finished.output());
        finished
    }

    fn take(&mut self) -> Process {
        self.process.take().expect("not stopped yet")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.signal(Signal::TERM);
            if process.wait(ECHO).is_none() {
                // A test that fails may have it open still.
                process.signal(Signal::TERM);
            }
            if process.wait(STOP).is_none() {
                abort(&self.path);
            }
        }
        unmount(&self.path);
    }
}

/// Ends a FUSE connection by force, so that nobody waits for it any longer.
pub fn abort(path: &Path) {
    if let Some(mount) = mount_at(path) {
        let _ = connection::abort(mount.minor);
    }
}

/// Waits until so many requests of clients of the mount at `path` are there.
pub fn wait_for_requests(path: &Path, count: u32) {
    let number = mount_at(path).expect("a mount").minor;
    let seen = until(READY, || connection::waiting(number).is_ok_and(|n| n >= count).then_some(()));
    assert_eq!(seen, Some(()), "no {count} requests for {}", path.display());
}

/// Removes what is mounted at `path`, lazily; nothing mounted is no error.
pub fn unmount(path: &Path) {
    for _ in 0..10 {
        if mount_at(path).is_none() {
            return;
        }
        let _ = run(command(&["umount", "-l"]).arg(path));
    }
}

/// Removes whatever is mounted at a path when it is dropped: for mounts whose process is not a
/// child of the test.
#[derive(Debug)]
pub struct Cleared(pub PathBuf);

impl Drop for Cleared {
    fn drop(&mut self) {
        abort(&self.0);
        unmount(&self.0);
    }
}

/// A file system that is mounted for a test.
#[derive(Debug)]
pub struct FileSystem {
    path: PathBuf,
}

impl FileSystem {
    /// A file system in memory of `bytes` at `path` (made when missing).
    #[must_use]
    pub fn tmpfs(path: &Path, bytes: u64) -> FileSystem {
        std::fs::create_dir_all(path).expect("a directory");
        let options = format!("size={bytes},mode=0777");
        ok_words(&["mount", "-t", "tmpfs", "-o", &options, "tmpfs", text(path)]);
        FileSystem { path: path.to_owned() }
    }

    /// A file system in memory that cannot make holes in files, at `path` (made when missing).
    #[must_use]
    pub fn ramfs(path: &Path) -> FileSystem {
        std::fs::create_dir_all(path).expect("a directory");
        ok_words(&["mount", "-t", "ramfs", "-o", "mode=0777", "ramfs", text(path)]);
        FileSystem { path: path.to_owned() }
    }

    /// Mounts the file system in `device` (a block device or, with `-o loop`, a file) at `path`.
    #[must_use]
    pub fn of(device: &Path, path: &Path, options: &str) -> FileSystem {
        std::fs::create_dir_all(path).expect("a directory");
        ok_words(&["mount", "-o", options, text(device), text(path)]);
        FileSystem { path: path.to_owned() }
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts it properly, so that everything is written.
    pub fn unmount(self) {
        ok_words(&["umount", text(&self.path)]);
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        unmount(&self.path);
    }
}

/// A loop device.
#[derive(Debug)]
pub struct Loop {
    device: PathBuf,
}

impl Loop {
    /// Attaches a file; `None` where the machine has no loop devices, or for others than root: the
    /// test is noted as skipped then.
    #[must_use]
    #[track_caller]
    pub fn attach(file: &Path, options: &[&str]) -> Option<Loop> {
        if !crate::limits::needs("loop devices", Path::new("/dev/loop-control").exists())
            || !crate::limits::needs_root()
        {
            return None;
        }
        let out = ok(command(&["losetup", "--find", "--show"]).args(options).arg(file));
        Some(Loop { device: PathBuf::from(out.trim()) })
    }

    /// Such as `/dev/loop0`.
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = run(command(&["losetup", "--detach"]).arg(&self.device));
    }
}

/// A copy of a program that every user may start (a build directory may be closed to others), in a
/// directory that belongs to `uid`.
#[must_use]
pub fn for_user(binary: &str, uid: u32) -> (TempDir, PathBuf) {
    let directory = scratch();
    let path = directory.path().join("ringdisk");
    copy_program(binary, &path);
    let open = |p: &Path| std::fs::set_permissions(p, std::fs::Permissions::from_mode(0o755));
    open(&path).and_then(|()| open(directory.path())).expect("permissions");
    std::os::unix::fs::chown(directory.path(), Some(uid), Some(uid)).expect("chown");
    (directory, path)
}

/// Copies a program that is to be started. By another process: while we write, the children that
/// other threads of this one start have the descriptor too, until their exec, and a program that
/// a process may write to cannot be started (ETXTBSY).
pub fn copy_program(binary: &str, to: &Path) {
    ok_words(&["cp", binary, text(to)]);
}

fn ok(command: &mut Command) -> String {
    crate::process::ok(command)
}

/// A path as text; the tests make only such paths.
#[must_use]
pub fn text(path: &Path) -> &str {
    path.to_str().expect("a path of this test")
}
