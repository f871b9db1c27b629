//! Images as command lines name them: paths, addresses, descriptions.
//!
//! Promises: what a description says of an image counts as if it were options of the command; what
//! contradicts these is refused.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::new_file::check_new_name;
use ringdisk_disk::name::{FileName, is_export};
use ringdisk_disk::{Disk, Format, ImageOptions, Source};
use ringdisk_ring::Runtime;
use ringdisk_storage::{NbdOptions, OpenOptions, Storage};

use crate::cli::{NameArgs, PoolArgs};

/// An image of a command line.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    name: FileName,
    /// The path, or the URI of an NBD export; means the same to everything that takes a path.
    path: PathBuf,
}

impl Named {
    /// Reads the name of an image.
    ///
    /// Errors: a description that is wrong, or of what we do not have.
    pub(crate) fn of(words: NameArgs, image: &Path) -> Result<Named, Failure> {
        Named::read(words.image_opts, image)
    }

    /// The same.
    ///
    /// * `are_options`: the name is a list of options.
    pub(crate) fn read(are_options: bool, image: &Path) -> Result<Named, Failure> {
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
    pub(crate) fn of_new(image: &Path) -> Result<Named, Failure> {
        if image.as_os_str().as_bytes().starts_with(b"json:") && !is_export(image) {
            check_new_name(image)?;
        }
        Named::read(false, image)
    }

    /// The path, or the URI of an NBD export.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The options of the command line with what the name says.
    ///
    /// Errors: as [`FileName::add_to`].
    pub(crate) fn options(&self, mut options: ImageOptions) -> Result<ImageOptions, Failure> {
        self.name.add_to(&mut options)?;
        Ok(options)
    }

    /// The source for [`Disk::open`].
    pub(crate) fn source(&self) -> Source {
        // An address may have more to it than its URI: a part of a raw export.
        Source::Path(self.path.clone())
    }

    /// Opens the image with its chain.
    ///
    /// Errors: those of [`Named::options`] and [`Disk::open`].
    pub(crate) fn open(
        &self,
        runtime: &mut Runtime,
        options: ImageOptions,
    ) -> Result<Arc<Disk>, Failure> {
        let options = self.options(options)?;
        let ring = runtime.ring().clone();
        Ok(runtime.block_on(Disk::open(&ring, self.source(), &options))?)
    }

    /// Opens the image for reading, with its chain.
    ///
    /// Errors: as [`Named::open`].
    pub(crate) fn open_for_reading(
        &self,
        runtime: &mut Runtime,
        format: Option<Format>,
        force_share: bool,
        pool: &PoolArgs,
    ) -> Result<Arc<Disk>, Failure> {
        let options = ImageOptions { format, read_only: true, force_share, ..of_pool(pool) };
        self.open(runtime, options)
    }

    /// Opens the storage of the image alone.
    ///
    /// Errors: those of [`Storage::open`] and [`Storage::open_nbd`].
    pub(crate) fn storage(&self, options: &OpenOptions) -> Result<Arc<Storage>, Failure> {
        if let Some(address) = &self.name.nbd {
            let options = NbdOptions { read_only: options.read_only, ..NbdOptions::default() };
            return Ok(Arc::new(Storage::open_nbd(address, &options)?));
        }
        Ok(Arc::new(Storage::open(&self.path, options)?))
    }
}

/// Options of a disk with the places that a command line allows.
pub(crate) fn of_pool(pool: &PoolArgs) -> ImageOptions {
    ImageOptions {
        allow_paths: pool.allow_path.clone(),
        allow_hosts: pool.allow_host.clone(),
        ..ImageOptions::default()
    }
}
