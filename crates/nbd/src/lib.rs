//! Serves disks over NBD.
//!
//! Promises: a client that sends anything, stops anywhere or reads no replies stalls its own
//! connection and nothing else. The memory of a connection is bounded ([`CONNECTION_BYTES_MAX`]),
//! and so is their number. A request of at most 256 KiB allocates nothing once its connection is
//! warm; all requests that are there are taken together, and all replies that are finished leave in
//! one system call.
//!
//! ```
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//!
//! use ringdisk_disk::{Bytes, Disk, NullOptions};
//! use ringdisk_nbd::{Export, NamedDisk, NbdOptions};
//!
//! let disk = Disk::null(&NullOptions { size: Bytes(1 << 30), ..NullOptions::default() });
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("nbd.sock");
//! let listeners = vec![UnixListener::bind(path)?.into()];
//! let export = Export::start(vec![NamedDisk::new("", disk)], listeners, NbdOptions::default())?;
//! export.stop_handle().stop();
//! println!("{} requests", export.wait()?.total().requests);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Modules use one another in one direction only: [`options`] ◄ `exported` ◄ `agreed`, `end`,
//! `ending`, `idle`, `peers`, `places`, `rarely` ◄ `transport`, `moved` (connections that stand
//! still) ◄ `queue` (what a queue thread has) ◄ `input` ◄ `handshake` ◄ `session` (requests) ◄
//! `connection` ◄ `accept`, `hand_over` (the state for a successor) ◄ `export` (control thread,
//! with `leaving`), `on_ring` (a ring of the caller). The wire is in `ringdisk-nbd-protocol`.

#![forbid(unsafe_code)]

mod accept;
mod client_limit;
mod connection;
mod disk_handle;
mod end_reason;
mod export;
mod exported_disk;
mod hand_over;
mod handshake;
mod idle;
mod input_buffer;
mod log_rate;
mod negotiated;
pub mod options;
mod peers;
mod queue;
mod session;
mod shared_ring;
mod stop_request;
mod suspended_connections;
mod transport;

pub use disk_handle::DiskHandle;
pub use export::Export;
pub use hand_over::{Handed, HandedClients};
pub use options::{AllowedUsers, DirtyBitmap, NamedDisk, NbdOptions, TlsOptions};
pub use peers::Peer;
pub use ringdisk_export::{CommonOptions, Error, ErrorKind};
pub use ringdisk_tls::{
    AllowList, Match, Rule, STREAM_BYTES_MAX, ServerTls, Source as TlsSource, VerifyPeer,
};
pub use session::CONNECTION_BYTES_MAX;
pub use shared_ring::RingExport;
pub use stop_request::HandOverHandle;
pub use stop_request::StopHandle;
