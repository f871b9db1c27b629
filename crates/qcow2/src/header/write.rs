//! Writes the header to the file.
//!
//! Promises: a crash at any point leaves the old header or the new one. Everything fixed lies in
//! the first 512 bytes, which a disk writes in one piece. Extensions and the name of the backing
//! file may go on behind them; they are written while nothing refers to them:
//! - where the old header does not use the sectors that change: those first, a barrier, then the
//!   first sector;
//! - else by a detour: a complete copy of the new extensions goes to an unused place of the first
//!   cluster, the first sector leads there (an extension that fills the gap, which every reader
//!   skips as unknown), and then, with the usual place free, the same way back.
//!
//! One case is left: extensions and names that fill more than about half of a first cluster of 1 or
//! 2 KiB and lie behind the first sector have no room for the detour. A power cut in the middle of
//! that write can leave a name or an extension half new.

use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Storage;

use super::image::{self, HeaderImage};
use crate::extensions::FILLER;
use crate::limits::SECTOR_LEN;
use crate::units::HostOffset;

/// Type and length of an extension.
const EXTENSION_HEAD_BYTES: usize = 8;
/// Alignment of buffers: a page suits O_DIRECT everywhere.
const ALIGN: usize = 4096;

impl HeaderImage {
    /// Writes the first 512 bytes, in one piece, durable after the next flush. Where names and
    /// extensions were changed, does what [`write_all`](HeaderImage::write_all) does.
    ///
    /// Errors: as there.
    pub(crate) async fn write_first_sector(
        &self,
        ring: &Ring,
        file: &Storage,
    ) -> Result<(), Errno> {
        if self.laid_out {
            return self.write_steps(ring, file).await;
        }
        write_bytes(ring, file, HostOffset(0), &self.bytes[..SECTOR_LEN]).await
    }

    /// The first 512 bytes, where [`write_first_sector`](HeaderImage::write_first_sector) writes
    /// nothing else.
    pub(crate) fn first_sector(&self) -> Option<&[u8]> {
        (!self.laid_out).then(|| &self.bytes[..SECTOR_LEN])
    }

    /// Writes everything; durable when it returns. See the module for the order.
    ///
    /// Errors: those of the storage, `EIO` too for a header on the file that cannot be read any
    /// more. The file then has the old header or the new one (perhaps by the detour).
    pub(crate) async fn write_all(&mut self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        self.write_steps(ring, file).await?;
        self.laid_out = false;
        Ok(())
    }

    /// Puts this header, which was there before, back after a write of another one that failed;
    /// durable when it returns.
    ///
    /// Errors: as [`write_all`](HeaderImage::write_all): it is not known which of the two is there.
    pub(crate) async fn restore(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        self.write_steps(ring, file).await
    }

    async fn write_steps(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        let old = HeaderImage::read(ring, file).await.map_err(|_| Errno::IO)?;
        for step in steps(&old, self) {
            if !step.behind.is_empty() {
                write_bytes(ring, file, HostOffset(step.at as u64), &step.behind).await?;
                file.flush(ring).await?;
            }
            write_bytes(ring, file, HostOffset(0), &step.first).await?;
            file.flush(ring).await?;
        }
        Ok(())
    }

    /// Writes the header of a new image in one go, which makes it one; durable after the next
    /// flush.
    pub(crate) async fn write_new(&mut self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        write_bytes(ring, file, HostOffset(0), &self.bytes).await?;
        self.laid_out = false;
        Ok(())
    }
}

/// One change of the header that takes effect by its first sector.
pub(super) struct Step {
    /// Where `behind` goes: not in the first sector.
    pub(super) at: usize,
    /// Written first and made durable. May be empty.
    pub(super) behind: Vec<u8>,
    pub(super) first: Vec<u8>,
}

/// How to get from `old` to `new`.
pub(super) fn steps(old: &HeaderImage, new: &HeaderImage) -> Vec<Step> {
    let (first, behind) = new.bytes.split_at(SECTOR_LEN);
    let behind = if old.bytes[SECTOR_LEN..].starts_with(behind) { &[] } else { behind };
    let direct = Step { at: SECTOR_LEN, behind: behind.to_vec(), first: first.to_vec() };
    if is_harmless(old, &direct.behind) {
        return vec![direct];
    }
    detour(old, new).into_iter().chain([direct]).collect()
}

/// Whether the old header means the same when the bytes behind its first sector are replaced.
fn is_harmless(old: &HeaderImage, behind: &[u8]) -> bool {
    [old.chain.clone(), old.name()].into_iter().flatten().filter(|at| *at >= SECTOR_LEN).all(|at| {
        let replaced = behind.get(at - SECTOR_LEN);
        replaced.is_none() || replaced == old.bytes.get(at)
    })
}

/// The new header with its extensions behind everything that the old and the new one use.
fn detour(old: &HeaderImage, new: &HeaderImage) -> Option<Step> {
    let at = old.bytes.len().max(new.bytes.len());
    let mut behind = image::chain(&new.extensions);
    let name = new.backing_file().unwrap_or_default();
    let name_at = if name.is_empty() { 0 } else { at + behind.len() };
    behind.extend_from_slice(name);
    let gap = new.chain.start + EXTENSION_HEAD_BYTES;
    if at + behind.len() > 1 << new.cluster_bits() || gap > SECTOR_LEN {
        return None;
    }
    let mut first = new.bytes[..SECTOR_LEN].to_vec();
    image::put_name(&mut first, name_at, name.len());
    first[new.chain.start..gap - 4].copy_from_slice(&FILLER.to_be_bytes());
    let filled = u32::try_from(at - gap).ok()?;
    first[gap - 4..gap].copy_from_slice(&filled.to_be_bytes());
    Some(Step { at, behind, first })
}

/// Writes all of `bytes` at `offset`. Durable after the next flush.
///
/// Errors: those of the storage; `EIO` when it takes nothing.
pub(crate) async fn write_bytes(
    ring: &Ring,
    file: &Storage,
    offset: HostOffset,
    bytes: &[u8],
) -> Result<(), Errno> {
    let buf = IoBuf::new(bytes.len().max(1), ALIGN).slice(0..bytes.len());
    buf.copy_from_slice(0, bytes);
    file.write_all(ring, offset.0, &buf).await
}
