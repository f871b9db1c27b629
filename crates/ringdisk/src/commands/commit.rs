//! `ringdisk commit`: what an image holds goes into its backing file.
//!
//! Promises: only turns the options into a request of `ringdisk_images::commit`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::commit::{Request, run as commit};

use crate::cli::CommitArgs;

/// Does it.
///
/// Errors: as [`commit`].
pub(crate) fn run(args: &CommitArgs) -> Result<(), Failure> {
    let request = Request {
        file: args.image.file.clone(),
        image_opts: args.image.name.image_opts,
        format: args.format,
        cache: args.cache,
        base: args.base.clone(),
        base_format: args.base_format,
        keep: args.drop,
        pool: (&args.image.pool).into(),
    };
    commit(&request, args.progress.into())
}
