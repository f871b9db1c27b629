//! `ringdisk info`: what an image is.

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
