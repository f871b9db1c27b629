//! Making, checking and removing the mount of an export, without libfuse.
//!
//! Promises: a [`Mount`] that goes out of scope takes its mount with it; only mounts of our own are
//! ever removed; every failure says what to do. Called on control threads only: mounting and
//! unmounting wait for other processes, and unmounting from a thread that serves requests would
//! wait for itself.
//!
//! Root mounts directly, by the file-descriptor API (fsopen, fsmount, move_mount) or, where that is
//! missing or forbidden, by mount(2). All other users ask `fusermount3`.

use std::ffi::OsString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ringdisk_export::wait_until;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{getegid, geteuid};

use crate::reply::notify_inval_inode;
use crate::{Error, ErrorKind};

mod abort;
mod answer_check;
pub mod device;
mod direct;
pub mod ffi;
mod helper;
pub mod inherited;
pub mod mountpoint;
pub mod table;

pub use abort::Abort;
pub(crate) use answer_check::AnswerCheck;
pub use ffi::{clone_device, open_backing};
pub use table::{FSTYPE, MountEntry};

/// Bytes of a buffer that no request exceeds: 1 MiB of data, its headers, and room.
const GONE_BUFFER_BYTES: usize = (1 << 20) + 8192;

/// How often it is looked whether a connection is closed.
const CLOSED_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// What the mount table shows as the source: the name of the image.
    pub source: OsString,
    /// The kernel refuses writes with EROFS.
    pub read_only: bool,
    /// Other users than the one that mounts may open the file, as far as its permissions let them.
    pub allow_other: bool,
    /// Largest READ, bytes: [`crate::negotiate::Profile::transfer_bytes`].
    pub max_read: u32,
    /// Who mounts.
    pub method: Method,
}

/// Who calls mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    /// This process if it is root, otherwise, or if it may not, `fusermount3`.
    #[default]
    Auto,
    /// This process.
    Direct,
    /// `fusermount3`.
    Helper,
}

/// How hard to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmount {
    /// Fails with [`ErrorKind::Busy`] while a client has the file open.
    Normal,
    /// Disappears from the tree at once and ends when the last user closes it.
    Lazy,
    /// Aborts the connection first (every request ends with an error), then as lazy.
    Force,
}

/// Takes the mount away for a process that has given up the right to do so: another process, most
/// likely.
pub trait Remover: std::fmt::Debug + Send + Sync {
    /// Removes the mount, as [`remove`] does.
    ///
    /// Errors: those of [`remove`].
    fn remove(&self, how: Unmount) -> Result<(), Error>;

    /// Aborts its connection, as [`Abort`] does. Returns whether the kernel was told.
    fn abort(&self) -> bool;
}

/// Who takes a mount away; empty: the process itself. Clones share it.
pub type RemoverSlot = Arc<OnceLock<Arc<dyn Remover>>>;

/// A mount of ours, with the first `/dev/fuse` descriptor of its connection.
///
/// Dropping it removes the mount (lazily if it is busy).
#[derive(Debug)]
pub struct Mount {
    device: OwnedFd,
    mountpoint: PathBuf,
    /// `None` if the mount was gone again before we could look.
    connection: Option<u32>,
    is_active: bool,
    remover: RemoverSlot,
}

/// Mounts an export on `path`, an existing regular file, and gives the descriptor on which its
/// requests arrive.
///
/// The kernel sends INIT now but does not wait for the answer. Nothing may touch the mountpoint
/// before requests are served.
///
/// Errors: those of [`mountpoint::check`]; [`ErrorKind::DeviceMissing`],
/// [`ErrorKind::DeviceForbidden`], [`ErrorKind::HelperMissing`], [`ErrorKind::AllowOtherDenied`],
/// [`ErrorKind::PermissionDenied`], [`ErrorKind::TransportMissing`], [`ErrorKind::System`].
pub fn mount(path: &Path, options: &MountOptions) -> Result<Mount, Error> {
    let mountpoint = mountpoint::check(path)?;
    let device = match options.method {
        Method::Direct => mount_direct(&mountpoint, options)?,
        Method::Helper => helper::mount(&mountpoint, options)?,
        Method::Auto if geteuid().is_root() => match mount_direct(&mountpoint, options) {
            // Root of a container may lack the right to mount while the helper, set-user-id outside
            // of it, cannot help either; the first error is then the one to show.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                helper::mount(&mountpoint, options).map_err(|_| error)?
            }
            result => result?,
        },
        Method::Auto => match helper::mount(&mountpoint, options) {
            // In a user namespace with /dev/fuse the helper is not needed.
            Err(error) if error.kind() == ErrorKind::HelperMissing => {
                mount_direct(&mountpoint, options).map_err(|_| error)?
            }
            result => result?,
        },
    };
    let connection =
        table::at(&mountpoint)?.filter(MountEntry::is_ours).and_then(|entry| entry.connection());
    Ok(Mount { device, mountpoint, connection, is_active: true, remover: RemoverSlot::default() })
}

fn mount_direct(mountpoint: &Path, options: &MountOptions) -> Result<OwnedFd, Error> {
    let device = device::open_for_mount()?;
    let at = mountpoint::hold(mountpoint)?;
    direct::mount(at.as_fd(), mountpoint, device.as_fd(), options)?;
    Ok(device)
}

impl Mount {
    /// A mount that another process has made, with a descriptor of its connection. It stays when
    /// this is dropped, until [`Mount::take_over`].
    ///
    /// * `mountpoint`: absolute, without symbolic links.
    /// * `connection`: its number as that process says; what the kernel says of the descriptor
    ///   counts.
    #[must_use]
    pub fn adopt(device: OwnedFd, mountpoint: PathBuf, connection: u32) -> Mount {
        let connection = Some(abort::connection_of(device.as_fd()).unwrap_or(connection));
        let remover = RemoverSlot::default();
        Mount { device, mountpoint, connection, is_active: false, remover }
    }

    /// Makes this process responsible for the mount: dropping it removes it.
    #[must_use]
    pub fn take_over(self) -> Mount {
        let mut mount = self;
        mount.is_active = true;
        mount
    }

    /// Where to say who takes the mount away.
    #[must_use]
    pub fn remover(&self) -> RemoverSlot {
        Arc::clone(&self.remover)
    }

    /// The first descriptor of the connection, nonblocking; more by [`clone_device`]. It must stay
    /// open while requests that were read from it are unanswered, and the connection ends when the
    /// last one is closed.
    #[must_use]
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Absolute path of the file.
    #[must_use]
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Number of the connection (its name in fusectl), if the mount was seen.
    #[must_use]
    pub fn connection(&self) -> Option<u32> {
        self.connection
    }

    /// Whether the filesystem of this mount has ended: it was unmounted, and no client uses it
    /// any more. Its number is free then, and the next mount of any process takes it: nothing may
    /// be done by that number any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_closed() && has_ended(&self.device, self.place())
    }

    /// Whether a connection that takes no more requests was aborted, and did not just end with its
    /// filesystem. Not known of one that `umount -f` has aborted and that no client used any
    /// longer: it looks like any that was unmounted.
    pub(crate) fn was_aborted(&self) -> bool {
        !self.is_closed() || was_aborted(&self.device, self.place())
    }

    /// Where the mount is as long as no other process has removed it. `None`: out of the tree by
    /// our own doing; what is at our place with our number is the next mount there.
    fn place(&self) -> Option<(u32, &Path)> {
        self.connection.filter(|_| self.is_active).map(|number| (number, &*self.mountpoint))
    }

    /// Waits until the kernel has closed the connection. It closes the queues of the device first,
    /// so a thread that takes a request at that moment hears ECONNABORTED before it shows whether
    /// it was aborted ([`Mount::was_aborted`]) (`dev.c`, `fuse_dev_do_read`, `fuse_abort_conn`).
    ///
    /// * `limit`: how long at most.
    pub(crate) fn wait_closed(&self, limit: Duration) {
        wait_until(limit, CLOSED_POLL_INTERVAL, || self.is_closed());
    }

    /// Whether the connection takes no more requests.
    pub fn is_closed(&self) -> bool {
        let mut device = [PollFd::new(&self.device, PollFlags::IN)];
        let polled = poll(&mut device, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && device[0].revents().contains(PollFlags::ERR)
    }

    /// Whether the mount is still in the tree of this process.
    ///
    /// Errors: [`ErrorKind::System`] if the mount table cannot be read.
    pub fn is_mounted(&self) -> Result<bool, Error> {
        if self.is_gone() {
            return Ok(false);
        }
        match self.connection {
            Some(connection) => Ok(table::of_connection(connection)?.is_some()),
            None => Ok(false),
        }
    }

    /// Removes the mount. It is no error if another process removed it already.
    ///
    /// After success nothing is done on drop.
    ///
    /// Errors: [`ErrorKind::Busy`] with [`Unmount::Normal`], [`ErrorKind::PermissionDenied`],
    /// [`ErrorKind::System`].
    pub fn unmount(&mut self, how: Unmount) -> Result<(), Error> {
        if !self.is_active {
            return Ok(());
        }
        if self.is_gone() {
            self.is_active = false;
            return Ok(());
        }
        let at_our_place = |number| table::of_connection_at(number, &self.mountpoint);
        let Some(entry) = self.connection.map(at_our_place).transpose()?.flatten() else {
            self.is_active = false;
            return Ok(());
        };
        match self.remover.get() {
            Some(remover) => remover.remove(how)?,
            None => {
                if how == Unmount::Force {
                    self.abort();
                }
                detach(&entry, how)?;
            }
        }
        self.is_active = false;
        Ok(())
    }

    /// Aborts the connection: every request ends with ECONNABORTED, later ones with ENOTCONN,
    /// reading the device with ECONNABORTED. The mount stays until it is removed.
    ///
    /// Returns whether the kernel was told. If not (an ordinary user without fusectl), closing
    /// every descriptor of the connection has the same effect.
    pub fn abort(&self) -> bool {
        match self.remover.get() {
            _ if self.is_gone() => false,
            Some(remover) => remover.abort(),
            None => self.connection.is_some_and(abort_connection),
        }
    }

    /// Another process is responsible for the mount from now on: dropping this leaves it.
    pub(crate) fn leave(&mut self) {
        self.is_active = false;
    }

    /// Keeps the mount and gives up responsibility for it. For tests and for a process that hands
    /// its descriptors to another.
    pub fn into_device(mut self) -> Result<OwnedFd, Error> {
        self.is_active = false;
        self.device.try_clone().map_err(|source| {
            Error::new(ErrorKind::System, "cannot duplicate the FUSE descriptor").source(source)
        })
    }
}

/// Whether the filesystem of a connection that is closed has ended. One that was aborted lives on
/// as long as it is mounted somewhere or a file of it is open.
///
/// * `place`: number and place of the mount, if it may be there still.
///
/// Linux 6.18 can be asked: told to look at the attributes of the file again, it does, or finds no
/// file (ENOENT: `fuse_reverse_inval_inode`; the filesystem is taken off the connection before that
/// is closed). Linux 7.3 takes nothing on a closed connection (EINVAL); there reading says
/// ECONNABORTED of one that lives on, but for those that `umount -f` has aborted: these are still
/// shown at their place.
fn has_ended(device: &OwnedFd, place: Option<(u32, &Path)>) -> bool {
    match rustix::io::write(device, &notify_inval_inode(false)) {
        Ok(_) => false,
        Err(Errno::NOENT) => true,
        Err(_) => {
            read_closed(device) == Errno::NODEV
                && !place.is_some_and(|(number, path)| is_in_table_at(number, path))
        }
    }
}

/// Whether a connection that is closed was aborted. See [`Mount::was_aborted`].
///
/// * `place`: as for [`has_ended`].
pub(crate) fn was_aborted(device: &OwnedFd, place: Option<(u32, &Path)>) -> bool {
    read_closed(device) == Errno::CONNABORTED || !has_ended(device, place)
}

/// What reading the device of a closed connection says, which takes no request: after an abort by
/// way of fusectl ECONNABORTED (in Linux 7.3 as long as the filesystem is there), else, also after
/// `umount -f` and where INIT was not answered, ENODEV.
fn read_closed(device: &OwnedFd) -> Errno {
    // It must have the size of any request, or the answer is EINVAL.
    let mut buffer = vec![0; GONE_BUFFER_BYTES];
    rustix::io::read(device, &mut buffer[..]).err().unwrap_or(Errno::AGAIN)
}

/// Whether the mount table has this connection at exactly this path.
fn is_in_table_at(connection: u32, mountpoint: &Path) -> bool {
    let entry = table::of_connection_at(connection, mountpoint).ok().flatten();
    entry.is_some_and(|entry| entry.mountpoint == mountpoint)
}

impl Drop for Mount {
    fn drop(&mut self) {
        if !self.is_active {
            return;
        }
        let result = match self.unmount(Unmount::Normal) {
            Err(error) if error.kind() == ErrorKind::Busy => self.unmount(Unmount::Lazy),
            result => result,
        };
        if let Err(error) = result {
            tracing::warn!("{}", error.with_hint());
        }
    }
}

/// Removes a ringdisk mount of any process, by its path.
///
/// Errors: [`ErrorKind::NotMounted`] if no export of ours is there, [`ErrorKind::Busy`] with
/// [`Unmount::Normal`], [`ErrorKind::PermissionDenied`], [`ErrorKind::System`].
pub fn unmount(path: &Path, how: Unmount) -> Result<(), Error> {
    let mountpoint = mountpoint::resolve(path)?;
    let shown = mountpoint.display();
    let Some(entry) = table::at(&mountpoint)? else {
        return Err(not_mounted(&mountpoint)?);
    };
    if !entry.is_ours() {
        let message = format!(
            "{shown} is not served by ringdisk but by {} ({})",
            entry.source.display(),
            entry.fstype
        );
        return Err(
            Error::new(ErrorKind::NotMounted, message).hint(format!("use `umount {shown}`"))
        );
    }
    if how == Unmount::Force
        && let Some(connection) = entry.connection()
    {
        abort_connection(connection);
    }
    detach(&entry, how)
}

/// Removes one mount, of any process, by its place and the number of its connection; nothing is
/// done when what is there is another one.
///
/// * `mountpoint`: absolute, without symbolic links.
/// * `how`: the connection is not aborted, however hard it is to be removed.
///
/// Errors: [`ErrorKind::Busy`] with [`Unmount::Normal`], [`ErrorKind::PermissionDenied`],
/// [`ErrorKind::System`].
pub fn remove(mountpoint: &Path, connection: u32, how: Unmount) -> Result<(), Error> {
    match own_entry_at(connection, mountpoint)? {
        Some(entry) => detach(&entry, how),
        None => Ok(()),
    }
}

/// Number of the connection that a `/dev/fuse` descriptor belongs to, as the kernel says it;
/// `None`: it does not say, or there is none.
#[must_use]
pub fn connection_of(device: &OwnedFd) -> Option<u32> {
    abort::connection_of(device.as_fd())
}

/// Whether the kernel says which connection a `/dev/fuse` descriptor belongs to.
#[must_use]
pub fn knows_its_connection(device: &OwnedFd) -> bool {
    connection_of(device).is_some()
}

/// What aborts the connection of a mount, of any process. `None`: that mount is not there, or its
/// connection cannot be aborted from here.
///
/// * `mountpoint`: as for [`remove`].
#[must_use]
pub fn abort_of(mountpoint: &Path, connection: u32) -> Option<Abort> {
    own_entry_at(connection, mountpoint).ok().flatten().and_then(|_| Abort::of(connection))
}

/// The entry of the mount table for a mount of ringdisk with this connection number at exactly this
/// path.
fn own_entry_at(connection: u32, mountpoint: &Path) -> Result<Option<MountEntry>, Error> {
    let entry = table::of_connection_at(connection, mountpoint)?;
    Ok(entry.filter(|entry| entry.is_ours() && entry.mountpoint == mountpoint))
}

/// Nothing is mounted there; the hint names the mounts that there are.
///
/// Errors: as [`table::read`].
fn not_mounted(mountpoint: &Path) -> Result<Error, Error> {
    let shown = mountpoint.display();
    let names: Vec<String> =
        table::ours()?.iter().map(|entry| entry.mountpoint.display().to_string()).collect();
    if names.is_empty() {
        let text = format!("nothing is mounted on {shown}, nor does ringdisk serve another file");
        return Ok(Error::new(ErrorKind::NotMounted, text));
    }
    let text = format!("nothing is mounted on {shown}");
    let hint = format!("name one of the files that ringdisk serves: {}", names.join(", "));
    Ok(Error::new(ErrorKind::NotMounted, text).hint(hint))
}

/// Takes one mount out of the tree.
fn detach(entry: &MountEntry, how: Unmount) -> Result<(), Error> {
    let lazy = how != Unmount::Normal;
    let flags =
        if lazy { UnmountFlags::DETACH | UnmountFlags::NOFOLLOW } else { UnmountFlags::NOFOLLOW };
    let shown = entry.mountpoint.display();
    // The call takes a path and removes what is on top there, which must not be another mount.
    match table::at(&entry.mountpoint)? {
        Some(top) if top.id != entry.id => {
            let message =
                format!("{shown} is covered by {} ({})", top.source.display(), top.fstype);
            return Err(
                Error::new(ErrorKind::Busy, message).hint(format!("first `umount {shown}`"))
            );
        }
        Some(_) => {}
        None => return Ok(()),
    }
    match rustix::mount::unmount(&entry.mountpoint, flags) {
        Ok(()) => Ok(()),
        // EINVAL: not a mountpoint any more. ENOENT: the file went with it.
        Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(Errno::BUSY) => Err(busy(&entry.mountpoint)),
        Err(Errno::PERM | Errno::ACCESS) => helper::unmount(&entry.mountpoint, lazy),
        Err(errno) => {
            Err(Error::new(ErrorKind::System, format!("cannot unmount {shown}")).errno(errno))
        }
    }
}

fn busy(mountpoint: &Path) -> Error {
    let shown = mountpoint.display();
    Error::new(ErrorKind::Busy, format!("{shown} is in use")).hint(format!(
        "see who has it open with `fuser -v {shown}` or `losetup -a`, or end it anyway with \
         `ringdisk umount --lazy {shown}`"
    ))
}

/// Tells the kernel to abort a connection, which is ours. Returns whether it was told.
fn abort_connection(connection: u32) -> bool {
    Abort::of(connection).is_some_and(|abort| abort.abort())
}

/// Numbers of the user and group that own the mount.
fn owner() -> (u32, u32) {
    (geteuid().as_raw(), getegid().as_raw())
}

#[cfg(test)]
mod tests;
