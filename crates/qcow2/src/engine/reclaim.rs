//! Waiting for space that is on its way to being free.
//!
//! A cluster that was discarded is free once its unlink is on stable storage and every request that
//! may still use the old mapping has ended ([`unlinked`](crate::concurrent::unlinked),
//! [`grace`](crate::concurrent::grace)). A
//! request that finds no space, in the image or on the file system that holds it, waits for that in
//! place of failing.
//!
//! Promises: a waiting request holds neither a grace nor the gate of the checkpoints, and a request
//! that holds a grace waits for nothing but storage and that gate: so they never wait for one
//! another. Requests that begin meanwhile do not prolong the wait. A request fails when no cluster
//! is on its way.

use std::time::Duration;

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use super::Qcow2;
use crate::sync::Ordering;
use crate::units::HostOffset;

/// First pause between two checks of the requests in flight: as long as one on a fast device.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// Longest pause: far less than a person or a guest notices.
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// Whether an error says that there is no space.
pub(super) fn is_full(errno: Errno) -> bool {
    matches!(errno, Errno::NOSPC | Errno::DQUOT)
}

impl Qcow2 {
    /// How often clusters became free so far. To be asked before the attempt that may fail.
    pub(super) fn times_freed(&self) -> u64 {
        self.engine().map_or(0, |engine| engine.times_freed.load(Ordering::SeqCst))
    }

    /// After an attempt that found no space: waits until clusters have become free. False: none are
    /// on their way (or what frees them failed), so another attempt is of no use.
    ///
    /// * `seen`: [`times_freed`](Qcow2::times_freed) before the attempt.
    ///
    /// The caller may hold claims of clusters and tables, but no grace, and not the gate of the
    /// checkpoints.
    pub(super) async fn reclaim(&self, ring: &Ring, seen: u64) -> bool {
        let Ok(engine) = self.engine() else { return false };
        let mut pause = PAUSE_MIN;
        loop {
            match self.try_reclaim(ring, seen).await {
                Some(answer) => return answer,
                // A request that was dropped in the middle never ends.
                None if engine.write_abandoned.load(Ordering::Acquire) => return false,
                None => {}
            }
            ring.sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Frees what can be freed now. `None`: requests in flight may still use the rest.
    async fn try_reclaim(&self, ring: &Ring, seen: u64) -> Option<bool> {
        let engine = self.engine().ok()?;
        // Clusters are freed under the gate, so those on their way are in `unlinked` or freed
        // already.
        let _gate = self.checkpoint_gate().await;
        if self.times_freed() != seen {
            return Some(true);
        }
        if engine.unlinked.has_fresh() {
            if self.checkpoint_in_gate(ring).await.is_err() {
                return Some(false);
            }
        } else {
            self.reap(ring).await;
        }
        if self.times_freed() != seen {
            return Some(true);
        }
        (!engine.unlinked.is_busy()).then_some(false)
    }

    /// As [`write_all`], and waits for space like [`reclaim`](Qcow2::reclaim).
    pub(super) async fn write_or_reclaim(
        &self,
        ring: &Ring,
        offset: HostOffset,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        loop {
            let seen = self.times_freed();
            match self.file.write_all(ring, offset.0, buf).await {
                Err(errno) if is_full(errno) && self.reclaim(ring, seen).await => {}
                result => return result,
            }
        }
    }
}
