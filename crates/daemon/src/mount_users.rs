//! Who uses a mount: processes, loop devices, and what is mounted on these.
//!
//! Promises: only `/proc` and `/sys` are read, never a file that is served, so nothing here waits
//! for a server or for storage. Memory of a process that waits for the mount may be locked; so a
//! thread of its own looks, and what it has found after [`LOOK_LIMIT`] is the answer. What may not
//! be looked at (processes of other users) is not found: the answer helps people, and nothing
//! depends on it.
//!
//! An open file is known by the number of its mount (`mnt_id` in `/proc/PID/fdinfo`), which stays
//! when the mount has left the tree; a mapped one by the number of its file system. A loop device
//! shows the path of its file, which is there as long as the mount has one.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ringdisk_fuse::mount::table::{self, MountEntry};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use serde::{Deserialize, Serialize};

use crate::terminal::visible;

/// How long a look may take (5 s): a busy machine with thousands of processes needs seconds.
const LOOK_LIMIT: Duration = Duration::from_secs(5);
/// Processes and devices that are named; more are counted.
const NAMED_MAX: usize = 16;
/// Mounts that are named of one device.
const MOUNTS_MAX: usize = 4;
/// Devices upon devices that are followed (partitions, device mapper).
const DEPTH_MAX: usize = 8;

/// A mount whose users are looked for.
#[derive(Clone, Debug)]
pub struct Place {
    mountpoint: PathBuf,
    /// Device number of its file system: major 0, and the number of the connection.
    device: (u32, u32),
    /// Number of the mount while it was seen in the tree.
    id: Option<u64>,
}

impl Place {
    /// Of the mount of a connection, which should be in the tree still.
    ///
    /// * `mountpoint`: absolute, without symbolic links.
    pub fn of(mountpoint: &Path, connection: u32) -> Place {
        let entry = table::of_connection_at(connection, mountpoint).ok().flatten();
        Place {
            mountpoint: mountpoint.to_owned(),
            device: entry.as_ref().map_or((0, connection), |entry| entry.device),
            id: entry.map(|entry| entry.id),
        }
    }

    /// Whether it was in the tree.
    pub fn was_seen(&self) -> bool {
        self.id.is_some()
    }
}

/// A process that has the file open or mapped.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Process {
    pid: u32,
    name: String,
}

/// A block device made of the file.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Device {
    name: String,
    /// Where file systems on it are mounted.
    mounted: Vec<String>,
    is_swap: bool,
}

/// What was found.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Users {
    devices: Vec<Device>,
    processes: Vec<Process>,
    /// Processes that are not named.
    more: usize,
}

impl Users {
    /// In words, for one line.
    ///
    /// * `open_files`: that the clients have together, if that is known.
    pub fn text(&self, open_files: Option<u64>) -> String {
        let devices = self.devices.iter().map(Device::text);
        let processes = self.processes.iter().map(|process| {
            if process.name.is_empty() {
                format!("process {}", process.pid)
            } else {
                format!("process {} ({})", process.pid, process.name)
            }
        });
        let mut all: Vec<String> = devices.chain(processes).collect();
        if self.more > 0 {
            all.push(format!("{} more processes", self.more));
        }
        match (all.is_empty(), open_files) {
            (false, _) => all.join(", "),
            (true, Some(1)) => {
                String::from("1 open file of a process that cannot be seen from here")
            }
            (true, Some(count)) => {
                format!("{count} open files of processes that cannot be seen from here")
            }
            (true, None) => String::from("a process that cannot be seen from here"),
        }
    }

    /// Each in words.
    pub fn names(&self) -> Vec<String> {
        let is_empty = self.devices.is_empty() && self.processes.is_empty() && self.more == 0;
        if is_empty { Vec::new() } else { vec![self.text(None)] }
    }

    /// Without what may be long.
    pub fn shortened(mut self) -> Users {
        self.devices.truncate(1);
        self.devices.iter_mut().for_each(|device| device.mounted.clear());
        self
    }

    fn add(&mut self, pid: u32) {
        if self.processes.len() >= NAMED_MAX {
            self.more += 1;
            return;
        }
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        // A user of the mount chooses this name, and it is shown in logs, too.
        self.processes.push(Process { pid, name: visible(name.trim()) });
    }
}

impl Device {
    fn text(&self) -> String {
        match (self.mounted.as_slice(), self.is_swap) {
            ([], true) => format!("{}, used as swap", self.name),
            ([], false) => self.name.clone(),
            (mounted, _) => format!("{} (mounted on {})", self.name, mounted.join(" and ")),
        }
    }
}

/// Looks now; takes [`LOOK_LIMIT`] at most.
pub fn look(place: &Place) -> Users {
    look_at_all(vec![place.clone()]).pop().unwrap_or_default()
}

/// The same for several mounts, in their order, with one look at each process.
pub fn look_at_all(places: Vec<Place>) -> Vec<Users> {
    let found = Arc::new(Mutex::new(vec![Users::default(); places.len()]));
    let theirs = Arc::clone(&found);
    let (working, done) = channel::<()>();
    let thread = std::thread::Builder::new().name(String::from("users")).stack_size(256 << 10);
    let started = thread.spawn(move || {
        search(&places, &theirs);
        drop(working);
    });
    if started.is_ok() {
        // Nothing is ever sent: this waits for the other end to go.
        let _ = done.recv_timeout(LOOK_LIMIT);
    }
    lock(&found).clone()
}

/// What was found; a panic elsewhere leaves it valid, so poison is ignored.
fn lock(found: &Mutex<Vec<Users>>) -> MutexGuard<'_, Vec<Users>> {
    found.lock().unwrap_or_else(PoisonError::into_inner)
}

fn search(places: &[Place], found: &Mutex<Vec<Users>>) {
    let own = std::process::id();
    let processes: Vec<u32> = names("/proc").filter_map(|name| name.parse().ok()).collect();
    let tables = tables(&processes);
    let ids: Vec<HashSet<u64>> = places
        .iter()
        .map(|place| {
            let of_place = |entry: &&MountEntry| entry.device == place.device;
            let entries = tables.iter().flatten().filter(of_place);
            entries.map(|entry| entry.id).chain(place.id).collect()
        })
        .collect();
    let all_ids: HashSet<u64> = ids.iter().flatten().copied().collect();
    for (index, place) in places.iter().enumerate() {
        let devices = devices(place, &tables);
        lock(found)[index].devices = devices;
    }
    let mut others = Vec::new();
    // Each is told at once: on a busy machine the time may not do for all of them.
    for pid in processes.into_iter().filter(|pid| *pid != own) {
        let files = open_files(pid, &all_ids);
        let is_open = |index: usize| {
            let place = &places[index];
            files.iter().any(|(id, device)| {
                ids[index].contains(id) && device.is_none_or(|device| device == place.device)
            })
        };
        let mut is_user = false;
        for index in (0..places.len()).filter(|index| is_open(*index)) {
            lock(found)[index].add(pid);
            is_user = true;
        }
        if !is_user {
            others.push(pid);
        }
    }
    // Last: what may have to wait.
    for pid in others {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        for (index, place) in places.iter().enumerate() {
            if maps.lines().any(|line| is_of_device(line, place.device)) {
                lock(found)[index].add(pid);
            }
        }
    }
}

/// Names in a directory.
fn names(directory: impl AsRef<Path>) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

/// The mount table of each mount namespace that can be seen, our own first.
fn tables(processes: &[u32]) -> Vec<Vec<MountEntry>> {
    let mut seen = HashSet::new();
    let own = std::process::id();
    std::iter::once(&own)
        .chain(processes)
        .filter(|pid| {
            let namespace = fs::read_link(format!("/proc/{pid}/ns/mnt"));
            namespace.is_ok_and(|namespace| seen.insert(namespace))
        })
        .filter_map(|pid| table::of_process(*pid).ok())
        .collect()
}

/// The mounts that open files of a process are on: the number of each, and the device number of its
/// file system. The kernel gives the number of a mount that is gone, as ours may be while a copy of
/// it is used, to the next one.
///
/// * `ids`: the mounts that are of interest.
fn open_files(pid: u32, ids: &HashSet<u64>) -> Vec<(u64, Option<(u32, u32)>)> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let of_file = |name: String| {
        let info = fs::read_to_string(process.join("fdinfo").join(&name)).unwrap_or_default();
        let id = mount_id(&info).filter(|id| ids.contains(id))?;
        Some((id, device_of(&process.join("fd").join(&name))))
    };
    names(process.join("fdinfo")).filter_map(of_file).collect()
}

/// The file system that an open file is on, as the kernel knows it: nothing is asked of that file
/// system. `None`: it may not be seen.
fn device_of(file: &Path) -> Option<(u32, u32)> {
    let file = statx(CWD, file, AtFlags::STATX_DONT_SYNC, StatxFlags::empty()).ok()?;
    Some((file.stx_dev_major, file.stx_dev_minor))
}

/// The number of the mount that an open file is on.
fn mount_id(info: &str) -> Option<u64> {
    info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// Whether a line of `/proc/PID/maps` is of a file on that device: `start-end mode offset
/// major:minor inode path`.
fn is_of_device(line: &str, (major, minor): (u32, u32)) -> bool {
    let numbers = line.split_whitespace().nth(3).and_then(|field| field.split_once(':'));
    let number = |text| u32::from_str_radix(text, 16).ok();
    numbers.is_some_and(|(a, b)| (number(a), number(b)) == (Some(major), Some(minor)))
}

/// Loop devices of the file.
fn devices(place: &Place, tables: &[Vec<MountEntry>]) -> Vec<Device> {
    // The mount itself, and copies of it (bind mounts, other mount namespaces).
    let copies: HashSet<&Path> = tables
        .iter()
        .flatten()
        .filter(|entry| entry.device == place.device)
        .map(|entry| entry.mountpoint.as_path())
        .collect();
    let is_ours = |name: &String| {
        let path = format!("/sys/block/{name}/loop/backing_file");
        let file = fs::read_to_string(path).unwrap_or_default();
        let file = Path::new(file.trim_end_matches('\n').trim_end_matches(" (deleted)"));
        // A file that is a mount of its own and has left the tree shows so; a directory cannot be
        // such a file.
        let has_left = copies.is_empty() && file == Path::new("/");
        file == place.mountpoint || copies.contains(file) || has_left
    };
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    names("/sys/block")
        .filter(is_ours)
        .take(NAMED_MAX)
        .map(|name| {
            let mut stack = Vec::new();
            upon(&PathBuf::from("/sys/block").join(&name), &name, DEPTH_MAX, &mut stack);
            let is_on = |entry: &&MountEntry| {
                stack.iter().any(|(device, node)| {
                    // btrfs shows a number of its own.
                    Some(entry.device) == *device || entry.source == node.as_str()
                })
            };
            let mut mounted: Vec<String> = tables
                .iter()
                .flatten()
                .filter(is_on)
                .map(|entry| visible(&entry.mountpoint.display().to_string()))
                .collect();
            mounted.sort();
            mounted.dedup();
            mounted.truncate(MOUNTS_MAX);
            let is_swap = stack.iter().any(|(_, node)| {
                swaps.lines().any(|line| line.split_whitespace().next() == Some(node))
            });
            Device { name, mounted, is_swap }
        })
        .collect()
}

/// A block device, its partitions, and what is made of these: number and node of each.
///
/// * `directory`: of the device in `/sys`.
fn upon(directory: &Path, name: &str, depth: usize, stack: &mut Vec<(Option<(u32, u32)>, String)>) {
    let number = fs::read_to_string(directory.join("dev")).unwrap_or_default();
    let number = number.trim().split_once(':');
    let number = number.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    stack.push((number, format!("/dev/{name}")));
    let Some(depth) = depth.checked_sub(1) else { return };
    for part in names(directory).filter(|part| part.starts_with(name)) {
        upon(&directory.join(&part), &part, depth, stack);
    }
    for holder in names(directory.join("holders")) {
        upon(&PathBuf::from("/sys/block").join(&holder), &holder, depth, stack);
    }
}

#[cfg(test)]
mod tests;
