//! The words of `--user`.
//!
//! Promises: parses only; no user is looked up.

use clap::Args;
use ringdisk_daemon::run_as::RequestedUser;

/// Which user a process serves as.
#[derive(Args, Clone, Debug)]
pub(crate) struct UserArgs {
    /// Serve as this user, once everything that takes root is done: auto (the owner of the image,
    /// where that does), root, or a name or number
    ///
    /// For root only. All threads become that user, with its first group or GROUP and no other, and
    /// keep no capability. auto does so where the owner of the image on top is not root and may
    /// open all images of the disk (of all disks of the process) again as they are open, and not
    /// with --sandbox off; the log (-v) and `ringdisk ctl ... stats` say why the process stays
    /// root. A command that the user may not carry out (an overlay in a directory of root, a commit
    /// into another one's image) fails; `--user root` serves as before. From then on the user's
    /// quota counts, and the user may send signals to the process.
    #[arg(
        id = "user",
        long = "user",
        value_name = "USER[:GROUP]",
        default_value = "auto",
        help_heading = "Serving options"
    )]
    pub(crate) word: RequestedUser,
}
