//! Backups: checkpoints of disks that servers serve, copies of their state, and images made from
//! backups.
//!
//! Promises: servers are asked over their control sockets; what they may not make inside their
//! sandboxes is made here. A backup has its name only when it is whole and on stable storage; when
//! it fails, its file goes and the bitmaps of the images are as they were.
//!
//! - [`checkpoint`]: the state of several disks at one instant, begun and ended;
//! - [`back_up`]: a copy of such a state, as a [`request`] says, into a file or a [`directory`] of
//!   backups;
//! - [`restore`]: an image from a backup and all below it;
//! - [`jobs`]: mirrors and backups that a server makes, begun from outside;
//! - [`target`]: what such a job writes to, made and opened as its user.
//!
//! ```
//! use ringdisk_backup::directory::stored;
//!
//! # let directory = tempfile::tempdir().unwrap();
//! # let directory = directory.path();
//! std::fs::write(directory.join("FULL-20260101T000000.000Z.qcow2"), "").unwrap();
//! let all = stored(directory)?;
//! assert_eq!(all[0].bitmap(), "ringdisk-20260101T000000.000Z");
//! # Ok::<(), ringdisk_daemon::failure::Failure>(())
//! ```

#![forbid(unsafe_code)]

pub mod back_up;
pub mod checkpoint;
mod destination;
pub mod directory;
pub mod jobs;
pub mod request;
pub mod restore;
mod source;
pub mod target;
