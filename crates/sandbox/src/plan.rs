//! The plan of a sandbox: what stays allowed; and entering it.
//!
//! Promises: [`Plan::enter`] confines every thread permanently, or says which part is missing.

use std::fmt;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::fs::Mode;
use rustix::process::umask;
use rustix::thread::CapabilitySet;

use crate::calls::{self, Calls, Filters};
use crate::capabilities::{self, Keep};
use crate::failure::Failure;
use crate::files::{self, NoRules, Right, Rules};
use crate::threads::{self, Confinement};
use crate::user::User;

/// Rights that no file gets that is created inside: no one may run it, and group and others may not
/// write it.
const NOT_FOR_RUNNING: Mode = Mode::from_raw_mode(0o133);

/// Files that every serving process of this program opens. Nothing else of `/proc` and `/sys` is
/// allowed: neither other processes nor the rest of the machine. (The directories of `/sys` about a
/// block device come with the rule of the device: [`crate::files`].)
const OWN: [(&str, Right); 7] = [
    // The state of this process: threads, their CPUs and times (`ctl stats`, `ctl topology`), locks
    // of its files, its mounts, the code of a backtrace. The directory also holds the tables of its
    // network, which a rule for a directory cannot leave out.
    ("/proc/self", Right::ReadBelow),
    // glibc reads it before it frees memory of a thread's heap.
    ("/proc/sys/vm/overcommit_memory", Right::ReadFile),
    // CPUs: for `ctl topology`; glibc counts them for its heaps.
    ("/sys/devices/system/cpu/online", Right::ReadFile),
    ("/sys/devices/system/cpu/possible", Right::ReadFile),
    // Nodes, with their CPUs and memory: for the placement of threads and guest memory.
    ("/sys/devices/system/node", Right::ReadBelow),
    ("/dev/null", Right::WriteFile),
    ("/dev/zero", Right::ReadFile),
];

/// The needs of a serving process. Everything else is taken away.
#[derive(Debug)]
pub struct Plan {
    paths: Vec<(PathBuf, Right)>,
    without_files: Option<String>,
    calls: Calls,
    keep: Keep,
    user: Option<User>,
    is_required: bool,
}

/// The parts of the sandbox that are in force. Shown in one line.
#[derive(Clone, Debug)]
pub struct InForce {
    /// The kernel's version of landlock, and the number of paths with rules.
    pub landlock: Option<(i32, usize)>,
    /// System calls that may be made; `None`: no seccomp.
    pub calls: Option<usize>,
    /// Capabilities that are kept. `None`: the process is not root, so it has none; or they could
    /// not be dropped ([`InForce::missing`]).
    pub capabilities: Option<CapabilitySet>,
    /// The parts that are missing, each with the reason.
    pub missing: Vec<String>,
}

/// The prepared parts of the sandbox.
#[derive(Debug)]
struct Prepared {
    rules: Option<Rules>,
    filters: Option<Filters>,
    /// Every thread can be found and confined.
    reaches_threads: bool,
}

impl Default for Plan {
    /// The program's own needs.
    fn default() -> Plan {
        Plan {
            paths: OWN.map(|(path, right)| (PathBuf::from(path), right)).to_vec(),
            without_files: None,
            calls: Calls::default(),
            keep: Keep::default(),
            user: None,
            is_required: false,
        }
    }
}

impl Plan {
    /// The program's own needs.
    #[must_use]
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Makes entering fail where a part is missing; otherwise the part is listed in
    /// [`InForce::missing`].
    #[must_use]
    pub fn insist(mut self, is_required: bool) -> Plan {
        self.is_required = is_required;
        self
    }

    fn path(mut self, path: impl Into<PathBuf>, right: Right) -> Plan {
        self.paths.push((path.into(), right));
        self
    }

    /// A file or device that may be read. The rule is for the file that the name leads to when
    /// entering, so `/proc/self/fd/N` works too.
    #[must_use]
    pub fn read(self, file: impl Into<PathBuf>) -> Plan {
        self.path(file, Right::ReadFile)
    }

    /// A file or device that may be read, written and made shorter.
    #[must_use]
    pub fn read_write(self, file: impl Into<PathBuf>) -> Plan {
        self.path(file, Right::WriteFile)
    }

    /// A directory in which all files may be read, at any depth.
    #[must_use]
    pub fn read_below(self, directory: impl Into<PathBuf>) -> Plan {
        self.path(directory, Right::ReadBelow)
    }

    /// A directory in which files may be read, created, written and removed, at any depth.
    #[must_use]
    pub fn write_below(self, directory: impl Into<PathBuf>) -> Plan {
        self.path(directory, Right::WriteBelow)
    }

    /// System calls besides those of every plan.
    #[must_use]
    pub fn calls(mut self, calls: Calls) -> Plan {
        self.calls = calls;
        self
    }

    /// Capabilities to keep in place of the default ones.
    #[must_use]
    pub fn keep(mut self, keep: Keep) -> Plan {
        self.keep = keep;
        self
    }

    /// The process changes to this user, and keeps no capability. Entering always fails where that
    /// is not possible.
    #[must_use]
    pub fn user(mut self, user: User) -> Plan {
        self.user = Some(user);
        self
    }

    /// Leaves landlock out: inside it no file system can be unmounted, and the caller has no helper
    /// process for that.
    ///
    /// * `why`: for [`InForce::missing`].
    #[must_use]
    pub fn without_files(mut self, why: impl Into<String>) -> Plan {
        self.without_files = Some(why.into());
        self
    }

    /// Checks that the kernel has the parts that [`Plan::enter`] needs, and changes nothing: for a
    /// caller that cannot go back later.
    ///
    /// Errors: a required part is missing.
    pub fn check(&self) -> Result<(), Failure> {
        self.prepare(&mut Vec::new()).map(|_| ())
    }

    /// Prepares the parts.
    fn prepare(&self, missing: &mut Vec<String>) -> Result<Prepared, Failure> {
        let known = threads::are_known().map_err(|errno| {
            format!("no landlock, and capabilities stay: the threads in /proc/self/task: {errno}")
        });
        let reaches_threads = self.or_missing(known, missing)?.is_some();
        let rules = match &self.without_files {
            Some(why) => Err(why.clone()),
            None => files::rules(&self.paths).map_err(|no| match no {
                NoRules::Missing(why) => why.to_owned(),
                NoRules::Failed(error) => format!("landlock: {error}"),
            }),
        };
        let rules = self.or_missing(rules, missing)?;
        let filters = calls::filters(&self.calls).map_err(|error| format!("seccomp: {error}"));
        let filters = self.or_missing(filters, missing)?;
        Ok(Prepared { rules: rules.filter(|_| reaches_threads), filters, reaches_threads })
    }

    /// Enters the sandbox with all threads, permanently.
    ///
    /// Errors: a required part is missing, or a thread cannot be confined; some parts may be in
    /// force then, so the process should end.
    pub fn enter(self) -> Result<InForce, Failure> {
        let mut missing = Vec::new();
        let Prepared { rules, filters, reaches_threads } = self.prepare(&mut missing)?;
        let is_root = rustix::process::geteuid().is_root();
        let kept = || self.user.map_or_else(|| self.keep.present(), |_| CapabilitySet::empty());
        let capabilities = (is_root && reaches_threads).then(kept);
        if self.user.is_some() && !reaches_threads {
            let why = "the process cannot become another user, as its threads cannot be found";
            return Err(Failure(String::from(why)));
        }
        let ruleset = rules.as_ref().map(|rules| rules.ruleset.as_fd());
        if reaches_threads {
            let confined =
                threads::confine(&Confinement { ruleset, user: self.user, capabilities });
            confined.map_err(|error| {
                let what = format!("{} cannot be confined: {}", error.thread, error.errno);
                Failure(what)
            })?;
        }
        let mut allowed = None;
        if let Some(filters) = filters {
            // The filter refuses executable modes; libc uses 0666. No call inside changes the
            // umask.
            umask(umask(NOT_FOR_RUNNING) | NOT_FOR_RUNNING);
            let installed = filters.programs.iter().try_for_each(|program| {
                seccompiler::apply_filter_all_threads(program)
                    .map_err(|error| format!("seccomp: {error}"))
            });
            allowed = self.or_missing(installed, &mut missing)?.map(|()| filters.allowed);
        }
        Ok(InForce {
            landlock: rules.map(|rules| {
                rules.hold();
                (rules.abi, rules.paths)
            }),
            calls: allowed,
            capabilities,
            missing,
        })
    }

    /// The part, or its reason in `missing`; an error where the part is required.
    fn or_missing<T>(
        &self,
        result: Result<T, String>,
        missing: &mut Vec<String>,
    ) -> Result<Option<T>, Failure> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(why) if self.is_required => Err(Failure(why)),
            Err(why) => {
                missing.push(why);
                Ok(None)
            }
        }
    }
}

/// Changes all threads to that user, permanently. No other part of a sandbox is put in force.
///
/// Errors: a thread that could not be changed; the threads before it have been, so the process
/// should end.
pub fn become_user(user: User) -> Result<(), Failure> {
    let none = Some(CapabilitySet::empty());
    let all = Confinement { ruleset: None, user: Some(user), capabilities: none };
    threads::confine(&all).map(|_| ()).map_err(|error| {
        Failure(format!("{} cannot become another user: {}", error.thread, error.errno))
    })
}

impl fmt::Display for InForce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.landlock {
            Some((abi, paths)) => write!(f, "landlock (ABI {abi}) with {paths} paths")?,
            None => write!(f, "no landlock")?,
        }
        match self.calls {
            Some(calls) => write!(f, ", seccomp with {calls} calls")?,
            None => write!(f, ", no seccomp")?,
        }
        if let Some(kept) = self.capabilities {
            write!(f, ", capabilities {}", capabilities::describe(kept))?;
        }
        Ok(())
    }
}
