//! What a test may assume of the machine, and what it must not leave behind.
//!
//! Promises: counts descriptors, threads and mounts by reading /proc; guards put global settings
//! back when they are dropped.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

pub use crate::skips::{needs, part_needs};

/// Where FUSE file systems are mounted through.
const DEVICE: &str = "/dev/fuse";

/// Whether all combinations are wanted in place of pairs (`RINGDISK_FULL=1`).
#[must_use]
pub fn full() -> bool {
    is_set("RINGDISK_FULL")
}

/// Whether a quarter of the longest tables and walks is enough (`RINGDISK_QUICK=1`).
#[must_use]
pub fn quick() -> bool {
    is_set("RINGDISK_QUICK")
}

fn is_set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| !value.is_empty() && value != "0")
}

/// Whether this process may mount without help.
#[must_use]
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// True when this is root; else the test is noted as skipped ([`needs`]).
#[must_use]
#[track_caller]
pub fn needs_root() -> bool {
    needs("root for this test", is_root())
}

/// Open descriptors of a process.
#[must_use]
pub fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// Threads of a process.
#[must_use]
pub fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// What a process holds at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holds {
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads, kernel workers of its rings included.
    pub threads: usize,
}

impl Holds {
    /// Counts them.
    #[must_use]
    pub fn of(pid: u32) -> Holds {
        Holds { descriptors: descriptors(pid), threads: threads(pid) }
    }
}

/// Resident memory of a process in bytes.
#[must_use]
pub fn resident_bytes(pid: u32) -> u64 {
    status_number(pid, "VmRSS:") * 1024
}

fn status_number(pid: u32, key: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|l| l.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Time on a CPU, in ns, of the threads of a process that are alive.
#[must_use]
pub fn cpu_ns(pid: u32) -> u64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    tasks
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok())
        .filter_map(|line| line.split_whitespace().next()?.parse::<u64>().ok())
        .sum()
}

/// The signals that ask for a clean stop. Without SIGHUP where it is ignored (nohup): a program
/// that we start ignores it, too.
#[must_use]
pub fn stop_signals() -> Vec<Signal> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let is_ignored = ignored >> (Signal::HUP.as_raw() - 1) & 1 == 1;
    let mut signals = vec![Signal::TERM, Signal::INT];
    if part_needs("SIGHUP that is not ignored (nohup)", !is_ignored) {
        signals.push(Signal::HUP);
    }
    signals
}

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Mountpoint.
    pub path: PathBuf,
    /// File system type, such as `fuse.ringdisk`.
    pub kind: String,
    /// Options of the mount and of its super block, joined by a comma.
    pub options: String,
    /// Minor device number: the name of a FUSE connection in sysfs.
    pub minor: u32,
}

/// The mount table of this process.
#[must_use]
pub fn mounts() -> Vec<MountEntry> {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().filter_map(parse_mount).collect()
}

// Source: proc_pid_mountinfo(5).
fn parse_mount(line: &str) -> Option<MountEntry> {
    let (left, right) = line.split_once(" - ")?;
    let left: Vec<&str> = left.split(' ').collect();
    let right: Vec<&str> = right.split(' ').collect();
    Some(MountEntry {
        path: PathBuf::from(unescape(left.get(4)?)),
        kind: (*right.first()?).to_owned(),
        options: format!("{},{}", left.get(5)?, right.get(2)?),
        minor: left.get(2)?.split_once(':')?.1.parse().ok()?,
    })
}

/// Octal escapes of the mount table: blank, tab, newline, backslash.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// The mount at exactly this path, the topmost one.
#[must_use]
pub fn mount_at(path: &Path) -> Option<MountEntry> {
    // Not canonicalize: that asks the file system, which may be the one that hangs.
    let parent = path.parent()?.canonicalize().ok()?;
    let wanted = parent.join(path.file_name()?);
    mounts().into_iter().rev().find(|mount| mount.path == wanted)
}

/// Keeps tests that touch settings of the whole machine apart, also those of other test programs.
#[derive(Debug)]
pub struct Alone {
    _file: File,
}

/// Waits until no other test holds the machine.
#[must_use]
pub fn alone() -> Alone {
    lock(FlockOperation::LockExclusive)
}

/// Held by tests that only need that nobody changes settings of the machine meanwhile.
#[must_use]
pub fn together() -> Alone {
    lock(FlockOperation::LockShared)
}

fn lock(operation: FlockOperation) -> Alone {
    let path = std::env::temp_dir().join("ringdisk-tests.lock");
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    flock(&file, operation).expect("flock");
    Alone { _file: file }
}

/// `/dev/fuse` open to every user, as udev has it on every distribution; put back when dropped. No
/// other test changes or relies on it meanwhile.
#[derive(Debug)]
pub struct OpenDevice {
    before: Permissions,
    _alone: Alone,
}

impl OpenDevice {
    /// Waits for its turn and opens the device.
    #[must_use]
    pub fn open() -> OpenDevice {
        let _alone = alone();
        let before = std::fs::metadata(DEVICE).expect(DEVICE).permissions();
        let _ = std::fs::set_permissions(DEVICE, Permissions::from_mode(0o666));
        OpenDevice { before, _alone }
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let _ = std::fs::set_permissions(DEVICE, self.before.clone());
    }
}

/// A kernel setting that is put back when this is dropped.
#[derive(Debug)]
pub struct Sysctl {
    path: PathBuf,
    before: String,
}

impl Sysctl {
    /// Sets `kernel/io_uring_disabled` and the like, or a path in sysfs; `None` when the kernel has
    /// no such setting or it may not be written: the test is noted as skipped then.
    #[must_use]
    #[track_caller]
    pub fn set(name: &str, value: &str) -> Option<Sysctl> {
        let path = Path::new("/proc/sys").join(name);
        let before = std::fs::read_to_string(&path).ok();
        let before = before.filter(|_| std::fs::write(&path, value).is_ok());
        if !needs(&format!("leave to set {name}"), before.is_some()) {
            return None;
        }
        let before = before?;
        // Of a choice, sysfs shows all words and the one that holds in brackets.
        let chosen = before.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        let before = chosen.map_or(before.trim(), |(word, _)| word).to_owned();
        Some(Sysctl { path, before })
    }
}

impl Drop for Sysctl {
    fn drop(&mut self) {
        let _ = std::fs::write(&self.path, &self.before);
    }
}

/// The kernel's module parameter for FUSE over io_uring.
const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";

/// Sets whether new mounts may use FUSE over io_uring, and puts it back when dropped. Tests of all
/// processes take turns.
#[derive(Debug)]
pub struct UringParameter {
    before: String,
    // Dropped last: the turn of the next.
    _turn: File,
}

impl UringParameter {
    /// `None` where the kernel does not have the parameter or we may not set it: the test is noted
    /// as skipped then.
    #[must_use]
    #[track_caller]
    pub fn set(enabled: bool) -> Option<UringParameter> {
        let path = std::env::temp_dir().join("ringdisk-test-enable-uring.lock");
        let turn = File::create(&path);
        let turn = turn.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        flock(&turn, FlockOperation::LockExclusive).expect("flock");
        let before = std::fs::read_to_string(ENABLE_URING).ok();
        if !needs("FUSE over io_uring", before.is_some()) {
            return None;
        }
        let set = std::fs::write(ENABLE_URING, if enabled { "Y" } else { "N" });
        if !needs("right to switch FUSE over io_uring", set.is_ok()) {
            return None;
        }
        Some(UringParameter { before: before.unwrap_or_default(), _turn: turn })
    }
}

impl Drop for UringParameter {
    fn drop(&mut self) {
        let _ = std::fs::write(ENABLE_URING, self.before.trim());
    }
}
