//! What a caller can choose about an image.
//!
//! Promises: plain data with defaults; nothing here opens a file.

use ringdisk_qcow2::Bytes;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_storage::{NbdServer, Opener};

use crate::{Error, ErrorKind};

pub use ringdisk_qcow2::{Discard, SnapshotChoice};

/// An image format that can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Bytes as they are.
    Raw,
    /// QEMU copy-on-write, version 2 and 3.
    Qcow2,
}

impl Format {
    /// The name that images and command lines use.
    pub fn name(self) -> &'static str {
        match self {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Format {
    type Err = Error;

    /// Reads `raw` or `qcow2`.
    ///
    /// Errors: `UnknownFormat` for every other word.
    fn from_str(text: &str) -> Result<Format, Error> {
        match text {
            "raw" => Ok(Format::Raw),
            "qcow2" => Ok(Format::Qcow2),
            _ => Err(Error::new(
                ErrorKind::UnknownFormat,
                format!("unknown format '{}'; known formats: raw, qcow2", text.escape_debug()),
            )),
        }
    }
}

/// How the host's page cache and flushes are used; the words are QEMU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cache {
    /// Host page cache; a flush makes writes durable.
    #[default]
    Writeback,
    /// `O_DIRECT`: no host page cache; a flush makes writes durable.
    None,
    /// Host page cache; each write is flushed before it is answered.
    Writethrough,
    /// `O_DIRECT`; each write is flushed before it is answered.
    DirectSync,
    /// Host page cache; flushes are ignored, so a crash of the host loses data.
    Unsafe,
}

impl Cache {
    /// Whether files are opened with `O_DIRECT`.
    pub fn direct(self) -> bool {
        matches!(self, Cache::None | Cache::DirectSync)
    }

    /// QEMU's word.
    pub fn name(self) -> &'static str {
        match self {
            Cache::Writeback => "writeback",
            Cache::None => "none",
            Cache::Writethrough => "writethrough",
            Cache::DirectSync => "directsync",
            Cache::Unsafe => "unsafe",
        }
    }

    /// Whether each write is durable before it is answered.
    pub fn sync(self) -> bool {
        matches!(self, Cache::Writethrough | Cache::DirectSync)
    }
}

impl FromStr for Cache {
    type Err = Error;

    /// Reads QEMU's words.
    ///
    /// Errors: `Invalid` for every other word.
    fn from_str(text: &str) -> Result<Cache, Error> {
        match text {
            "writeback" => Ok(Cache::Writeback),
            "none" => Ok(Cache::None),
            "writethrough" => Ok(Cache::Writethrough),
            "directsync" => Ok(Cache::DirectSync),
            "unsafe" => Ok(Cache::Unsafe),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "unknown cache mode '{}'; known modes: writeback, none, writethrough, \
                     directsync, unsafe",
                    text.escape_debug()
                ),
            )),
        }
    }
}

/// Whether a write of nothing but zeroes is turned into zero clusters or holes; the words are
/// QEMU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DetectZeroes {
    /// Writes are not looked at.
    #[default]
    Off,
    /// As `write_zeroes` that keeps the space.
    On,
    /// As `write_zeroes` that gives the space back, if discard is on too.
    Unmap,
}

impl FromStr for DetectZeroes {
    type Err = Error;

    /// Reads QEMU's words.
    ///
    /// Errors: `Invalid` for every other word.
    fn from_str(text: &str) -> Result<DetectZeroes, Error> {
        match text {
            "off" => Ok(DetectZeroes::Off),
            "on" => Ok(DetectZeroes::On),
            "unmap" => Ok(DetectZeroes::Unmap),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "unknown detect-zeroes mode '{}'; known modes: off, on, unmap",
                    text.escape_debug()
                ),
            )),
        }
    }
}

/// A server that names inside images may lead to (`--allow-host`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedHost {
    /// All ports of a host, by the name or address that an image has for it.
    Host(String),
    /// One port of a host, or one Unix socket.
    Server(NbdServer),
}

impl AllowedHost {
    /// Whether an image may name a server.
    pub fn allows(&self, server: &NbdServer) -> bool {
        match self {
            AllowedHost::Host(host) => {
                server.host().is_some_and(|other| other.eq_ignore_ascii_case(host))
            }
            AllowedHost::Server(allowed) => allowed == server,
        }
    }
}

impl FromStr for AllowedHost {
    type Err = Error;

    /// Reads `HOST`, `HOST:PORT`, `[ADDRESS]:PORT` and `unix:PATH`.
    ///
    /// Errors: `Invalid` for anything else.
    fn from_str(text: &str) -> Result<AllowedHost, Error> {
        let wrong = || {
            let text = text.escape_debug();
            let what = "a host is HOST, HOST:PORT, [ADDRESS]:PORT or unix:PATH";
            Error::new(ErrorKind::Invalid, format!("'{text}' names no host: {what}"))
        };
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(AllowedHost::Server(NbdServer::Unix(path.into())));
        }
        let is_plain =
            |host: &str| !host.is_empty() && !host.contains(['/', '[', ']', '?', ' ', '@']);
        let with_port = |host: &str, port: &str| {
            let port = port.parse().ok().filter(|port| *port != 0 && is_plain(host));
            let port = port.ok_or_else(wrong)?;
            Ok(AllowedHost::Server(NbdServer::Tcp(host.to_owned(), port)))
        };
        if let Some(rest) = text.strip_prefix('[') {
            return match rest.split_once(']') {
                Some((host, "")) if is_plain(host) => Ok(AllowedHost::Host(host.to_owned())),
                Some((host, port)) => with_port(host, port.strip_prefix(':').ok_or_else(wrong)?),
                None => Err(wrong()),
            };
        }
        match text.split_once(':') {
            Some((host, port)) if !port.contains(':') => with_port(host, port),
            _ if is_plain(text) => Ok(AllowedHost::Host(text.to_owned())),
            _ => Err(wrong()),
        }
    }
}

/// Options of [`Disk::open`](crate::Disk::open). `Default` probes the format, opens for writing
/// and allows files below the image's own directory.
#[derive(Clone, Debug, Default)]
pub struct ImageOptions {
    /// Format of the top image; `None` probes it, and then a raw image protects its first sector.
    /// A written file that is raw gets a note of that (an extended attribute): a later probe
    /// finds raw, or asks the user, whatever was written. Where the file cannot keep the note, the
    /// first sector is protected.
    pub format: Option<Format>,
    /// A written image is opened as raw only if the user says so, or the image has a note of that.
    pub ask_for_raw: bool,
    /// The format of the raw image at the bottom was probed when the disk was opened first, by
    /// this process or a predecessor: its first sector is protected although the format is stated
    /// now.
    pub protect_raw: bool,
    /// The caller has looked for the note of a raw image itself, where this process cannot, and has
    /// `protect_raw` as that says.
    pub raw_is_noted: bool,
    /// The user confirms the format that the images above state for the raw image at the bottom:
    /// its first sector is not protected. Otherwise it is protected as if its format had been
    /// probed, since the next program that opens it may probe.
    pub trust_base_format: bool,
    /// Open for reading only.
    pub read_only: bool,
    /// Fall back to reading where the image cannot be written (a format that is only read, no
    /// permission, a read-only file system) instead of failing; the reason is then in
    /// [`Disk::read_only_reason`](crate::Disk::read_only_reason).
    pub auto_read_only: bool,
    /// Use of the host page cache and of flushes, for every file of the chain.
    pub cache: Cache,
    /// First byte of the disk that is served inside the disk of the image, bytes; of any format.
    pub window_offset: u64,
    /// Size of the disk that is served, bytes; `None`: to the end of the disk of the image. A disk
    /// with a given size cannot be resized.
    pub window_size: Option<Bytes>,
    /// Serve this partition of the image's disk, numbered as the kernel does, instead of an offset
    /// and a size. Its table is read when the image is opened.
    pub partition: Option<u32>,
    /// Directories (with all below) and single files that backing and data file names may lead
    /// to, beside the image's own directory.
    pub allow_paths: Vec<PathBuf>,
    /// Servers that backing file names may lead to.
    pub allow_hosts: Vec<AllowedHost>,
    /// How long requests to an NBD server wait for a connection that was lost; `None`: the default
    /// of [`ringdisk_storage::NBD_RECONNECT_DEFAULT`].
    pub reconnect: Option<Duration>,
    /// As `allow_paths`, but not named by the user: a header may lead there only with the names
    /// that the note at the image has ([`crate::names_note`]).
    pub known_paths: Vec<PathBuf>,
    /// The process is confined, and an attacker may control it later: the names in the header of
    /// the written image are noted now, so that names that are written there later do not count.
    pub note_names: bool,
    /// Memory cap of the metadata cache of each qcow2 layer, bytes; `None`: sized by the image.
    pub metadata_cache_bytes: Option<Bytes>,
    /// Take no locks (QEMU's `force-share`); only with `read_only`.
    pub force_share: bool,
    /// Take no locks on the images below the one on top, all of which are only read.
    pub share_backing: bool,
    /// What a discard does. [`Disk::punch`](crate::Disk::punch) works in every mode.
    pub discard: Discard,
    /// A discard in a qcow2 image keeps the reference on its cluster (QEMU's `discard-no-unref`):
    /// the space is given back, and the cluster is used again when the same place is written.
    pub discard_no_unref: bool,
    /// Writes of zeroes.
    pub detect_zeroes: DetectZeroes,
    /// What is read of the layers below is kept in the top image, too (QEMU's filter
    /// `copy-on-read`); [`Disk::set_copy_on_read`](crate::Disk::set_copy_on_read) changes it.
    pub copy_on_read: bool,
    /// Refcounts of the top image are written lazily; `None`: as the image says.
    pub lazy_refcounts: Option<bool>,
    /// Writes go to a temporary overlay that vanishes with the disk; the image and its chain are
    /// opened for reading only.
    pub temporary: bool,
    /// Writes go to this qcow2 overlay over the image; created when there is none.
    pub overlay: Option<PathBuf>,
    /// Answered writes survive the end of the process: a change of the mapping of a qcow2 image is
    /// on stable storage before the request that made or used it is answered. (Data is in the
    /// kernel's page cache by then.)
    pub outlives_process: bool,
    /// Open for a guest that is still running elsewhere: no lock is taken, no tables are read, and
    /// requests fail with EBUSY until [`Disk::activate`](crate::Disk::activate).
    pub inactive: bool,
    /// How long to wait for the locks of the images, for a process that takes the place of one that
    /// was killed; `None`: not at all.
    pub wait_for_locks: Option<Duration>,
    /// Open the top image only, whatever backing file it names: unallocated ranges read as zeroes.
    pub without_backing: bool,
    /// Show the disk as this internal snapshot of the top image, a qcow2, has it; only with
    /// `read_only`.
    pub internal_snapshot: Option<SnapshotChoice>,
    /// Opens files and creates overlays where this process may not do it itself.
    pub opener: Option<Arc<dyn Opener>>,
}

/// The place of the top image.
#[derive(Debug)]
pub enum Source {
    /// A path that the user named; symbolic links in it are followed. Or the address of an NBD
    /// export ([`FileName::export_of`](crate::name::FileName::export_of)).
    Path(PathBuf),
    /// An inherited descriptor, and a name for messages.
    Fd(OwnedFd, String),
}

/// Options of [`Disk::null`](crate::Disk::null).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NullOptions {
    /// Size of the disk, bytes.
    pub size: Bytes,
    /// Reads return zeroes; otherwise they leave the buffer as it is.
    pub read_zeroes: bool,
    /// How long each read, write, flush and write-zeroes takes; zero: no wait.
    pub latency: Duration,
}
