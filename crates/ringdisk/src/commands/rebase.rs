//! `ringdisk rebase`: another backing file.
//!
//! Promises: only turns the options into a request of `ringdisk_images::rebase`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::rebase::{Request, run as rebase};

use crate::cli::RebaseArgs;

/// Does it.
///
/// Errors: as [`rebase`].
pub(crate) fn run(args: &RebaseArgs) -> Result<(), Failure> {
    let request = Request {
        file: args.image.file.clone(),
        image_opts: args.image.name.image_opts,
        format: args.format,
        cache: args.cache,
        backing_cache: args.backing_cache,
        backing: args.backing.clone(),
        backing_format: args.backing_format,
        backing_unsafe: args.backing_unsafe,
        compress: args.compress,
        force_share: args.force_share,
        pool: (&args.image.pool).into(),
    };
    rebase(&request, args.progress.into())
}
