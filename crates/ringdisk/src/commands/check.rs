//! `ringdisk check`: whether the metadata of an image is sound, and its repair.
//!
//! Promises: only turns the options into a request of `ringdisk_images::check`, which does the work
//! and prints the result.

use ringdisk_daemon::failure::Failure;
pub(crate) use ringdisk_images::check::FAILED;
use ringdisk_images::check::{Request, run as check};

use crate::cli::CheckArgs;

/// Does it.
///
/// Errors: as [`check`].
pub(crate) fn run(args: &CheckArgs) -> Result<u8, Failure> {
    let request = Request {
        file: args.image.file.clone(),
        image_opts: args.image.name.image_opts,
        format: args.format,
        cache: args.cache,
        repair: args.repair,
        force_share: args.force_share,
        json: args.output.is_json(),
        pool: (&args.image.pool).into(),
    };
    check(&request, args.progress.into())
}
