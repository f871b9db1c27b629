//! `ringdisk umount`: ends a mount of any process, by its path.

use ringdisk_fuse::mount::{Unmount, mountpoint, unmount};

use crate::alive;
use crate::cli::UmountArgs;
use crate::report::{Exit, Failure};
use crate::terminal;

/// Takes the mount away, and waits until its server has flushed, let go of the image and ended.
///
/// Errors: nothing of ours is mounted there, it is in use, or the system does not allow it.
pub(crate) fn run(args: &UmountArgs) -> Result<(), Failure> {
    let how = match (args.lazy, args.force) {
        (true, _) => Unmount::Lazy,
        (_, true) => Unmount::Force,
        _ => Unmount::Normal,
    };
    // Resolved before the mount goes: afterwards the name may lead elsewhere.
    let mountpoint = mountpoint::resolve(&args.mountpoint)?;
    unmount(&mountpoint, how).map_err(|error| {
        let failure = Failure::from(error);
        if failure.exit == Exit::Locked && failure.hint_text().is_none() {
            failure.hint("close it there (`fuser -v` shows who uses it), or give --lazy or --force")
        } else {
            failure
        }
    })?;
    if how != Unmount::Lazy && !alive::wait(&mountpoint) {
        terminal::note("the mount is gone; its server has not ended yet");
    }
    Ok(())
}
