//! `ringdisk convert`: a copy of an image, in another format or shape.
//!
//! Promises: only turns the options into a request of `ringdisk_images::convert`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::convert::{Request, run as convert};

use crate::cli::ConvertArgs;

/// Does it.
///
/// Errors: as [`convert`].
pub(crate) fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let request = Request {
        files: args.files.clone(),
        image_opts: args.name.image_opts,
        format: args.format,
        snapshot: args.snapshot.clone(),
        source_cache: args.source_cache,
        bitmaps: args.bitmaps,
        skip_broken_bitmaps: args.skip_broken_bitmaps,
        salvage: args.salvage,
        target_format: args.target_format,
        target_image_opts: args.target_image_opts,
        options: args.options.clone(),
        target_cache: args.target_cache,
        backing: args.backing.clone(),
        backing_format: args.backing_format,
        sparse_size: args.sparse_size,
        no_create: args.no_create,
        target_is_zero: args.target_is_zero,
        compress: args.compress,
        force_share: args.force_share,
        parallel: args.parallel,
        oob_writes: args.oob_writes,
        copy_range_offloading: args.copy_range_offloading,
        pool: (&args.pool).into(),
    };
    convert(&request, args.progress.into())
}
