//! The ring of a command, and the ends of looking at an image.
//!
//! Promises: an image that was open for writing is closed however the work on it went, and the
//! first error counts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::probe::PROBE_LEN;
use ringdisk_disk::{Disk, Format, ImageOptions, SECTOR_ALIGN};
use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_storage::Storage;

use crate::named::{Named, Pool};

/// Submission entries of a ring that only looks: tables are read one by one or in small batches.
const ENTRIES: u32 = 32;

/// Operations in flight of that ring.
const SLOTS: u32 = 64;

/// An image that is only looked at.
#[derive(Clone, Debug)]
pub struct Look {
    /// The image.
    pub image: PathBuf,
    /// Its name is a list of options.
    pub image_opts: bool,
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// Other programs may write it meanwhile.
    pub force_share: bool,
    /// Where names inside it may lead.
    pub pool: Pool,
}

impl Look {
    /// Opens the image with its chain, for reading.
    ///
    /// Errors: those of [`Named::read`] and [`Named::open_for_reading`].
    pub fn open(&self, runtime: &mut Runtime) -> Result<Arc<Disk>, Failure> {
        let image = Named::read(self.image_opts, &self.image)?;
        image.open_for_reading(runtime, self.format, self.force_share, &self.pool)
    }
}

/// A small ring for the main thread.
///
/// Errors: io_uring is forbidden or a limit was hit.
pub fn runtime() -> Result<Runtime, Failure> {
    let config =
        Config { entries: ENTRIES, slots: SLOTS, name: String::from("main"), ..Config::default() };
    Ok(Runtime::new(config)?)
}

/// Closes a disk that was open for writing, however the work on it went.
///
/// Errors: that of the work; the image could not be written to the end.
pub fn close<T>(
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
pub async fn format_of(ring: &Ring, storage: &Storage) -> Result<Format, Failure> {
    let name = storage.name().to_owned();
    let head = IoBuf::new(PROBE_LEN, SECTOR_ALIGN);
    let count =
        storage.read(ring, 0, &head).await.map_err(|errno| unreadable(Path::new(&name), errno))?;
    let bytes = head.to_vec();
    Ok(ringdisk_disk::guess(storage, bytes.get(..count).unwrap_or_default())?)
}

/// An error of the data path while looking.
pub fn unreadable(image: &Path, errno: ringdisk_ring::Errno) -> Failure {
    Failure::system(format!("cannot read '{}'", image.display()), &errno.into(), Exit::Image)
}

/// Notes what a file names that a server may write from now on.
///
/// A file that cannot be opened is the server's to complain of.
pub fn note_names(file: &Path) {
    let Ok(mut runtime) = runtime() else {
        return tracing::debug!("no ring, so '{}' gets no note of its names", file.display());
    };
    let ring = runtime.ring().clone();
    let noted = runtime.block_on(ringdisk_disk::note_file(&ring, file, &ImageOptions::default()));
    if let Err(error) = noted {
        tracing::debug!("'{}' gets no note of its names: {error}", file.display());
    }
}
