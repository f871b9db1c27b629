//! Prepares a checkpoint: everything that takes time, before clients have to wait.
//!
//! Promises: a preparation that fails, or that is abandoned, leaves the disk and its bitmaps as
//! they were.

use ringdisk_qcow2::Bytes;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use ringdisk_ring::Ring;
use ringdisk_storage::{Kind, Storage};

use super::CheckpointOptions;
use super::bitmaps::Wanted;
use super::checks::check_seen;
use crate::graph::{Fleece, Graph};
use crate::layer::Node;
use crate::live::checkpointed;
use crate::{Disk, Error, ErrorKind};

/// A checkpoint that can be frozen. Dropping it leaves the new bitmap in the image:
/// [`Prepared::abandon`] removes it.
#[derive(Debug)]
pub struct Prepared {
    pub(super) live: Weak<Disk>,
    pub(super) wanted: Wanted,
    /// Taken when it is used, so that the checkpoint alone keeps its space.
    file: Mutex<Option<Arc<Storage>>>,
    max: Bytes,
    limit: Duration,
}

impl Disk {
    /// Prepares a checkpoint. Adds the new bitmap (clients wait while the image is opened again for
    /// that) and looks for the old one.
    ///
    /// Errors: `Unsupported` for a null disk, a frozen one, one that the kernel writes itself, and
    /// for bitmaps of an image that has none (raw, temporary overlay); `PermissionDenied` for a new
    /// bitmap of a disk that is open for reading only; `Busy` while another checkpoint is running,
    /// and for bitmaps during a commit or when requests in flight do not end within 2 s; `Invalid`
    /// for a fleecing file that is not empty, writable and regular, and for a bitmap that is there
    /// already, missing or inconsistent; `Io`.
    pub async fn prepare_checkpoint(
        &self,
        ring: &Ring,
        options: CheckpointOptions,
    ) -> Result<Prepared, Error> {
        let graph = self.graph();
        check_node(&graph)?;
        check_seen(self)?;
        check_file(&options)?;
        if graph.running_fleece().is_some() {
            return Err(checkpointed("and a disk has one at a time"));
        }
        drop(graph);
        let CheckpointOptions { fleece: file, fleece_max, copy_limit, bitmap, since } = options;
        let wanted = Wanted::prepare(self, ring, bitmap, since).await?;
        let (max, limit, file) = (fleece_max, copy_limit, Mutex::new(Some(file)));
        Ok(Prepared { live: self.weak(), wanted, file, max, limit })
    }
}

impl Prepared {
    /// The record for a disk as it is now; once. Its memory is zeroed by the kernel as it is used,
    /// so this is quick.
    ///
    /// Errors: `Invalid` the second time; `Io` where there is no memory.
    pub(super) fn begin(&self, graph: &Graph) -> Result<Arc<Fleece>, Error> {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(file) = file else {
            return Err(Error::new(ErrorKind::Invalid, "this preparation was used before"));
        };
        Fleece::new(graph.size(), file, self.max, self.limit)
            .map(Arc::new)
            .map_err(|errno| Error::os("there is no memory for a checkpoint", errno))
    }

    /// Gives the checkpoint up before it was frozen: removes the new bitmap.
    ///
    /// Errors: those of changing the bitmaps; the new one is still there then.
    pub async fn abandon(&self, ring: &Ring) -> Result<(), Error> {
        match self.live.upgrade() {
            Some(live) => self.wanted.undo(&live, ring).await,
            None => Ok(()),
        }
    }
}

/// Errors: `Unsupported`.
fn check_node(graph: &Graph) -> Result<(), Error> {
    let why = match &graph.top().node {
        Node::Raw(_) | Node::Qcow2(_) => return Ok(()),
        Node::Null(_) => "a null disk stores nothing, so it has no state that could be kept",
        Node::Frozen(_) => "this is the frozen state of a disk already",
    };
    Err(Error::new(ErrorKind::Unsupported, why))
}

/// Errors: `Invalid`.
fn check_file(options: &CheckpointOptions) -> Result<(), Error> {
    let file = &options.fleece;
    let why = if file.kind() == Kind::BlockDevice {
        "it is no regular file"
    } else if file.is_read_only() {
        "it is open for reading only"
    } else if !file.is_empty() {
        "it is not empty"
    } else {
        return Ok(());
    };
    let text = format!(
        "'{}' cannot take the old data of a checkpoint: {why}; use a new file",
        file.name()
    );
    Err(Error::new(ErrorKind::Invalid, text))
}
