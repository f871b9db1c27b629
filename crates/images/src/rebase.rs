//! Another backing file for an image.
//!
//! Promises: the disk stays what it is, unless only the name is changed; an image that cannot be
//! rebased has its old backing file.

use std::path::{Path, PathBuf};

use ringdisk_console::operation::{Operation, Showing};
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::name::FileName;
use ringdisk_disk::{Backing, Cache, Format, ImageOptions, operations};

use crate::create::{backing_path, is_same};
use crate::inspect;
use crate::named::{Named, Pool, of_pool};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// The image.
    pub file: PathBuf,
    /// Its name is a list of options.
    pub image_opts: bool,
    /// `None`: it is probed.
    pub format: Option<Format>,
    /// How the image is opened.
    pub cache: Cache,
    /// How its backing files are.
    pub backing_cache: Cache,
    /// The new backing file; empty, or `None` where only the name is changed: none.
    pub backing: Option<String>,
    /// Its format.
    pub backing_format: Option<Format>,
    /// The name is changed only.
    pub backing_unsafe: bool,
    /// What is copied into the image is compressed.
    pub compress: bool,
    /// Other programs may write the backing files meanwhile.
    pub force_share: bool,
    /// Where the names inside images may lead.
    pub pool: Pool,
}

/// Rebases.
///
/// Errors: those of opening the image and both chains; stopped by a signal.
pub fn run(request: &Request, showing: Showing) -> Result<(), Failure> {
    let usage = |text: &str| Failure::new(Exit::Usage, text);
    if request.backing_cache != request.cache {
        return Err(Failure::new(
            Exit::Unsupported,
            "one cache mode serves the image and its backing files in this version",
        )
        .hint("give --cache and --backing-cache the same mode"));
    }
    let named = Named::read(request.image_opts, &request.file)?;
    let backing = match request.backing.as_deref() {
        None if !request.backing_unsafe => {
            return Err(usage("the new backing file is missing")
                .hint("--backing FILE, --backing '' for none; or --backing-unsafe"));
        }
        None | Some("") if request.backing_format.is_some() => {
            return Err(usage("a format of a backing file is given, and no backing file"));
        }
        None | Some("") => None,
        Some(name) => Some(backing(request, named.path(), name)?),
    };
    if request.compress && request.backing_unsafe {
        return Err(usage("with --backing-unsafe nothing is copied that could be compressed"));
    }
    let mut runtime = inspect::runtime()?;
    let ring = runtime.ring().clone();
    let options = named.options(ImageOptions {
        format: request.format,
        cache: request.cache,
        share_backing: request.force_share,
        ..of_pool(&request.pool)
    })?;
    let work = operations::Rebase {
        backing,
        header_only: request.backing_unsafe,
        compressed: request.compress,
    };
    let operation = Operation::start("rebase", showing)?;
    let rebase =
        operations::rebase(&ring, named.path().to_owned(), &options, &work, operation.progress());
    let result = runtime.block_on(rebase);
    operation.end(
        result.map_err(Failure::from),
        "the image is sound, has its old backing file, and reads as before",
    )
}

/// The new backing file.
///
/// Errors: a name that means nothing, no format, the image itself.
fn backing(request: &Request, file: &Path, name: &str) -> Result<Backing, Failure> {
    let parsed = FileName::parse(name.as_bytes())?;
    let Some(format) = request.backing_format.or(parsed.format) else {
        return Err(Failure::new(
            Exit::Usage,
            "the format of the backing file is missing; it is never guessed",
        )
        .hint("give --backing-format raw or --backing-format qcow2"));
    };
    if is_same(&backing_path(file, &parsed), file) {
        return Err(Failure::new(
            Exit::Usage,
            format!("'{}' cannot be its own backing file", file.display()),
        ));
    }
    Ok(Backing { file: name.as_bytes().to_vec(), format })
}
