//! Block status of a disk, and the maximal runs that `qemu-img map` prints.
//!
//! Promises: no data is read. For the control path and SEEK_DATA/SEEK_HOLE.

use ringdisk_qcow2::Bytes;
use ringdisk_ring::{Errno, Ring};
use serde_json::{Value, json};

use crate::layer::Node;
use crate::{BlockStatus, Disk};

/// One line of `qemu-img map`: a maximal run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// First byte on the disk, bytes.
    pub start: u64,
    /// What is known; `status.len` is the length.
    pub status: BlockStatus,
}

impl MapEntry {
    /// The object that `qemu-img map --output=json` prints.
    pub fn to_json(&self) -> Value {
        let status = &self.status;
        let mut value = json!({
            "start": self.start,
            "length": status.len.0,
            "depth": status.depth,
            "present": status.present,
            "zero": status.zero,
            "data": status.data,
            "compressed": status.compressed,
        });
        if let (Some(offset), Value::Object(object)) = (status.offset, &mut value) {
            object.insert("offset".to_owned(), offset.into());
        }
        value
    }

    /// Appends `next` if it goes on where this entry ends, with the same answer.
    fn extend(&mut self, next: &MapEntry) -> bool {
        let (ours, theirs) = (&mut self.status, &next.status);
        let follows = match (ours.offset, theirs.offset) {
            (None, None) => true,
            (Some(ours_at), Some(theirs_at)) => ours_at.checked_add(ours.len.0) == Some(theirs_at),
            _ => false,
        };
        let same = BlockStatus { len: theirs.len, offset: theirs.offset, ..*ours } == *theirs;
        if follows && same {
            ours.len += theirs.len;
        }
        follows && same
    }
}

impl Disk {
    /// What is known about the bytes from `offset` on.
    ///
    /// * `len`: how many bytes are of interest; the answer may be shorter.
    ///
    /// Errors: EIO for a damaged image, and those of the storage.
    pub async fn block_status(
        &self,
        ring: &Ring,
        offset: u64,
        len: Bytes,
    ) -> Result<BlockStatus, Errno> {
        let graph = self.enter().await;
        graph.check()?;
        let (offset, len) = graph.place(offset, len);
        if let Node::Frozen(frozen) = &graph.top().node {
            return if len.is_zero() {
                Ok(BlockStatus::EMPTY)
            } else {
                frozen.piece(ring, offset, len).await.map(BlockStatus::from)
            };
        }
        let _graces = graph.graces();
        let (status, _) = graph.chain().status(ring, offset, len).await?;
        Ok(status)
    }

    /// Calls `each` with every maximal run of a range, as `qemu-img map` prints them.
    ///
    /// Errors: as [`Disk::block_status`]; runs before the failure have been given out.
    pub async fn map_entries(
        &self,
        ring: &Ring,
        start: u64,
        len: Bytes,
        mut each: impl FnMut(&MapEntry),
    ) -> Result<(), Errno> {
        let end = start.saturating_add(len.0).min(self.size().0);
        let mut at = start;
        let mut current: Option<MapEntry> = None;
        while at < end {
            let status = self.block_status(ring, at, Bytes(end - at)).await?;
            if status.len.is_zero() {
                break;
            }
            let entry = MapEntry { start: at, status };
            at += status.len.0;
            if current.as_mut().is_some_and(|run| run.extend(&entry)) {
                continue;
            }
            if let Some(run) = current.replace(entry) {
                each(&run);
            }
        }
        if let Some(run) = current {
            each(&run);
        }
        Ok(())
    }
}
