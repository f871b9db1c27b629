//! Mounting and unmounting through `fusermount3`, for users who are not root.
//!
//! Promises: no descriptor leaks into the helper but its end of one socket, which is its standard
//! input; the device that comes back is close-on-exec and nonblocking; what the helper says on
//! failure is part of the error.
//!
//! The helper gets `_FUSE_COMMFD`, the number of a socket, mounts, sends the device over it with
//! one byte (SCM_RIGHTS), and exits.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ringdisk_messages::{Wait, pair, receive};
use rustix::io::Errno;
use rustix::net::SocketType;

use super::device::set_nonblocking;
use super::table::SUBTYPE;
use super::{MountOptions, busy};
use crate::{Error, ErrorKind};

/// Names of the helper, newest first; looked up in PATH and then where distributions keep it.
const HELPER_NAMES: [&str; 4] =
    ["fusermount3", "fusermount", "/usr/bin/fusermount3", "/bin/fusermount3"];
/// What the helper says is cut to this many bytes.
const HELPER_TEXT_MAX: u64 = 4096;

/// Mounts on `mountpoint` and gives the device of the new connection.
///
/// Errors: [`ErrorKind::HelperMissing`], [`ErrorKind::AllowOtherDenied`],
/// [`ErrorKind::DeviceMissing`], [`ErrorKind::DeviceForbidden`], [`ErrorKind::PermissionDenied`],
/// [`ErrorKind::System`].
pub(super) fn mount(mountpoint: &Path, options: &MountOptions) -> Result<OwnedFd, Error> {
    let system =
        |errno: Errno| Error::new(ErrorKind::System, "cannot talk to fusermount3").errno(errno);
    let (ours, theirs) = pair(SocketType::STREAM).map_err(system)?;

    let mut child = spawn(|command| {
        command.arg("-o").arg(option_text(options)).arg("--").arg(mountpoint);
        // Standard input is the only descriptor that std hands over without code of our own between
        // fork and exec.
        command.env("_FUSE_COMMFD", "0").stdin(Stdio::from(theirs.try_clone()?));
        Ok(())
    })?;
    // Otherwise a helper that dies would leave us waiting for our own copy of its end.
    drop(theirs);

    // `None`: the helper ended without sending one.
    let device = receive(&ours, &mut [0], Wait::Forever).map_err(system);
    let said = finish(&mut child);
    match (device?.into_one(), said) {
        (Some(device), Ok(())) => {
            set_nonblocking(&device).map_err(system)?;
            Ok(device)
        }
        (_, Err(text)) => Err(explain(mountpoint, &text)),
        (None, Ok(())) => {
            Err(Error::new(ErrorKind::System, "fusermount3 mounted but sent no device"))
        }
    }
}

/// Unmounts `mountpoint`, which must be a FUSE mount of this user.
///
/// Errors: [`ErrorKind::HelperMissing`], [`ErrorKind::Busy`], [`ErrorKind::PermissionDenied`].
pub(super) fn unmount(mountpoint: &Path, lazy: bool) -> Result<(), Error> {
    let mut child = spawn(|command| {
        command.arg("-u").arg("-q");
        if lazy {
            command.arg("-z");
        }
        command.arg("--").arg(mountpoint).stdin(Stdio::null());
        Ok(())
    })?;
    match finish(&mut child) {
        Ok(()) => Ok(()),
        // With -q the helper is silent about EBUSY, the one reason left for a mount of our own.
        Err(text) if text.is_empty() || text.contains("busy") => Err(busy(mountpoint)),
        Err(text) => {
            let message = format!("not allowed to unmount {}: {text}", mountpoint.display());
            Err(Error::new(ErrorKind::PermissionDenied, message)
                .hint("only root and the user who mounted it may"))
        }
    }
}

/// Starts the first helper that exists.
fn spawn(prepare: impl Fn(&mut Command) -> io::Result<()>) -> Result<Child, Error> {
    for name in HELPER_NAMES {
        let mut command = Command::new(name);
        command.stdout(Stdio::null()).stderr(Stdio::piped()).env("LC_ALL", "C");
        let started = prepare(&mut command).and_then(|()| command.spawn());
        match started {
            Ok(child) => return Ok(child),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(
                    Error::new(ErrorKind::System, format!("cannot start {name}")).source(error)
                );
            }
        }
    }
    Err(Error::new(ErrorKind::HelperMissing, "fusermount3 was not found")
        .hint("install the package fuse3, or run as root"))
}

/// Waits for the helper; `Err` with what it said if it failed.
fn finish(child: &mut Child) -> Result<(), String> {
    let mut text = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        // Unreadable text is no reason to fail; the exit status decides.
        let _ = stderr.take(HELPER_TEXT_MAX).read_to_end(&mut text);
    }
    let text = String::from_utf8_lossy(&text).trim().replace('\n', "; ");
    match child.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(text),
        Err(error) => Err(format!("{text} ({error})")),
    }
}

/// Options in the helper's syntax, where a backslash protects commas and backslashes.
fn option_text(options: &MountOptions) -> std::ffi::OsString {
    use std::os::unix::ffi::OsStringExt;

    let mut text = b"fsname=".to_vec();
    for &byte in options.source.as_bytes() {
        if byte == b',' || byte == b'\\' {
            text.push(b'\\');
        }
        text.push(byte);
    }
    let access = if options.read_only { "ro" } else { "rw" };
    let rest = format!(
        ",subtype={SUBTYPE},max_read={},default_permissions,noatime,nosuid,nodev,{access}",
        options.max_read
    );
    text.extend_from_slice(rest.as_bytes());
    if options.allow_other {
        text.extend_from_slice(b",allow_other");
    }
    std::ffi::OsString::from_vec(text)
}

/// Puts what the helper said into our words.
fn explain(mountpoint: &Path, text: &str) -> Error {
    let shown = mountpoint.display();
    if text.contains("allow_other") {
        return Error::new(
            ErrorKind::AllowOtherDenied,
            "ordinary users may not mount with --allow-other on this machine",
        )
        .hint("put the line `user_allow_other` into /etc/fuse.conf, or leave the option out");
    }
    if text.contains("/dev/fuse") || text.contains("device not found") {
        return if text.contains("Permission denied") || text.contains("not permitted") {
            super::device::open_error(Errno::ACCESS)
        } else {
            super::device::open_error(Errno::NOENT)
        };
    }
    let error = Error::new(
        ErrorKind::PermissionDenied,
        format!("fusermount3 refused to mount on {shown}: {text}"),
    );
    let about_the_file =
        ["user has no write access", "failed to open", "failed to access", "bad mount point"];
    if about_the_file.iter().any(|words| text.contains(words)) {
        return error.hint("the mountpoint must be a file that you own or may write");
    }
    error
}

#[cfg(test)]
mod tests;
