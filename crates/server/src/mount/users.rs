//! Reports the users of a mount for which its end has to wait.
//!
//! Promises: called by the export, once, when a stop finds open files; nothing here waits for the
//! mount itself.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::mount_users::{self, Place};
use ringdisk_daemon::notify::Notify;
use ringdisk_daemon::stopping::Stopping;
use ringdisk_daemon::terminal::{self, shell_word};
use ringdisk_daemon::{helper, mount_lock};

use super::export::Served;
use super::plan::Plan;

/// Reports the users of the mount for which a stop has to wait.
///
/// * `limit`: how long it waits at most.
/// * `lock`: the lock of the file below the mount. A command that waits for the lock waits for the
///   next mount from then on.
pub(super) fn watch(
    served: &Served,
    plan: &Plan<'_>,
    limit: Option<Duration>,
    stopping: &Arc<Stopping>,
    notify: &Arc<Notify>,
    lock: Option<Arc<File>>,
) {
    let most = limit.map_or_else(String::new, |limit| format!(" ({limit:?} at most)"));
    let place = served.connection().map(|number| Place::of(&plan.mountpoint, number));
    let shown = shell_word(&plan.mountpoint.display().to_string());
    let (stopping, notify) = (Arc::clone(stopping), Arc::clone(notify));
    served.watch_users(move |open_files| {
        let found = helper::users().or_else(|| place.as_ref().map(mount_users::look));
        let text = found.unwrap_or_default().text(Some(open_files));
        terminal::warn(format_args!(
            "{shown} is in use by {text}: it goes on without its name until they have closed \
             it{most}, and then ends; \
             a second signal, or `ringdisk ctl {shown} stop --force`, ends it at once, and what \
             they have not written yet is lost"
        ));
        notify.in_use(&format!("stopping; still in use by {text}"));
        if let Some(lock) = &lock {
            mount_lock::release(lock);
        }
        stopping.wait_for(text);
    });
}
