//! The state of a mount on its way to a successor: words, and descriptors with their roles.
//!
//! Promises: the successor believes descriptors, not words. The predecessor is confined and may
//! have been taken over: the descriptor has to be one of the very connection that the successor
//! found at the mountpoint of its command line, and sizes that memory depends on are those of this
//! machine. State of another version is refused before the predecessor gives anything up.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Format, HandOver};
use ringdisk_export::{Error, ErrorKind, HandOverState, HandedOver};
use ringdisk_fuse::HandOverHandle;
use ringdisk_fuse::kept::{FileState, HandedMount, Parked, TakenMount};
use ringdisk_fuse::mount::{clone_device, connection_of, device};
use ringdisk_fuse::negotiate::Profile;
use ringdisk_messages::state::{NotUnderstood, Versions, with_roles};
use rustix::fs::FileType;
use serde::{Deserialize, Serialize};

use super::{HandsOver, Kind};
use crate::failure::{Exit, Failure};
use crate::keep::State;

/// Of the description.
const VERSIONS: Versions = Versions::new(1, 1);

/// The description.
#[derive(Debug, Serialize, Deserialize)]
struct Words {
    mount: State,
    file: FileWords,
    /// As [`ringdisk_disk::HandOver::description`].
    disk: String,
    /// What each descriptor is.
    roles: Vec<Role>,
}

/// The file, as clients have made it.
#[derive(Debug, Serialize, Deserialize)]
struct FileWords {
    mode: u32,
    uid: u32,
    gid: u32,
    open_files: u64,
    writable_files: u64,
    /// The time that a read-only file shows, after 1970.
    since_s: u64,
    since_ns: u32,
}

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Role {
    /// `/dev/fuse`, of the connection.
    Device,
    /// The file below the mount, with the lock that says that it is served.
    Lock,
    Image,
}

/// A mount that waits for a successor.
#[derive(Debug)]
pub struct MountToHandOver {
    /// The export.
    pub handle: HandOverHandle,
    /// Device and inode number of the mountpoint, if ringdisk made it.
    pub made: Option<(u64, u64)>,
    /// Format of an image that `--create` made.
    pub created: Option<Format>,
    /// The file below the mount, with its lock.
    pub lock: Option<Arc<File>>,
}

impl HandsOver for MountToHandOver {
    fn hand_over(&self) -> Result<(HandOverState, HandedOver), Error> {
        let (mount, still) = self.handle.hand_over()?;
        // Dropping `still` lets the mount go on.
        Ok((self.pack(mount)?, still))
    }

    fn kind(&self) -> Kind {
        Kind::Mount
    }
}

/// A mount that a service manager keeps, and so not handed over.
#[derive(Debug)]
pub struct ManagerKeeps;

impl HandsOver for ManagerKeeps {
    fn hand_over(&self) -> Result<(HandOverState, HandedOver), Error> {
        let text = "the service manager keeps the mount, and starts each process that serves it";
        Err(Error::new(ErrorKind::Unsupported, text)
            .hint("`systemctl restart` goes on with it in the new version (docs/lifecycle.md)"))
    }

    fn kind(&self) -> Kind {
        Kind::Mount
    }
}

impl MountToHandOver {
    fn pack(&self, mount: HandedMount) -> Result<HandOverState, Error> {
        let cannot = |error: io::Error| {
            Error::new(ErrorKind::System, "the mount cannot be described").source(error)
        };
        let HandedMount { parked, file, disk } = mount;
        let state = State::new(&parked.terms, parked.devices.len(), self.made, self.created);
        let mut fds: Vec<(Role, OwnedFd)> =
            parked.devices.into_iter().map(|device| (Role::Device, device)).collect();
        if let Some(lock) = &self.lock {
            fds.push((Role::Lock, lock.as_fd().try_clone_to_owned().map_err(cannot)?));
        }
        fds.extend(disk.fds.into_iter().map(|image| (Role::Image, image)));
        let words = Words {
            mount: state,
            file: FileWords {
                mode: file.mode,
                uid: file.uid,
                gid: file.gid,
                open_files: file.open_files,
                writable_files: file.writable_files,
                since_s: file.since.as_secs(),
                since_ns: file.since.subsec_nanos(),
            },
            disk: disk.description,
            roles: fds.iter().map(|(role, _)| *role).collect(),
        };
        let description = VERSIONS.to_text(&words).map_err(cannot)?;
        Ok(HandOverState { description, fds: fds.into_iter().map(|(_, fd)| fd).collect() })
    }
}

/// A mount as a successor takes it.
#[derive(Debug)]
pub struct Handed {
    /// For the export.
    pub mount: TakenMount,
    /// The disk.
    pub disk: HandOver,
    /// Device and inode number of the mountpoint, if ringdisk made it and it is empty.
    pub made: Option<(u64, u64)>,
    /// Format of an image that `--create` made.
    pub created: Option<Format>,
    /// The file below the mount, with its lock.
    pub lock: Option<File>,
}

/// Opens the state of a mount.
///
/// * `mountpoint`, `connection`: where the mount is, and its number, as this process found them.
///
/// Errors: it is of another version, or damaged, or of another mount.
pub fn open(state: HandOverState, mountpoint: &Path, connection: u32) -> Result<Handed, Failure> {
    let unknown = |why: NotUnderstood| misfit(&why.to_string());
    let words: Words = VERSIONS.from_text(state.description.as_bytes()).map_err(unknown)?;
    let named = with_roles(words.roles, state.fds).map_err(unknown)?;
    let (mut device, mut lock, mut images) = (None, None, Vec::new());
    for (role, fd) in named {
        match role {
            Role::Device => device = device.or(Some(fd)),
            Role::Lock => lock = file_of(fd),
            Role::Image => images.push(fd),
        }
    }
    let device = device.ok_or_else(|| misfit("no descriptor of the mount came with it"))?;
    let mut terms = words.mount.terms();
    if terms.mountpoint != mountpoint || terms.connection != connection {
        return Err(misfit("it is the state of another mount"));
    }
    let device = checked(device, connection)?;
    terms.profile = sizes(terms.profile)?;
    let FileWords { mode, uid, gid, open_files, writable_files, since_s, since_ns } = words.file;
    let since = Duration::from_secs(since_s)
        .checked_add(Duration::from_nanos(since_ns.into()))
        .unwrap_or_default();
    let file = FileState { mode, uid, gid, open_files, writable_files, since };
    // The predecessor may name any file as made by ringdisk, which is removed at the end: one with
    // content stays.
    let made =
        words.mount.made.filter(|made| lock.as_ref().is_some_and(|lock| is_empty(lock, *made)));
    Ok(Handed {
        mount: TakenMount { parked: Parked { terms, devices: vec![device] }, file },
        disk: HandOver { description: words.disk, fds: images },
        made,
        created: words.mount.format(),
        lock,
    })
}

fn misfit(why: &str) -> Failure {
    Failure::new(Exit::Unsupported, format!("the mount cannot be taken over: {why}")).hint(
        "the process that serves it goes on as before; end it with `ringdisk umount` and mount the \
         image anew",
    )
}

/// A descriptor of its own for a connection, whose flags no other process can change. That of the
/// predecessor where /dev/fuse cannot be opened.
///
/// Errors: it is none of that connection.
fn checked(device: OwnedFd, connection: u32) -> Result<OwnedFd, Failure> {
    if !device::is_device(&device) {
        return Err(misfit("the descriptor of the mount is none of /dev/fuse"));
    }
    match connection_of(&device) {
        Some(number) if number == connection => {}
        Some(_) => return Err(misfit("the descriptor of the mount is one of another mount")),
        None => {
            return Err(misfit(
                "the kernel does not say which mount a descriptor of /dev/fuse belongs to \
                 (`fuse_connection` in its fdinfo)",
            ));
        }
    }
    if let Ok(own) = clone_device(device.as_fd()) {
        return Ok(own);
    }
    device::set_nonblocking(&device).map_err(|errno| {
        Failure::system("the descriptor of the mount", &errno.into(), Exit::General)
    })?;
    Ok(device)
}

/// The sizes of requests, if this machine can have agreed on them.
///
/// Errors: it cannot.
fn sizes(profile: Profile) -> Result<Profile, Failure> {
    let ours = Profile::new(Profile::detect(profile.kernel_cache).page_bytes, None, false);
    let largest = ringdisk_fuse::negotiate::TRANSFER_BYTES_MAX / ours.page_bytes;
    let fits = profile.page_bytes == ours.page_bytes
        && (1..=largest.max(1)).contains(&u32::from(profile.max_pages));
    if fits { Ok(profile) } else { Err(misfit("it names sizes that this machine does not have")) }
}

/// A regular file; `None`: something else, which is not touched.
fn file_of(fd: OwnedFd) -> Option<File> {
    let stat = rustix::fs::fstat(&fd).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then(|| File::from(fd))
}

/// Whether a file is this one, and has no content.
fn is_empty(file: &File, id: (u64, u64)) -> bool {
    file.metadata().is_ok_and(|meta| (meta.dev(), meta.ino()) == id && meta.len() == 0)
}

#[cfg(test)]
mod tests;
