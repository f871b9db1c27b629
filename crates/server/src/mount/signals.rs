//! Signals while a mount starts, and what they do while it serves.
//!
//! Promises: before the mount is there a stop removes what was made and ends the process; of a
//! mount that another process left it is remembered. While the mount serves, the first one asks for
//! a clean end and a second one for the end at once.

use std::sync::Arc;

use ringdisk_daemon::control::disk::DiskControl;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::signals::{AT_ONCE, Actions, Phase, Watcher};
use ringdisk_daemon::stopping::{Asked, Insist};
use ringdisk_daemon::terminal;
use ringdisk_disk::Disk;

use super::created_files::Made;
use super::export::Handle;

/// Takes signals while nothing is mounted: a stop removes what was made and ends the process.
///
/// * `has_supervisor`: another process keeps the mount, and passes signals on.
pub(super) fn watch_start(made: &Made, has_supervisor: bool) -> Result<Watcher, Failure> {
    let made = made.clone();
    let quit = move |signal: &'static str| {
        made.undo();
        terminal::say_error(format_args!(
            "{}: stopped by {signal} before the mount was ready",
            terminal::NAME
        ));
        std::process::exit(i32::from(Exit::General.code()));
    };
    start_watcher(Phase::Starting(Box::new(quit)), has_supervisor)
        .map_err(|error| Failure::system("cannot watch for signals", &error, Exit::General))
}

/// Takes signals from the start of a process that goes on with a mount: a stop is remembered.
pub(super) fn watch_resumed(has_supervisor: bool) -> Result<Watcher, Failure> {
    start_watcher(Phase::Mounting, has_supervisor)
        .map_err(|error| Failure::system("cannot watch for signals", &error, Exit::General))
}

fn start_watcher(phase: Phase, has_supervisor: bool) -> std::io::Result<Watcher> {
    if has_supervisor { Watcher::start_kept(phase) } else { Watcher::start(phase) }
}

/// What signals do while the mount serves.
///
/// * `insist`: counts them.
/// * `has_supervisor`: another process keeps the mount; it counts them itself, and its signals may
///   come beside those of a terminal.
pub(super) fn actions(
    handle: &Handle,
    disk: &Arc<Disk>,
    notify: &Arc<Notify>,
    commands: Arc<DiskControl>,
    insist: Arc<Insist>,
    has_supervisor: bool,
) -> Actions {
    let (for_stop, for_print, shown) = (handle.clone(), handle.clone(), Arc::clone(disk));
    let manager = Arc::clone(notify);
    let stop = move |signal: &'static str| {
        let asked = match signal {
            AT_ONCE => Asked::Again,
            _ => insist.count(signal != "SIGHUP" && !has_supervisor),
        };
        commands.cancel();
        match asked {
            Asked::First => {
                manager.stopping(&format!("stopping on {signal}"));
                for_stop.stop();
            }
            Asked::Echo => {}
            Asked::Again => {
                manager.stopping("ending at once");
                for_stop.force();
            }
        }
    };
    let print = move || {
        let fault = shown.fault();
        terminal::say_error(for_print.stats().with_layers(&shown.layers(), fault.as_deref()));
    };
    Actions { stop: Box::new(stop), print: Box::new(print) }
}
