//! What the machine keeps of mounts that have ended.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_testkit::connection::waiting;
use ringdisk_testkit::limits::mounts;
use ringdisk_testkit::process::until;

/// How long the kernel may take to let go of what it ends in the background.
const GONE: Duration = Duration::from_secs(10);

/// Numbers of the whole machine. Others change them too, so a growth says something only after many
/// mounts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// Open files of all processes and of the kernel (`/proc/sys/fs/file-nr`).
    pub(crate) files: u64,
    /// Slab that cannot be reclaimed, KiB.
    pub(crate) slab_kib: u64,
    /// Memory that is neither free nor counted anywhere else, KiB: the pages of rings are there.
    pub(crate) other_kib: u64,
}

impl Machine {
    pub(crate) fn now() -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let first = |text: &str| -> u64 {
            text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_default()
        };
        let memory = read("/proc/meminfo");
        let line =
            |key: &str| memory.lines().find_map(|line| line.strip_prefix(key)).map_or(0, &first);
        let known = [
            "MemFree:",
            "Buffers:",
            "Cached:",
            "AnonPages:",
            "Slab:",
            "KernelStack:",
            "PageTables:",
            "Percpu:",
        ];
        let known = known.iter().map(|key| line(key)).sum();
        Machine {
            files: first(&read("/proc/sys/fs/file-nr")),
            slab_kib: line("SUnreclaim:"),
            other_kib: line("MemTotal:").saturating_sub(known),
        }
    }

    /// What is more in `self` than in `before`.
    pub(crate) fn since(&self, before: &Machine) -> Machine {
        Machine {
            files: self.files.saturating_sub(before.files),
            slab_kib: self.slab_kib.saturating_sub(before.slab_kib),
            other_kib: self.other_kib.saturating_sub(before.other_kib),
        }
    }
}

/// What belongs to the mounts of one test.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    connections: BTreeSet<u32>,
}

impl Kept {
    /// A mount with this connection was there.
    pub(crate) fn saw(&mut self, connection: u32) {
        self.connections.insert(connection);
    }

    /// How many different numbers the kernel gave: it takes the number of a connection that is gone
    /// again.
    pub(crate) fn numbers(&self) -> usize {
        self.connections.len()
    }

    /// Nothing of them is there any more: mounts, connections, sockets, processes, files below
    /// `directory` but those in `files`.
    pub(crate) fn assert_nothing(&self, directory: &Path, files: &[&str]) {
        let left = || {
            let mut left = Vec::new();
            let table = mounts();
            let ours = table.iter().filter(|mount| mount.path.starts_with(directory));
            left.extend(ours.map(|mount| format!("mount {}", mount.path.display())));
            // Another mount may have the number now.
            let is_ours = |number: &&u32| table.iter().all(|mount| mount.minor != **number);
            let numbers: Vec<&u32> = self.connections.iter().filter(is_ours).collect();
            let numbers_left = numbers.iter().filter(|number| waiting(***number).is_ok());
            left.extend(numbers_left.map(|number| format!("connection {number}")));
            let sockets = numbers.iter().filter_map(|number| socket(**number));
            left.extend(sockets.map(|path| path.display().to_string()));
            left.extend(processes(directory));
            left
        };
        let gone = until(GONE, || left().is_empty().then_some(()));
        assert!(gone.is_some(), "left behind: {:?}", left());
        let mut names = super::tools::names(directory);
        names.retain(|name| !files.contains(&name.as_str()));
        assert!(names.is_empty(), "{names:?} in {}", directory.display());
    }
}

/// Processes that name something below a directory.
fn processes(directory: &Path) -> Vec<String> {
    let word = directory.to_string_lossy().into_owned();
    let me = std::process::id().to_string();
    let Ok(all) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = all.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    numbers
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()) && *name != me)
        .filter_map(|name| {
            let line = std::fs::read(format!("/proc/{name}/cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            line.contains(&word).then(|| format!("process {name}: {line}"))
        })
        .collect()
}

/// The control socket of a mount, where root's are.
fn socket(number: u32) -> Option<PathBuf> {
    let directories = ["/run/user/0/ringdisk", "/run/ringdisk", "/tmp/ringdisk-0"].map(Path::new);
    let mut paths = directories.iter().map(|path| path.join(format!("mount-0-{number}.sock")));
    paths.find(|path| path.exists())
}
