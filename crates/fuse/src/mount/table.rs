//! The mount table of this process, `/proc/self/mountinfo`.
//!
//! Promises: looking something up never asks a mounted filesystem anything, so it cannot hang on a
//! dead or busy server. Bytes of paths are kept as they are.
//!
//! Source: proc_pid_mountinfo(5).

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::{Error, ErrorKind};

/// Filesystem type under which our mounts show.
pub const FSTYPE: &str = "fuse.ringdisk";
/// Part of [`FSTYPE`] after `fuse.`.
pub const SUBTYPE: &str = "ringdisk";

const TABLE_PATH: &str = "/proc/self/mountinfo";

/// One line of the mount table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Identity of the mount.
    pub id: u64,
    /// Identity of the mount that it sits on.
    pub parent: u64,
    /// Major and minor number of the device that `stat` shows; for FUSE the minor is the number of
    /// the connection.
    pub device: (u32, u32),
    /// Where it is mounted, absolute.
    pub mountpoint: PathBuf,
    /// Options of the mount, comma-separated.
    pub options: String,
    /// Filesystem type.
    pub fstype: String,
    /// What is mounted; for our mounts the name of the image.
    pub source: OsString,
    /// Options of the filesystem, comma-separated.
    pub super_options: String,
}

impl MountEntry {
    /// Whether a ringdisk export is (or was) behind this mount.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.fstype == FSTYPE
    }

    /// Number of the FUSE connection, also the name of its directory in fusectl.
    #[must_use]
    pub fn connection(&self) -> Option<u32> {
        let is_fuse =
            self.fstype == "fuse" || self.fstype == "fuseblk" || self.fstype.starts_with("fuse.");
        is_fuse.then_some(self.device.1)
    }
}

/// Reads the table.
///
/// Errors: [`ErrorKind::System`] if `/proc` is not there.
pub fn read() -> Result<Vec<MountEntry>, Error> {
    let bytes = fs::read(TABLE_PATH).map_err(|source| {
        Error::new(ErrorKind::System, format!("cannot read {TABLE_PATH}"))
            .source(source)
            .hint("is /proc mounted?")
    })?;
    Ok(parse(&bytes))
}

/// Reads the table of another process, which may be in another mount namespace.
///
/// Errors: [`ErrorKind::System`] if the process is gone or may not be looked at.
pub fn of_process(pid: u32) -> Result<Vec<MountEntry>, Error> {
    let path = format!("/proc/{pid}/mountinfo");
    let bytes = fs::read(&path).map_err(|source| {
        Error::new(ErrorKind::System, format!("cannot read {path}")).source(source)
    })?;
    Ok(parse(&bytes))
}

/// All ringdisk mounts that this process can see.
///
/// Errors: as [`read`].
pub fn ours() -> Result<Vec<MountEntry>, Error> {
    let mut entries = read()?;
    entries.retain(MountEntry::is_ours);
    Ok(entries)
}

/// The mount of one FUSE connection at `mountpoint`, or, when there is none (a directory above it
/// was renamed), another one of it: a bind mount of the file has the same connection and is not
/// ours to remove.
///
/// Errors: as [`read`].
pub fn of_connection_at(connection: u32, mountpoint: &Path) -> Result<Option<MountEntry>, Error> {
    let mut entries = read()?;
    entries.retain(|entry| entry.is_ours() && entry.device.1 == connection);
    let place = entries.iter().rposition(|entry| entry.mountpoint == mountpoint);
    Ok(match place {
        Some(place) => Some(entries.swap_remove(place)),
        None => entries.pop(),
    })
}

/// The mount that is on top at exactly `mountpoint` (absolute, without symbolic links), if any.
///
/// Errors: as [`read`].
pub fn at(mountpoint: &Path) -> Result<Option<MountEntry>, Error> {
    Ok(top(read()?, mountpoint))
}

/// The mount of one FUSE connection, if it is still there.
///
/// Errors: as [`read`].
pub fn of_connection(connection: u32) -> Result<Option<MountEntry>, Error> {
    Ok(read()?.into_iter().rev().find(|entry| entry.is_ours() && entry.device.1 == connection))
}

/// The table lists mounts in the order of mounting, so the last one at a path covers the others.
fn top(entries: Vec<MountEntry>, mountpoint: &Path) -> Option<MountEntry> {
    entries.into_iter().rev().find(|entry| entry.mountpoint == mountpoint)
}

/// Parses the table; lines that do not look like the manual says are left out.
fn parse(bytes: &[u8]) -> Vec<MountEntry> {
    bytes.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let mut device =
        text(fields.next()?).split(':').map(str::to_owned).collect::<Vec<_>>().into_iter();
    let major = device.next()?.parse().ok()?;
    let minor = device.next()?.parse().ok()?;
    let _root = fields.next()?;
    let mountpoint = PathBuf::from(unescape(fields.next()?));
    let options = text(fields.next()?);
    // A varying number of optional fields ends with a dash.
    fields.by_ref().find(|field| *field == b"-")?;
    let fstype = text(&unescape(fields.next()?).into_vec());
    let source = unescape(fields.next()?);
    let super_options = fields.next().map(text).unwrap_or_default();
    Some(MountEntry {
        id,
        parent,
        device: (major, minor),
        mountpoint,
        options,
        fstype,
        source,
        super_options,
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn number(bytes: &[u8]) -> Option<u64> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

/// Space, tab, newline and backslash are written as a backslash and three octal digits.
fn unescape(bytes: &[u8]) -> OsString {
    let mut plain = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&first, tail)) = rest.split_first() {
        if let Some(byte) = octal(rest) {
            plain.push(byte);
            rest = &rest[4..];
        } else {
            plain.push(first);
            rest = tail;
        }
    }
    OsString::from_vec(plain)
}

fn octal(bytes: &[u8]) -> Option<u8> {
    let &[b'\\', high @ b'0'..=b'3', middle @ b'0'..=b'7', low @ b'0'..=b'7', ..] = bytes else {
        return None;
    };
    Some((high - b'0') << 6 | (middle - b'0') << 3 | (low - b'0'))
}

#[cfg(test)]
mod tests;
