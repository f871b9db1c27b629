//! Images as users name, make, open and look at them: the commands for images without their words.
//!
//! Promises: a name means the same in every command, and what it says counts as an option does; a
//! new image that cannot be made leaves nothing behind. Errors say what the user can do. All of it
//! runs on the thread of the caller, on a ring of its own ([`inspect::runtime`]).
//!
//! - [`named`], [`inspect`], [`own_image`], [`new_image`]: what all of them have in common;
//! - [`create`], [`convert`], [`compare`], [`check`], [`info`], [`map`], [`measure`], [`resize`],
//!   [`rebase`], [`commit`], [`snapshot`], [`bitmap`]: what they do and print, in the words of
//!   qemu-img.
//!
//! ```
//! use ringdisk_daemon::new_file::NewFiles;
//! use ringdisk_disk::{Format, ImageOptions};
//! use ringdisk_images::inspect;
//! use ringdisk_images::named::Named;
//! use ringdisk_images::new_image::{Described, NewImage};
//!
//! # let directory = tempfile::tempdir().unwrap();
//! # let file = directory.path().join("disk.qcow2");
//! let options = [String::from("cluster_size=128k")];
//! let Described::Image(image) = NewImage::parse(Format::Qcow2, &options)? else { panic!() };
//! let mut runtime = inspect::runtime()?;
//! let ring = runtime.ring().clone();
//! let fresh = NewFiles::default();
//! runtime.block_on(image.make(&ring, &file, 1 << 20, &fresh))?;
//! fresh.keep();
//!
//! let disk = Named::read(false, &file)?.open(&mut runtime, ImageOptions::default())?;
//! assert_eq!(disk.size(), ringdisk_disk::Bytes(1 << 20));
//! inspect::close(&mut runtime, &disk, &file, Ok(()))?;
//! # Ok::<(), ringdisk_daemon::failure::Failure>(())
//! ```

#![forbid(unsafe_code)]

pub mod bitmap;
pub mod check;
pub mod commit;
pub mod compare;
pub mod convert;
pub mod create;
pub mod info;
pub mod inspect;
pub mod map;
pub mod measure;
pub mod named;
pub mod new_image;
pub mod own_image;
pub mod rebase;
pub mod resize;
pub mod snapshot;
mod snapshot_list;
