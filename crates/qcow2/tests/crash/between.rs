//! Operations that need the image for themselves, between two streams.

use crate::world::World;

impl World {
    /// Makes, applies and deletes snapshots.
    pub(crate) async fn snapshots_between(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Grows or shrinks the disk.
    pub(crate) async fn resize_between(&mut self) -> Result<(), String> {
        Ok(())
    }
}
