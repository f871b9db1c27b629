//! Where the control sockets are, and how they are called.
//!
//! Promises: a socket is made in a directory that belongs to us and that nobody else may write; it
//! appears under its name complete (listening, mode 0600); what dead servers left is removed, what
//! living ones use is not.
//!
//! A socket is named after the number of the FUSE connection, which the kernel gives to one mount at
//! a time, so a mount is found by its path whichever way that is written, and never mistaken for
//! another.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ringdisk_fuse::mount::table::MountEntry;
use rustix::fs::{FlockOperation, flock};

use crate::sandbox;

/// Longest path of a socket, bytes: `sun_path` (unix(7)) less the final zero.
const PATH_BYTES_MAX: usize = 107;

/// Sockets that one start looks at for having been left: enough for any machine, and no work without end.
const STALE_LOOKS_MAX: usize = 1024;

/// A socket that is not complete yet may be another start's; after so long it is not.
const UNFINISHED: Duration = Duration::from_secs(60);

/// Our directory below those that the system gives.
const DIRECTORY: &str = "ringdisk";

/// A listening socket under its name; dropping it removes the name.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    /// Device and inode number of the socket.
    identity: (u64, u64),
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _lock = self.path.parent().and_then(|directory| lock(directory).ok());
        // Our mount is gone and its number given away: the name may be the next one's already.
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            let _ = sandbox::remove_file(&self.path);
        }
    }
}

impl Listening {
    /// Its name, with device and inode number.
    pub(crate) fn named(&self) -> sandbox::Named {
        (self.path.clone(), self.identity)
    }
}

/// Device and inode number of what has this name.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// One process at a time changes the names in a directory: the number of a mount that is gone is given to
/// the next, so a name that was seen to be dead may be another's a moment later. Held until dropped.
fn lock(directory: &Path) -> io::Result<fs::File> {
    let lock = fs::File::open(directory)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    Ok(lock)
}

/// Effective user.
pub(crate) fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The name of the socket of a mount.
fn name_of(device: (u32, u32)) -> String {
    format!("mount-{}-{}.sock", device.0, device.1)
}

/// Whose mount this is: `user_id=` of its options.
pub(crate) fn owner_of(mount: &MountEntry) -> Option<u32> {
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
    all.push(PathBuf::from(format!("/tmp/ringdisk-{user}")));
    all.dedup();
    all
}

fn runtime_directory() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
}

/// Where the socket of a mount of `owner` may be, for a client.
pub(crate) fn candidates(device: (u32, u32), owner: u32) -> Vec<PathBuf> {
    let runtime = runtime_directory();
    let mut all = directories(owner, runtime.as_deref());
    all.iter_mut().for_each(|directory| directory.push(name_of(device)));
    all
}

/// Makes the socket of a mount of ours.
///
/// Errors: why none of the directories will do.
pub(crate) fn listen(device: (u32, u32)) -> io::Result<Listening> {
    let runtime = runtime_directory();
    listen_in(&directories(user(), runtime.as_deref()), device)
}

fn listen_in(directories: &[PathBuf], device: (u32, u32)) -> io::Result<Listening> {
    let mut why = io::Error::from(io::ErrorKind::NotFound);
    for directory in directories {
        let result = prepare(directory).and_then(|()| {
            let _lock = lock(directory)?;
            remove_stale(directory);
            bind(directory, &name_of(device))
        });
        match result {
            Ok(listening) => return Ok(listening),
            Err(error) => {
                let text = format!("'{}': {error}", directory.display());
                tracing::debug!("no control socket in {text}");
                why = io::Error::new(error.kind(), text);
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
    let _ = fs::remove_file(&unfinished);
    // Listening before it has its name: nobody sees a socket that refuses and takes it for a dead one.
    let listener = UnixListener::bind(&unfinished)?;
    let finish = || {
        listener.set_nonblocking(true)?;
        fs::set_permissions(&unfinished, Permissions::from_mode(0o600))?;
        // A name that is there already was left: the kernel gives its number to our mount now.
        fs::rename(&unfinished, &path)?;
        identity(&path)
    };
    match finish() {
        Ok(identity) => Ok(Listening { listener, path, identity }),
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
            && (name.starts_with("mount-") || (name.starts_with("new-") && is_old()));
        if ours && is_dead(&entry.path()) {
            tracing::debug!("'{}' was left by a server that is gone", entry.path().display());
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether nobody listens to a socket.
fn is_dead(path: &Path) -> bool {
    // A server whose queue is full answers EAGAIN or makes us wait; none of ours has a full one for long.
    UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileTypeExt;

    const DEVICE: (u32, u32) = (0, 77);

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
        let listening = listen_in(std::slice::from_ref(&place), DEVICE).expect("listens");
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
        let first = listen_in(std::slice::from_ref(&place), DEVICE).expect("listens");
        let second = listen_in(std::slice::from_ref(&place), DEVICE).expect("listens");
        drop(first);
        assert!(UnixStream::connect(place.join("mount-0-77.sock")).is_ok());
        drop(second);
        assert_eq!(fs::read_dir(&place).expect("there").count(), 0);
    }

    #[test]
    fn what_a_dead_server_left_is_removed_and_a_living_one_is_not() {
        let directory = scratch();
        let place = directory.path().to_owned();
        drop(UnixListener::bind(place.join("mount-0-1.sock")).expect("bind"));
        drop(UnixListener::bind(place.join("mount-0-77.sock")).expect("bind"));
        let alive = UnixListener::bind(place.join("mount-0-2.sock")).expect("bind");
        fs::write(place.join("notes.txt"), "mine").expect("write");
        let listening = listen_in(std::slice::from_ref(&place), DEVICE).expect("listens");
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
        let listening = listen_in(&all, DEVICE).expect("listens");
        assert!(good.join("mount-0-77.sock").exists());
        assert!(listen_in(&all[..3], DEVICE).is_err());
        drop(listening);
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
