//! What shall still be possible, and entering.

use std::fmt;
use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::fs::Mode;
use rustix::process::umask;
use rustix::thread::CapabilitySet;

use crate::calls::{self, Calls, Filters};
use crate::capabilities::{self, Keep};
use crate::files::{self, NoRules, Right, Rules};
use crate::threads::{self, Confinement};
use crate::user::User;

/// Rights that no file gets that is made inside: nobody runs it, and the group and others do not
/// write it.
const NOT_FOR_RUNNING: Mode = Mode::from_raw_mode(0o133);

/// What a process of this program opens once it serves, whatever it serves. Of `/proc` and `/sys`
/// it is this and nothing else: neither other processes nor the rest of the machine. (What the
/// kernel says of block devices comes with those: [`crate::files`].)
const OWN: [(&str, Right); 7] = [
    // Its own state: threads, their CPUs and times (`ctl stats`, `ctl topology`), locks of its
    // files, its mounts, where code is (a backtrace). It holds the tables of its network, too,
    // which cannot be left out of a directory.
    ("/proc/self", Right::ReadBelow),
    // glibc looks before it gives memory of a thread's heap back.
    ("/proc/sys/vm/overcommit_memory", Right::ReadFile),
    // CPUs: for `ctl topology`; glibc counts them for its heaps.
    ("/sys/devices/system/cpu/online", Right::ReadFile),
    ("/sys/devices/system/cpu/possible", Right::ReadFile),
    // Nodes, with their CPUs and memory: where threads and memory of a guest go.
    ("/sys/devices/system/node", Right::ReadBelow),
    ("/dev/null", Right::WriteFile),
    ("/dev/zero", Right::ReadFile),
];

/// What a serving process still needs. Everything else goes.
#[derive(Debug)]
pub struct Plan {
    paths: Vec<(PathBuf, Right)>,
    without_files: Option<String>,
    calls: Calls,
    keep: Keep,
    user: Option<User>,
    is_insisted_on: bool,
}

/// What is in force. Shown in one line.
#[derive(Clone, Debug)]
pub struct InForce {
    /// The kernel's version of landlock, and the number of paths with rules.
    pub landlock: Option<(i32, usize)>,
    /// System calls that may be made; `None`: no seccomp.
    pub calls: Option<usize>,
    /// `None`: not root, so there are none to lose; or they could not be taken
    /// ([`InForce::missing`]).
    pub capabilities: Option<CapabilitySet>,
    /// What could not be had, each with the reason.
    pub missing: Vec<String>,
}

/// What is to be put in force.
#[derive(Debug)]
struct Walls {
    rules: Option<Rules>,
    filters: Option<Filters>,
    /// Each thread can be told to give something up.
    reaches_threads: bool,
}

/// Why a process is not confined as it was insisted on, or not even as it must be for its own sake.
#[derive(Debug)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

impl Default for Plan {
    /// The program's own needs.
    fn default() -> Plan {
        Plan {
            paths: OWN.map(|(path, right)| (PathBuf::from(path), right)).to_vec(),
            without_files: None,
            calls: Calls::default(),
            keep: Keep::default(),
            user: None,
            is_insisted_on: false,
        }
    }
}

impl Plan {
    /// The program's own needs.
    #[must_use]
    pub fn new() -> Plan {
        Plan::default()
    }

    /// Entering fails where a wall is missing; otherwise that is told in [`InForce::missing`].
    #[must_use]
    pub fn insist(mut self, is_insisted_on: bool) -> Plan {
        self.is_insisted_on = is_insisted_on;
        self
    }

    fn path(mut self, path: impl Into<PathBuf>, right: Right) -> Plan {
        self.paths.push((path.into(), right));
        self
    }

    /// A file or device that may be read. By whatever name: the rule is for what is there when
    /// entering, so `/proc/self/fd/N` will do.
    #[must_use]
    pub fn read(self, file: impl Into<PathBuf>) -> Plan {
        self.path(file, Right::ReadFile)
    }

    /// A file or device that may be read, written and made shorter.
    #[must_use]
    pub fn read_write(self, file: impl Into<PathBuf>) -> Plan {
        self.path(file, Right::WriteFile)
    }

    /// A directory of which everything may be read, at any depth.
    #[must_use]
    pub fn read_below(self, directory: impl Into<PathBuf>) -> Plan {
        self.path(directory, Right::ReadBelow)
    }

    /// A directory in which, at any depth, files may be read, made, written and removed.
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

    /// The process becomes this user's, and keeps no capability. That is never left out: entering
    /// fails where it cannot be done.
    #[must_use]
    pub fn user(mut self, user: User) -> Plan {
        self.user = Some(user);
        self
    }

    /// Leaves landlock out: inside, no file system may be unmounted, and the caller has nobody to
    /// do it.
    ///
    /// * `why`: for [`InForce::missing`].
    #[must_use]
    pub fn without_files(mut self, why: impl Into<String>) -> Plan {
        self.without_files = Some(why.into());
        self
    }

    /// Looks whether the kernel has what [`Plan::enter`] needs, and changes nothing: for who cannot
    /// go back later.
    ///
    /// Errors: something is missing that was insisted on.
    pub fn check(&self) -> Result<(), Failure> {
        self.walls(&mut Vec::new()).map(|_| ())
    }

    /// Makes what is to be put in force.
    fn walls(&self, missing: &mut Vec<String>) -> Result<Walls, Failure> {
        let known = threads::are_known().map_err(|errno| {
            format!("no landlock, and capabilities stay: the threads in /proc/self/task: {errno}")
        });
        let reaches_threads = self.or_note(known, missing)?.is_some();
        let rules = match &self.without_files {
            Some(why) => Err(why.clone()),
            None => files::rules(&self.paths).map_err(|no| match no {
                NoRules::Missing(why) => why.to_owned(),
                NoRules::Failed(error) => format!("landlock: {error}"),
            }),
        };
        let rules = self.or_note(rules, missing)?;
        let filters = calls::filters(&self.calls).map_err(|error| format!("seccomp: {error}"));
        let filters = self.or_note(filters, missing)?;
        Ok(Walls { rules: rules.filter(|_| reaches_threads), filters, reaches_threads })
    }

    /// Enters, with all threads, for good.
    ///
    /// Errors: something is missing that was insisted on, or a thread cannot be confined; some of
    /// it may be in force then, so the process had better end.
    pub fn enter(self) -> Result<InForce, Failure> {
        let mut missing = Vec::new();
        let Walls { rules, filters, reaches_threads } = self.walls(&mut missing)?;
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
            // The filter refuses modes with which a file could be run; libc's own is 0666. No call
            // inside changes this.
            umask(umask(NOT_FOR_RUNNING) | NOT_FOR_RUNNING);
            let installed = filters.programs.iter().try_for_each(|program| {
                seccompiler::apply_filter_all_threads(program)
                    .map_err(|error| format!("seccomp: {error}"))
            });
            allowed = self.or_note(installed, &mut missing)?.map(|()| filters.allowed);
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

    fn or_note<T>(
        &self,
        result: Result<T, String>,
        missing: &mut Vec<String>,
    ) -> Result<Option<T>, Failure> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(why) if self.is_insisted_on => Err(Failure(why)),
            Err(why) => {
                missing.push(why);
                Ok(None)
            }
        }
    }
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
