//! Checkpoints: the state of a disk at one instant, for readers, while clients go on writing.
//!
//! ```text
//! prepare ──► hold (requests wait) ──► freeze ──► requests go on, readers read ──► end
//! ```
//!
//! Several disks are first prepared, then all held, then all frozen, then all let go: their frozen
//! states are of one instant. What takes time is done before the hold
//! ([`Disk::prepare_checkpoint`]) and after it; [`Held::freeze`] does no I/O.
//!
//! Promises:
//! - The frozen disk ([`Checkpoint::disk`]) gives the bytes of the instant, or errors; never other
//!   bytes. Its size is that of the instant.
//! - A write, discard or zeroing of a client never fails because of a checkpoint. When old data
//!   cannot be copied away (fleecing file full, failing, or too slow) the checkpoint fails.
//! - A hold is bounded in time until it has the disk; the control thread then lets go soon.
//!
//! Control path. The copies themselves are made by `graph/fleece`.

mod bitmaps;
mod checks;
mod end;
mod frozen;
mod hold;
mod options;
mod prepare;

use ringdisk_qcow2::Bytes;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use ringdisk_ring::Ring;

use crate::graph::Fleece;
use crate::{Disk, Error};

pub use hold::Held;
pub use options::{CheckpointEnd, CheckpointOptions, CheckpointState, DirtyRanges, NewBitmap};
pub use prepare::Prepared;

/// A running or ended checkpoint of one disk. Shared; for any thread.
#[derive(Debug)]
pub struct Checkpoint {
    /// The disk whose state is kept.
    live: Weak<Disk>,
    /// That state.
    frozen: Arc<Disk>,
    fleece: Arc<Fleece>,
    bitmaps: bitmaps::Chosen,
    /// The bitmaps were treated as the end says.
    are_bitmaps_done: AtomicBool,
}

impl Checkpoint {
    /// The disk as it was at the instant: read-only, of fixed size. For exports and jobs, on any
    /// ring. Reads fail with EIO once the checkpoint has failed or ended ([`Checkpoint::state`]
    /// says why).
    pub fn disk(&self) -> &Arc<Disk> {
        &self.frozen
    }

    /// Whether the frozen state can be read, and why not.
    pub fn state(&self) -> CheckpointState {
        self.fleece.state()
    }

    /// Whether the frozen state is kept.
    pub(crate) fn is_running(&self) -> bool {
        self.fleece.is_running()
    }

    /// Waits until the checkpoint has failed or ended. For any ring thread.
    pub async fn over(&self) -> CheckpointState {
        self.fleece.over().await
    }

    /// Bytes that the fleecing file holds.
    pub fn fleeced_bytes(&self) -> Bytes {
        self.fleece.used()
    }

    /// Bytes that the fleecing file may hold.
    pub fn fleece_max(&self) -> Bytes {
        self.fleece.max()
    }

    /// The bitmap that was asked for by [`CheckpointOptions::since`], as it was at the instant.
    /// Walks the bitmap; control path.
    pub fn dirty(&self) -> Option<DirtyRanges> {
        self.bitmaps.dirty(&self.frozen)
    }

    /// Ends the checkpoint: clients copy nothing any more, readers get EIO, the fleecing file is
    /// let go (its space is freed when the last read has ended and the caller has no descriptor of
    /// it). Then the bitmaps are treated as `end` says. A second call only repeats the part that
    /// failed.
    ///
    /// Errors: those of changing the bitmaps (`Busy` during a commit, and when requests in flight
    /// do not end within 2 s; those of the storage). The checkpoint has ended all the same; the
    /// bitmaps are as they were, and valid.
    pub async fn end(&self, ring: &Ring, end: CheckpointEnd) -> Result<(), Error> {
        end::end(self, ring, end).await
    }
}
