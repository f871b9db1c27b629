//! The layers below an image, as the qcow2 engine reads them to complete a cluster.
//!
//! Promises: past the end of the uppermost of these layers everything reads as zeroes; `has_data`
//! uses tables in memory only and never waits.

use ringdisk_qcow2::{Below, Grace, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::Chain;
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
        let _grace = self.grace();
        // Boxed: the engine's futures would otherwise contain this future four times, and a copy
        // from a backing file waits for storage anyway.
        Box::pin(self.fill(ring, offset, &buf.slice(0..inside))).await
    }

    fn has_data(&self, offset: GuestOffset, len: u64) -> bool {
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
    /// Grace of the layer below that a commit writes to, if there is one.
    fn grace(self) -> Option<Grace<'a>> {
        let target = self.0.iter().find(|layer| layer.is_writable)?;
        target.qcow2().map(|image| image.enter())
    }
}
