//! `ringdisk umount`: ends a mount of any process, by its path.

use ringdisk_fuse::mount::{Unmount, unmount};

use crate::cli::UmountArgs;
use crate::report::{Exit, Failure};

/// Takes the mount away. Its server notices, flushes and ends by itself.
///
/// Errors: nothing of ours is mounted there, it is in use, or the system does not allow it.
pub(crate) fn run(args: &UmountArgs) -> Result<(), Failure> {
    let how = match (args.lazy, args.force) {
        (true, _) => Unmount::Lazy,
        (_, true) => Unmount::Force,
        _ => Unmount::Normal,
    };
    unmount(&args.mountpoint, how).map_err(|error| {
        let failure = Failure::from(error);
        if failure.exit == Exit::Locked && failure.hint_text().is_none() {
            failure.hint("close it there (`fuser -v` shows who uses it), or give --lazy or --force")
        } else {
            failure
        }
    })
}
