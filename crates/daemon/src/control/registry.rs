//! Where the control sockets are, and how they are called.
//!
//! Promises: a socket is made in a directory that belongs to us and that nobody else may write; it
//! appears under its name complete (listening, mode 0600); what dead servers left is removed, what
//! living ones use is not.
//!
//! The socket of a mount is named after the number of the FUSE connection, which the kernel gives
//! to one mount at a time, so a mount is found by its path whichever way that is written, and never
//! mistaken for another. It has a second name after that path, by which the server is found when
//! its mount has left the tree (a stop that waits for users) or is covered by another one. That of
//! a disk for a virtual machine is named after the path of its vhost-user socket, which only one
//! process serves at a time.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use ringdisk_fuse::mount::table::MountEntry;
use rustix::fs::{FileType, Mode, OFlags, fchmod, fstat, openat};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::directory_lock::{self, lock};
use crate::helper;

/// Longest path of a socket, bytes: `sun_path` (unix(7)) less the final zero.
pub const PATH_BYTES_MAX: usize = 107;

/// Sockets that one start looks at for having been left: enough for any machine, and no work
/// without end.
const STALE_SOCKETS_MAX: usize = 1024;

/// A socket that is not complete yet may be another start's; after so long it is not.
const UNFINISHED: Duration = Duration::from_secs(60);

/// A process that was killed closes its sockets one after the other, and has them until then.
const DYING: Duration = Duration::from_secs(2);
/// How often it is looked at meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Clients that may wait to be taken.
const BACKLOG: i32 = 128;

/// Our directory below those that the system gives.
const DIRECTORY: &str = "ringdisk";

/// A listening socket under its name; dropping it removes the name.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub listener: UnixListener,
    path: PathBuf,
    /// A second name of it.
    other: Option<PathBuf>,
    /// Device and inode number of the socket, which keeps them as long as it is open.
    identity: (u64, u64),
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Inside a sandbox the directory cannot be opened, and the helper process locks it.
        let _lock = self.path.parent().and_then(|directory| lock(directory, directory_lock::END));
        // Our mount is gone and its number given away: the names may be the next one's already.
        for path in self.names() {
            if helper::may_be(path, self.identity) {
                let _ = helper::remove_file(path);
            }
        }
    }
}

impl Listening {
    fn names(&self) -> impl Iterator<Item = &PathBuf> {
        std::iter::once(&self.path).chain(&self.other)
    }

    /// Its first name, with device and inode number.
    pub fn named(&self) -> helper::Named {
        (self.path.clone(), self.identity)
    }

    /// All of its names, the first one first.
    pub fn all_named(&self) -> Vec<helper::Named> {
        self.names().map(|path| (path.clone(), self.identity)).collect()
    }

    /// Gives it a second name, beside the first, which another server that had it loses. Nothing
    /// else fails without one.
    pub fn add_name(&mut self, name: &str) {
        let other = self.path.with_file_name(name);
        let unfinished = self.path.with_file_name(format!("new-{}.sock", std::process::id()));
        // A hard link: one that was left leads to a socket that nobody has, never to another
        // server.
        let add = || -> io::Result<()> {
            let _lock =
                self.path.parent().and_then(|directory| lock(directory, directory_lock::START));
            let _ = fs::remove_file(&unfinished);
            fs::hard_link(&self.path, &unfinished)?;
            fs::rename(&unfinished, &other)
        };
        match add() {
            Ok(()) => self.other = Some(other),
            Err(error) => {
                let _ = fs::remove_file(&unfinished);
                tracing::debug!("no second name for the control socket: {error}");
            }
        }
    }
}

/// Device and inode number of what has this name.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// The user who started this process, also after it has become another one (`--user`): the owner of
/// its sockets, and besides root the only user whom they obey.
pub fn user() -> u32 {
    static USER: OnceLock<u32> = OnceLock::new();
    *USER.get_or_init(|| rustix::process::geteuid().as_raw())
}

/// What the names of the sockets of disks for virtual machines begin with.
const DISK: &str = "disk-";
/// What second names of the sockets of mounts begin with.
const PATH: &str = "path-";
/// What the names of sockets for readers of checkpoints begin with.
const READERS: &str = "nbd-";
/// What the names of the sockets for their successors begin with.
const UPGRADE: &str = "upgrade-";

/// The name of the socket of a mount.
pub fn name_of_mount(device: (u32, u32)) -> String {
    format!("mount-{}-{}.sock", device.0, device.1)
}

/// The name of the socket of a disk for virtual machines.
///
/// * `path`: of its vhost-user socket, as [`real_path`] gives it.
pub fn name_of_disk(path: &Path) -> String {
    format!("{DISK}{}.sock", hash(path))
}

/// The second name of the socket of a mount.
///
/// * `path`: of the mountpoint, absolute, without symbolic links.
pub fn name_of_path(path: &Path) -> String {
    format!("{PATH}{}.sock", hash(path))
}

/// Whether a server of ours was mounted at this path last, and still serves.
pub fn is_served(mountpoint: &Path) -> bool {
    candidates(&name_of_path(mountpoint), user()).iter().any(|path| connect_now(path).is_ok())
}

/// Connects to a socket without waiting for its server. Neither the name nor its directory may be a
/// link: the directory can be another user's, and a link there could lead to any server of ours,
/// which then did what was meant for his.
///
/// Errors: nobody listens; it is no socket; `WouldBlock` when too many wait already.
pub fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let held = hold(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", held.as_raw_fd()))?;
    connect(&socket, &address)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// The socket that a name means itself.
fn hold(path: &Path) -> io::Result<OwnedFd> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags | OFlags::DIRECTORY, Mode::empty())?;
    let held = openat(directory, name, flags, Mode::empty())?;
    match FileType::from_raw_mode(fstat(&held)?.st_mode) {
        FileType::Socket => Ok(held),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no socket")),
    }
}

/// A path as text for a name.
fn hash(path: &Path) -> String {
    /// FNV-1a, 128 bits: the same in all versions, and short enough for any directory.
    const START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = path.as_os_str().as_bytes();
    let hash =
        bytes.iter().fold(START, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME));
    format!("{hash:032x}")
}

/// The name of the socket for the process that takes such a disk over.
///
/// * `path`: as [`name_of_disk`] takes it.
pub fn name_for_successor(path: &Path) -> String {
    format!("{UPGRADE}{}", name_of_disk(path))
}

/// The name of the socket for the process that takes such a mount over.
pub fn name_for_successor_of_mount(device: (u32, u32)) -> String {
    format!("{UPGRADE}{}", name_of_mount(device))
}

/// A path without links and dots in its directory, whether there is such a file or not.
///
/// Errors: there is no such directory.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    if let Ok(real) = path.canonicalize() {
        return Ok(real);
    }
    let path = std::path::absolute(path)?;
    match (path.parent(), path.file_name()) {
        (Some(directory), Some(name)) => Ok(directory.canonicalize()?.join(name)),
        _ => Ok(path),
    }
}

/// Whose mount this is: `user_id=` of its options.
pub fn owner_of(mount: &MountEntry) -> Option<u32> {
    let mut options = mount.super_options.split(',');
    options.find_map(|option| option.strip_prefix("user_id="))?.parse().ok()
}

/// Directories of a user's sockets, the best first.
///
/// * `runtime`: `$XDG_RUNTIME_DIR`, if it is known.
fn directories(user: u32, runtime: Option<&Path>) -> Vec<PathBuf> {
    let mut all = Vec::new();
    if let Some(runtime) = runtime.filter(|path| path.is_absolute()) {
        all.push(runtime.join(DIRECTORY));
    }
    all.push(PathBuf::from(format!("/run/user/{user}")).join(DIRECTORY));
    if user == 0 {
        all.push(Path::new("/run").join(DIRECTORY));
    }
    all.push(Path::new(TEMPORARY).join(temporary(user)));
    all.dedup();
    all
}

/// Where all users may make directories.
const TEMPORARY: &str = "/tmp";

/// The name of a user's directory there.
fn temporary(user: u32) -> String {
    format!("ringdisk-{user}")
}

/// A user's further directories in `root`: another user may have been the first to make the one
/// with the plain name, so that the user's own has a name that cannot be foreseen. In the order of
/// their names.
fn further(root: &Path, user: u32) -> Vec<PathBuf> {
    let beginning = format!("{}-", temporary(user));
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let is_ours = |path: &PathBuf| {
        let meta = fs::symlink_metadata(path);
        meta.is_ok_and(|meta| meta.is_dir() && meta.uid() == user && meta.mode() & 0o077 == 0)
    };
    let names = entries.flatten().filter(|entry| {
        entry.file_name().to_str().is_some_and(|name| name.starts_with(&beginning))
    });
    let mut all: Vec<PathBuf> = names.map(|entry| entry.path()).filter(is_ours).collect();
    all.sort();
    all
}

/// Makes a further directory in `root`.
fn make_further(root: &Path, user: u32) -> io::Result<PathBuf> {
    let beginning = format!("{}-", temporary(user));
    let ours = Permissions::from_mode(0o700);
    let made = tempfile::Builder::new().prefix(&beginning).permissions(ours).tempdir_in(root)?;
    Ok(made.keep())
}

fn runtime_directory() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
}

/// Whether a directory belongs to us. The runtime directory may be that of the user who called su,
/// and what we make there he can replace.
fn is_ours(directory: &Path) -> bool {
    fs::metadata(directory).is_ok_and(|meta| meta.uid() == user())
}

/// A control socket of a disk, in use or left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its first name.
    pub path: PathBuf,
    /// The user whose directory it is in.
    pub owner: u32,
    /// Number of the FUSE connection, of a mount.
    pub connection: Option<u32>,
    /// When it was made.
    pub made: Option<SystemTime>,
}

/// The control sockets of this user's disks.
///
/// * `everyone`: those of all users, as root finds them.
pub fn all(everyone: bool) -> Vec<Found> {
    let runtime = runtime_directory();
    let mut all = directories(user(), runtime.as_deref());
    all.extend(further(Path::new(TEMPORARY), user()));
    if everyone {
        let below = |root: &str| -> Vec<PathBuf> {
            let entries = fs::read_dir(root).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect()
        };
        all.extend(below("/run/user").into_iter().map(|path| path.join(DIRECTORY)));
        let begins = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("ringdisk-"))
        };
        all.extend(below(TEMPORARY).into_iter().filter(begins));
    }
    all.sort();
    all.dedup();
    all.iter().flat_map(|directory| found_in(directory, everyone)).collect()
}

/// The control sockets in one directory, which belongs to its users alone.
fn found_in(directory: &Path, everyone: bool) -> Vec<Found> {
    let Ok(meta) = fs::symlink_metadata(directory) else { return Vec::new() };
    let is_private = meta.is_dir() && meta.mode() & 0o077 == 0;
    if !is_private || !(everyone || meta.uid() == user()) {
        return Vec::new();
    }
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<Found> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let connection =
                name.strip_prefix("mount-0-").and_then(|name| name.strip_suffix(".sock"));
            let is_first = connection.is_some() || name.starts_with(DISK);
            let made = entry.metadata().and_then(|meta| meta.modified()).ok();
            let connection = connection.and_then(|number| number.parse().ok());
            is_first.then(|| Found { path: entry.path(), owner: meta.uid(), connection, made })
        })
        .collect();
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Where a socket of `owner` may be, for a client.
pub fn candidates(name: &str, owner: u32) -> Vec<PathBuf> {
    let runtime = runtime_directory();
    let mut all = directories(owner, runtime.as_deref());
    all.extend(further(Path::new(TEMPORARY), owner));
    all.iter_mut().for_each(|directory| directory.push(name));
    all
}

/// Makes the socket of a mount or a disk of ours.
///
/// * `name`: as [`name_of_mount`] and [`name_of_disk`] give it.
///
/// Errors: why none of the directories will do; another process has the name, and does not end
/// within [`DYING`].
pub fn listen(name: &str) -> io::Result<Listening> {
    let runtime = runtime_directory().filter(|directory| is_ours(directory));
    let directories = directories(user(), runtime.as_deref());
    let end = Instant::now() + DYING;
    loop {
        match listen_somewhere(&directories, Path::new(TEMPORARY), name) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < end => {
                std::thread::sleep(POLL_INTERVAL);
            }
            result => return result,
        }
    }
}

/// The path of a socket for readers of a checkpoint, in the first directory of ours that there is
/// or can be made; sockets there that nobody listens to go.
///
/// * `name`: of the checkpoint, at most 48 bytes.
/// * `number`: makes it unique.
///
/// Errors: why none of the directories will do.
pub fn reader_socket(name: &str, number: &str) -> io::Result<PathBuf> {
    let runtime = runtime_directory().filter(|directory| is_ours(directory));
    let mut why = io::Error::from(io::ErrorKind::NotFound);
    for directory in directories(user(), runtime.as_deref()) {
        if let Err(error) = prepare(&directory) {
            why = io::Error::new(error.kind(), format!("'{}': {error}", directory.display()));
            continue;
        }
        if lock(&directory, directory_lock::START).is_some() {
            remove_stale(&directory);
        }
        return Ok(directory.join(format!("{READERS}{name}-{number}.sock")));
    }
    Err(why)
}

/// Whether a socket was left: nobody listens to it.
pub fn is_left(path: &Path) -> bool {
    is_dead(path)
}

/// Makes the socket in one of `directories`, or in a further one in `root`.
fn listen_somewhere(directories: &[PathBuf], root: &Path, name: &str) -> io::Result<Listening> {
    let why = match listen_in(directories, name) {
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => error,
        done => return done,
    };
    let mut further = further(root, user());
    if further.is_empty() {
        // The first reason tells more.
        let Ok(made) = make_further(root, user()) else { return Err(why) };
        further.push(made);
    }
    listen_in(&further, name).map_err(|_| why)
}

fn listen_in(directories: &[PathBuf], name: &str) -> io::Result<Listening> {
    let mut why = io::Error::from(io::ErrorKind::NotFound);
    for directory in directories {
        let result = prepare(directory).and_then(|()| {
            // One process at a time changes the names in a directory: the number of a mount that is
            // gone is given to the next, so a name that was seen to be dead may be another's a
            // moment later.
            let lock = lock(directory, directory_lock::START);
            if lock.is_some() {
                remove_stale(directory);
            }
            bind(directory, name)
        });
        match result {
            Ok(listening) => return Ok(listening),
            Err(error) => {
                let is_taken = error.kind() == io::ErrorKind::AddrInUse;
                let text = format!("'{}': {error}", directory.display());
                tracing::debug!("no control socket in {text}");
                why = io::Error::new(error.kind(), text);
                // Clients would find the other one first.
                if is_taken {
                    break;
                }
            }
        }
    }
    Err(why)
}

/// Makes a directory of ours, or sees that the one that is there is ours alone.
fn prepare(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let meta = fs::symlink_metadata(directory)?;
    let refuse = |text| Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    if !meta.is_dir() {
        return refuse("it is no directory");
    }
    if meta.uid() != user() {
        return refuse("it belongs to another user");
    }
    if meta.mode() & 0o077 != 0 {
        return refuse("others may look into it");
    }
    Ok(())
}

/// Listens under a name.
fn bind(directory: &Path, name: &str) -> io::Result<Listening> {
    let path = directory.join(name);
    let unfinished = directory.join(format!("new-{}.sock", std::process::id()));
    let longest = path.as_os_str().len().max(unfinished.as_os_str().len());
    if longest > PATH_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "its path is too long"));
    }
    // Nothing but us sees to it that a path is served once.
    if name.starts_with(DISK) && path.exists() && !is_dead(&path) {
        return Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "another process has the control socket of this disk",
        ));
    }
    let _ = fs::remove_file(&unfinished);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets this mode when it is made, less the umask: afterwards the name may be another
    // file's.
    fchmod(&socket, Mode::from_raw_mode(0o600))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(&unfinished)?)?;
    let finish = || {
        // Before it has its name: nobody sees a socket that refuses and takes it for a dead one.
        rustix::net::listen(&socket, BACKLOG)?;
        // A name that is there already was left: the kernel gives its number to our mount now.
        fs::rename(&unfinished, &path)?;
        identity(&path)
    };
    match finish() {
        Ok(identity) => {
            let listener = UnixListener::from(socket);
            Ok(Listening { listener, path, other: None, identity })
        }
        Err(error) => {
            let _ = fs::remove_file(&unfinished);
            Err(error)
        }
    }
}

/// Removes sockets that nobody listens to.
fn remove_stale(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten().take(STALE_SOCKETS_MAX) {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_old = || {
            let age = entry.metadata().and_then(|meta| meta.modified()).ok();
            age.and_then(|at| SystemTime::now().duration_since(at).ok())
                .is_some_and(|age| age > UNFINISHED)
        };
        // Of further processes of a checkpoint, more follows.
        let ours = name.starts_with(READERS)
            || name.ends_with(".sock")
                && (name.starts_with("mount-")
                    || name.starts_with(DISK)
                    || name.starts_with(PATH)
                    || name.starts_with(UPGRADE)
                    || (name.starts_with("new-") && is_old()));
        if ours && is_dead(&entry.path()) {
            tracing::debug!("'{}' was left by a server that is gone", entry.path().display());
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether nobody listens to a socket.
fn is_dead(path: &Path) -> bool {
    // A server whose queue is full answers EAGAIN.
    connect_now(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests;
