//! What is known about ranges of a disk, in the terms of `qemu-img map`.
//!
//! Control path and SEEK_DATA/SEEK_HOLE; asks the file system about holes where the image cannot
//! know.

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Allocation;
use serde_json::{Value, json};

use crate::Disk;
use crate::chain::Chain;
use crate::layer::{Kind, Layer, Node};

/// A run of bytes with one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Length of the run, bytes; 0 only at and past the end of the disk.
    pub len: u64,
    /// Bytes are stored; otherwise nothing has to be read to know them.
    pub data: bool,
    /// The run is known to read as zeroes.
    pub zero: bool,
    /// Some layer of the chain has the run, be it as zeroes.
    pub present: bool,
    /// The layer that answered: 0 is the top image.
    pub depth: u32,
    /// Where the run begins in the layer's [`host file`](Layer::host_name), bytes, when it is there
    /// as it is.
    pub offset: Option<u64>,
    /// The run is stored compressed.
    pub compressed: bool,
}

impl BlockStatus {
    /// What is said about nothing.
    const EMPTY: BlockStatus = BlockStatus {
        len: 0,
        data: false,
        zero: true,
        present: false,
        depth: 0,
        offset: None,
        compressed: false,
    };

    /// SEEK_DATA stops here: the run may hold something else than zeroes.
    pub fn is_data(&self) -> bool {
        self.data && !self.zero
    }
}

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
            "length": status.len,
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
            (Some(ours_at), Some(theirs_at)) => ours_at.checked_add(ours.len) == Some(theirs_at),
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
        len: u64,
    ) -> Result<BlockStatus, Errno> {
        let graph = self.enter().await;
        graph.check()?;
        let (offset, len) = graph.place(offset, len);
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
        len: u64,
        mut each: impl FnMut(&MapEntry),
    ) -> Result<(), Errno> {
        let end = start.saturating_add(len).min(self.size());
        let mut at = start;
        let mut current: Option<MapEntry> = None;
        while at < end {
            let status = self.block_status(ring, at, end - at).await?;
            if status.len == 0 {
                break;
            }
            let entry = MapEntry { start: at, status };
            at += status.len;
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

impl Chain<'_> {
    /// As [`Disk::block_status`]; depths count from the top of this chain. The caller holds the
    /// graces. Also says whether the run is hidden by the end of a shorter layer: it reads as
    /// zeroes then, whatever may be below the chain.
    ///
    /// * `len`: the range lies inside the top layer.
    pub(crate) async fn status(
        self,
        ring: &Ring,
        offset: u64,
        len: u64,
    ) -> Result<(BlockStatus, bool), Errno> {
        let mut status = BlockStatus::EMPTY;
        if len == 0 {
            return Ok((status, false));
        }
        let found = self.locate(ring, offset, len).await?;
        let layer = self.layer(found.depth)?;
        status.len = found.len;
        status.depth = u32::try_from(found.depth).unwrap_or(u32::MAX);
        status.present = !matches!(found.kind, Kind::Unallocated);
        match found.kind {
            Kind::Unallocated => {}
            Kind::Zero { offset } => status.offset = offset,
            Kind::Untouched => (status.data, status.zero) = (true, false),
            Kind::Compressed(_) => {
                (status.data, status.zero, status.compressed) = (true, false, true);
            }
            Kind::Data { offset } => {
                (status.data, status.zero, status.offset) = (true, false, Some(offset));
                holes(ring, layer, offset, &mut status).await?;
            }
        }
        Ok((status, found.is_cut))
    }
}

/// Refines a run of plain bytes by the holes of the file: always for raw, and for an image that was
/// preallocated, whose clusters are there but hold nothing.
async fn holes(
    ring: &Ring,
    layer: &Layer,
    offset: u64,
    status: &mut BlockStatus,
) -> Result<(), Errno> {
    let raw = matches!(layer.node, Node::Raw(_));
    if !raw && !layer.sparse {
        return Ok(());
    }
    let storage = layer.data_storage().ok_or(Errno::IO)?;
    let left = storage.len().saturating_sub(offset);
    if left == 0 {
        // Past the end of the file: it was cut, or its last cluster is not whole.
        status.zero = true;
        return Ok(());
    }
    let len = status.len.min(left);
    let (allocation, run) = match storage.allocation(ring, offset, len).await {
        Ok(answer) => answer,
        // Storage that cannot tell holds data.
        Err(Errno::OPNOTSUPP | Errno::INVAL) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    if run == 0 {
        return Ok(());
    }
    status.len = len.min(run);
    if allocation == Allocation::Hole {
        status.zero = true;
        status.data = !raw;
    }
    Ok(())
}
