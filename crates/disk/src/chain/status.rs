//! Block status of a range of a chain, in the terms of `qemu-img map`.
//!
//! Promises: an answer costs no read of data; the file system is asked for holes only where the
//! image cannot know them. For the control path and SEEK_DATA/SEEK_HOLE.

use ringdisk_qcow2::{Bytes, GuestOffset, HostOffset};
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Allocation;

use super::Chain;
use crate::layer::{Kind, Layer, Node, Piece};

/// A run of bytes with one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStatus {
    /// Length of the run, bytes; 0 only at and past the end of the disk.
    pub len: Bytes,
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
    pub(crate) const EMPTY: BlockStatus = BlockStatus {
        len: Bytes::ZERO,
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

impl From<Piece> for BlockStatus {
    fn from(piece: Piece) -> BlockStatus {
        let Piece { len, data, zero, present, depth } = piece;
        BlockStatus { len, data, zero, present, depth, offset: None, compressed: false }
    }
}

impl Chain<'_> {
    /// As [`Disk::block_status`](crate::Disk::block_status); depths count from the top of this
    /// chain. The caller holds the graces. Also says whether the run is hidden by the end of a
    /// shorter layer: it reads as zeroes then, whatever may be below the chain.
    ///
    /// * `len`: the range lies inside the top layer.
    pub(crate) async fn status(
        self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<(BlockStatus, bool), Errno> {
        let mut status = BlockStatus::EMPTY;
        if len.is_zero() {
            return Ok((status, false));
        }
        let found = self.locate(ring, offset, len).await?;
        let layer = self.layer(found.depth)?;
        status.len = found.len;
        status.depth = u32::try_from(found.depth).unwrap_or(u32::MAX);
        status.present = !matches!(found.kind, Kind::Unallocated);
        match found.kind {
            Kind::Unallocated => {}
            Kind::Zero { offset } => status.offset = offset.map(|offset| offset.0),
            Kind::Untouched => (status.data, status.zero) = (true, false),
            Kind::Compressed(_) => {
                (status.data, status.zero, status.compressed) = (true, false, true);
            }
            Kind::Data { offset } => {
                (status.data, status.zero, status.offset) = (true, false, Some(offset.0));
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
    offset: HostOffset,
    status: &mut BlockStatus,
) -> Result<(), Errno> {
    let raw = matches!(layer.node, Node::Raw(_));
    if !raw && !layer.sparse {
        return Ok(());
    }
    let storage = layer.data_storage().ok_or(Errno::IO)?;
    let left = Bytes(storage.len()).saturating_sub(offset.from_start());
    if left.is_zero() {
        // Past the end of the file: it was cut, or its last cluster is not whole.
        status.zero = true;
        return Ok(());
    }
    let len = status.len.min(left);
    let (allocation, run) = match storage.allocation(ring, offset.0, len.0).await {
        Ok(answer) => answer,
        // Storage that cannot answer counts as data.
        Err(Errno::OPNOTSUPP | Errno::INVAL) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    if run == 0 {
        return Ok(());
    }
    status.len = len.min(Bytes(run));
    if allocation == Allocation::Hole {
        status.zero = true;
        status.data = !raw;
    }
    Ok(())
}
