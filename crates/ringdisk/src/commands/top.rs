//! `ringdisk top`: what all disks of the machine do, live.
//!
//! Promises: only turns the options into a request of `ringdisk_observe::top`, which does the work
//! and prints the result.

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
