//! Images as command lines name them: paths, addresses, descriptions.
//!
//! Promises: what a description says of an image counts as if it were options of the command; what
//! contradicts these is refused.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::new_file::check_new_name;
use ringdisk_disk::name::{FileName, is_export};
use ringdisk_disk::{AllowedHost, Disk, Format, ImageOptions, Source};
use ringdisk_ring::Runtime;
use ringdisk_storage::{NbdOptions, OpenOptions, Storage};

/// Where the files that images name may be.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Directories and files that names inside an image may lead to, beside its own directory.
    pub allow_path: Vec<PathBuf>,
    /// Servers that names of NBD exports inside an image may lead to.
    pub allow_host: Vec<AllowedHost>,
    /// How long requests to an NBD export wait for a lost connection; `None`: the default.
    pub reconnect: Option<Duration>,
}

impl From<&Pool> for Pool {
    fn from(pool: &Pool) -> Pool {
        pool.clone()
    }
}

/// An image of a command line.
#[derive(Clone, Debug)]
pub struct Named {
    name: FileName,
    /// The path, or the URI of an NBD export; means the same to everything that takes a path.
    path: PathBuf,
}

impl Named {
    /// Reads the name of an image.
    ///
    /// * `are_options`: the name is a list of options.
    ///
    /// Errors: a description that is wrong, or of what we do not have.
    pub fn read(are_options: bool, image: &Path) -> Result<Named, Failure> {
        let name = match are_options {
            true => FileName::of_options(&image.to_string_lossy())
                .map_err(|error| error.context(image.display()))?,
            false => FileName::of_user(image)?,
        };
        let is_path = name.nbd.is_none() && name.path == image;
        let path = if is_path { image.to_owned() } else { name.plain_path() };
        Ok(Named { name, path })
    }

    /// Reads the name of an image that is to be made: a path, also behind `file:`, or an NBD
    /// export.
    ///
    /// Errors: as [`Named::read`]; a description of a file.
    pub fn of_new(image: &Path) -> Result<Named, Failure> {
        if image.as_os_str().as_bytes().starts_with(b"json:") && !is_export(image) {
            check_new_name(image)?;
        }
        Named::read(false, image)
    }

    /// The path, or the URI of an NBD export.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The options of the command line with what the name says.
    ///
    /// Errors: as [`FileName::add_to`].
    pub fn options(&self, mut options: ImageOptions) -> Result<ImageOptions, Failure> {
        self.name.add_to(&mut options)?;
        Ok(options)
    }

    /// The source for [`Disk::open`].
    pub fn source(&self) -> Source {
        // An address may have more to it than its URI: a part of a raw export.
        Source::Path(self.path.clone())
    }

    /// Opens the image with its chain.
    ///
    /// Errors: those of [`Named::options`] and [`Disk::open`].
    pub fn open(&self, runtime: &mut Runtime, options: ImageOptions) -> Result<Arc<Disk>, Failure> {
        let options = self.options(options)?;
        let ring = runtime.ring().clone();
        Ok(runtime.block_on(Disk::open(&ring, self.source(), &options))?)
    }

    /// Opens the image for reading, with its chain.
    ///
    /// Errors: as [`Named::open`].
    pub fn open_for_reading(
        &self,
        runtime: &mut Runtime,
        format: Option<Format>,
        force_share: bool,
        pool: impl Into<Pool>,
    ) -> Result<Arc<Disk>, Failure> {
        let options = ImageOptions { format, read_only: true, force_share, ..of_pool(pool) };
        self.open(runtime, options)
    }

    /// Opens the storage of the image alone.
    ///
    /// * `reconnect`: as [`Pool::reconnect`].
    ///
    /// Errors: those of [`Storage::open`] and [`Storage::open_nbd`].
    pub fn storage(
        &self,
        options: &OpenOptions,
        reconnect: Option<Duration>,
    ) -> Result<Arc<Storage>, Failure> {
        if let Some(address) = &self.name.nbd {
            let own = NbdOptions { read_only: options.read_only, ..NbdOptions::default() };
            let options = NbdOptions { reconnect: reconnect.unwrap_or(own.reconnect), ..own };
            return Ok(Arc::new(Storage::open_nbd(address, &options)?));
        }
        Ok(Arc::new(Storage::open(&self.path, options)?))
    }
}

/// Options of a disk with the places that a command line allows.
pub fn of_pool(pool: impl Into<Pool>) -> ImageOptions {
    let pool = pool.into();
    ImageOptions {
        allow_paths: pool.allow_path,
        allow_hosts: pool.allow_host,
        reconnect: pool.reconnect,
        ..ImageOptions::default()
    }
}
