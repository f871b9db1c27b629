//! A disk for virtual machines: vhost-user-blk.
//!
//! Promises: nothing that a front end or a guest sends ends the process, panics, or reaches memory
//! outside of the guest's; a request whose mapping is cached allocates nothing and takes no lock.
//!
//! ```
//! use std::os::unix::net::UnixListener;
//!
//! use ringdisk_disk::{Bytes, Disk, NullOptions};
//! use ringdisk_vhost::export::{Export, ExportOptions, Listen};
//!
//! # let directory = tempfile::tempdir()?;
//! # let path = directory.path().join("disk.sock");
//! let disk = Disk::null(&NullOptions { size: Bytes(1 << 30), ..NullOptions::default() });
//! let listener = UnixListener::bind(&path)?;
//! let export = Export::start(disk, ExportOptions::new(Listen::Listener(listener.into())))?;
//! // QEMU connects: -chardev socket,id=c,path=disk.sock -device vhost-user-blk-pci,chardev=c
//! export.stop_handle().stop();
//! assert_eq!(export.wait()?.total().requests, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Rooms, from the wire inwards:
//! - [`protocol`]: bytes to messages and replies to bytes, without a socket;
//! - [`session`]: what one front end has said and what follows from it, without a thread;
//! - [`Connection`], [`BackChannel`]: the sockets;
//! - [`keep`]: who keeps an export while its process is killed and another one goes on;
//! - `export`: a disk that is served, from its start to its end, and the device that a session
//!   talks to;
//! - `worker`: queue threads, their virtqueues, and the tasks that serve requests;
//! - `blk`: what a request does;
//! - `device`: what all of these threads share.

#![forbid(unsafe_code)]

mod back_channel;
mod blk;
mod closing;
mod connection;
mod descriptor_check;
mod device;
pub mod export;
mod hand_over_state;
pub mod keep;
pub mod protocol;
pub mod session;
mod signals;
#[doc(hidden)]
pub mod testing;
mod wire;
mod worker;

pub use back_channel::BackChannel;
pub use connection::{Connection, Received};
pub use export::{Export, ExportOptions, Listen, StopHandle};
pub use ringdisk_export::{
    CommonOptions, Error, ErrorKind, HaltReason, Numa, ThreadOptions, Threads,
};
