//! `ringdisk restore`: an image from a backup and all those below it.
//!
//! Promises: the work is `restore` of crate `backup`; here are only its options and the text at its
//! end.

use ringdisk_backup::restore::{Request, restore};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::size::human_size_exact;
use ringdisk_daemon::terminal;

use crate::cli::RestoreArgs;

/// Restores.
///
/// Errors: as [`restore`].
pub(crate) fn run(args: &RestoreArgs) -> Result<(), Failure> {
    let request = Request {
        backup: args.backup.clone(),
        image: args.image.clone(),
        at: args.at.clone(),
        target_format: args.target_format,
        force: args.force,
        pool: (&args.pool).into(),
    };
    let (backup, size) = restore(&request, args.progress.into())?;
    if !args.progress.quiet {
        terminal::say(format_args!(
            "{}: a disk of {} from {}",
            args.image.display(),
            human_size_exact(size),
            backup.display()
        ));
    }
    Ok(())
}
