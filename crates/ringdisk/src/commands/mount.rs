//! `ringdisk mount`: a disk as a file.
//!
//! Promises: returns when the mount has ended, in the foreground; the work is that of
//! `ringdisk_server::mount`.

use ringdisk_daemon::failure::Failure;
use ringdisk_server::mount;
use ringdisk_server::mount::request::Paths;

use crate::cli::MountArgs;

/// Serves until the end. Gives the exit code.
///
/// Errors: as [`mount::run`]; the log cannot be had.
pub(crate) fn run(args: &MountArgs, paths: Paths) -> Result<u8, Failure> {
    args.log.prepare(args.daemonize)?;
    mount::run(&args.into(), paths)
}
