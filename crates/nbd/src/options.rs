//! What an NBD export is asked for.
//!
//! Promises: plain values; control path.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::Disk;
use ringdisk_export::{CommonOptions, Error, ErrorKind};
use ringdisk_nbd_protocol::numbers::NAME_BYTES_MAX;
use ringdisk_tls::ServerTls;

/// Connections at once, unless another number is asked for.
pub const CONNECTIONS_DEFAULT: usize = 64;
/// Most connections at once. Each takes up to [`crate::CONNECTION_BYTES_MAX`] bytes.
pub const CONNECTIONS_MAX: usize = 10_000;
/// Bitmaps of a disk that clients can ask for at most.
pub const BITMAPS_MAX: usize = 254;
/// A client has so long for its handshake, unless another time is asked for.
pub const HANDSHAKE_DEFAULT: Duration = Duration::from_secs(10);

/// A bitmap, as it was when it was read.
#[derive(Clone, Debug)]
pub struct DirtyBitmap {
    /// Its name in the image.
    pub name: String,
    /// The ranges that it marks, in bytes of the disk: in order, without overlaps.
    pub ranges: Arc<[Range<u64>]>,
}

/// A disk, and the name that clients ask for.
#[derive(Clone, Debug)]
pub struct NamedDisk {
    /// The name; may be empty (the default export), at most 4096 bytes.
    pub name: String,
    /// A text for people; may be empty, at most 4096 bytes.
    pub description: String,
    /// The disk.
    pub disk: Arc<Disk>,
    /// Refuse writes although the disk would take them.
    pub read_only: bool,
    /// Bitmaps that clients can ask for.
    pub bitmaps: Vec<DirtyBitmap>,
    /// Whether `qemu:allocation-depth` is offered.
    pub allocation_depth: bool,
}

impl NamedDisk {
    /// A disk without a description and without bitmaps.
    pub fn new(name: impl Into<String>, disk: Arc<Disk>) -> NamedDisk {
        NamedDisk {
            name: name.into(),
            description: String::new(),
            disk,
            read_only: false,
            bitmaps: Vec::new(),
            allocation_depth: true,
        }
    }
}

/// How connections are encrypted.
#[derive(Clone, Debug)]
pub struct TlsOptions {
    /// The server's certificate, and which clients it lets in.
    pub server: ServerTls,
    /// Clients that do not encrypt are refused.
    pub required: bool,
}

/// Users whose processes may connect to Unix sockets. Those of root always may.
#[derive(Clone, Debug, Default)]
pub struct AllowedUsers {
    /// Numbers of users.
    pub users: Vec<u32>,
    /// Numbers of groups: a process may connect whose group is one of them.
    pub groups: Vec<u32>,
}

impl AllowedUsers {
    /// Whether a process may connect.
    #[must_use]
    pub fn allows(&self, user: u32, group: u32) -> bool {
        user == 0 || self.users.contains(&user) || self.groups.contains(&group)
    }
}

/// How to serve disks over NBD.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// Name, queue threads, whether writes are refused on all disks.
    pub common: CommonOptions,
    /// Clients that use the disks at once, 1..=[`CONNECTIONS_MAX`]; those above wait, without a
    /// greeting or, when they were greeted before, at their `GO`.
    pub max_connections: usize,
    /// How long a handshake may take; `None`: any time.
    pub handshake_limit: Option<Duration>,
    /// Ends the export when no client has been in its transmission phase for so long, from the
    /// start on; zero: when the last one has gone, and not before there was one. `None`: never.
    pub idle_exit: Option<Duration>,
    /// No word of a client is read before [`Export::release`](crate::Export::release): those that
    /// come wait.
    pub held: bool,
    /// Another export of this process is in charge of the disks: it closes them, after each has
    /// left this export ([`Export::disk_handle`](crate::Export::disk_handle)).
    pub beside_another: bool,
    /// TLS; `None`: STARTTLS is refused.
    pub tls: Option<TlsOptions>,
    /// Who may connect to Unix sockets; `None`: all users who can reach them.
    pub allowed_users: Option<AllowedUsers>,
}

impl Default for NbdOptions {
    fn default() -> NbdOptions {
        NbdOptions {
            common: CommonOptions::default(),
            max_connections: CONNECTIONS_DEFAULT,
            handshake_limit: Some(HANDSHAKE_DEFAULT),
            idle_exit: None,
            held: false,
            beside_another: false,
            tls: None,
            allowed_users: None,
        }
    }
}

/// Looks whether disks can be served together with these options.
///
/// Errors: [`ErrorKind::Usage`] for no disk, two of one name, texts that are too long, a number of
/// connections that is out of its limits.
pub(crate) fn check(disks: &[NamedDisk], options: &NbdOptions) -> Result<(), Error> {
    let usage = |text: String| Err(Error::new(ErrorKind::Usage, text));
    if disks.is_empty() {
        return usage(String::from("no disk is to be served"));
    }
    for (number, disk) in disks.iter().enumerate() {
        check_text("the name of an export", &disk.name).or_else(usage)?;
        check_text("the description of an export", &disk.description).or_else(usage)?;
        if disks[..number].iter().any(|other| other.name == disk.name) {
            return usage(format!("two disks are named '{}'", disk.name));
        }
        if disk.bitmaps.len() > BITMAPS_MAX {
            let count = disk.bitmaps.len();
            return usage(format!("{count} bitmaps of a disk; {BITMAPS_MAX} is the most"));
        }
    }
    if !(1..=CONNECTIONS_MAX).contains(&options.max_connections) {
        let count = options.max_connections;
        return usage(format!("{count} connections; there are 1 to {CONNECTIONS_MAX}"));
    }
    Ok(())
}

/// Looks whether a text can be the name or the description of an export.
///
/// * `what`: for the message.
///
/// Errors: why not.
pub fn check_text(what: &str, text: &str) -> Result<(), String> {
    if text.len() > NAME_BYTES_MAX {
        return Err(format!("{what} has {} bytes; {NAME_BYTES_MAX} is the most", text.len()));
    }
    if text.contains('\0') {
        return Err(format!("{what} contains a NUL"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
