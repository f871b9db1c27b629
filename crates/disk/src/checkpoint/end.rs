//! The end of a checkpoint.
//!
//! Promises: clients copy nothing any more as soon as the end has begun, also when the rest of it
//! fails.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_ring::Ring;

use super::{Checkpoint, CheckpointEnd};
use crate::graph::Graph;
use crate::live::DRAIN_LIMIT;
use crate::{Disk, Error};

/// As [`Checkpoint::end`].
pub(super) async fn end(
    checkpoint: &Checkpoint,
    ring: &Ring,
    end: CheckpointEnd,
) -> Result<(), Error> {
    checkpoint.fleece.end(ring).await;
    let Some(live) = checkpoint.live.upgrade() else { return Ok(()) };
    detach(checkpoint, &live, ring).await?;
    if checkpoint.are_bitmaps_done.load(Ordering::Acquire) {
        return Ok(());
    }
    checkpoint.bitmaps.end(&live, ring, end).await?;
    checkpoint.are_bitmaps_done.store(true, Ordering::Release);
    Ok(())
}

/// Takes the record out of the graph, so that its memory is freed. Where requests in flight do not
/// end in time the record stays, without effect, until the next checkpoint.
async fn detach(checkpoint: &Checkpoint, live: &Disk, ring: &Ring) -> Result<(), Error> {
    let fleece = Arc::clone(&checkpoint.fleece);
    let run = move |disk: Arc<Disk>, ring: Ring| async move {
        let is_ours = |graph: &Graph| {
            graph.fleece.as_ref().is_some_and(|attached| Arc::ptr_eq(attached, &fleece))
        };
        let drained = async {
            let turn = disk.changes().lock().await;
            match is_ours(&disk.graph()) {
                true => Some(disk.gateway().drain(&ring, turn).await),
                false => None,
            }
        };
        let Ok(Some(mut drained)) = ring.within(DRAIN_LIMIT, drained).await else {
            return Ok(());
        };
        let mut graph = Graph::clone(drained.graph());
        graph.fleece = None;
        drained.replace(graph);
        Ok(())
    };
    live.detached(ring, run).await
}
