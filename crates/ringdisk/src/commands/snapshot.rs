//! `ringdisk snapshot`: the snapshots inside an image.
//!
//! Promises: only turns the options into a request of `ringdisk_images::snapshot`, which does the
//! work and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::snapshot::{Request, run as snapshot};

use crate::cli::SnapshotArgs;

/// Lists the snapshots, or makes, applies or deletes one.
///
/// Errors: as [`snapshot`].
pub(crate) fn run(args: &SnapshotArgs) -> Result<(), Failure> {
    let request = Request {
        file: args.image.file.clone(),
        image_opts: args.image.name.image_opts,
        format: args.format,
        work: args.work(),
        force_share: args.force_share,
        quiet: args.quiet,
        pool: (&args.image.pool).into(),
    };
    snapshot(&request)
}
