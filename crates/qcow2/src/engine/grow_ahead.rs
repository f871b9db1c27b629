//! Lets the image file grow ahead of the writes.
//!
//! A direct write that makes a file longer takes the file's lock for itself alone and waits; one
//! into space that the file has does neither. So when new clusters come close to the end of the
//! file, space behind them is reserved in one operation, and what was not used is cut off at the
//! close.
//!
//! Promises: for direct regular files only; never makes a file shorter while requests run; a
//! failure (a full disk, a file system that cannot) changes nothing but the speed. What is reserved
//! reads as zeroes.

use ringdisk_ring::Ring;
use ringdisk_storage::{Kind, Preallocation, Storage};

use super::Qcow2;
use crate::concurrent::registry::Registry;
use crate::sync::{AtomicU64, Ordering};
use crate::units::{Bytes, HostCluster, HostOffset};

/// Least and most that is reserved at once, bytes; in between an eighth of the file.
const STEP_MIN: Bytes = Bytes(1 << 20);
const STEP_MAX: Bytes = Bytes(64 << 20);

/// How far the file was made to reach.
pub(super) struct Ahead {
    /// Length of the file at the open, bytes.
    original: Bytes,
    /// No write before this offset makes the file longer, bytes; `u64::MAX`: nothing is reserved.
    reached: AtomicU64,
    gate: Registry,
}

impl Ahead {
    pub(super) fn new(file: &Storage) -> Ahead {
        let wanted = file.kind() == Kind::Regular && file.limits().direct;
        let original = Bytes(file.len());
        let reached = AtomicU64::new(if wanted { original.0 } else { u64::MAX });
        Ahead { original, reached, gate: Registry::new() }
    }
}

impl Qcow2 {
    /// New clusters end at the host cluster `end`: makes sure that there is space behind.
    pub(super) async fn reach(&self, ring: &Ring, end: HostCluster) {
        let Ok(engine) = self.engine() else { return };
        let end = end << self.geometry.cluster_bits;
        if end.0 <= engine.ahead.reached.load(Ordering::Relaxed) {
            return;
        }
        // A request that comes meanwhile goes on without: its write is slower, not wrong.
        let Some(_claim) = engine.ahead.gate.try_claim(0, 1) else { return };
        let start = end.max(HostOffset(self.file.len()));
        let step =
            (start.from_start() / 8).clamp(STEP_MIN, STEP_MAX).next_multiple_of(Bytes(1 << 16));
        let done = self.file.preallocate(ring, start.0, step.0, Preallocation::Falloc).await;
        let reached = if done.is_ok() { (start + step).0 } else { u64::MAX };
        engine.ahead.reached.store(reached, Ordering::Relaxed);
    }

    /// Cuts off what was reserved and not used. No request uses the image any more.
    pub(crate) async fn cut(&self, ring: &Ring) {
        let Ok(engine) = self.engine() else { return };
        let reached = engine.ahead.reached.swap(u64::MAX, Ordering::Relaxed);
        if reached == u64::MAX || Bytes(reached) <= engine.ahead.original {
            return;
        }
        let Ok(used) = self.space().map(|space| (space.end() << self.geometry.cluster_bits).0)
        else {
            return;
        };
        let target = used.max(engine.ahead.original.0);
        if target < self.file.len() {
            // A longer file does no harm.
            let _ = self.file.set_len(ring, target).await;
        }
    }
}
