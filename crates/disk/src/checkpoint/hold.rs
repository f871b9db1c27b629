//! Holds a disk: no request is in flight and none begins.
//!
//! Promises: taking hold is bounded in time, and gives up without a trace. Dropping [`Held`] lets
//! requests go on. A held disk excludes all other changes.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ringdisk_ring::Ring;

use super::checks::check_seen;
use super::frozen::Source;
use super::{Checkpoint, Prepared};
use crate::disk::{Parts, Policy};
use crate::graph::{Drained, Fleece, Graph};
use crate::layer::{Layer, Node};
use crate::live::{checkpointed, not_drained};
use crate::{Disk, Error, ErrorKind};

/// A disk that is held. Requests of clients wait, so drop it within milliseconds. Bound to its
/// thread.
pub struct Held<'a> {
    disk: &'a Disk,
    drained: Drained<'a>,
}

impl Disk {
    /// Waits until no request is in flight, and keeps new ones waiting until the answer is dropped.
    /// To be called for all disks of one instant before the first is frozen. Allowed beside a
    /// commit.
    ///
    /// * `limit`: longest time to wait for other changes and for requests in flight. New requests
    ///   wait meanwhile.
    ///
    /// Errors: `Busy` when the limit has passed (requests go on) and when the disk is not active;
    /// `Unsupported` while the kernel writes the image itself (`--passthrough`); `Io` on a disk
    /// that is broken.
    pub async fn hold(&self, ring: &Ring, limit: Duration) -> Result<Held<'_>, Error> {
        let held = async {
            let turn = self.changes().lock().await;
            self.check_beside_commit()?;
            check_seen(self)?;
            Ok(self.gateway().drain(ring, turn).await)
        };
        match ring.within(limit, held).await {
            Ok(drained) => Ok(Held { disk: self, drained: drained? }),
            Err(_) => Err(not_drained(limit)),
        }
    }
}

impl Held<'_> {
    /// Keeps the state of this moment from now on. No I/O.
    ///
    /// * `prepared`: of this disk; used once.
    ///
    /// Errors: `Busy` where another checkpoint of the disk is running, and where one of the bitmaps
    /// is not in the top image any more: prepare it again; `Invalid` for a preparation of another
    /// disk, or one that was used; `Io` where there is no memory. The disk is as it was.
    pub fn freeze(&mut self, prepared: &Prepared) -> Result<Arc<Checkpoint>, Error> {
        let graph = self.drained.graph();
        let live = self.disk.weak();
        if !Weak::ptr_eq(&live, &prepared.live) {
            return Err(Error::new(ErrorKind::Invalid, "this was prepared for another disk"));
        }
        if graph.running_fleece().is_some() {
            return Err(checkpointed("and a disk has one at a time"));
        }
        let bitmaps = prepared.wanted.at_instant(graph)?;
        let fleece = prepared.begin(graph)?;
        bitmaps.begin(graph);
        let frozen = frozen_disk(self.disk, graph, &fleece);
        let mut next = Graph::clone(graph);
        next.fleece = Some(Arc::clone(&fleece));
        self.drained.replace(next);
        Ok(Arc::new(Checkpoint {
            live,
            frozen,
            fleece,
            bitmaps,
            are_bitmaps_done: AtomicBool::new(false),
        }))
    }
}

/// The disk that shows the frozen state.
fn frozen_disk(disk: &Disk, graph: &Graph, fleece: &Arc<Fleece>) -> Arc<Disk> {
    let source = Source::new(disk.weak(), Arc::clone(fleece), graph);
    let mut layer = Layer::new(Node::Frozen(Arc::new(source)), graph.visible_size());
    graph.top().name().clone_into(&mut layer.name);
    let policy = Policy { read_only: true, cache: disk.cache(), ..Policy::default() };
    Disk::build(vec![layer], Parts { policy, ..Parts::default() })
}

impl std::fmt::Debug for Held<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("disk", &self.disk).finish_non_exhaustive()
    }
}
