//! Which files may be opened: landlock.
//!
//! Promises: a ruleset that denies everything but what it was told; rights that the kernel does not know are left out. A file or
//! directory that is not there gets no rule: it could not be opened anyway.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::io::Errno;

use crate::threads;

/// The newest set of rights that is known here: up to ioctls of devices (Linux 6.10) and scopes (6.12).
const KNOWN: ABI = ABI::V6;

/// Repair 2 of landlock: signals between threads of one process are never scoped (Linux 6.15, and 6.12 and 6.14 with later updates).
/// Source: Documentation/userspace-api/landlock.rst, "Landlock errata".
const SIGNALS_BETWEEN_THREADS: i32 = 1 << 1;

/// What may be done with a file, or with everything in a directory.
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

/// Makes a ruleset. Sockets with abstract names of processes outside cannot be talked to, and no signal goes there.
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
    // Each thread enters by itself. Kernels without that repair take the threads of one process for strangers then, and refuse the signal
    // that interrupts a thread.
    if threads::landlock_repairs() & SIGNALS_BETWEEN_THREADS != 0 {
        ruleset = ruleset.scope(Scope::Signal)?;
    }
    let mut created = ruleset.create()?;
    let mut count = 0;
    for (path, right) in paths {
        let held = match PathFd::new(path) {
            Ok(held) => held,
            Err(error) => {
                tracing::debug!("sandbox: no rule for '{}': {error}", path.display());
                continue;
            }
        };
        created = created.add_rule(PathBeneath::new(held, right.access()))?;
        count += 1;
    }
    let ruleset: Option<OwnedFd> = created.into();
    let ruleset = ruleset.ok_or(NoRules::Missing("the kernel has no landlock"))?;
    Ok(Rules { ruleset, abi, paths: count })
}
