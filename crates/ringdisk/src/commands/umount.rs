//! `ringdisk umount`: ends mounts of any process, by their paths.
//!
//! Promises: each mount is ended by itself: one that fails is reported and does not keep the next
//! from its end.

use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::terminal;
use ringdisk_daemon::unmount::{self, How};

use crate::cli::UmountArgs;

/// Ends the mounts that are named, or all. Gives the exit code: of several mounts the first one
/// that is a failure.
///
/// Errors: as [`unmount::end`]; of several mounts each has been said before the next one is ended.
pub(crate) fn run(args: &UmountArgs) -> Result<u8, Failure> {
    let how = How { lazy: args.lazy, force: args.force, timeout: args.timeout };
    let mountpoints = if args.all { unmount::all()? } else { args.mountpoints.clone() };
    if let [only] = mountpoints.as_slice() {
        return unmount::end(how, only);
    }
    if mountpoints.is_empty() {
        terminal::note("there is no mount that could be ended");
    }
    let mut first = Exit::Clean.code();
    for path in &mountpoints {
        let code = unmount::end(how, path).unwrap_or_else(|failure| {
            terminal::complain(&failure);
            failure.code()
        });
        first = if first == Exit::Clean.code() { code } else { first };
    }
    Ok(first)
}
