//! `ringdisk top`: what all disks of the machine do, live.

use ringdisk_daemon::failure::Failure;
use ringdisk_observe::top::{self, Options};

use crate::cli::TopArgs;

/// Shows it until the user ends it, or as often as was asked for.
///
/// Errors: as [`top::run`].
pub(crate) fn run(args: &TopArgs) -> Result<(), Failure> {
    top::run(&Options {
        every: args.every,
        sort: args.sort,
        filter: args.filter.clone(),
        plain: args.plain,
        count: args.count,
    })
}
