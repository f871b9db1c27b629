//! `ringdisk compare`: whether two images hold the same.
//!
//! Promises: only turns the options into a request of `ringdisk_images::compare`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::compare::{Request, run as compare};

use crate::cli::CompareArgs;

/// Does it. Gives the exit code.
///
/// Errors: as [`compare`].
pub(crate) fn run(args: &CompareArgs) -> Result<u8, Failure> {
    let request = Request {
        first: args.first.clone(),
        format: args.format,
        second: args.second.clone(),
        second_format: args.b_format,
        image_opts: args.name.image_opts,
        strict: args.strict,
        cache: args.cache,
        force_share: args.force_share,
        pool: (&args.pool).into(),
    };
    compare(&request, args.progress.into())
}
