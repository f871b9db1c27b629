//! What starts of servers with sockets have in common.
//!
//! Promises: a signal that comes before a disk is served removes what was made, and ends the
//! process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::control::registry;
use ringdisk_daemon::control::server::Server;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::helper;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::pidfile::Pidfile;
use ringdisk_daemon::signals::{Phase, Watcher};
use ringdisk_daemon::terminal;

/// Takes signals while nothing is served: a stop removes what was made and ends the process.
///
/// Errors: no thread for them.
pub fn watch_start(fresh: &NewFiles) -> Result<Watcher, Failure> {
    Watcher::start(stop_before(fresh)).map_err(cannot_watch)
}

pub(crate) fn cannot_watch(error: std::io::Error) -> Failure {
    Failure::system("cannot watch for signals", &error, Exit::General)
}

/// What a stop does while nothing is served.
pub(crate) fn stop_before(fresh: &NewFiles) -> Phase {
    let fresh = fresh.clone();
    Phase::Starting(Box::new(move |signal: &'static str| {
        fresh.undo();
        terminal::say_error(format_args!(
            "{}: stopped by {signal} before the disk was served",
            terminal::NAME
        ));
        std::process::exit(i32::from(Exit::General.code()));
    }))
}

/// The pid file that is asked for, if it can be had. `None`: none is.
///
/// * `upgrade`: another process gives its disks away.
///
/// Errors: as [`Pidfile::check`].
pub(crate) fn pidfile_of(
    pidfile: Option<&Path>,
    upgrade: bool,
) -> Option<Result<PathBuf, Failure>> {
    let check = |pidfile: PathBuf| Pidfile::check_for(&pidfile, upgrade).map(|()| pidfile);
    let cannot = |error| Failure::system("the name of the pid file", &error, Exit::General);
    Some(std::path::absolute(pidfile?).map_err(cannot).and_then(check))
}

/// Tells the service manager why the disks have ended.
pub(crate) fn say_why(notify: &Notify, watcher: &Watcher, failure: Option<&Failure>) {
    let stopped = watcher.stopped_by();
    let why = match (failure, &stopped) {
        (Some(failure), _) => failure.message().to_owned(),
        (None, Some(signal)) => format!("stopped by {signal}"),
        (None, None) => String::from("stopped"),
    };
    match stopped {
        Some(_) => notify.status(&why),
        None => notify.stopping(&why),
    }
}

/// Makes the control socket. Without one the disk is served all the same.
pub fn control(
    path: Option<&PathBuf>,
    commands: &Arc<DiskControl>,
    restricted: bool,
) -> Option<(Server, helper::Named)> {
    // Nobody could name a disk without a path.
    let name = registry::name_of_disk(path?);
    let started = registry::listen(&name).and_then(|listening| {
        let named = listening.named();
        Ok((Server::start(listening, Arc::clone(commands), restricted)?, named))
    });
    match started {
        Ok(started) => Some(started),
        Err(error) => {
            tracing::warn!("`ringdisk ctl` cannot be used: {error}");
            commands.lose_jobs();
            None
        }
    }
}
