//! Landlock: which files may be opened.
//!
//! Promises: the ruleset denies every file that the plan does not name; rights that the kernel does
//! not know are left out. A missing file or directory gets no rule: it could not be opened anyway.
//! A block device, or a directory with block devices, comes with their directories of `/sys`
//! ([`sys_directory`]).

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::fs::{PROC_SUPER_MAGIC, fstatfs, major, minor};
use rustix::io::Errno;

use crate::threads;

/// Loop devices and those of the device mapper.
const VIRTUAL_DEVICES: &str = "/sys/devices/virtual/block";

/// The newest set of rights that is known here: up to ioctls of devices (Linux 6.10) and scopes
/// (6.12).
const KNOWN: ABI = ABI::V6;

/// Repair 2 of landlock: signals between threads of one process are never scoped (Linux 6.15, and
/// 6.12 and 6.14 with later updates). Source: Documentation/userspace-api/landlock.rst, "Landlock
/// errata".
const SIGNALS_BETWEEN_THREADS: i32 = 1 << 1;

/// Rights on a file, or on all files in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Right {
    /// A file: read.
    ReadFile,
    /// A file or device: read, written, made shorter.
    WriteFile,
    /// A directory: listed, and files in it read.
    ReadBelow,
    /// A directory: the same, and files made, written and removed.
    WriteBelow,
}

impl Right {
    fn access(self) -> BitFlags<AccessFs> {
        match self {
            Right::ReadFile => AccessFs::ReadFile | AccessFs::IoctlDev,
            Right::WriteFile => Right::ReadFile.access() | AccessFs::WriteFile | AccessFs::Truncate,
            Right::ReadBelow => AccessFs::ReadFile | AccessFs::ReadDir,
            Right::WriteBelow => {
                Right::ReadBelow.access()
                    | AccessFs::WriteFile
                    | AccessFs::Truncate
                    | AccessFs::MakeReg
                    | AccessFs::RemoveFile
            }
        }
    }
}

/// A ruleset that is not in force yet.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) ruleset: OwnedFd,
    /// Of the kernel.
    pub(crate) abi: i32,
    /// Paths with a rule.
    pub(crate) paths: usize,
    /// Files of `/proc` with a rule ([`Rules::hold`]).
    of_proc: Vec<PathFd>,
}

impl Rules {
    /// Keeps the files of `/proc` that have a rule, for as long as the process lives: a rule is for
    /// an inode, and `/proc` makes another one when a name that is not open was dropped from the
    /// cache, as happens when memory is short.
    pub(crate) fn hold(&self) {
        for file in &self.of_proc {
            match rustix::io::fcntl_dupfd_cloexec(file, 0) {
                Ok(held) => std::mem::forget(held),
                Err(errno) => tracing::warn!("sandbox: a file of /proc is not held: {errno}"),
            }
        }
    }
}

/// Why there is no ruleset.
#[derive(Debug)]
pub(crate) enum NoRules {
    /// The kernel has no landlock, or it was not enabled when it booted.
    Missing(&'static str),
    Failed(RulesetError),
}

impl From<RulesetError> for NoRules {
    fn from(error: RulesetError) -> NoRules {
        NoRules::Failed(error)
    }
}

/// Makes a ruleset. Sockets with abstract names of processes outside cannot be talked to, and no
/// signal goes there.
pub(crate) fn rules(paths: &[(PathBuf, Right)]) -> Result<Rules, NoRules> {
    let abi = match threads::landlock_version() {
        Ok(abi) => abi,
        Err(Errno::OPNOTSUPP) => {
            return Err(NoRules::Missing("landlock is not enabled (boot with lsm=landlock,…)"));
        }
        Err(_) => return Err(NoRules::Missing("the kernel has no landlock, or it is forbidden")),
    };
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        // No rule for any port: no TCP.
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::AbstractUnixSocket)?;
    // Each thread enters by itself. Kernels without that repair treat the threads of one process as
    // unrelated then, and refuse the signal that interrupts a thread.
    if threads::landlock_repairs() & SIGNALS_BETWEEN_THREADS != 0 {
        ruleset = ruleset.scope(Scope::Signal)?;
    }
    let mut created = ruleset.create()?;
    let (mut count, mut of_proc) = (0, Vec::new());
    let devices = paths.iter().flat_map(|(path, right)| sys_directories(path, *right));
    let devices: BTreeSet<PathBuf> = devices.collect();
    let devices: Vec<(PathBuf, Right)> =
        devices.into_iter().map(|path| (path, Right::ReadBelow)).collect();
    for (path, right) in paths.iter().chain(&devices) {
        let held = match PathFd::new(path) {
            Ok(held) => held,
            Err(error) => {
                tracing::debug!("sandbox: no rule for '{}': {error}", path.display());
                continue;
            }
        };
        created = created.add_rule(PathBeneath::new(&held, right.access()))?;
        count += 1;
        if fstatfs(&held).is_ok_and(|its| its.f_type == PROC_SUPER_MAGIC) {
            of_proc.push(held);
        }
    }
    let ruleset: Option<OwnedFd> = created.into();
    let ruleset = ruleset.ok_or(NoRules::Missing("the kernel has no landlock"))?;
    Ok(Rules { ruleset, abi, paths: count, of_proc })
}

/// Directories of `/sys` that must be readable with a path: those of the block devices that it
/// allows to open.
fn sys_directories(path: &Path, right: Right) -> Vec<PathBuf> {
    let Ok(meta) = fs::metadata(path) else { return Vec::new() };
    match right {
        Right::ReadFile | Right::WriteFile if meta.file_type().is_block_device() => {
            sys_directory(meta.rdev()).into_iter().collect()
        }
        Right::ReadBelow | Right::WriteBelow => {
            let entries = fs::read_dir(path).into_iter().flatten().flatten();
            let is_device =
                |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_block_device());
            let devices = entries.filter(is_device).filter_map(|entry| entry.metadata().ok());
            let mut found: Vec<PathBuf> =
                devices.filter_map(|device| sys_directory(device.rdev())).collect();
            if !found.is_empty() {
                // Some are made when they are needed.
                found.push(PathBuf::from(VIRTUAL_DEVICES));
            }
            found
        }
        Right::ReadFile | Right::WriteFile => Vec::new(),
    }
}

/// The directory of `/sys` about a block device: sizes and limits of its queue, and the file of a
/// loop device. For a partition it is that of the whole device, which has the queue.
fn sys_directory(device: u64) -> Option<PathBuf> {
    let link = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    let directory = fs::canonicalize(link).ok()?;
    match directory.join("partition").exists() {
        true => directory.parent().map(Path::to_owned),
        false => Some(directory),
    }
}
