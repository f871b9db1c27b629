//! What a server for NBD clients is asked for, as plain values.
//!
//! Promises: plain values; what does not go together is refused where the server begins.

use std::path::PathBuf;
use std::time::Duration;

use ringdisk_daemon::confine::Confinement;
use ringdisk_daemon::sockets::Address;
use ringdisk_export::ThreadOptions;
use ringdisk_nbd::{AllowList, TlsSource, VerifyPeer};

use crate::request::ImageRequest;

/// What all disks of the process have in common.
#[derive(Clone, Debug)]
pub struct Request {
    /// Where clients connect.
    pub addresses: Vec<Address>,
    /// Mode of Unix sockets that are made.
    pub socket_mode: Option<u32>,
    /// Their group.
    pub socket_group: Option<String>,
    /// Who may connect.
    pub access: AccessRequest,
    /// Queue threads, their CPUs and nodes.
    pub threads: ThreadOptions,
    /// Clients at once.
    pub max_connections: usize,
    /// How long a client may take for its handshake.
    pub handshake_limit: Option<Duration>,
    /// The process ends when nobody has used a disk for so long.
    pub idle_exit: Option<Duration>,
    /// Clients write to disks that virtual machines use.
    pub share_rw: bool,
    /// Another process gives its disks and clients away.
    pub upgrade: bool,
    /// Another process holds the disks, and goes on with them when this one dies.
    pub keep: bool,
    /// Nothing is printed when the disks are served.
    pub is_quiet: bool,
    /// A client is a block device of this machine.
    pub is_for_a_device: bool,
    /// In the background the standard streams stay.
    pub keeps_output: bool,
    /// The process goes into the background when the disks answer.
    pub daemonize: bool,
    /// Gets the pid.
    pub pidfile: Option<PathBuf>,
    /// Where metrics are served.
    pub metrics: Vec<Address>,
    /// How far the process is confined.
    pub sandbox: Confinement,
    /// Counters are printed at the end.
    pub stats: bool,
}

/// Who may connect.
#[derive(Clone, Debug, Default)]
pub struct AccessRequest {
    /// Keys and certificates; `None`: no connection is encrypted.
    pub tls: Option<TlsSource>,
    /// Clients need not encrypt.
    pub is_tls_optional: bool,
    /// Whether clients need a certificate.
    pub verify: VerifyPeer,
    /// Names in certificates that are let in; empty: any.
    pub names: Vec<String>,
    /// Rules about these names, which count in place of them.
    pub rules: Option<AllowList>,
    /// Users that are let in at Unix sockets.
    pub users: Vec<String>,
    /// Groups whose members are.
    pub groups: Vec<String>,
}

/// One disk.
#[derive(Clone, Debug)]
pub struct DiskRequest {
    /// `None`: a null disk.
    pub image: Option<PathBuf>,
    /// The options of the image.
    pub source: ImageRequest,
    /// The name that clients ask for; may be empty.
    pub name: String,
    /// For clients; may be empty.
    pub description: String,
    /// Names of bitmaps that clients see.
    pub bitmaps: Vec<String>,
    /// Clients may ask for `qemu:allocation-depth`.
    pub allocation_depth: bool,
    /// A bitmap that records is shown as it is at the start.
    pub shows_recording: bool,
}
