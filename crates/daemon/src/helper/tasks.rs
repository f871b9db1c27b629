//! The tasks of the helper process: what it does, outside of the sandbox, for the server inside.
//!
//! Promises: the server names all tasks before it enters the sandbox, and none after that. Each
//! task names one mount, one file, one socket or one directory, so an attacker who takes the server
//! over can order these only. The helper process removes a file only if the name still leads to the
//! same file. It opens connections, mounts and files when it is given the tasks ([`Held`]), since
//! their numbers may belong to others later.
//!
//! Messages from the server: first one for each mount, file, socket and directory, and one that
//! ends the list; each is a letter, and fields between zero bytes. Then orders: a letter and, for a
//! file or a socket, its name.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ringdisk_fuse::ErrorKind;
use ringdisk_fuse::mount::{self, Abort, Unmount};
use ringdisk_sandbox::User;
use ringdisk_storage::NbdEndpoint;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect as connect_to, socket_with,
};

use super::answer::{Answer, BUSY, DONE, REFUSED};
use super::approval::Allows;
use super::chain::Image;
use super::named::{Named, pin};
use super::overlays::{Overlays, Purpose};
use crate::directory_lock;
use crate::mount_users::{self, Place};
use crate::pid_text;

/// Longest message, bytes: two names of 4096 bytes, with numbers and the names in a header.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 10;

const MOUNT: u8 = b'm';
const FILE: u8 = b'f';
const FRONT: u8 = b's';
const SERVER: u8 = b'n';
const DIRECTORY: u8 = b'd';
const TREE: u8 = b't';
const MAKER: u8 = b'u';
const MARK: u8 = b'k';
const IMAGE: u8 = b'i';
const ALL: u8 = b'.';

/// Servers that users may name while the process serves.
const SERVERS_MAX: usize = 1024;

/// Orders.
pub(crate) const NORMAL: u8 = b'N';
pub(crate) const LAZY: u8 = b'L';
pub(crate) const FORCE: u8 = b'F';
pub(crate) const ABORT: u8 = b'A';
pub(crate) const UNLINK: u8 = b'R';
pub(crate) const CONNECT: u8 = b'C';
/// Begins to connect to the server of an NBD export: its endpoint.
pub(crate) const CONNECT_NBD: u8 = b'O';
pub(crate) const USERS: u8 = b'U';
/// A user's word, in a descriptor: see [`super::approval`].
pub(crate) const HEAR: u8 = b'H';
/// Words for the service manager, without an answer: see [`super::manager`].
pub(crate) const SAY: u8 = b'W';

/// What will have to be done.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tasks {
    /// Mountpoint and number of the connection.
    pub mount: Option<(PathBuf, u32)>,
    /// Files that go at the end.
    pub files: Vec<Named>,
    /// Sockets of front ends that listen.
    pub fronts: Vec<PathBuf>,
    /// Servers of NBD exports that are images, or lie below them.
    pub servers: Vec<NbdEndpoint>,
    /// Directories in which new overlays may be made, one for each disk.
    pub directories: Vec<Named>,
    /// Directories of `--allow-path`: new overlays may be made in them at any depth.
    pub trees: Vec<Named>,
    /// Who makes them, and owns them, where the serving process is not root any more.
    pub maker: Option<User>,
    /// Files of the chains: what may be written on a user's word, and named.
    pub images: Vec<Image>,
    /// What they are marked with, for the next process of a kept mount ([`crate::helper::mark`]);
    /// empty: nothing.
    pub mark: String,
}

/// What the numbers of the tasks meant when they were told.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The mount, to find out who uses it.
    place: Option<Place>,
    /// Aborts the mount's connection.
    abort: Option<Abort>,
    /// Descriptors of the files. While they are open no other file gets the number of one of these:
    /// an order may be carried out when the process that gave it is gone, and the next one has the
    /// name.
    pins: Vec<Option<OwnedFd>>,
    /// New overlays: what was made since is here, too.
    overlays: RefCell<Overlays>,
    /// Servers of exports that users have named since, as targets of mirrors or backups.
    servers: RefCell<Vec<NbdEndpoint>>,
}

impl Held {
    /// A user's word, which came with an order. The answer has the numbers of the file that is held
    /// because of it.
    ///
    /// * `server`: pid of the confined process, which cannot give its own word.
    pub(crate) fn hear(&self, word: Option<OwnedFd>, server: u32) -> Answer {
        let mut overlays = self.overlays.borrow_mut();
        let mut file = String::new();
        let heard = overlays.below.hear(word, server).and_then(|allows| match allows {
            Some(Allows::Target(path, id, format)) => {
                file = format!("{} {}", id.0, id.1);
                overlays.adopt(&path, id, format, Purpose::Top)
            }
            Some(Allows::Copy(path, id, format)) => {
                file = format!("{} {}", id.0, id.1);
                overlays.adopt(&path, id, format, Purpose::Copy)
            }
            Some(Allows::Servers(servers)) => {
                let mut known = self.servers.borrow_mut();
                let new = servers.into_iter().filter(|server| !known.contains(server));
                let new: Vec<_> = new.collect();
                if known.len() + new.len() > SERVERS_MAX {
                    return Err(Errno::DQUOT);
                }
                known.extend(new);
                Ok(())
            }
            _ => Ok(()),
        });
        match heard {
            Ok(()) => Answer::new(DONE, file),
            Err(errno) => Answer::new(REFUSED, errno.raw_os_error().to_string()),
        }
    }

    /// Whether the mount has ended: its number and its place may be those of another one by now.
    /// Where the kernel cannot be asked, the number at its place is what is left to go by, if the
    /// mount was seen there.
    fn is_gone(&self) -> bool {
        match &self.abort {
            Some(abort) => !abort.is_there(),
            None => self.place.as_ref().is_some_and(|place| !place.was_seen()),
        }
    }
}

/// The users of a mount in one message.
fn users(place: &Place) -> Answer {
    let all = mount_users::look(place);
    let fitting = [all.clone(), all.shortened()].into_iter().filter_map(|users| {
        serde_json::to_string(&users).ok().filter(|text| text.len() < MESSAGE_BYTES_MAX)
    });
    fitting.into_iter().next().map_or_else(Answer::refused, |text| Answer::new(DONE, text))
}

impl Tasks {
    /// The messages that tell of them.
    pub(crate) fn messages(&self) -> Vec<Vec<u8>> {
        let message = |letter: u8, path: &Path, numbers: &[u64]| {
            let mut message = vec![letter];
            message.extend_from_slice(path.as_os_str().as_bytes());
            for number in numbers {
                message.push(0);
                message.extend_from_slice(number.to_string().as_bytes());
            }
            message
        };
        let mount =
            self.mount.iter().map(|(path, number)| message(MOUNT, path, &[(*number).into()]));
        let files = self.files.iter().map(|(path, id)| message(FILE, path, &[id.0, id.1]));
        let fronts = self.fronts.iter().map(|path| message(FRONT, path, &[]));
        let servers = self.servers.iter().map(|server| {
            let name = server.to_string();
            message(SERVER, Path::new(&name), &[])
        });
        let directories =
            self.directories.iter().map(|(path, id)| message(DIRECTORY, path, &[id.0, id.1]));
        let trees = self.trees.iter().map(|(path, id)| message(TREE, path, &[id.0, id.1]));
        let mark = Some(&self.mark).filter(|mark| !mark.is_empty());
        let mark = mark.map(|mark| message(MARK, Path::new(mark), &[]));
        let maker = self
            .maker
            .iter()
            .map(|user| message(MAKER, Path::new(""), &[user.uid().into(), user.gid().into()]));
        let images =
            self.images.iter().map(|Image { named: (path, id), format, names, directory }| {
                let mut message = message(IMAGE, path, &[id.0, id.1]);
                let format = format.name().as_bytes();
                for text in [directory.as_os_str().as_bytes(), names.as_bytes(), format] {
                    message.push(0);
                    message.extend_from_slice(text);
                }
                message
            });
        // One that is longer is read, and never written.
        let images = images.filter(|message| message.len() <= MESSAGE_BYTES_MAX);
        mount
            .chain(images)
            .chain(files)
            .chain(fronts)
            .chain(servers)
            .chain(directories)
            .chain(trees)
            .chain(maker)
            .chain(mark)
            .chain([vec![ALL]])
            .collect()
    }

    /// Takes hold of what is meant, while it is there.
    pub(crate) fn hold(&self) -> Held {
        let place = self.mount.as_ref().map(|(path, number)| Place::of(path, *number));
        let abort = self.mount.as_ref().and_then(|(path, number)| mount::abort_of(path, *number));
        let pins = self.files.iter().map(|(path, id)| pin(path, *id)).collect();
        let overlays =
            Overlays::hold(&self.directories, &self.trees, self.maker, &self.mark, &self.images);
        Held { place, abort, pins, overlays: overlays.into(), ..Held::default() }
    }

    /// Takes one of these. Returns whether it was the last one; `None`: not one of ours.
    pub(crate) fn take(&mut self, message: &[u8]) -> Option<bool> {
        let (letter, fields) = message.split_first()?;
        let fields: Vec<&[u8]> = fields.split(|byte| *byte == 0).collect();
        let path = |field: &[u8]| PathBuf::from(OsStr::from_bytes(field));
        let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse::<u64>().ok();
        match (*letter, fields.as_slice()) {
            (MOUNT, [name, connection]) => {
                let connection = u32::try_from(number(connection)?).ok()?;
                self.mount = Some((path(name), connection));
            }
            (FILE, [name, device, inode]) => {
                self.files.push((path(name), (number(device)?, number(inode)?)));
            }
            (FRONT, [name]) => self.fronts.push(path(name)),
            (SERVER, [name]) => {
                self.servers.push(std::str::from_utf8(name).ok()?.parse().ok()?);
            }
            (DIRECTORY, [name, device, inode]) => {
                self.directories.push((path(name), (number(device)?, number(inode)?)));
            }
            (TREE, [name, device, inode]) => {
                self.trees.push((path(name), (number(device)?, number(inode)?)));
            }
            (IMAGE, [name, device, inode, directory, names, format]) => {
                let named = (path(name), (number(device)?, number(inode)?));
                let names = std::str::from_utf8(names).ok()?.to_owned();
                let format = std::str::from_utf8(format).ok()?.parse().ok()?;
                self.images.push(Image { named, format, names, directory: path(directory) });
            }
            (MAKER, [[], user, group]) => {
                let numbers = [number(user)?, number(group)?].map(u32::try_from);
                let [Ok(user), Ok(group)] = numbers else { return None };
                self.maker = Some(User::new(user, group)?);
            }
            (MARK, [mark]) => mark_of(mark)?.clone_into(&mut self.mark),
            (ALL, [[]]) => return Some(true),
            _ => return None,
        }
        Some(false)
    }

    /// Does what an order asks for.
    ///
    /// * `held`: as the tasks were told.
    pub(crate) fn carry_out(&self, order: &[u8], held: &Held) -> Answer {
        let Some((what, name)) = order.split_first() else { return Answer::refused() };
        if let Some(answer) = held.overlays.borrow_mut().carry_out(*what, name) {
            return answer;
        }
        let name = Path::new(OsStr::from_bytes(name));
        if b"NLFAU".contains(what) && held.is_gone() {
            return Answer::new(DONE, "");
        }
        let abort = || held.abort.as_ref().is_some_and(Abort::abort);
        match (*what, &self.mount) {
            (NORMAL, Some(mount)) => unmount(mount, Unmount::Normal),
            (LAZY, Some(mount)) => unmount(mount, Unmount::Lazy),
            (FORCE, Some(mount)) => {
                abort();
                unmount(mount, Unmount::Force)
            }
            (ABORT, Some(_)) => Answer::new(if abort() { DONE } else { REFUSED }, ""),
            (USERS, _) => held.place.as_ref().map_or_else(Answer::refused, users),
            (UNLINK, _) => {
                let file = self.files.iter().position(|(path, _)| path == name);
                file.map_or_else(Answer::refused, |index| {
                    let (path, id) = &self.files[index];
                    unlink(path, *id, held.pins.get(index).is_some_and(Option::is_some))
                })
            }
            (CONNECT, _) => {
                let front = self.fronts.iter().find(|path| *path == name);
                front.map_or_else(Answer::refused, |path| connect(path))
            }
            (CONNECT_NBD, _) => {
                let asked = name.to_str().and_then(|name| name.parse().ok());
                let named = held.servers.borrow();
                let mut servers = self.servers.iter().chain(&*named);
                let server = servers.find(|server| Some(*server) == asked.as_ref());
                server.map_or_else(Answer::refused, connect_nbd)
            }
            _ => Answer::refused(),
        }
    }
}

/// Digits and letters only.
fn mark_of(field: &[u8]) -> Option<&str> {
    let is_plain = !field.is_empty() && field.iter().all(u8::is_ascii_alphanumeric);
    std::str::from_utf8(field).ok().filter(|_| is_plain)
}

fn unmount((mountpoint, connection): &(PathBuf, u32), how: Unmount) -> Answer {
    match mount::remove(mountpoint, *connection, how) {
        Ok(()) => Answer::new(DONE, ""),
        Err(error) if error.kind() == ErrorKind::Busy => {
            Answer::new(BUSY, error.with_hint().to_string())
        }
        Err(error) => Answer::new(REFUSED, error.with_hint().to_string()),
    }
}

/// Removes a file if its name still leads to it, and if it is one that a server makes: a socket, a
/// mountpoint, which is empty, or a pid file. A predecessor may have named
/// a user's file as the mountpoint.
///
/// * `is_pinned`: no other file can have its number. One that is not, as what lies below a mount,
///   goes only if it is the empty file that was made there.
fn unlink(path: &Path, id: (u64, u64), is_pinned: bool) -> Answer {
    // The process inside cannot: nobody there shall keep others waiting.
    let _lock =
        path.parent().and_then(|directory| directory_lock::lock(directory, directory_lock::END));
    let found = fs::symlink_metadata(path);
    let is_it = |meta: &fs::Metadata| (meta.dev(), meta.ino()) == id;
    if found.as_ref().is_ok_and(|meta| is_it(meta) && meta.is_file() && !is_made(path, meta)) {
        return Answer::new(REFUSED, "it holds something");
    }
    let goes =
        |meta: &fs::Metadata| is_it(meta) && (is_pinned || meta.is_file() && meta.len() == 0);
    match found.and_then(|meta| if goes(&meta) { fs::remove_file(path) } else { Ok(()) }) {
        Ok(()) => Answer::new(DONE, ""),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Answer::new(DONE, ""),
        Err(error) => Answer::new(REFUSED, error.to_string()),
    }
}

/// Whether a regular file holds nothing, or a pid.
fn is_made(path: &Path, meta: &fs::Metadata) -> bool {
    meta.len() == 0
        || meta.len() <= pid_text::CONTENT_BYTES_MAX as u64
            && fs::read(path).is_ok_and(|content| pid_text::is_pid(&content))
}

/// Begins to connect, without waiting. The words of a failure are the number of its errno.
fn connect_nbd(server: &NbdEndpoint) -> Answer {
    match server.begin() {
        Ok(socket) => Answer { fd: Some(socket), ..Answer::new(DONE, "") },
        Err(errno) => Answer::new(REFUSED, errno.raw_os_error().to_string()),
    }
}

/// Connects, without waiting for a front end that is busy.
fn connect(path: &Path) -> Answer {
    let connected = || -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect_to(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    };
    match connected() {
        Ok(socket) => Answer { fd: Some(socket), ..Answer::new(DONE, "") },
        Err(errno) => Answer::new(REFUSED, io::Error::from(errno).to_string()),
    }
}

#[cfg(test)]
mod tests;
