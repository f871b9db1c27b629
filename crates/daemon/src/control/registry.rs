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
const STALE_LOOKS_MAX: usize = 1024;

/// A socket that is not complete yet may be another start's; after so long it is not.
const UNFINISHED: Duration = Duration::from_secs(60);

/// A process that was killed closes its sockets one after the other, and has them until then.
const DYING: Duration = Duration::from_secs(2);
/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(20);

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

/// The user who started this process, whoever it has become since (`--user`): the owner of its
/// sockets, and with root the only one whom they obey.
pub fn user() -> u32 {
    static USER: OnceLock<u32> = OnceLock::new();
    *USER.get_or_init(|| rustix::process::geteuid().as_raw())
}

/// What the names of the sockets of disks for virtual machines begin with.
const DISK: &str = "disk-";
/// What second names of the sockets of mounts begin with.
const PATH: &str = "path-";
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

/// Where everybody may make directories.
const TEMPORARY: &str = "/tmp";

/// The name of a user's directory there.
fn temporary(user: u32) -> String {
    format!("ringdisk-{user}")
}

/// A user's further directories in `root`: somebody else may have been the first to make the one
/// with the plain name, so that the user's own has a name that nobody foresees. In the order of
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
                std::thread::sleep(LOOK);
            }
            result => return result,
        }
    }
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
        return refuse("it belongs to somebody else");
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
    for entry in entries.flatten().take(STALE_LOOKS_MAX) {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_old = || {
            let age = entry.metadata().and_then(|meta| meta.modified()).ok();
            age.and_then(|at| SystemTime::now().duration_since(at).ok())
                .is_some_and(|age| age > UNFINISHED)
        };
        let ours = name.ends_with(".sock")
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
mod tests {
    use std::os::unix::fs::FileTypeExt;

    use super::*;

    const NAME: &str = "mount-0-77.sock";

    fn scratch() -> tempfile::TempDir {
        tempfile::Builder::new()
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
            .expect("a directory")
    }

    #[test]
    fn a_socket_is_ours_alone_and_goes_with_its_server() {
        let directory = scratch();
        let place = directory.path().join("ringdisk");
        let listening = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
        let path = place.join("mount-0-77.sock");
        let meta = fs::symlink_metadata(&path).expect("there");
        assert!(meta.file_type().is_socket());
        assert_eq!(meta.mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&place).expect("there").mode() & 0o777, 0o700);
        assert!(UnixStream::connect(&path).is_ok());
        drop(listening);
        assert_eq!(fs::read_dir(&place).expect("there").count(), 0);
    }

    #[test]
    fn the_next_server_under_the_same_name_keeps_it() {
        let directory = scratch();
        let place = directory.path().to_owned();
        let first = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
        let second = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
        drop(first);
        assert!(UnixStream::connect(place.join("mount-0-77.sock")).is_ok());
        drop(second);
        assert_eq!(fs::read_dir(&place).expect("there").count(), 0);
    }

    #[test]
    fn a_second_name_leads_to_the_last_server_and_goes_with_it() {
        let directory = scratch();
        let place = directory.path().to_owned();
        let name = name_of_path(Path::new("/srv/disk"));
        let mut first = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
        first.add_name(&name);
        assert!(connect_now(&place.join(&name)).is_ok());
        let mut second =
            listen_in(std::slice::from_ref(&place), "mount-0-78.sock").expect("listens");
        second.add_name(&name);
        assert_eq!(second.all_named().len(), 2);
        drop(first);
        assert!(connect_now(&place.join(&name)).is_ok(), "that of the second one");
        drop(second);
        assert_eq!(fs::read_dir(&place).expect("there").count(), 0);
    }

    #[test]
    fn a_disk_is_found_by_any_way_to_its_socket_and_served_by_one_process() {
        let directory = scratch();
        let (real, link) = (directory.path().join("real"), directory.path().join("link"));
        fs::create_dir(&real).expect("mkdir");
        std::os::unix::fs::symlink(&real, &link).expect("symlink");
        let name = |path: PathBuf| name_of_disk(&real_path(&path).expect("a directory"));
        assert_eq!(name(real.join("vm.sock")), name(link.join("./vm.sock")));
        assert_ne!(name(real.join("vm.sock")), name(real.join("vm2.sock")));
        assert!(real_path(&directory.path().join("none/vm.sock")).is_err());
        let name = name(real.join("vm.sock"));
        let places = [directory.path().to_owned(), directory.path().join("next")];
        let first = listen_in(&places, &name).expect("listens");
        // Nor is it made where clients look later.
        let error = listen_in(&places, &name).expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("another process"), "{error}");
        assert!(!places[1].join(&name).exists());
        drop(first);
        listen_in(&places, &name).expect("listens again");
    }

    #[test]
    fn what_a_dead_server_left_is_removed_and_a_living_one_is_not() {
        let directory = scratch();
        let place = directory.path().to_owned();
        drop(UnixListener::bind(place.join("mount-0-1.sock")).expect("bind"));
        drop(UnixListener::bind(place.join("disk-1.sock")).expect("bind"));
        drop(UnixListener::bind(place.join("upgrade-disk-1.sock")).expect("bind"));
        drop(UnixListener::bind(place.join("mount-0-77.sock")).expect("bind"));
        let alive = UnixListener::bind(place.join("mount-0-2.sock")).expect("bind");
        fs::write(place.join("notes.txt"), "mine").expect("write");
        let listening = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
        let mut names: Vec<_> = fs::read_dir(&place)
            .expect("there")
            .map(|entry| entry.expect("readable").file_name().into_string().expect("text"))
            .collect();
        names.sort();
        assert_eq!(names, ["mount-0-2.sock", "mount-0-77.sock", "notes.txt"]);
        drop((alive, listening));
    }

    #[test]
    fn a_directory_that_others_can_enter_is_passed_over() {
        let directory = scratch();
        let open = directory.path().join("open");
        let link = directory.path().join("link");
        let good = directory.path().join("good");
        fs::create_dir(&open).expect("mkdir");
        fs::set_permissions(&open, Permissions::from_mode(0o755)).expect("chmod");
        std::os::unix::fs::symlink(directory.path(), &link).expect("symlink");
        let long = directory.path().join("x".repeat(100));
        let all = [open.clone(), link, long, good.clone()];
        let listening = listen_in(&all, NAME).expect("listens");
        assert!(good.join("mount-0-77.sock").exists());
        assert!(listen_in(&all[..3], NAME).is_err());
        drop(listening);
    }

    #[test]
    fn links_lead_to_no_other_server() {
        let directory = scratch();
        let path = |name: &str| directory.path().join(name);
        for name in ["theirs", "ours"] {
            fs::create_dir(path(name)).expect("mkdir");
        }
        let _ours = UnixListener::bind(path("ours/mount-0-1.sock")).expect("bind");
        std::os::unix::fs::symlink("../ours/mount-0-1.sock", path("theirs/mount-0-77.sock"))
            .expect("a link");
        std::os::unix::fs::symlink("ours", path("linked")).expect("a link");
        fs::write(path("ours/file"), "").expect("write");
        assert!(connect_now(&path("ours/mount-0-1.sock")).is_ok());
        for name in ["theirs/mount-0-77.sock", "linked/mount-0-1.sock", "ours/file"] {
            assert!(connect_now(&path(name)).is_err(), "{name}");
            assert!(!is_dead(&path(name)), "{name}");
        }
        let gone = connect_now(&path("ours/gone")).expect_err("gone");
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_lock_that_others_keep_is_waited_for_and_then_done_without() {
        let directory = scratch();
        let place = directory.path().to_owned();
        drop(UnixListener::bind(place.join("mount-0-1.sock")).expect("bind"));
        let kept = fs::File::open(&place).expect("a directory");
        rustix::fs::flock(&kept, rustix::fs::FlockOperation::LockExclusive).expect("a lock");
        let mut listening = listen_in(std::slice::from_ref(&place), NAME).expect("listens");
        listening.add_name("path-1.sock");
        assert!(connect_now(&place.join(NAME)).is_ok());
        assert!(place.join("mount-0-1.sock").exists(), "names are not judged without the lock");
        drop(listening);
        assert!(!place.join(NAME).exists() && !place.join("path-1.sock").exists());
    }

    #[test]
    fn somebody_who_takes_the_directory_first_does_not_take_the_control_socket_away() {
        let directory = scratch();
        let root = directory.path();
        // Others may look into it: it may as well be theirs.
        let taken = root.join(temporary(user()));
        fs::create_dir(&taken).expect("mkdir");
        fs::set_permissions(&taken, Permissions::from_mode(0o755)).expect("chmod");
        fs::create_dir(root.join(format!("{}-open", temporary(user())))).expect("mkdir");
        let places = [taken.clone()];
        let first = listen_somewhere(&places, root, NAME).expect("listens");
        let further = further(root, user());
        let [place] = further.as_slice() else { panic!("{further:?}") };
        assert!(connect_now(&place.join(NAME)).is_ok());
        // The next one uses it, too.
        let second = listen_somewhere(&places, root, "mount-0-78.sock").expect("listens");
        assert!(connect_now(&place.join("mount-0-78.sock")).is_ok());
        drop((first, second));
        assert_eq!(fs::read_dir(place).expect("there").count(), 0);
        assert_eq!(fs::read_dir(&taken).expect("there").count(), 0);
    }

    #[test]
    fn directories_depend_on_the_user() {
        let text = |user, runtime: Option<&str>| -> Vec<String> {
            let all = directories(user, runtime.map(Path::new));
            all.iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(
            text(1000, Some("/run/user/1000")),
            ["/run/user/1000/ringdisk", "/tmp/ringdisk-1000"]
        );
        assert_eq!(text(0, None), ["/run/user/0/ringdisk", "/run/ringdisk", "/tmp/ringdisk-0"]);
        assert_eq!(text(5, Some("relative")), ["/run/user/5/ringdisk", "/tmp/ringdisk-5"]);
    }
}
