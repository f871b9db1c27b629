//! Ownership of the disk's images: this process, its successor (upgrade), or another host
//! (migration).
//!
//! Promises:
//! - A disk that is not active touches no image: requests fail with EBUSY, changes with `Busy`, and
//!   no task works in the background.
//! - [`Disk::deactivate`] and [`Disk::hand_over`] end with everything on stable storage and no
//!   request in flight. Where that is not possible they fail, and the disk stays active, with its
//!   locks.
//! - [`Disk::activate`] uses nothing that was cached before: every header, table and length is read
//!   again, after the locks are held.
//! - A lock is changed on the descriptors that do the I/O; during a hand-over the images are locked
//!   at every moment.
//!
//! Control path. Each operation runs one after the other with the changes of `live`, and runs to
//! its end when its caller is dropped (except the wait for locks, which then ends).

mod activate;
mod hand_over;
mod state;
mod successor;
mod suspend;

use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_storage::Lock;

use crate::graph::{Drained, Graph, State};
use crate::layer::Layer;
use crate::live::{broken, busy, checkpointed, close_layer};
use crate::open::locks::give_back;
use crate::{Disk, Error, ErrorKind};

pub use hand_over::HandOver;

impl Disk {
    /// Whether this process owns the images, so that requests are served.
    pub fn is_active(&self) -> bool {
        self.graph().state == State::Active
    }

    /// Whether another process waits with [`Disk::activate`] for the images of this active disk: a
    /// good time for [`Disk::deactivate`], if no client uses the disk. The wait is visible wherever
    /// locks are, also on other hosts. One quick system call; a request to the server on a network
    /// file system.
    pub fn is_wanted(&self) -> bool {
        let graph = self.graph();
        graph.state == State::Active && graph.storages().first().is_some_and(|it| it.is_wanted())
    }

    /// Releases the images for a process that waits for them with [`Disk::activate`]: waits for the
    /// requests in flight, puts all writes and all cached metadata on stable storage, and releases
    /// the locks of the images that it may write. Later requests fail with EBUSY. Does nothing on
    /// an inactive disk.
    ///
    /// Errors: those of the storage, and `Busy` during a commit, or while a write that was given up
    /// may still reach the storage: the disk stays active, as it was. `Unsupported` for a disk with
    /// a temporary overlay, and while the kernel has a descriptor of the image.
    pub async fn deactivate(&self, ring: &Ring) -> Result<(), Error> {
        let change = |disk: Arc<Disk>, ring: Ring| async move {
            if disk.options().temporary {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "the disk has a temporary overlay, which nobody else can open",
                ));
            }
            let turn = disk.changes().lock().await;
            match disk.graph().state {
                State::Inactive => return Ok(()),
                State::Broken => return Err(broken()),
                State::Quiet => return Err(handed_over()),
                State::Active => disk.check_own()?,
            }
            let mut drained = disk.gateway().drain(&ring, turn).await;
            quieten(&ring, &mut drained, State::Inactive).await?;
            // The layers below stay locked for reading, which does not hinder a process that opens
            // the same chain. A process that would write to one of them does not know the layers
            // that were put above it, and is refused.
            let written = |(index, layer): &(usize, &Arc<Layer>)| *index == 0 || layer.is_writable;
            let layers = &drained.graph().layers;
            let written = layers.iter().enumerate().filter(written);
            let given: Vec<_> = written.flat_map(|(_, layer)| layer.storages()).cloned().collect();
            give_back(&given, Lock::Inactive);
            Ok(())
        };
        self.detached(ring, change).await
    }

    /// Checks that no commit, checkpoint or kernel passthrough uses the disk. The caller holds the
    /// lock of changes.
    fn check_own(&self) -> Result<(), Error> {
        if self.long.any() {
            return Err(busy());
        }
        if self.graph().running_fleece().is_some() {
            return Err(checkpointed("so its images stay with this process"));
        }
        if self.is_lent() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the kernel reads and writes the image itself (--passthrough)",
            ));
        }
        Ok(())
    }
}

/// The error for an operation between [`Disk::hand_over`] and [`Disk::resume`]: it would take the
/// locks away from the successor.
fn handed_over() -> Error {
    Error::new(ErrorKind::Busy, "the disk was handed over to another process")
}

/// Puts everything on stable storage; the caches in memory are not valid afterwards.
async fn quieten(ring: &Ring, drained: &mut Drained<'_>, state: State) -> Result<(), Error> {
    if drained.graph().state == State::Active {
        let layers = drained.graph().layers.clone();
        let written = || layers.iter().filter(|layer| layer.is_writable);
        for layer in written() {
            if let Some(storage) = layer.storages().find(|storage| storage.may_change_late()) {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "a write to '{}' was given up and may still be under way in the kernel, so \
                         nobody can say when the disk stands still; stop the process instead",
                        storage.name()
                    ),
                ));
            }
        }
        let mut is_first = true;
        for layer in written() {
            close_layer(ring, layer).await?;
            if is_first {
                // With two writable layers (a commit that could not end) a failure of the second
                // leaves an unusable disk.
                is_first = false;
                drained.begin();
            }
        }
    }
    let mut graph = Graph::clone(drained.graph());
    graph.state = state;
    drained.replace(graph);
    Ok(())
}
