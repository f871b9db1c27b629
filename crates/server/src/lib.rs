//! A server of disks: from a request in plain values to disks that answer, and from their end to an
//! exit code.
//!
//! Promises: what was made on the way (images, mountpoints, sockets, a pid file) is removed again
//! when a start fails; signals are honoured from the first moment. Nothing here is on the path of a
//! request. Errors say what the user can do, in the words of the command line.
//!
//! - [`request`], [`open`], [`limits`], [`reopen`]: the image that is served, opened or made, and
//!   opened again after a crash;
//! - [`mount`]: a disk as a file, from start to end; [`vm`]: disks of virtual machines, from start
//!   to end; [`nbd`]: disks for NBD clients, from start to end; [`vhost`]: handles of disks that
//!   are served to virtual machines;
//! - [`start`], [`privileges`]: what servers with sockets have in common;
//! - [`client_view`], [`hand_over`]: what a successor has to show, and what it takes from a
//!   predecessor;
//! - [`keep`]: disks that outlive their process;
//! - [`metrics`]: sockets for Prometheus.
//!
//! ```
//! use ringdisk_daemon::new_file::NewFiles;
//! use ringdisk_server::open::ImagePlan;
//! use ringdisk_server::request::ImageRequest;
//!
//! # let directory = tempfile::tempdir().unwrap();
//! # let file = directory.path().join("disk.qcow2");
//! let request = ImageRequest { create: Some(1 << 20), ..ImageRequest::default() };
//! let plan = ImagePlan::new(&request, Some(file.clone()));
//! let fresh = NewFiles::default();
//! let disk = plan.open(&fresh, plan.new_image()?.as_ref())?;
//! assert_eq!(disk.size(), ringdisk_disk::Bytes(1 << 20));
//! assert!(plan.describe(&disk).ends_with("disk.qcow2 (1 MiB, qcow2)"));
//! # Ok::<(), ringdisk_daemon::failure::Failure>(())
//! ```

#![forbid(unsafe_code)]

pub mod client_view;
pub mod hand_over;
pub mod keep;
pub mod limits;
pub mod metrics;
pub mod mount;
pub mod nbd;
mod observers;
pub mod open;
pub mod privileges;
pub mod reopen;
pub mod request;
pub mod start;
pub mod vhost;
pub mod vm;
