//! A mount with the process that keeps it and the one that serves it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_testkit::mount::{Mounted, text};
use ringdisk_testkit::process::{self, Finished, Process, command, run, until};
use rustix::process::{Pid, Signal, kill_process};

pub(crate) use crate::common::tools::child_of;
use crate::common::{mount, program};

/// A new process is allowed 5 times in 10 s.
pub(crate) const PAUSE: Duration = Duration::from_millis(2100);

/// How long the next process may take: the one before it ends only when what it has given to the
/// storage has ended.
const RESTART: Duration = Duration::from_secs(30);

/// A kept mount.
pub(crate) struct Kept(pub(crate) Mounted);

impl Kept {
    /// `ringdisk mount --keep-mount ARGS… MOUNTPOINT` on a new file.
    pub(crate) fn start(args: &[&str]) -> Kept {
        Kept(mount(&[&["--keep-mount", "--transport", "dev"], args].concat()))
    }

    /// The same at a path.
    pub(crate) fn start_at(args: &[&str], path: &Path) -> Kept {
        let words = [&["--keep-mount", "--transport", "dev"], args].concat();
        Kept(Mounted::start_at(&program(), &words, path))
    }

    /// A raw image.
    pub(crate) fn raw(image: &Path, args: &[&str]) -> Kept {
        Kept::start(&[args, &["--format", "raw", text(image)]].concat())
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().to_owned()
    }

    /// The process that serves, if one does.
    pub(crate) fn server(&self) -> Option<u32> {
        child_of(self.0.pid())
    }

    /// Kills the serving process and waits for the next one. Returns its pid.
    pub(crate) fn kill_server(&self) -> u32 {
        let old = until(RESTART, || self.server()).expect("somebody serves");
        kill(old, Signal::KILL);
        let next = until(RESTART, || self.server().filter(|pid| *pid != old));
        next.unwrap_or_else(|| panic!("nobody serves: {}", self.0.output()))
    }

    /// Whether the next process answers commands, which comes a moment after it serves.
    pub(crate) fn is_ready(&self) -> bool {
        run(command(&[&program(), "ctl", text(self.0.path()), "stats"])).code() == Some(0)
    }

    /// A clean end.
    pub(crate) fn stop(self) -> Finished {
        let finished = self.0.stop();
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        finished
    }
}

/// Sends a signal; a process that is gone is no error.
pub(crate) fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        match signal {
            Signal::STOP => process::stop(pid),
            signal => drop(kill_process(pid, signal)),
        }
    }
}

/// Ends a mount by force: a client that waits for it gets an error.
pub(crate) fn abandon(path: &Path) {
    let _ = run(command(&[&program(), "umount", "--force", text(path)]));
}

/// Whether a process is there.
pub(crate) fn lives(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}/task")).exists()
}

/// A client that reads one block past the page cache and waits for it.
pub(crate) fn reader(path: &Path) -> Process {
    let input = format!("if={}", text(path));
    let words = ["dd", &input, "of=/dev/null", "bs=4k", "count=1", "iflag=direct"];
    Process::spawn(&mut command(&words))
}
