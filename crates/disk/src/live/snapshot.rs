//! Internal snapshots of a disk that is in use.

use std::sync::Arc;

use ringdisk_ring::Ring;

use super::check_lasting;
use crate::{Disk, Error, lost};

/// What is done with an internal snapshot of the top image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotChange {
    /// Takes one of the disk as it is, under this name.
    Create(String),
    /// Makes the disk what it was in the snapshot of this id or name; what was written since is
    /// lost.
    Apply(String),
    /// Removes the snapshot of this id or name.
    Delete(String),
}

impl Disk {
    /// Creates, applies or deletes an internal snapshot of the top image. Clients wait meanwhile.
    /// After an apply those who watch the size are told, since all content may have changed.
    ///
    /// Errors: `Unsupported` when the top is no qcow2 image, `Invalid` for a name that is not there
    /// or there already, `NotFound` when the name of the image does not lead to it any more,
    /// `Busy`, those of the storage. The disk is as it was.
    pub async fn snapshot(&self, ring: &Ring, change: SnapshotChange) -> Result<(), Error> {
        check_lasting(self)?;
        let run = move |disk: Arc<Disk>, ring: Ring| async move {
            let turn = disk.turns().enter().await;
            disk.check_free()?;
            if matches!(change, SnapshotChange::Create(_)) {
                lost::check("take a snapshot", [&**disk.graph().top()])?;
            }
            let mut drained = disk.gateway().drain(&ring, turn).await;
            let tells = matches!(change, SnapshotChange::Apply(_));
            disk.offline(&ring, &mut drained, tells, async |ring, image| match &change {
                SnapshotChange::Create(name) => image.snapshot_create(ring, name).await.map(drop),
                SnapshotChange::Apply(name) => image.snapshot_apply(ring, name).await,
                SnapshotChange::Delete(name) => image.snapshot_delete(ring, name).await,
            })
            .await
        };
        self.detached(ring, run).await
    }
}
