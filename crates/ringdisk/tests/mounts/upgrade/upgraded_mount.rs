//! A mount whose process changes.

use std::path::{Path, PathBuf};
use std::process::Command;

use ringdisk_testkit::limits::mount_at;
use ringdisk_testkit::mount::{Cleared, scratch, text};
use ringdisk_testkit::process::{Finished, LIMIT, Process, command, run, until};
use tempfile::TempDir;

use crate::common::program;

/// What a successor says first, with no words of its own.
pub(crate) const ASK: &[u8] = b"A\x02\0\0\0{}";

/// A mount, the process that serves it, and the words that it was started with.
pub(crate) struct Taken {
    pub(crate) process: Process,
    words: Vec<String>,
    path: PathBuf,
    _cleared: Cleared,
    pub(crate) directory: TempDir,
}

impl Taken {
    /// `ringdisk mount --transport dev WORDS… MOUNTPOINT`.
    pub(crate) fn start(words: &[&str]) -> Taken {
        Taken::start_over(&[&["--transport", "dev"], words].concat())
    }

    /// The same over any transport.
    pub(crate) fn start_over(words: &[&str]) -> Taken {
        let directory = scratch();
        let path = directory.path().join("disk");
        let words: Vec<_> = words.iter().map(|&word| word.to_owned()).collect();
        let process = ready(Process::spawn(&mut mount(&words, &[], &path)));
        let cleared = Cleared(path.clone());
        Taken { process, words, path, _cleared: cleared, directory }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The command of a successor.
    pub(crate) fn successor(&self, more: &[&str]) -> Command {
        mount(&self.words, &[&["--upgrade"], more].concat(), &self.path)
    }

    /// The next process takes the mount over; the one before ends without a complaint.
    pub(crate) fn upgrade(&mut self, more: &[&str]) {
        self.upgrade_and_warn(more);
        let said = self.process.output();
        assert!(!said.contains("warning") && !said.contains("WARN"), "{said}");
    }

    /// The same, where the next process may have something to complain of.
    pub(crate) fn upgrade_and_warn(&mut self, more: &[&str]) {
        let before = mount_at(&self.path).expect("a mount").minor;
        let new = ready(Process::spawn(&mut self.successor(more)));
        let old = std::mem::replace(&mut self.process, new).finish(LIMIT);
        assert_eq!(old.code(), Some(0), "{}", old.output());
        assert!(old.stderr.contains("handed over to another process"), "{}", old.output());
        assert_eq!(mount_at(&self.path).expect("a mount").minor, before, "another mount");
        // `ringdisk ctl` talks to the new one.
        self.ctl(&["stats"]);
    }

    /// `ringdisk ctl MOUNTPOINT WORDS…`, as soon as the process answers.
    pub(crate) fn ctl(&self, words: &[&str]) -> Finished {
        let program = program();
        let words = [&[program.as_str(), "ctl", text(&self.path)], words].concat();
        let done = until(LIMIT, || Some(run(command(&words))).filter(|it| it.code() == Some(0)));
        done.unwrap_or_else(|| panic!("{words:?}: {}", run(command(&words)).output()))
    }

    /// A successor that must fail, and say this; the mount goes on.
    pub(crate) fn refuses(&self, mut successor: Command, code: i32, texts: &[&str]) {
        let finished = run(&mut successor);
        assert_eq!(finished.code(), Some(code), "{}", finished.output());
        for wanted in texts {
            assert!(finished.stderr.contains(wanted), "nothing of {wanted}: {}", finished.output());
        }
        assert!(mount_at(&self.path).is_some());
        let output = self.process.output();
        assert!(!output.contains("panicked") && !output.contains("handed over to"), "{output}");
    }

    /// Where the process waits for its successor.
    pub(crate) fn socket(&self) -> PathBuf {
        let number = mount_at(&self.path).expect("a mount").minor;
        let name = format!("upgrade-mount-0-{number}.sock");
        let uid = rustix::process::getuid().as_raw();
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let directories = [
            runtime.map(|it| it.join("ringdisk")),
            Some(PathBuf::from(format!("/run/user/{uid}/ringdisk"))),
            Some(PathBuf::from("/run/ringdisk")),
            Some(PathBuf::from(format!("/tmp/ringdisk-{uid}"))),
        ];
        let found = || directories.iter().flatten().map(|it| it.join(&name)).find(|it| it.exists());
        until(LIMIT, found).expect("a socket")
    }

    /// A clean end, of which nothing stays.
    pub(crate) fn stop(self) -> TempDir {
        self.process.signal(rustix::process::Signal::TERM);
        let finished = self.process.finish(LIMIT);
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        assert!(mount_at(&self.path).is_none(), "{}", finished.output());
        assert!(!self.path.exists(), "the mountpoint was made for it: {}", finished.output());
        self.directory
    }
}

/// `ringdisk mount WORDS… MORE… MOUNTPOINT`.
fn mount(words: &[String], more: &[&str], path: &Path) -> Command {
    let mut command = command(&[&program(), "mount"]);
    command.args(words).args(more).arg(path).env_remove("NOTIFY_SOCKET");
    command
}

/// Waits until the process says that the mount answers.
pub(crate) fn ready(mut process: Process) -> Process {
    let is_ready = until(LIMIT, || {
        if process.output().contains("is served as") {
            return Some(true);
        }
        process.ended().map(|_| false)
    });
    assert_eq!(is_ready, Some(true), "{}", process.output());
    process
}
