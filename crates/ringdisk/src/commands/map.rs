//! `ringdisk map`: where the bytes of a disk are.
//!
//! Promises: only turns the options into a request of `ringdisk_images::map`, which does the work
//! and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::map::{Request, run as map};

use crate::cli::MapArgs;

/// Does it.
///
/// Errors: as [`map`].
pub(crate) fn run(args: &MapArgs) -> Result<(), Failure> {
    let request = Request {
        look: (&args.look).into(),
        start_offset: args.start_offset,
        max_length: args.max_length,
        json: args.look.output.is_json(),
    };
    map(&request)
}
