//! What a backup is asked for, as plain values.
//!
//! Promises: plain values; nothing is checked, opened or looked up here. Options of the command
//! line become these in crate `ringdisk`.

use std::path::PathBuf;

use ringdisk_disk::Format;
use ringdisk_images::named::Pool;

use crate::checkpoint::Fleece;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// A mount, a socket of a server, or an image.
    pub target: PathBuf,
    /// Other disks that are backed up at the same instant.
    pub with: Vec<PathBuf>,
    /// The backup, or a directory for backups.
    pub file: PathBuf,
    /// The bitmap that says what has changed.
    pub since: Option<String>,
    /// The backup that was made when that was started.
    pub backing: Option<PathBuf>,
    /// The bitmap that is started.
    pub bitmap: Option<String>,
    /// In a directory: a full backup, whatever is there.
    pub full: bool,
    /// The backup is compressed.
    pub compress: bool,
    /// Format of the backup; `None`: qcow2.
    pub format: Option<Format>,
    /// Where old data goes that clients overwrite meanwhile.
    pub fleece: Fleece,
    /// Where images may lead.
    pub pool: Pool,
}
