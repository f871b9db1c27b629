//! Control groups that restrict CPUs, as a container manager makes them.
//!
//! Promises: a group is removed when it is dropped. Source: the kernel's
//! Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::limits::{MountEntry, mounts, needs};
use crate::process::{command, until};

/// A group of processes that may run on some CPUs only. Removed when dropped; its processes must
/// have ended.
#[derive(Debug)]
pub struct Cpuset {
    path: PathBuf,
    // Unmounted after the group is gone.
    _mount: Option<GroupMount>,
}

/// The hierarchy of version 2, mounted for a test.
#[derive(Debug)]
struct GroupMount(tempfile::TempDir);

impl Drop for GroupMount {
    fn drop(&mut self) {
        let _ = command(&["umount"]).arg(self.0.path()).status();
    }
}

/// Where groups that restrict CPUs can be made: version 1, then version 2.
fn hierarchy(table: &[MountEntry]) -> Option<(PathBuf, Option<GroupMount>)> {
    let is_first = |mount: &&MountEntry| {
        mount.kind == "cgroup" && mount.options.split(',').any(|o| o == "cpuset")
    };
    if let Some(mount) = table.iter().find(is_first) {
        return Some((mount.path.clone(), None));
    }
    let there = table.iter().find(|mount| mount.kind == "cgroup2");
    let (path, mount) = match there {
        Some(mount) => (mount.path.clone(), None),
        None => {
            let directory = tempfile::tempdir().ok()?;
            let words = ["mount", "-t", "cgroup2", "none", directory.path().to_str()?];
            if !command(&words).status().is_ok_and(|status| status.success()) {
                return None;
            }
            (directory.path().to_owned(), Some(GroupMount(directory)))
        }
    };
    let offered = std::fs::read_to_string(path.join("cgroup.controllers")).ok()?;
    if !offered.split_whitespace().any(|controller| controller == "cpuset") {
        return None;
    }
    std::fs::write(path.join("cgroup.subtree_control"), "+cpuset").ok()?;
    Some((path, mount))
}

impl Cpuset {
    /// A group for these CPUs, a list such as `0-1,3`. `None`, with a word about it, where the
    /// system has no such groups or we may not make one.
    #[must_use]
    pub fn new(cpus: &str) -> Option<Cpuset> {
        let found = hierarchy(&mounts());
        if !needs("control groups for CPUs", found.is_some()) {
            return None;
        }
        let (root, mount) = found?;
        let path = root.join(format!("ringdisk-test-{}", std::process::id()));
        let made = std::fs::create_dir(&path);
        if !needs("right to make control groups", made.is_ok()) {
            return None;
        }
        let set = Cpuset { path, _mount: mount };
        // Version 1 starts without any memory node.
        if let Ok(nodes) = std::fs::read_to_string(root.join("cpuset.mems"))
            && !nodes.trim().is_empty()
        {
            set.write("cpuset.mems", nodes.trim());
        }
        set.set_cpus(cpus);
        Some(set)
    }

    /// Lets its processes run on these CPUs from now on.
    pub fn set_cpus(&self, cpus: &str) {
        self.write("cpuset.cpus", cpus);
    }

    /// A command that runs inside the group, with the process id of what `spawn` starts.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Command {
        let join =
            format!("echo $$ > '{}' && exec \"$@\"", self.path.join("cgroup.procs").display());
        let mut inside = command(&["sh", "-c", &join, "sh"]);
        inside.args(words);
        inside
    }

    fn write(&self, name: &str, value: &str) {
        let path = self.path.join(name);
        std::fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        // A process that has just ended is in its group for a moment.
        let remove = |path: &Path| std::fs::remove_dir(path).ok();
        if until(Duration::from_secs(10), || remove(&self.path)).is_none() {
            eprintln!("{} could not be removed", self.path.display());
        }
    }
}
