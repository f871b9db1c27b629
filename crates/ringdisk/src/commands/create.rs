//! `ringdisk create`: a new image.
//!
//! Promises: only turns the options into a request of `ringdisk_images::create`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::create::{Request, run as create};

use crate::cli::CreateArgs;

/// Does it.
///
/// Errors: as [`create`].
pub(crate) fn run(args: &CreateArgs) -> Result<(), Failure> {
    let request = Request {
        file: args.file.clone(),
        size: args.size,
        format: args.format,
        options: args.options.clone(),
        backing: args.backing.clone(),
        backing_format: args.backing_format,
        backing_unsafe: args.backing_unsafe,
        quiet: args.quiet,
        pool: (&args.pool).into(),
    };
    create(&request)
}
