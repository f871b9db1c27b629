//! `ringdisk bitmap`: changes of the bitmaps inside an image.
//!
//! Promises: only turns the options into a request of `ringdisk_images::bitmap`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::bitmap::{Request, Work, run as bitmap};

use crate::cli::BitmapArgs;

/// Does it.
///
/// Errors: as [`bitmap`].
pub(crate) fn run(args: &BitmapArgs, works: &[Work]) -> Result<(), Failure> {
    let request = Request {
        file: args.file.clone(),
        image_opts: args.name.image_opts,
        format: args.format,
        bitmap: args.bitmap.clone().unwrap_or_default(),
        works: works.to_vec(),
        granularity: args.granularity,
        source_file: args.source_file.clone(),
        source_format: args.source_format,
        pool: (&args.pool).into(),
    };
    bitmap(&request)
}
