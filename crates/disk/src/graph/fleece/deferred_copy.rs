//! Old data on its way to the fleecing file, for which no client waits.
//!
//! Promises: what is recorded here is in memory, and in the file when the record is gone. A reader
//! of the file waits for the record of what it reads. When a write fails, or its thread ends before
//! it, the checkpoint fails: what it was to keep is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::Storage;

use super::copy::Failure;
use super::{BEHIND_MAX, CheckpointState, Fleece};
use crate::graph::sync::lock;

/// Why a checkpoint fails whose writing task was dropped with its ring.
const THREAD_ENDED: &str = "the thread that kept old data has ended; begin it again";

/// The record of a range; removed on drop.
struct Behind {
    fleece: Arc<Fleece>,
    range: (GuestOffset, Bytes),
}

impl Behind {
    /// The range is in the file, or it is not, for a reason. Gives the file of a checkpoint that
    /// has failed by this, to be closed.
    ///
    /// The record goes and the checkpoint fails in one step: a reader that waits for the range must
    /// not find it neither on its way nor lost.
    fn settle(&mut self, failure: Option<String>) -> Option<Arc<Storage>> {
        let mut shared = lock(&self.fleece.shared);
        let at = shared.behind.iter().position(|range| *range == self.range)?;
        shared.behind.swap_remove(at);
        shared.behind_bytes -= self.range.1;
        let reason = failure.filter(|_| shared.state == CheckpointState::Running)?;
        tracing::warn!("a checkpoint failed, and clients go on without it: {reason}");
        shared.state = CheckpointState::Failed(reason);
        self.fleece.is_over.store(true, Ordering::SeqCst);
        shared.file.take()
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        // The task has not come to its end, unless it has settled it.
        let file = self.settle(Some(String::from(THREAD_ENDED)));
        if file.is_some() {
            drop(file);
            self.fleece.is_closed.store(true, Ordering::SeqCst);
        }
        self.fleece.wake();
    }
}

impl Fleece {
    /// Writes old data to the file in a task of its own. The caller marks its granules as kept
    /// after this. A failure ends the checkpoint.
    pub(super) fn write_behind(
        self: &Arc<Fleece>,
        ring: &Ring,
        file: Arc<Storage>,
        offset: GuestOffset,
        buf: IoBuf,
    ) {
        let range = (offset, Bytes::of(buf.len()));
        {
            let mut shared = lock(&self.shared);
            shared.behind.push(range);
            shared.behind_bytes += range.1;
        }
        let mut behind = Behind { fleece: Arc::clone(self), range };
        let handle = ring.clone();
        ring.spawn(async move {
            let ring = handle;
            let fleece = Arc::clone(&behind.fleece);
            let written = ring.within(fleece.limit, file.write_all(&ring, offset.0, &buf)).await;
            let failure = match written {
                Ok(Ok(())) => None,
                Ok(Err(errno)) => Some(fleece.reason(&Failure::Write(errno))),
                Err(_) => Some(fleece.too_slow()),
            };
            let failed = behind.settle(failure);
            // Closing it can take long, where this is the last one that has it.
            if failed.is_some() || !fleece.is_running() {
                let _ = ring.offload(move || drop(file)).await;
            }
            drop(behind);
            if failed.is_some() {
                fleece.close(&ring, failed).await;
            }
        });
    }

    /// Waits while too much is on its way to the file.
    pub(super) async fn wait_for_room(&self) {
        self.wait(|shared| shared.behind_bytes <= BEHIND_MAX || !self.is_running()).await;
    }

    /// Waits until a range is not on its way to the file.
    pub(super) async fn in_file(&self, offset: GuestOffset, len: Bytes) {
        let end = offset.saturating_add(len);
        let is_there = |(at, len): &(GuestOffset, Bytes)| *at >= end || *at + *len <= offset;
        self.wait(|shared| shared.behind.iter().all(is_there)).await;
    }

    /// Waits until nothing is on its way to the file.
    pub(super) async fn all_in_file(&self) {
        self.wait(|shared| shared.behind.is_empty()).await;
    }
}
