//! `ringdisk resize`: another size for the disk inside an image.
//!
//! Promises: only turns the options into a request of `ringdisk_images::resize`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::resize::{Request, run as resize};

use crate::cli::ResizeArgs;

/// Does it.
///
/// Errors: as [`resize`].
pub(crate) fn run(args: &ResizeArgs) -> Result<(), Failure> {
    let request = Request {
        file: args.file.clone(),
        image_opts: args.name.image_opts,
        format: args.format,
        size: args.size,
        shrink: args.shrink,
        preallocation: args.preallocation,
        quiet: args.quiet,
        pool: (&args.pool).into(),
    };
    resize(&request)
}
