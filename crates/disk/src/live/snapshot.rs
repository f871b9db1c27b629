//! Internal snapshots of a disk that is in use.
//!
//! Promises: clients wait while a snapshot is created, applied or deleted; they see no state
//! between.

use std::sync::Arc;

use ringdisk_ring::Ring;

use super::{check_lasting, checkpointed};
use crate::{Disk, Error, lost_names};

/// A change of the internal snapshots of the top image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChange {
    /// Creates a snapshot of the present disk with this name.
    Create(String),
    /// Restores the disk from the snapshot of this id or name; later writes are lost.
    Apply(String),
    /// Removes the snapshot of this id or name.
    Delete(String),
}

impl Disk {
    /// Creates, applies or deletes an internal snapshot of the top image. Clients wait meanwhile.
    /// After an apply the watchers of the size are called, since all content may have changed.
    ///
    /// Errors: `Busy` for an apply while a checkpoint is running, since all content may change;
    /// `Unsupported` when the top is no qcow2 image, `Invalid` for a name that is not there
    /// or there already, `NotFound` when the name of the image does not lead to it any more,
    /// `Busy`, those of the storage. The disk is as it was.
    pub async fn snapshot(&self, ring: &Ring, change: SnapshotChange) -> Result<(), Error> {
        check_lasting(self)?;
        let run = move |disk: Arc<Disk>, ring: Ring| async move {
            let turn = disk.changes().lock().await;
            disk.check_free()?;
            if matches!(change, SnapshotChange::Create(_)) {
                lost_names::check("take a snapshot", [&**disk.graph().top()])?;
            }
            let mut drained = disk.gateway().drain(&ring, turn).await;
            if matches!(change, SnapshotChange::Apply(_))
                && drained.graph().running_fleece().is_some()
            {
                return Err(checkpointed("and applying a snapshot would change the whole disk"));
            }
            let always_tell = matches!(change, SnapshotChange::Apply(_));
            disk.offline(&ring, &mut drained, always_tell, async |ring, image| match &change {
                SnapshotChange::Create(name) => image.snapshot_create(ring, name).await.map(drop),
                SnapshotChange::Apply(name) => image.snapshot_apply(ring, name).await,
                SnapshotChange::Delete(name) => image.snapshot_delete(ring, name).await,
            })
            .await
        };
        self.detached(ring, run).await
    }
}
