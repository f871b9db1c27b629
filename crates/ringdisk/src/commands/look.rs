//! Opening an image just to look at it; shared by `info` and `map`.

use std::path::Path;
use std::sync::Arc;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::probe::PROBE_LEN;
use ringdisk_disk::{Disk, Format};
use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_storage::Storage;

use crate::cli::LookArgs;
use crate::commands::named::Named;

/// Submission entries of a ring that only looks: tables are read one by one or in small batches.
const ENTRIES: u32 = 32;

/// Alignment of the buffer for the first sector: a page suits every device.
const SECTOR_ALIGN: usize = 4096;

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
    let image = Named::of(args.name, &args.image)?;
    image.open_for_reading(runtime, args.format, args.force_share, &args.pool)
}

/// Closes a disk that was open for writing, however the work on it went.
///
/// Errors: that of the work; the image could not be written to the end.
pub(crate) fn close<T>(
    runtime: &mut Runtime,
    disk: &Arc<Disk>,
    file: &Path,
    result: Result<T, Failure>,
) -> Result<T, Failure> {
    let ring = runtime.ring().clone();
    let closed = runtime.block_on(disk.close(&ring)).map_err(|errno| {
        let doing = format!("cannot write '{}' to the end", file.display());
        Failure::system(doing, &errno.into(), Exit::Storage)
    });
    let value = result?;
    closed.map(|()| value)
}

/// The format of an image by its first bytes.
///
/// Errors: it cannot be read, has a format that we know by name only, or one that its guest may
/// have written.
pub(crate) async fn format_of(ring: &Ring, storage: &Storage) -> Result<Format, Failure> {
    let name = storage.name().to_owned();
    let head = IoBuf::new(PROBE_LEN, SECTOR_ALIGN);
    let count =
        storage.read(ring, 0, &head).await.map_err(|errno| unreadable(Path::new(&name), errno))?;
    let bytes = head.to_vec();
    Ok(ringdisk_disk::guess(storage, bytes.get(..count).unwrap_or_default())?)
}

/// An error of the data path while looking.
pub(crate) fn unreadable(image: &Path, errno: ringdisk_ring::Errno) -> Failure {
    Failure::system(format!("cannot read '{}'", image.display()), &errno.into(), Exit::Image)
}
