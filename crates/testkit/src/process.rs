//! External commands with a time limit.
//!
//! Promises: no command outlives its limit or its guard; output goes to files, so a full pipe never
//! blocks one. Called by tests on any thread. Panics, with the command and what it printed, when
//! something does not work as the test assumes.

use std::borrow::BorrowMut;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// Enough for every single command of the tests, also on a busy machine with two CPUs.
pub const LIMIT: Duration = Duration::from_secs(60);
/// How often a waiting test looks.
const POLL_INTERVAL: Duration = Duration::from_millis(3);
/// Bytes of an output that are looked at: a program in trouble can print gigabytes.
const KEPT: u64 = 4 << 20;
/// How long a killed process may take to be gone.
const GONE: Duration = Duration::from_secs(3);

/// What a command did.
#[derive(Debug)]
pub struct Finished {
    /// Exit code or signal.
    pub status: ExitStatus,
    /// The last 4 MiB it printed, replaced where it is not UTF-8.
    pub stdout: String,
    /// The same of standard error.
    pub stderr: String,
}

impl Finished {
    /// Exit code; `None` when a signal ended it.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Number of the signal that ended it.
    #[must_use]
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// Both outputs, for messages and searches.
    #[must_use]
    pub fn output(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

/// A running command in its own process group; dropping it kills the group.
#[derive(Debug)]
pub struct Process {
    child: Child,
    what: String,
    stdout: File,
    stderr: File,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` with nothing on standard input; standard output and error go to files
    /// unless `command` set them (`Command` does not tell, so use [`Process::spawn_as_is`] for
    /// that).
    #[must_use]
    pub fn spawn(command: &mut Command) -> Process {
        let (stdout, stderr) = (scratch_file(), scratch_file());
        command.stdout(clone(&stdout)).stderr(clone(&stderr));
        Self::start(command, stdout, stderr)
    }

    /// Starts `command` with the standard output that it was given; standard error goes to a file.
    #[must_use]
    pub fn spawn_as_is(command: &mut Command) -> Process {
        let (stdout, stderr) = (scratch_file(), scratch_file());
        command.stderr(clone(&stderr));
        Self::start(command, stdout, stderr)
    }

    fn start(command: &mut Command, stdout: File, stderr: File) -> Process {
        command.stdin(Stdio::null()).process_group(0);
        let what = format!("{command:?}");
        let child = command.spawn().unwrap_or_else(|error| panic!("{what}: {error}"));
        Process { child, what, stdout, stderr, status: None }
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The end of the process, when it has come.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("wait for a child");
        }
        self.status
    }

    /// Waits up to `limit` for the end.
    pub fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        until(limit, || self.ended())
    }

    /// Waits up to `limit` for the end and panics when it does not come.
    pub fn finish(mut self, limit: Duration) -> Finished {
        let Some(status) = self.wait(limit) else {
            let output = self.output();
            let tail: String =
                output.chars().rev().take(2000).collect::<Vec<_>>().into_iter().rev().collect();
            let threads = whereabouts(self.pid());
            panic!("{} did not end within {limit:?}; it said: {tail}\n{threads}", self.what);
        };
        Finished { status, stdout: content(&self.stdout), stderr: content(&self.stderr) }
    }

    /// Waits until the process has a file open, and a little longer: what it asks of that file is
    /// on its way then. Or has ended.
    pub fn has_begun(&mut self, file: &Path) {
        let begun = until(LIMIT, || {
            if self.ended().is_some() {
                return Some(());
            }
            let descriptors = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).ok()?;
            let mut links = descriptors.flatten().filter_map(|fd| fd.path().read_link().ok());
            links.any(|link| link == file).then_some(())
        });
        assert!(begun.is_some(), "{} has not opened {}", self.what, file.display());
        if self.status.is_none() {
            pause(Duration::from_millis(300));
        }
    }

    /// Waits until the process has ended, or its main thread sleeps in one call of the kernel: the
    /// same at five looks in a row.
    pub fn rests(&mut self) {
        let call = format!("/proc/{}/syscall", self.pid());
        let (mut last, mut looks) = (String::new(), 0);
        let rested = until(LIMIT, || {
            if self.ended().is_some() {
                return Some(());
            }
            let now = std::fs::read_to_string(&call).unwrap_or_default();
            looks = if now == last { looks + 1 } else { 1 };
            last = now;
            (looks >= 5 && last.starts_with(|first: char| first.is_ascii_digit())).then_some(())
        });
        assert!(rested.is_some(), "{} does not come to rest: {last}", self.what);
    }

    /// Sends a signal to the process alone; an ended process is no error. After SIGSTOP it stands
    /// still.
    pub fn signal(&self, signal: Signal) {
        match self.status {
            None if signal == Signal::STOP => stop(self.id()),
            None => {
                let _ = kill_process(self.id(), signal);
            }
            Some(_) => {}
        }
    }

    /// What it has printed so far, output and error.
    #[must_use]
    pub fn output(&self) -> String {
        format!("{}{}", content(&self.stdout), content(&self.stderr))
    }

    fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

/// Where the threads of a process and of its children are in the kernel, a line each: why does it
/// not end?
fn whereabouts(pid: u32) -> String {
    let mut text = String::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let read = |name| std::fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let stack: Vec<_> = read("stack").lines().map(|line| format!(" {}", line.trim())).collect();
        text += &format!("{pid} {}: {}{}\n", read("comm").trim(), read("wchan"), stack.concat());
        for child in read("children").split_whitespace().filter_map(|pid| pid.parse().ok()) {
            text += &whereabouts(child);
        }
    }
    text
}

impl Drop for Process {
    fn drop(&mut self) {
        // The group also when the leader has ended: it may have left children.
        let _ = kill_process_group(self.id(), Signal::KILL);
        // A process in an uninterruptible wait must not block the test run.
        self.wait(GONE);
    }
}

/// Runs `command` to its end.
pub fn run(mut command: impl BorrowMut<Command>) -> Finished {
    Process::spawn(command.borrow_mut()).finish(LIMIT)
}

/// Runs `command`, which must succeed, and returns its standard output.
pub fn ok(mut command: impl BorrowMut<Command>) -> String {
    let command = command.borrow_mut();
    let finished = run(&mut *command);
    assert!(
        finished.status.success(),
        "{command:?}: {}\n{}",
        finished.status,
        finished.output().trim_end()
    );
    finished.stdout
}

/// A command from words: `command(&["qemu-img", "info", path])`.
#[must_use]
pub fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    // Programs of the administrator are not on the path of every caller.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    command
}

/// Runs words, which must succeed.
pub fn ok_words(words: &[&str]) -> String {
    ok(command(words))
}

/// A limit on this machine: `RINGDISK_TEST_SLOWER=N` says that it is N times slower than usual (an
/// emulated one). What waits here does so by itself; only a test that measures time has to ask.
#[must_use]
pub fn patient(limit: Duration) -> Duration {
    let slower = std::env::var("RINGDISK_TEST_SLOWER").ok().and_then(|n| n.parse().ok());
    limit * slower.unwrap_or(1).max(1)
}

/// Gives a client time to begin (longer on a slow machine: [`patient`]).
pub fn pause(time: Duration) {
    std::thread::sleep(patient(time));
}

/// Looks until `found` gives something, at most for `limit` (longer on a slow machine:
/// [`patient`]).
pub fn until<T>(limit: Duration, mut found: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + patient(limit);
    loop {
        if let Some(value) = found() {
            return Some(value);
        }
        if Instant::now() >= end {
            return None;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Stops a process (SIGSTOP), and waits until none of its threads runs. One of them has to take the
/// signal before the others are told to stand still, and on a busy machine they go on for some time
/// until then, with requests of clients, too.
pub fn stop(pid: Pid) {
    let _ = kill_process(pid, Signal::STOP);
    let still = until(LIMIT, || stands_still(pid).then_some(()));
    assert!(still.is_some(), "process {pid:?} does not stop");
}

/// Whether no thread of a process runs, or would when it is woken; so also when it has ended.
fn stands_still(pid: Pid) -> bool {
    /// Threads of the kernel for rings and virtqueues run no code of the process: `PF_IO_WORKER`
    /// and `PF_USER_WORKER` of linux/sched.h.
    const NO_CODE: u32 = 0x10 | 0x4000;
    let goes_on = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // State and, six words later, flags.
        let mut words = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let state = words.next().unwrap_or_default();
        let flags = words.nth(5).and_then(|flags| flags.parse::<u32>().ok()).unwrap_or(0);
        // One that waits for a device (D) cannot be stopped before it has it.
        flags & NO_CODE == 0 && matches!(state, "R" | "S")
    };
    let tasks = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
    !tasks.into_iter().flatten().flatten().any(goes_on)
}

/// Whether a program of this name can be started.
#[must_use]
pub fn has(program: &str) -> bool {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/sbin:/sbin")
        .split(':')
        .any(|directory| std::path::Path::new(directory).join(program).exists())
}

fn scratch_file() -> File {
    tempfile::tempfile().expect("a temporary file")
}

fn clone(file: &File) -> Stdio {
    Stdio::from(file.try_clone().expect("a second descriptor"))
}

/// The last part of a file; the position, which the child shares, is not touched.
fn content(file: &File) -> String {
    let len = file.metadata().map_or(0, |m| m.len());
    let start = len.saturating_sub(KEPT);
    let mut bytes = vec![0; usize::try_from(len - start).unwrap_or(0)];
    let read = file.read_at(&mut bytes, start).unwrap_or(0);
    bytes.truncate(read);
    String::from_utf8_lossy(&bytes).into_owned()
}
