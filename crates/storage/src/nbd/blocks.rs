//! Requests that one command cannot carry: too long, not of whole blocks, or memory of clients.
//!
//! Promises: a write to a part of a block never loses a concurrent write of this process to another
//! part of it (other clients of the server must not write to the same blocks). Copies; the rare
//! path.

use ringdisk_ring::{Errno, IoBuf, Ring};

use super::Nbd;
use crate::read::BOUNCE_MAX;

impl Nbd {
    /// Whether a range has whole blocks only.
    pub(super) fn fits(&self, offset: u64, len: u64) -> bool {
        (offset | len).is_multiple_of(u64::from(self.shared.agreed.block))
    }

    /// Bytes of a block.
    fn block(&self) -> usize {
        self.shared.agreed.block as usize
    }

    /// Bytes of one piece: whole blocks.
    fn piece_max(&self) -> usize {
        (self.shared.agreed.payload_max as usize).min(BOUNCE_MAX).max(self.block())
    }

    /// Reads through a buffer of whole blocks.
    pub(super) async fn read_in_pieces(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        let block = u64::from(self.shared.agreed.block);
        let total =
            usize::try_from(self.clipped(offset, buf.len() as u64)).map_err(|_| Errno::INVAL)?;
        let most = self.piece_max();
        let mut done = 0;
        while done < total {
            let at = offset + done as u64;
            if buf.is_ours() && self.fits(at, 0) {
                // Whole blocks in the middle need no copy.
                let len = (total - done).min(self.shared.agreed.payload_max as usize);
                let len = len - len % self.block();
                if len > 0 {
                    done += self.read_one(ring, at, &buf.slice(done..done + len)).await?;
                    continue;
                }
            }
            let start = at / block * block;
            let before = usize::try_from(at - start).map_err(|_| Errno::INVAL)?;
            let len = (total - done).min(most - before);
            let bounce = IoBuf::new((before + len).next_multiple_of(self.block()), 1);
            self.read_one(ring, start, &bounce).await?;
            let piece = bounce.slice(before..before + len);
            ring.copy(&piece, &buf.slice(done..done + len)).await?;
            done += len;
        }
        Ok(done)
    }

    /// Writes piece by piece. Short at the end of the export, and after an error that came after
    /// some progress.
    pub(super) async fn write_in_pieces(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        let buf = &ring.in_memory(buf).await?;
        let block = u64::from(self.shared.agreed.block);
        let total =
            usize::try_from(self.clipped(offset, buf.len() as u64)).map_err(|_| Errno::INVAL)?;
        let mut done = 0;
        while done < total {
            let at = offset + done as u64;
            let into_block = usize::try_from(at % block).map_err(|_| Errno::INVAL)?;
            let left = total - done;
            let whole = left.min(self.shared.agreed.payload_max as usize);
            let whole = whole - whole % self.block();
            let len = if into_block == 0 && whole > 0 {
                whole
            } else {
                left.min(self.block() - into_block)
            };
            let piece = buf.slice(done..done + len);
            let written = if into_block == 0 && whole > 0 {
                let pass = match &self.gate {
                    None => None,
                    Some(gate) => Some(gate.shared(at, at + len as u64).await),
                };
                let written = self.write_one(ring, at, &piece).await;
                drop(pass);
                written
            } else {
                self.write_part_of_block(ring, at, &piece).await
            };
            match written {
                Ok(count) => done += count,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Reads a block, changes a part of it, and writes it back.
    async fn write_part_of_block(
        &self,
        ring: &Ring,
        offset: u64,
        piece: &IoBuf,
    ) -> Result<usize, Errno> {
        let block = u64::from(self.shared.agreed.block);
        let start = offset / block * block;
        let _pass = match &self.gate {
            None => None,
            Some(gate) => Some(gate.exclusive(start, start + block).await),
        };
        let whole = IoBuf::new(self.block(), 1);
        self.read_one(ring, start, &whole).await?;
        let at = usize::try_from(offset - start).map_err(|_| Errno::INVAL)?;
        whole.copy_from_buf(at, piece);
        self.write_one(ring, start, &whole).await?;
        Ok(piece.len())
    }
}
