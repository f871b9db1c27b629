//! Ownership of the disk during a migration: this process or the one at the destination; and what
//! the end of an export writes.
//!
//! Promises: the disk is written by one process at a time. It is taken before the first virtqueue
//! runs, or that virtqueue is refused, and given only while none runs. The last flush has a limit;
//! if it fails the caller hears of it. Control thread; what touches the images runs on a queue
//! thread.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_export::{Gone, close_disk};
use ringdisk_ring::Errno;

use super::backend::Control;
use crate::session::Refusal;

/// A migration's destination waits so long for the source to give the disk away.
const TAKE_OVER: Duration = Duration::from_secs(10);

/// The last flush has so long.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(300);

impl Control {
    /// Makes the disk ours before the first virtqueue runs: in a migration another process has had
    /// it until now.
    pub(super) fn take_disk(&self) -> Result<(), Refusal> {
        if self.disk.is_active() {
            return Ok(());
        }
        let taken = self.threads[0].ask_task(|worker| async move {
            worker.disk.activate(&worker.ring, TAKE_OVER).await.map_err(|error| {
                format!(
                    "the disk is not ours: {error}. A ringdisk that serves it elsewhere gives it \
                     away as soon as its guest is paused or gone"
                )
            })
        });
        taken.wait(self.may_wait())??;
        tracing::info!("{}: the disk is ours", self.device.name);
        Ok(())
    }

    /// Whether another process may have the disk, should one wait for it: no virtqueue runs, so at
    /// most a guest that is paused, or has no driver yet, is connected here. Nothing tells us that
    /// such a guest has been migrated: front ends speak of the log only while virtqueues run, and
    /// stay connected for as long as they like.
    pub(super) fn may_give_disk(&self) -> bool {
        let stands = self.rings.iter().all(|ring| ring.setup.is_none());
        self.had_front_end && stands && self.disk.is_active()
    }

    /// Whether the disk may be given and another process waits for it. That process is about to run
    /// a guest, which ours then has become.
    pub(super) fn may_give_disk_now(&self) -> bool {
        self.may_give_disk() && self.disk.is_wanted()
    }

    /// The guest stands still at the end of a migration: the process that serves it there may have
    /// the disk. If it comes back, so does the disk.
    pub(super) fn give_disk(&self) {
        let given = self.threads[0].ask_task(|worker| async move {
            worker.disk.deactivate(&worker.ring).await.map_err(|error| error.to_string())
        });
        match given.wait(self.may_wait()) {
            Ok(Ok(())) => tracing::info!("{}: the disk is given away", self.device.name),
            Ok(Err(why)) => tracing::error!("{}: the disk stays ours: {why}", self.device.name),
            Err(Gone) => tracing::error!("{}: the queue thread does not answer", self.device.name),
        }
    }

    /// Makes what was written durable.
    pub(super) fn flush(&self) -> Result<(), Refusal> {
        if !self.disk.is_active() {
            return Ok(());
        }
        let flushed =
            self.threads[0].ask_task(|worker| async move { worker.disk.flush(&worker.ring).await });
        Ok(flushed.wait(self.may_wait())??)
    }

    /// The end of an export whose virtqueues have stopped: makes what was written durable and
    /// closes the images. What qcow2 keeps for later (dirty bitmaps, clusters that are to be given
    /// back) is written then. The flush comes first: closing waits for requests, and some may never
    /// end.
    ///
    /// Errors: those of the storage; the queue thread does not answer in time.
    pub(super) fn close(&self) -> Result<(), Errno> {
        if !self.disk.is_active() {
            return Ok(());
        }
        let closed = self.threads[0]
            .ask_task(|worker| async move { close_disk(&worker.disk, &worker.ring, false).await });
        // A page cache full of writes may take its time.
        let (device, begun) = (Arc::clone(&self.device), Instant::now());
        let waits = || !device.gives_up() && begun.elapsed() < CLOSE_TIMEOUT;
        closed.wait(waits).unwrap_or(Err(Errno::TIMEDOUT))
    }
}
