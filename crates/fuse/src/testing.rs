//! Starts of an export with single parts forced, for tests and measurements of these parts.
//! Promises: no part of the interface for users of the library, and never an option of an export.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringdisk_disk::Disk;
use ringdisk_export::Error;

pub use crate::export::Forced;
use crate::export::{Export, ExportOptions, start};

/// As [`Export::start`].
///
/// Errors: the same.
pub fn start(disk: Arc<Disk>, options: ExportOptions, forced: Forced) -> Result<Export, Error> {
    start::start(disk, options, forced, Vec::new())
}

/// As [`Export::start`], with one queue more for each of `devices`, whose messages it takes for
/// requests of the kernel: what a broken device does.
///
/// Errors: the same.
pub fn start_with_devices(
    disk: Arc<Disk>,
    options: ExportOptions,
    devices: Vec<OwnedFd>,
) -> Result<Export, Error> {
    start::start(disk, options, Forced::default(), devices)
}

/// Makes a queue thread of an export panic.
pub fn panic(export: &Export) {
    export.panic_on_a_queue();
}
