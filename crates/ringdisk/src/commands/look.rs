//! Opening an image just to look at it; shared by `info` and `map`.

use std::path::Path;
use std::sync::Arc;

use ringdisk_disk::{Disk, ImageOptions, Source};
use ringdisk_ring::{Config, Runtime};

use crate::cli::LookArgs;
use crate::report::{Exit, Failure};

/// Submission entries of a ring that only looks: tables are read one by one or in small batches.
const ENTRIES: u32 = 32;

/// Operations in flight of that ring.
const SLOTS: u32 = 64;

/// A small ring for the main thread.
///
/// Errors: io_uring is forbidden or a limit was hit.
pub(crate) fn runtime() -> Result<Runtime, Failure> {
    let config =
        Config { entries: ENTRIES, slots: SLOTS, name: String::from("main"), ..Config::default() };
    Ok(Runtime::new(config)?)
}

/// Opens an image with its chain, for reading.
///
/// Errors: those of [`Disk::open`].
pub(crate) fn open(runtime: &mut Runtime, args: &LookArgs) -> Result<Arc<Disk>, Failure> {
    let options = ImageOptions {
        format: args.format,
        read_only: true,
        allow_paths: args.pool.allow_path.clone(),
        force_share: args.force_share,
        ..ImageOptions::default()
    };
    let ring = runtime.ring().clone();
    let source = Source::Path(args.image.clone());
    Ok(runtime.block_on(Disk::open(&ring, source, &options))?)
}

/// An error of the data path while looking.
pub(crate) fn unreadable(image: &Path, errno: ringdisk_ring::Errno) -> Failure {
    Failure::system(format!("cannot read '{}'", image.display()), &errno.into(), Exit::Image)
}
