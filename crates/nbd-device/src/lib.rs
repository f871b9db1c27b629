//! NBD devices of the kernel, and the exports of a server: what `qemu-nbd` does beside serving.
//!
//! Promises: a server is asked in a handshake of our own, bounded in time and memory; the kernel by
//! netlink, without an ioctl. Errors have the texts of `qemu-nbd`. All of it blocks the thread of
//! the caller.
//!
//! ```no_run
//! use ringdisk_nbd_device::list;
//! use ringdisk_qemu_nbd::{Invocation, parse};
//!
//! let words = ["--list", "-k", "/run/disk.sock"].map(Into::into);
//! let Ok(Invocation::List(asked)) = parse("qemu-nbd", words) else { panic!() };
//! list::list(&asked)?; // prints "exports available: 1" and what there is to know of each
//! # Ok::<(), String>(())
//! ```

#![forbid(unsafe_code)]

pub mod device;
pub mod list;
mod netlink;
mod server;
