//! Mounting by this process: the file-descriptor API, and mount(2) where a kernel or a container's
//! filter lacks that.
//!
//! Promises: either the mount is on its mountpoint, or nothing is left of it. The kernel's own
//! words about a refused option are part of the error.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
};

use super::table::{FSTYPE, SUBTYPE};
use super::{MountOptions, owner};
use crate::{Error, ErrorKind};

/// Type bits of a regular file, in octal as the option wants it; the permissions come with the
/// first GETATTR.
const ROOT_MODE: &str = "100600";

/// Mounts the connection of `device` on a file.
///
/// * `at`: the file, as [`super::mountpoint::hold`] gives it.
/// * `mountpoint`: its name, for messages.
///
/// Errors: [`ErrorKind::PermissionDenied`], [`ErrorKind::TransportMissing`] (no FUSE in this
/// kernel), [`ErrorKind::System`].
pub(super) fn mount(
    at: BorrowedFd<'_>,
    mountpoint: &Path,
    device: BorrowedFd<'_>,
    options: &MountOptions,
) -> Result<(), Error> {
    match mount_by_descriptors(at, device, options) {
        Ok(()) => Ok(()),
        // ENOSYS: Linux before 5.2. EPERM: also what filters of system calls answer for calls that
        // they do not know.
        Err(failure) if matches!(failure.errno, Errno::NOSYS | Errno::PERM) => {
            mount_classic(at, device, options).map_err(|errno| explain(mountpoint, errno, ""))
        }
        Err(failure) => Err(explain(mountpoint, failure.errno, &failure.log)),
    }
}

/// Makes a mount of a filesystem that needs no options, attached nowhere; it goes with the
/// descriptor.
pub(super) fn detached(fstype: &str) -> Result<OwnedFd, Errno> {
    let context = fsopen(fstype, FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// What a step of the descriptor API said.
pub(super) struct Failure {
    pub(super) errno: Errno,
    /// Messages of the kernel, may be empty.
    log: String,
}

pub(super) fn mount_by_descriptors(
    at: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
    options: &MountOptions,
) -> Result<(), Failure> {
    let context = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)
        .map_err(|errno| Failure { errno, log: String::new() })?;
    let attached = configure(&context, device, options).and_then(|()| {
        let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
            | MountAttrFlags::MOUNT_ATTR_NODEV
            | MountAttrFlags::MOUNT_ATTR_NOATIME;
        if options.read_only {
            attributes |= MountAttrFlags::MOUNT_ATTR_RDONLY;
        }
        let tree = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        let both =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&tree, "", at, "", both)
    });
    attached.map_err(|errno| Failure { errno, log: kernel_log(context.as_fd()) })
}

fn configure(
    context: &OwnedFd,
    device: BorrowedFd<'_>,
    options: &MountOptions,
) -> Result<(), Errno> {
    let (user, group) = owner();
    fsconfig_set_string(context, "source", options.source.as_bytes())?;
    fsconfig_set_string(context, "subtype", SUBTYPE)?;
    fsconfig_set_string(context, "fd", device.as_raw_fd().to_string())?;
    fsconfig_set_string(context, "rootmode", ROOT_MODE)?;
    fsconfig_set_string(context, "user_id", user.to_string())?;
    fsconfig_set_string(context, "group_id", group.to_string())?;
    fsconfig_set_string(context, "max_read", options.max_read.to_string())?;
    fsconfig_set_flag(context, "default_permissions")?;
    if options.allow_other {
        fsconfig_set_flag(context, "allow_other")?;
    }
    if options.read_only {
        fsconfig_set_flag(context, "ro")?;
    }
    fsconfig_create(context)
}

/// Reads what the kernel has to say: lines of a letter for the severity, a blank, and text.
fn kernel_log(context: BorrowedFd<'_>) -> String {
    let mut lines = Vec::new();
    let mut buffer = [0; 1024];
    // One message per read; ENODATA when there is no more. The kernel keeps eight.
    for _ in 0..8 {
        let Ok(len) = rustix::io::read(context, &mut buffer) else { break };
        let line = String::from_utf8_lossy(&buffer[..len]);
        lines.push(line.trim().trim_start_matches(['e', 'w', 'i']).trim().to_owned());
    }
    lines.join(", ")
}

pub(super) fn mount_classic(
    at: BorrowedFd<'_>,
    device: BorrowedFd<'_>,
    options: &MountOptions,
) -> Result<(), Errno> {
    let (user, group) = owner();
    let mut data = format!(
        "fd={},rootmode={ROOT_MODE},user_id={user},group_id={group},\
         default_permissions,max_read={}",
        device.as_raw_fd(),
        options.max_read
    );
    if options.allow_other {
        data.push_str(",allow_other");
    }
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    // Of /proc: it leads to the file itself.
    let at = format!("/proc/self/fd/{}", at.as_raw_fd());
    rustix::mount::mount(options.source.as_os_str(), at, FSTYPE, flags, data.as_c_str())
}

fn explain(mountpoint: &Path, errno: Errno, log: &str) -> Error {
    let shown = mountpoint.display();
    let said = if log.is_empty() { String::new() } else { format!(" (kernel: {log})") };
    match errno {
        Errno::PERM | Errno::ACCESS => Error::new(
            ErrorKind::PermissionDenied,
            format!(
                "not \
            allowed to mount on {shown}{said}"
            ),
        )
        .errno(errno)
        .hint(
            "run as root, or install fuse3 for its fusermount3; in a container, add \
                `--cap-add SYS_ADMIN --device /dev/fuse`",
        ),
        Errno::NODEV => Error::new(ErrorKind::TransportMissing, "this kernel has no FUSE")
            .hint("load it with `modprobe fuse`"),
        _ => Error::new(ErrorKind::System, format!("cannot mount on {shown}{said}")).errno(errno),
    }
}
