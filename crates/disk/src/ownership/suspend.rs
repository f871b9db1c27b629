//! Long changes that stop when the disk is handed over, so that the successor can go on with them.
//!
//! Promises: a change stops at the next point at which it could be cancelled, and leaves the chain
//! as it was. A change that is not named here, or does not stop in time, has the hand-over fail,
//! and the disk goes on. Control path.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use ringdisk_ring::Ring;

use crate::{Disk, Progress};

/// How long a change may take to stop: pieces of 1 MiB are under way, and the images that it writes
/// are closed. Clients wait meanwhile.
const STOPPING: Duration = Duration::from_secs(5);
/// How often it is looked whether it has stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

impl Disk {
    /// The next [`Disk::hand_over`] suspends these long changes ([`Progress::suspend`]) when no
    /// request is in flight any more; none: a long change has it fail.
    pub fn suspend_for_hand_over(&self, changes: Vec<Arc<Progress>>) {
        *self.suspends.lock().unwrap_or_else(PoisonError::into_inner) = changes;
    }

    /// Suspends them, and waits for that.
    pub(super) async fn suspend_changes(&self, ring: &Ring) {
        let changes = {
            let mut changes = self.suspends.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *changes)
        };
        if changes.is_empty() {
            return;
        }
        changes.iter().for_each(|change| change.suspend());
        let end = Instant::now() + STOPPING;
        let is_any = || self.long.any() || self.backups.load(Ordering::Acquire) > 0;
        while is_any() && Instant::now() < end {
            ring.sleep(POLL_INTERVAL).await;
        }
    }
}
