//! What a helper process may do to files, as a model: for tests, and for the fuzzer.
//!
//! Promises of the helper process that [`run`] checks, whatever is ordered and whatever others do
//! to the names meanwhile: a file goes if and only if it is one that the tasks name and still has
//! that name; only sockets that the tasks name are connected; nothing else changes.
//!
//! Mounts cannot be had here: tasks name one that is not there, and nothing may come of it. (Real
//! ones: `tests/rights/takeover`.)

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use super::tasks::{Held, Tasks};

/// Names of files.
const NAMES: u8 = 6;
/// A connection that no mount has.
const NO_CONNECTION: u32 = 0xffff_fff0;

/// A file, whatever name it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Node(u32);

impl Node {
    /// A regular file that no server has made.
    fn is_filled(self) -> bool {
        self.0.is_multiple_of(2)
    }
}

/// A directory, and what should be in it.
struct World<'a> {
    directory: &'a Path,
    names: BTreeMap<u8, Node>,
    /// Sockets that listen.
    listeners: Vec<(Node, UnixListener)>,
    made: u32,
}

/// The input, taken from its front; zeroes when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn name(&mut self) -> u8 {
        self.byte() % NAMES
    }
}

/// Runs one sequence of changes and orders. Panics when the helper process does what it must not,
/// or not what it must.
///
/// * `directory`: empty, and so it is left.
pub fn run(directory: &Path, bytes: &[u8]) {
    let mut input = Input(bytes);
    let mut world = World { directory, names: BTreeMap::new(), listeners: Vec::new(), made: 0 };
    for _ in 0..input.byte() % 8 {
        world.change(&mut input);
    }
    let told = world.names.clone();
    let is_meant = |mask: u8| move |name: &u8| mask & (1 << name) != 0;
    let (files, fronts) = (is_meant(input.byte()), is_meant(input.byte()));
    let tasks = Tasks {
        mount: (input.byte() % 2 == 1).then(|| (world.path(0), NO_CONNECTION)),
        files: told.keys().copied().filter(files).map(|name| world.named(name)).collect(),
        fronts: (0..NAMES).filter(fronts).map(|name| world.path(name)).collect(),
        ..Tasks::default()
    };
    assert_eq!(arrives(&tasks), Some(true), "tasks do not arrive as they were told");
    let held = tasks.hold();
    while !input.0.is_empty() {
        if input.byte() % 3 == 0 {
            world.change(&mut input);
        } else {
            let order = world.order(&mut input);
            world.carry_out(&tasks, &held, &told, &order);
        }
    }
    let left: Vec<u8> = world.names.keys().copied().collect();
    left.into_iter().for_each(|name| world.remove(name));
}

/// Whether the messages that tell of tasks give the same ones.
fn arrives(tasks: &Tasks) -> Option<bool> {
    let mut taken = Tasks::default();
    for message in tasks.messages() {
        taken.take(&message)?;
    }
    Some(taken == *tasks)
}

/// Takes any messages as tasks. Panics when some are taken that would be told otherwise.
pub fn hear(bytes: &[u8]) {
    let mut tasks = Tasks::default();
    for message in bytes.split(|byte| *byte == b'\n') {
        if tasks.take(message) == Some(true) {
            break;
        }
    }
    assert_eq!(arrives(&tasks), Some(true));
}

impl World<'_> {
    fn path(&self, name: u8) -> PathBuf {
        self.directory.join(name.to_string())
    }

    /// The name with its device and inode number.
    fn named(&self, name: u8) -> (PathBuf, (u64, u64)) {
        let meta = fs::symlink_metadata(self.path(name)).expect("it is there");
        (self.path(name), (meta.dev(), meta.ino()))
    }

    /// What others do.
    fn change(&mut self, input: &mut Input<'_>) {
        let (kind, name) = (input.byte() % 6, input.name());
        match kind {
            0 | 1 => self.make(name, kind == 1),
            2 => self.remove(name),
            3 => {
                let to = input.name();
                if let Some(node) = self.names.remove(&name) {
                    fs::rename(self.path(name), self.path(to)).expect("rename");
                    self.names.insert(to, node);
                }
            }
            // At once another one, which may get its number.
            _ => {
                self.remove(name);
                self.make(name, kind == 5);
            }
        }
    }

    fn make(&mut self, name: u8, is_socket: bool) {
        if self.names.contains_key(&name) {
            return;
        }
        let node = Node(self.made);
        self.made += 1;
        if is_socket {
            let listener = UnixListener::bind(self.path(name)).expect("bind");
            self.listeners.push((node, listener));
        } else {
            fs::write(self.path(name), if node.is_filled() { "x" } else { "" }).expect("write");
        }
        self.names.insert(name, node);
    }

    fn is_socket(&self, node: Node) -> bool {
        self.listeners.iter().any(|(it, _)| *it == node)
    }

    fn remove(&mut self, name: u8) {
        if self.names.remove(&name).is_some() {
            fs::remove_file(self.path(name)).expect("remove");
        }
    }

    /// An order: often one that makes sense.
    fn order(&self, input: &mut Input<'_>) -> Vec<u8> {
        let what = match input.byte() {
            choice @ 0..=200 => b"RRRRCCNLFAU"[usize::from(choice) % 11],
            other => other,
        };
        let mut order = vec![what];
        let path = self.path(input.name()).into_os_string().into_vec();
        match input.byte() % 8 {
            0 => order.extend_from_slice(input.0),
            1 => order.extend([&path[..], b"/"].concat()),
            2 => order.extend([&path[..], b"\0x"].concat()),
            3 => order.extend([&path[..], b"/../1"].concat()),
            _ => order.extend(path),
        }
        order
    }

    /// Gives an order, and looks at what has come of it.
    ///
    /// * `told`: what names meant when the tasks were told.
    fn carry_out(&mut self, tasks: &Tasks, held: &Held, told: &BTreeMap<u8, Node>, order: &[u8]) {
        let answer = tasks.carry_out(order, held);
        let (what, path) = order.split_first().expect("a letter");
        let path = Path::new(std::ffi::OsStr::from_bytes(path));
        let meant = (0..NAMES).find(|name| self.path(*name) == path);
        let file = tasks.files.iter().any(|(it, _)| it == path);
        let goes = meant.filter(|_| *what == b'R' && file);
        // What has the name by now is another file, or it is that one, and one that no server
        // makes.
        if let Some(name) = goes
            && let Some(node) = self.names.get(&name).filter(|node| Some(*node) == told.get(&name))
            && (self.is_socket(*node) || !node.is_filled())
        {
            self.names.remove(&name);
        }
        let front = *what == b'C' && tasks.fronts.iter().any(|it| it == path);
        let node = meant.and_then(|name| self.names.get(&name));
        let listens = node.is_some_and(|node| self.is_socket(*node));
        assert_eq!(answer.fd.is_some(), front && listens, "{}", order.escape_ascii());
        for (_, listener) in self.listeners.iter().filter(|_| answer.fd.is_some()) {
            listener.set_nonblocking(true).expect("a setting");
            drop(listener.accept());
        }
        let mut now: Vec<String> = fs::read_dir(self.directory)
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        now.sort();
        let should: Vec<String> = self.names.keys().map(u8::to_string).collect();
        assert_eq!(now, should, "{}", order.escape_ascii());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequences that are tried: a second.
    const SEQUENCES: u64 = 500;

    #[test]
    fn whatever_is_ordered_only_what_tasks_name_goes() {
        let directory = tempfile::tempdir().expect("directory");
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..SEQUENCES {
            let bytes: Vec<u8> = (0..160)
                .map(|_| {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    random.to_le_bytes()[3]
                })
                .collect();
            run(directory.path(), &bytes);
            hear(&bytes);
        }
    }

    #[test]
    fn tasks_are_heard_as_they_are_told() {
        for text in ["m/a\x007\nf/b\x001\x002\ns/c\n.", "f/b\x001\n", "m/a\x00-1", ".\nm", "m\x001"]
        {
            hear(text.as_bytes());
        }
    }
}
