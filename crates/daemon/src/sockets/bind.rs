//! Making a socket under a name.
//!
//! Promises: it is never open to more users than was asked for, not even for a moment; a name is
//! taken over from a process that is gone, and from nothing else; of two that start at once one
//! gets it.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_export::retry_while;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, chownat, fchmod};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::geteuid;

use crate::directory_lock::{self, lock};
use crate::failure::{Exit, Failure};
use crate::helper;
use crate::terminal;

/// Front ends that may wait to be taken.
const BACKLOG: i32 = 16;
/// Who was killed just when it started another program (its helper process) leaves a child that has
/// the socket until its exec.
const LEFT: Duration = Duration::from_millis(500);
/// How often it is looked at meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A socket of ours; dropping it removes its name.
#[derive(Debug)]
pub struct MadeSocket {
    /// Absolute.
    path: PathBuf,
    /// Device and inode number.
    id: (u64, u64),
    /// Keeps these numbers from being given to the next file of that name, which they would be when
    /// the socket is closed. `None`: of one that was handed over it cannot be had, as where there
    /// is no descriptor left.
    _pin: Option<OwnedFd>,
}

impl MadeSocket {
    /// A socket that another process has made and handed over.
    ///
    /// Errors: nothing has that name any more.
    pub fn adopt(path: &Path) -> io::Result<MadeSocket> {
        let meta = fs::symlink_metadata(path)?;
        let id = (meta.dev(), meta.ino());
        Ok(MadeSocket { path: std::path::absolute(path)?, id, _pin: helper::pin(path, id) })
    }

    /// Its name, with device and inode number.
    pub fn named(&self) -> helper::Named {
        (self.path.clone(), self.id)
    }

    /// Leaves the name to the process that has the socket now.
    pub fn leave(self) {
        std::mem::forget(self);
    }

    /// Makes a listening socket.
    ///
    /// * `path`: at most as long as the system takes.
    ///
    /// Errors: as [`check`]; those of the system.
    pub fn make(
        path: &Path,
        mode: u32,
        group: Option<u32>,
    ) -> Result<(OwnedFd, MadeSocket), Failure> {
        let cannot = |error: io::Error| {
            Failure::system(
                format!("cannot make the socket '{}'", path.display()),
                &error,
                Exit::Mountpoint,
            )
        };
        let whole = std::path::absolute(path).map_err(cannot)?;
        // One process at a time looks at what is there, removes it, and listens. Without the lock a
        // start at the same moment fails.
        let _lock = whole.parent().and_then(|directory| lock(directory, directory_lock::START));
        if let Some(left) = check(path)? {
            remove(&whole, left).map_err(cannot)?;
            terminal::note_of_tidying(format_args!(
                "'{}' was left by a process that is gone; it is replaced",
                path.display()
            ));
        }
        let make = || -> io::Result<(OwnedFd, MadeSocket)> {
            let socket =
                socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            // The file gets this mode when it is made, less the umask.
            fchmod(&socket, Mode::from_raw_mode(0o600))?;
            bind(&socket, &SocketAddrUnix::new(path)?)?;
            let made = open_to(&whole, mode, group)?;
            // Nobody could connect before this.
            listen(&socket, BACKLOG)?;
            Ok((socket, made))
        };
        make().map_err(|error| match (error.raw_os_error(), group) {
            (Some(1), Some(group)) => cannot(error)
                .hint(format!("only members of group {group} and root can give it a socket")),
            _ => cannot(error),
        })
    }
}

impl Drop for MadeSocket {
    fn drop(&mut self) {
        // Inside a sandbox the directory cannot be opened, and the helper process locks it.
        let _lock = self.path.parent().and_then(|directory| lock(directory, directory_lock::END));
        if let Err(error) = remove(&self.path, self.id) {
            tracing::warn!("cannot remove the socket '{}': {error}", self.path.display());
        }
    }
}

/// Gives the socket that was made just now its mode and group. The directory may be another user's,
/// who can put something else in its place at any moment: so what is changed is held, is a socket,
/// and is ours.
pub(crate) fn open_to(path: &Path, mode: u32, group: Option<u32>) -> io::Result<MadeSocket> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let meta = held.metadata()?;
    if !meta.file_type().is_socket() || meta.uid() != geteuid().as_raw() {
        let text = "something else has its name by now";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    let id = (meta.dev(), meta.ino());
    if let Some(group) = group {
        chownat(&held, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
    }
    if meta.mode() & 0o777 != mode {
        let held = format!("/proc/self/fd/{}", held.as_raw_fd());
        fs::set_permissions(held, Permissions::from_mode(mode))?;
    }
    Ok(MadeSocket { path: path.to_owned(), id, _pin: Some(held.into()) })
}

/// Removes a name if it is still that of this file.
fn remove(path: &Path, id: (u64, u64)) -> io::Result<()> {
    if helper::may_be(path, id) { helper::remove_file(path) } else { Ok(()) }
}

/// Looks at what has the name now, and changes nothing. Gives device and inode number of a socket
/// that was left.
///
/// Errors: another process listens there; it is no socket.
pub(super) fn check(path: &Path) -> Result<Option<(u64, u64)>, Failure> {
    let shown = path.display();
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => {
            let doing = format!("cannot look at '{shown}'");
            return Err(Failure::system(doing, &error, Exit::Mountpoint));
        }
    };
    if !meta.file_type().is_socket() {
        return Err(Failure::new(
            Exit::Mountpoint,
            format!("'{shown}' is there already and is no socket; it is left as it is"),
        )
        .hint("give another name, or remove that file if nobody needs it"));
    }
    match retry_while(LEFT, POLL_INTERVAL, Result::is_ok, || probe(path)) {
        Err(Errno::CONNREFUSED) => Ok(Some((meta.dev(), meta.ino()))),
        // It went between two looks.
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::ACCESS | Errno::PERM) => Err(Failure::new(
            Exit::Permission,
            format!("the socket '{shown}' is there already and belongs to another user"),
        )
        .hint("give another name")),
        // Also one of another type (EPROTOTYPE), or with a full queue (EAGAIN).
        Ok(()) | Err(_) => Err(Failure::new(
            Exit::Locked,
            format!("another process listens on the socket '{shown}'"),
        )
        .hint(format!(
            "give another name, or end that process: `ringdisk ctl {} stop` if it is ours",
            terminal::shell_word(&shown.to_string())
        ))),
    }
}

/// Connects and goes again, without waiting.
fn probe(path: &Path) -> Result<(), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)
}

/// The number of a group.
///
/// Errors: there is no such group in `/etc/group`.
pub fn group(name: &str) -> Result<u32, Failure> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let all = fs::read_to_string("/etc/group").unwrap_or_default();
    group_in(&all, name).ok_or_else(|| {
        Failure::new(
            Exit::Usage,
            format!("there is no group '{}' in /etc/group", terminal::visible(name)),
        )
        .hint("give its number, which `getent group` shows")
    })
}

/// Source: group(5): name, password, number and members between colons.
pub(crate) fn group_in(all: &str, name: &str) -> Option<u32> {
    let mut lines = all.lines().map(|line| line.split(':'));
    lines.find_map(|mut fields| {
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok())?
    })
}
