//! `ringdisk rebase`: another backing file.

use std::path::Path;

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::name::FileName;
use ringdisk_disk::{Backing, ImageOptions, jobs};

use crate::cli::RebaseArgs;
use crate::commands::create::{backing_path, is_same};
use crate::commands::look;
use crate::commands::named::{Named, of_pool};
use crate::commands::operation::Operation;

/// Rebases.
///
/// Errors: those of opening the image and both chains; stopped by a signal.
pub(crate) fn run(args: &RebaseArgs) -> Result<(), Failure> {
    let usage = |text: &str| Failure::new(Exit::Usage, text);
    if args.backing_cache != args.cache {
        return Err(Failure::new(
            Exit::Unsupported,
            "one cache mode serves the image and its backing files in this version",
        )
        .hint("give --cache and --backing-cache the same mode"));
    }
    let named = Named::of(args.name, &args.file)?;
    let backing = match args.backing.as_deref() {
        None if !args.backing_unsafe => {
            return Err(usage("the new backing file is missing")
                .hint("--backing FILE, --backing '' for none; or --backing-unsafe"));
        }
        None | Some("") if args.backing_format.is_some() => {
            return Err(usage("a format of a backing file is given, and no backing file"));
        }
        None | Some("") => None,
        Some(name) => Some(backing(args, named.path(), name)?),
    };
    if args.compress && args.backing_unsafe {
        return Err(usage("with --backing-unsafe nothing is copied that could be compressed"));
    }
    let mut runtime = look::runtime()?;
    let ring = runtime.ring().clone();
    let options = named.options(ImageOptions {
        format: args.format,
        cache: args.cache,
        share_backing: args.force_share,
        ..of_pool(&args.pool)
    })?;
    let work =
        jobs::Rebase { backing, header_only: args.backing_unsafe, compressed: args.compress };
    let job = Operation::start("rebase", args.show)?;
    let rebase = jobs::rebase(&ring, named.path().to_owned(), &options, &work, job.progress());
    let result = runtime.block_on(rebase);
    job.end(
        result.map_err(Failure::from),
        "the image is sound, has its old backing file, and reads as before",
    )
}

/// The new backing file.
///
/// Errors: a name that means nothing, no format, the image itself.
fn backing(args: &RebaseArgs, file: &Path, name: &str) -> Result<Backing, Failure> {
    let parsed = FileName::parse(name.as_bytes())?;
    let Some(format) = args.backing_format.or(parsed.format) else {
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
