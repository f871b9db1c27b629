//! `ringdisk measure`: how much space an image would take.
//!
//! Promises: only turns the options into a request of `ringdisk_images::measure`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::measure::{Request, run as measure};

use crate::cli::MeasureArgs;

/// Does it.
///
/// Errors: as [`measure`].
pub(crate) fn run(args: &MeasureArgs) -> Result<(), Failure> {
    let request = Request {
        file: args.file.clone(),
        image_opts: args.name.image_opts,
        format: args.format,
        target_format: args.target_format,
        options: args.options.clone(),
        size: args.size,
        force_share: args.force_share,
        snapshot: args.snapshot.clone(),
        json: args.output.is_json(),
        pool: (&args.pool).into(),
    };
    measure(&request)
}
