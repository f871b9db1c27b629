//! `ringdisk serve` as a process, and what is asked of it.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ringdisk_testkit::images;
use ringdisk_testkit::model::{Discards, FrontEnd, Load, LoadOptions, Vm, VmOptions, bits};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{Finished, LIMIT, Process, until};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::tools::{Ran, ringdisk};
use super::{MIB, program};

/// Bytes of the disks that a load runs on.
pub(crate) const SIZE: u64 = 8 * MIB;

/// `ringdisk serve WORDS…`, told by nobody where to listen.
pub(crate) fn serve_command(words: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.arg("serve").args(words).env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
    command
}

/// A process that serves disks; dropping it kills it.
pub(crate) struct Daemon {
    pub(crate) process: Process,
}

impl Daemon {
    /// Starts a command, and waits until it says that it serves.
    pub(crate) fn of(command: &mut Command) -> Daemon {
        Daemon { process: Process::spawn(command) }.ready()
    }

    /// `ringdisk serve WORDS…` with a socket as descriptor 3.
    ///
    /// * `set`: what a shell puts into the environment.
    pub(crate) fn with(socket: impl AsFd, set: &str, words: &[&str]) -> Daemon {
        // Where no other descriptor is, and open for the child only as long as this.
        let copy = fcntl_dupfd_cloexec(socket, 500).expect("a descriptor");
        fcntl_setfd(&copy, FdFlags::empty()).expect("a descriptor to be inherited");
        let number = copy.as_raw_fd();
        let mut command = Command::new("bash");
        command
            .arg("-c")
            .arg(format!("exec 3<&{number} {number}<&- && exec env {set} \"$0\" serve \"$@\""))
            .arg(program())
            .args(words)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("LISTEN_FDS");
        let process = Process::spawn(&mut command);
        drop(copy);
        Daemon { process }.ready()
    }

    /// `ringdisk serve WORDS… --vhost-user-blk SOCKET`.
    pub(crate) fn start(socket: &Path, words: &[&str]) -> Daemon {
        let socket = ["--vhost-user-blk", text(socket)];
        Daemon::of(&mut serve_command(&[words, &socket].concat()))
    }

    /// Waits until it says that it serves.
    pub(crate) fn ready(mut self) -> Daemon {
        let ready = until(LIMIT, || {
            let output = self.process.output();
            // A warning may say so of a disk whose sockets are still being made.
            let mut lines = output.lines().filter(|line| !line.contains("warning:"));
            let words = ["served at", "is served", "disks are served"];
            let ready = lines.any(|line| words.iter().any(|words| line.contains(words)));
            (ready || self.process.ended().is_some()).then_some(ready)
        });
        assert_eq!(ready, Some(true), "it does not serve: {}", self.process.output());
        self
    }

    /// Waits for its end, which is one of its own.
    pub(crate) fn ends(self, code: i32) -> Finished {
        let finished = self.process.finish(LIMIT);
        let output = finished.output();
        assert_eq!(finished.code(), Some(code), "{output}");
        assert!(!output.contains("panicked"), "{output}");
        finished
    }

    /// Stops it by a signal; the sockets are gone then.
    pub(crate) fn stop(self, sockets: &[&Path]) -> Finished {
        self.process.signal(Signal::TERM);
        let finished = self.ends(0);
        for socket in sockets {
            assert!(!socket.exists(), "{} is still there", socket.display());
        }
        finished
    }

    /// Kills it.
    pub(crate) fn kill(mut self) {
        self.process.signal(Signal::KILL);
        self.process.wait(LIMIT).expect("it was killed");
    }
}

/// `ringdisk ctl SOCKET WORDS…`.
pub(crate) fn ctl(socket: &Path, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", text(socket)], words].concat())
}

/// The counters of a disk.
pub(crate) fn stats(socket: &Path) -> Value {
    ctl(socket, &["stats", "--json"]).ok().json()
}

/// A directory with an image of [`SIZE`] bytes that is all zeroes, and a name for a socket.
pub(crate) struct Place {
    pub(crate) image: PathBuf,
    pub(crate) format: &'static str,
    pub(crate) socket: PathBuf,
    pub(crate) directory: TempDir,
}

impl Place {
    pub(crate) fn new(format: &'static str) -> Place {
        let directory = scratch();
        let image = directory.path().join("disk");
        match format {
            "raw" => images::sparse(&image, SIZE),
            _ => images::qcow2(&image, "8M", "cluster_size=4k"),
        }
        Place { image, format, socket: directory.path().join("socket"), directory }
    }

    /// The same with a raw image that is there already: a block device, or a file anywhere.
    pub(crate) fn on(image: &Path) -> Place {
        let directory = scratch();
        let socket = directory.path().join("socket");
        Place { image: image.to_owned(), format: "raw", socket, directory }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Words that name the image.
    pub(crate) fn words(&self) -> Vec<&str> {
        self.words_with("2")
    }

    /// The same with another number of virtqueues.
    pub(crate) fn words_with<'a>(&'a self, queues: &'a str) -> Vec<&'a str> {
        vec!["--format", self.format, "--queues", queues, "--threads", "2", text(&self.image)]
    }

    pub(crate) fn start(&self, words: &[&str]) -> Daemon {
        Daemon::start(&self.socket, &[&self.words(), words].concat())
    }

    pub(crate) fn vm(&self, packed: bool) -> Vm {
        Vm::started(FrontEnd::connect(&self.socket), options(packed))
    }

    /// The image holds what was written.
    pub(crate) fn judge(&self, load: &mut Load) {
        judge(&self.image, self.format, load);
    }
}

/// An image that nobody serves any more holds what was written.
pub(crate) fn judge(image: &Path, format: &str, load: &mut Load) {
    let content = match format {
        "raw" => image.to_owned(),
        _ => {
            images::assert_clean(image);
            images::reference(image, format)
        }
    };
    // A block device may be much larger.
    load.judge(&images::piece(&content, 0, usize::try_from(SIZE).expect("small")));
}

/// A machine with two virtqueues.
pub(crate) fn options(packed: bool) -> VmOptions {
    VmOptions {
        features: !bits::LOG_ALL & if packed { u64::MAX } else { !bits::PACKED },
        queues: 2,
        size: 64,
        indirect: 16,
        regions: 2,
        ..VmOptions::default()
    }
}

/// A load on a disk of [`SIZE`] zeroes.
pub(crate) fn load(seed: u64) -> Load {
    load_of(seed, Discards::Zero)
}

/// The same where discards leave something else.
pub(crate) fn load_of(seed: u64, discards: Discards) -> Load {
    let (block, bytes_max) = (4096, 64 << 10);
    Load::new(LoadOptions { size: SIZE, block, bytes_max, segments: 8, depth: 8, discards, seed })
}

/// Keeps a machine busy while something happens. Gives what that gives.
pub(crate) fn meanwhile<T: Send>(
    vm: &mut Vm,
    load: &mut Load,
    what: impl FnOnce() -> T + Send,
) -> T {
    let result = std::thread::scope(|scope| {
        let doing = scope.spawn(what);
        // Also when it was quick.
        load.run(vm, 200);
        while !doing.is_finished() {
            load.run(vm, 50);
        }
        doing.join()
    });
    load.drain(vm);
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Tries to lock a file again and again while something happens: it must be locked at every moment.
/// Gives what that gives, and how often the lock was tried.
pub(crate) fn locked_while<T>(image: &Path, what: impl FnOnce() -> T) -> (T, u64) {
    let is_done = AtomicBool::new(false);
    let tries = AtomicU64::new(0);
    let file = File::options().read(true).write(true).open(image).expect("the image");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                // One of this process on the whole file; those of the other side are on its
                // descriptors.
                let got = fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive);
                assert!(got.is_err(), "the image was free");
                tries.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        });
        let done = Done(&is_done);
        let result = what();
        drop(done);
        (result, tries.load(Ordering::Relaxed))
    })
}

/// Ends a thread also when the test fails.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Where the process that serves a disk waits for its successor.
pub(crate) fn successor_of(socket: &Path) -> PathBuf {
    let name = socket.canonicalize().expect("the socket");
    let hash = name
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(*byte)).wrapping_mul((1 << 88) + 0x13b)
        });
    let runtime = std::env::var("XDG_RUNTIME_DIR").unwrap_or_default();
    let user = rustix::process::geteuid().as_raw();
    let places = [format!("{runtime}/ringdisk"), format!("/run/user/{user}/ringdisk")];
    let places =
        places.into_iter().chain([String::from("/run/ringdisk"), format!("/tmp/ringdisk-{user}")]);
    let mut paths =
        places.map(|place| Path::new(&place).join(format!("upgrade-disk-{hash:032x}.sock")));
    paths.find(|path| path.exists()).expect("a socket for the successor")
}
