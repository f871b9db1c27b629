//! Writes metadata of writable images back when no client asks for a flush.
//!
//! Promises: after a write that left metadata dirty a task of the same ring writes it within about
//! a second (or at once when the image says that too much is dirty), so a crash loses little and
//! memory stays bounded. The task enters the graph like a request, so it never works on an image
//! that was closed. A change waits for it before it keeps clients waiting: the flush of a
//! write-back can take long.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ringdisk_qcow2::{Qcow2, WriteBack};
use ringdisk_ring::Ring;

use crate::Disk;

/// How long dirty metadata may wait for more: short enough that a crash without a flush loses
/// little that was not promised, long enough that steady writers share one write-back.
const DELAY: Duration = Duration::from_secs(1);

/// One write-back that is to be made. An image asks once, so a dropped one is recorded for the next
/// request.
struct PendingWriteBack {
    disk: Weak<Disk>,
    is_done: bool,
}

impl PendingWriteBack {
    fn finish(mut self) {
        self.is_done = true;
    }
}

impl Drop for PendingWriteBack {
    fn drop(&mut self) {
        if !self.is_done
            && let Some(disk) = self.disk.upgrade()
        {
            disk.is_write_back_orphaned.store(true, Ordering::Relaxed);
        }
    }
}

impl Disk {
    /// After a change of `image`: starts a task that writes its dirty metadata back.
    #[inline]
    pub(crate) fn look_after(&self, ring: &Ring, image: &Qcow2) {
        let delay = match image.wants_write_back() {
            WriteBack::Now => None,
            WriteBack::Soon => Some(DELAY),
            WriteBack::Nothing => {
                let orphaned = &self.is_write_back_orphaned;
                if !orphaned.load(Ordering::Relaxed) || !orphaned.swap(false, Ordering::Relaxed) {
                    return;
                }
                Some(DELAY)
            }
        };
        self.write_back_after(ring, delay);
    }

    /// Starts a task that writes dirty metadata back.
    fn write_back_after(&self, ring: &Ring, delay: Option<Duration>) {
        let pending = PendingWriteBack { disk: self.weak(), is_done: false };
        let handle = ring.clone();
        ring.spawn(async move {
            if let Some(delay) = delay {
                handle.sleep(delay).await;
            }
            let Some(disk) = pending.disk.upgrade() else { return };
            disk.write_back(&handle).await;
            pending.finish();
        });
    }

    /// Writes dirty metadata of all writable layers.
    async fn write_back(&self, ring: &Ring) {
        let _alone = self.gateway().write_backs().lock().await;
        let graph = self.enter_beside_clients().await;
        for layer in graph.layers.iter().filter(|layer| layer.is_writable) {
            if let Some(image) = layer.qcow2() {
                image.write_back(ring).await;
                // What could not be freed or written yet is tried again later: at once it might
                // fail again and again, and keep a change out.
                if image.wants_write_back() != WriteBack::Nothing {
                    self.write_back_after(ring, Some(DELAY));
                }
            }
        }
    }
}
