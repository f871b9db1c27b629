//! A disk that moves: to another host (migration) or to another process (upgrade).
//!
//! Promises:
//! - A disk that is not active touches no image: requests fail with EBUSY, changes with `Busy`, and
//!   no task works in the background.
//! - [`Disk::deactivate`] and [`Disk::hand_over`] end with everything on stable storage and no
//!   request in flight. Where that cannot be had they fail, and the disk is as active as it was,
//!   with its locks.
//! - [`Disk::activate`] trusts nothing that was read before: every header, table and length is read
//!   again, after the locks are held.
//! - A lock is changed on the descriptors that do the I/O; while a disk is handed over it is free
//!   at no moment.
//!
//! Control path; each of them takes its turn with the changes of `live`, and runs to its end when
//! its caller goes away (but for the wait for locks, which then ends).

mod activate;
mod describe;
mod hand_over;

use std::sync::Arc;

use ringdisk_ring::Ring;
use ringdisk_storage::{Lock, Storage};

use crate::graph::{Drained, Graph, State};
use crate::layer::Layer;
use crate::live::{broken, busy, close_layer};
use crate::open::locks::give_back;
use crate::{Disk, Error, ErrorKind};

pub(crate) use describe::{About, AboutLayer, Kind};
pub use hand_over::HandOver;

impl Disk {
    /// Whether requests are served: the images are ours.
    pub fn is_active(&self) -> bool {
        self.graph().state == State::Active
    }

    /// Whether another process waits with [`Disk::activate`] for what is ours: a good time for
    /// [`Disk::deactivate`], if nobody uses the disk. Seen wherever locks are, on other hosts too.
    /// One quick system call; a request to the server on a network file system.
    pub fn is_wanted(&self) -> bool {
        let graph = self.graph();
        graph.state == State::Active && graph.storages().first().is_some_and(|it| it.is_wanted())
    }

    /// Gives the images away, to a process that waits for them with [`Disk::activate`]: waits for
    /// the requests in flight, puts all that was written and all that is kept in memory on stable
    /// storage, and gives up the locks of what it may write. Later requests fail with EBUSY. Does
    /// nothing when that is so already.
    ///
    /// Errors: those of the storage, and `Busy` during a commit or while a write that was given up
    /// may still land: the disk is as it was then, and active. `Unsupported` for a disk with a
    /// temporary overlay, and while the kernel has a descriptor of the image.
    pub async fn deactivate(&self, ring: &Ring) -> Result<(), Error> {
        let change = |disk: Arc<Disk>, ring: Ring| async move {
            if disk.options().temporary {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "the disk has a temporary overlay, which nobody else can open",
                ));
            }
            let turn = disk.turns().enter().await;
            match disk.graph().state {
                State::Inactive => return Ok(()),
                State::Broken => return Err(broken()),
                State::Quiet => return Err(handed_over()),
                State::Active => disk.check_own()?,
            }
            let mut drained = disk.gateway().drain(&ring, turn).await;
            quieten(&ring, &mut drained, State::Inactive).await?;
            // Those below stay locked for reading, which is in nobody's way who has the same chain.
            // Who would write to one of them knows nothing of what was put above it since, and is
            // refused.
            let written = |(index, layer): &(usize, &Arc<Layer>)| *index == 0 || layer.is_writable;
            let layers = &drained.graph().layers;
            let written = layers.iter().enumerate().filter(written);
            let given: Vec<_> = written.flat_map(|(_, layer)| layer.storages()).cloned().collect();
            give_back(&given, Lock::Inactive);
            Ok(())
        };
        self.detached(ring, change).await
    }

    /// Whether the disk is all ours. The caller has the turn.
    fn check_own(&self) -> Result<(), Error> {
        if self.is_busy.load(std::sync::atomic::Ordering::Acquire) {
            return Err(busy());
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

/// What may not happen to a disk between [`Disk::hand_over`] and [`Disk::resume`]: it would take
/// the locks away from the new process.
fn handed_over() -> Error {
    Error::new(ErrorKind::Busy, "the disk was handed over to another process")
}

/// Brings all to stable storage, after which nothing in memory counts.
async fn quieten(ring: &Ring, drained: &mut Drained<'_>, state: State) -> Result<(), Error> {
    if drained.graph().state == State::Active {
        let layers = drained.graph().layers.clone();
        let written = || layers.iter().filter(|layer| layer.is_writable);
        for layer in written() {
            if let Some(storage) = layer.storages().find(|storage| storage.may_change_late()) {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "a write to '{}' was given up and may still be under way in the kernel, so nobody can say when the disk \
                         stands still; stop the process instead",
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
                // leaves nothing that can be used.
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

impl Graph {
    /// All files, from the top down.
    fn storages(&self) -> Vec<Arc<Storage>> {
        self.layers.iter().flat_map(|layer| layer.storages()).cloned().collect()
    }
}

impl Layer {
    /// The image file, and the external data file where there is one.
    pub(crate) fn storages(&self) -> impl Iterator<Item = &Arc<Storage>> {
        let file = self.file();
        let data = self.data_storage();
        let other = data.filter(|data| file.is_none_or(|file| !Arc::ptr_eq(file, data)));
        file.into_iter().chain(other)
    }
}
