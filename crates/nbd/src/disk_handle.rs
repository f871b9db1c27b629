//! One disk of an export, as the export that is in charge of the disk sees it.
//!
//! Promises: when [`DiskHandle::end`] returns `true`, no request of an NBD client is in flight on
//! the disk and none will come; other disks of the export go on. Control path, any thread.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use ringdisk_export::{Beside, ThreadHandle};

use crate::queue::{Queue, Shared, Work};

/// When a disk leaves, its clients have so long to take their last replies.
const LAST_REPLIES: Duration = Duration::from_secs(2);
/// When a disk leaves, requests in flight have so long.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// One disk of an export, for other threads; also after the end of the export.
#[derive(Clone)]
pub struct DiskHandle {
    name: String,
    shared: Arc<Shared>,
    threads: Vec<ThreadHandle<Work>>,
}

impl DiskHandle {
    pub(crate) fn new(
        name: &str,
        shared: Arc<Shared>,
        threads: Vec<ThreadHandle<Work>>,
    ) -> DiskHandle {
        DiskHandle { name: name.to_owned(), shared, threads }
    }

    /// Takes the disk out of the export: new clients do not find it, requests in flight are
    /// answered, and its clients are disconnected. Waits until that is done, 10 s at most. Gives
    /// whether it was.
    pub fn end(&self) -> bool {
        let Some(export) = self.shared.exports.remove(&self.name) else { return true };
        let _lifted = export.disk.lift_limits();
        // Each thread has a sender, which is dropped when the thread is done, or has ended.
        let (sender, receiver) = sync_channel::<()>(0);
        for thread in &self.threads {
            let (sender, export) = (sender.clone(), Arc::clone(&export));
            thread.send(move |queue| {
                let queue = Rc::clone(queue);
                let ring = queue.ring.clone();
                ring.spawn(async move {
                    queue.dismiss(&export, LAST_REPLIES).await;
                    drop((export, sender));
                });
            });
        }
        drop(sender);
        let is_done = receiver.recv_timeout(LEAVE_LIMIT) == Err(RecvTimeoutError::Disconnected);
        if !is_done {
            tracing::warn!(
                "NBD export '{}': requests are still in flight; the storage below the image does \
                 not answer",
                self.name.escape_debug()
            );
        }
        is_done
    }
}

impl Beside for DiskHandle {
    fn client_came(&self) {
        self.shared.idle.begin();
    }

    fn client_gone(&self) {
        if self.shared.idle.end() {
            self.shared.tell_first(Queue::end_if_idle);
        }
    }

    fn end(&self) {
        DiskHandle::end(self);
    }
}

impl fmt::Debug for DiskHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskHandle").field("name", &self.name).finish_non_exhaustive()
    }
}
