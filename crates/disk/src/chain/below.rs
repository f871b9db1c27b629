//! The layers below an image, as the qcow2 engine reads them to complete a cluster.
//!
//! Promises: past the end of the uppermost of these layers everything reads as zeroes; `has_data`
//! uses tables in memory only and never waits.

use ringdisk_qcow2::{Below, Bytes, Grace, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::Chain;
use crate::commit_options::COMMITS_MAX;
use crate::layer::Kind;

impl Below for Chain<'_> {
    /// Fills `buf`; past the end of the chain with zeroes.
    ///
    /// Errors: those of the storage; EIO for a damaged image.
    async fn read(&self, ring: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        let left = self.end().saturating_sub(offset);
        let inside = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        if inside < buf.len() {
            buf.slice(inside..buf.len()).fill(0);
        }
        if inside == 0 {
            return Ok(());
        }
        let _graces = self.graces();
        // Boxed: the engine's futures would otherwise contain this future four times, and a copy
        // from a backing file waits for storage anyway.
        Box::pin(self.fill(ring, offset, &buf.slice(0..inside))).await
    }

    fn has_data(&self, offset: GuestOffset, len: Bytes) -> bool {
        let end = offset.saturating_add(len).min(self.end());
        // A commit may be about to write data of the layer above there.
        if self.0.iter().any(|layer| layer.is_writable) {
            return offset < end;
        }
        let mut at = offset;
        while at < end {
            match self.locate_cached(at, end - at) {
                Ok(Some(found)) if matches!(found.kind, Kind::Zero { .. } | Kind::Unallocated) => {
                    at += found.len;
                }
                _ => return true,
            }
        }
        false
    }

    fn is_there(&self) -> bool {
        !self.0.is_empty()
    }
}

impl<'a> Chain<'a> {
    /// Graces of the layers that commits write to.
    pub(crate) fn graces(self) -> [Option<Grace<'a>>; COMMITS_MAX] {
        let mut targets =
            self.0.iter().filter(|layer| layer.is_writable).filter_map(|layer| layer.qcow2());
        std::array::from_fn(|_| targets.next().map(|image| image.enter()))
    }
}
