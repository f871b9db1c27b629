//! `ringdisk info`: what an image is.
//!
//! Promises: only turns the options into a request of `ringdisk_images::info`, which does the work
//! and prints the result.

use ringdisk_daemon::failure::Failure;
use ringdisk_images::info::{Request, run as info};

use crate::cli::InfoArgs;

/// Does it.
///
/// Errors: as [`info`].
pub(crate) fn run(args: &InfoArgs) -> Result<(), Failure> {
    let request = Request {
        look: (&args.look).into(),
        backing_chain: args.backing_chain,
        json: args.look.output.is_json(),
    };
    info(&request)
}
