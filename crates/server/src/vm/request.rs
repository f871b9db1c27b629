//! What a server of disks for virtual machines is asked for, as plain values.
//!
//! Promises: plain values; what does not go together is refused where the server begins.

use std::path::PathBuf;

use ringdisk_daemon::confine::Confinement;
use ringdisk_daemon::helper;
use ringdisk_daemon::sockets::{Address, SocketOptions};
use ringdisk_export::{CommonOptions, ThreadOptions};
use ringdisk_vhost::export::{AccelOptions, Connector, OnError, Packed, Second};
use ringdisk_vhost::{ExportOptions, Listen};

use crate::request::ImageRequest;

/// What all disks of the process have in common.
#[derive(Clone, Debug)]
pub struct Request {
    /// The process goes into the background when the disks answer.
    pub daemonize: bool,
    /// Another process holds the disks, so that they outlive this one.
    pub keep: bool,
    /// The disks are taken over from the process that serves them.
    pub upgrade: bool,
    /// Gets the pid.
    pub pidfile: Option<PathBuf>,
    /// Where metrics are served.
    pub metrics: Vec<Address>,
    /// How far the process is confined.
    pub sandbox: Confinement,
    /// Counters are printed at the end.
    pub stats: bool,
}

/// One disk.
#[derive(Clone, Debug)]
pub struct DiskRequest {
    /// `None`: a null disk.
    pub image: Option<PathBuf>,
    /// The options of the image.
    pub source: ImageRequest,
    /// Where front ends come from.
    pub socket: SocketOptions,
    /// What becomes of a second front end.
    pub second: Second,
    /// Virtqueues.
    pub queues: u16,
    /// Most entries of a virtqueue.
    pub queue_size: u16,
    /// The serial number; may be empty.
    pub serial: String,
    /// Bytes.
    pub logical_block_size: u32,
    /// Bytes; `None`: as the storage has it.
    pub physical_block_size: Option<u32>,
    /// Whether virtqueues may be packed.
    pub packed: Packed,
    /// What an error of the storage does.
    pub on_error: OnError,
    /// Another process has the disk, and gives it away by a migration.
    pub incoming: bool,
    /// Queue threads, their CPUs and nodes.
    pub threads: ThreadOptions,
    /// What the host kernel is to do; `None`: nothing.
    pub accel: Option<AccelOptions>,
    /// The guest's memory is pinned.
    pub pin_guest_memory: bool,
}

/// What a disk asks of its export.
///
/// * `read_only`: the disk can only be read.
/// * `restricted`: rings do nothing but what serving takes.
/// * `name`: shown in messages and statistics.
pub(super) fn options(
    request: &DiskRequest,
    read_only: bool,
    restricted: bool,
    listen: Listen,
    name: String,
) -> ExportOptions {
    ExportOptions {
        common: CommonOptions {
            name,
            threads: request.threads.clone(),
            read_only: request.source.read_only || read_only,
            restricted,
        },
        second: request.second,
        queues: request.queues,
        queue_size_max: request.queue_size,
        serial: request.serial.clone(),
        logical_block_size: request.logical_block_size,
        physical_block_size: request.physical_block_size,
        // Where each write is durable when it is answered there is no cache to speak of.
        write_cache: !request.source.cache.sync(),
        packed: request.packed,
        accel: request.accel,
        pin_guest_memory: request.pin_guest_memory,
        on_error: request.on_error,
        connector: Connector::new(helper::connect),
        ..ExportOptions::new(listen)
    }
}
