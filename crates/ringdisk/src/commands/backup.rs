//! `ringdisk backup`: a copy of disks as they are at one instant.
//!
//! Promises: what it does and prints is `back_up` of crate `backup`; here are only its options and
//! the text at its end.

use ringdisk_backup::back_up::back_up;
use ringdisk_backup::request::Request;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::size::human_size;
use ringdisk_daemon::terminal;

use crate::cli::BackupArgs;

/// Backs disks up.
///
/// Errors: as [`back_up`].
pub(crate) fn run(args: &BackupArgs) -> Result<(), Failure> {
    let request = Request {
        target: args.target.clone(),
        with: args.with.clone(),
        file: args.file.clone(),
        since: args.since.clone(),
        backing: args.backing.clone(),
        bitmap: args.bitmap.clone(),
        full: args.full,
        compress: args.compress,
        format: args.format,
        fleece: (&args.fleece).into(),
        pool: (&args.pool).into(),
    };
    let all = back_up(&request, args.progress.into())?;
    if args.progress.quiet {
        return Ok(());
    }
    for made in all {
        let (file, read) = (made.file().display(), human_size(made.report.read_bytes.0));
        terminal::say(match made.backing() {
            Some(backing) => format!("{file}: {read}, changed since {}", backing.display()),
            None if made.is_part() => format!("{file}: {read}, changes only"),
            None => format!("{file}: {read}, complete"),
        });
        if made.is_part() && made.backing().is_none() {
            terminal::note(format_args!(
                "{file} is of no use alone: `ringdisk rebase -u -F qcow2 -b BACKUP {file}` names \
                 the backup that it belongs to (or give --backing)"
            ));
        }
    }
    Ok(())
}
