//! The kernel's side of a FUSE connection: fusectl, also where nobody has mounted it.
//!
//! Promises: no mount of the machine is changed: fusectl is mounted detached, for this process
//! alone. Needs root.

use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The kernel has one instance; a detached mount of it is seen by nobody.
fn fusectl() -> io::Result<OwnedFd> {
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    Ok(root)
}

/// Requests that clients wait for, be they with the kernel or with the server.
///
/// * `number`: of the connection, [`crate::limits::MountEntry::minor`].
///
/// Errors: there is no such connection; not root.
pub fn waiting(number: u32) -> io::Result<u32> {
    let file = openat(fusectl()?, format!("{number}/waiting"), OFlags::RDONLY, Mode::empty())?;
    let text = io::read_to_string(std::fs::File::from(file))?;
    text.trim().parse().map_err(io::Error::other)
}

/// Ends a connection by force: processes that wait for it get an error. Errors: as [`waiting`].
pub fn abort(number: u32) -> io::Result<()> {
    let file = openat(fusectl()?, format!("{number}/abort"), OFlags::WRONLY, Mode::empty())?;
    rustix::io::write(file, b"1")?;
    Ok(())
}
