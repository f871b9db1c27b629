//! Reads of the frozen state: from the fleecing file, or from the disk that goes on.
//!
//! Promises: a request reads the disk as a request of a client does, so changes of the disk wait
//! for it and it for them; bytes that may have been overwritten meanwhile are read again from the
//! file.

use std::sync::{Arc, Weak};

use ringdisk_qcow2::GuestOffset;
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::Disk;
use crate::graph::{Fleece, Known};
use crate::layer::{Frozen, Pending, Piece};

/// The frozen state of a disk.
#[derive(Debug)]
pub(super) struct Source {
    live: Weak<Disk>,
    fleece: Arc<Fleece>,
    /// First byte of the window of the disk, in its layers, bytes.
    start: u64,
}

impl Source {
    pub(super) fn new(live: Weak<Disk>, fleece: Arc<Fleece>, start: u64) -> Source {
        Source { live, fleece, start }
    }

    /// Reads what the disk has now. Returns how many bytes of it are frozen ones.
    async fn read_live(&self, ring: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<u64, Errno> {
        let live = self.live.upgrade().ok_or(Errno::IO)?;
        let result = {
            let graph = live.enter().await;
            graph.check().map_err(|_| Errno::IO)?;
            let _graces = graph.graces();
            graph.chain().fill(ring, offset, buf).await
        };
        let untouched = self.fleece.untouched(offset, buf.len() as u64)?;
        // An error counts only where the disk was the place to look.
        if untouched > 0 { result.map(|()| untouched) } else { Ok(0) }
    }

    /// What is known about a range that the disk has. `None`: it was overwritten meanwhile.
    async fn piece_live(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: u64,
    ) -> Result<Option<Piece>, Errno> {
        let live = self.live.upgrade().ok_or(Errno::IO)?;
        let result = {
            let graph = live.enter().await;
            graph.check().map_err(|_| Errno::IO)?;
            let _graces = graph.graces();
            graph.chain().status(ring, offset, len).await
        };
        let len = result.as_ref().map_or(len, |(status, _)| status.len);
        let untouched = self.fleece.untouched(offset, len)?;
        if untouched == 0 {
            return Ok(None);
        }
        let (status, _) = result?;
        let (len, depth) = (untouched.min(status.len), status.depth);
        let (data, zero, present) = (status.data, status.zero, status.present);
        Ok(Some(Piece { len, data, zero, present, depth }))
    }
}

impl Frozen for Source {
    fn read<'a>(&'a self, ring: &'a Ring, offset: GuestOffset, buf: &'a IoBuf) -> Pending<'a, ()> {
        Box::pin(async move {
            let offset = offset + self.start;
            let mut done = 0;
            while done < buf.len() {
                self.fleece.check()?;
                let at = offset + done as u64;
                let (known, len) = self.fleece.known(at, (buf.len() - done) as u64);
                // Not longer than what is left of the buffer.
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                let part = buf.slice(done..buf.len().min(done.saturating_add(len)));
                if part.is_empty() {
                    return Err(Errno::IO);
                }
                done += match known {
                    Known::OnDisk => {
                        let frozen = self.read_live(ring, at, &part).await?;
                        usize::try_from(frozen).unwrap_or(usize::MAX)
                    }
                    Known::InFile => {
                        self.fleece.read_file(ring, at, &part).await?;
                        part.len()
                    }
                    Known::Zero => {
                        ring.zero(&part).await?;
                        part.len()
                    }
                };
            }
            Ok(())
        })
    }

    fn piece<'a>(&'a self, ring: &'a Ring, offset: GuestOffset, len: u64) -> Pending<'a, Piece> {
        Box::pin(async move {
            let offset = offset + self.start;
            loop {
                self.fleece.check()?;
                let (known, len) = self.fleece.known(offset, len);
                let kept = |data, zero| Piece { len, data, zero, present: true, depth: 0 };
                match known {
                    Known::OnDisk => {
                        if let Some(piece) = self.piece_live(ring, offset, len).await? {
                            return Ok(piece);
                        }
                    }
                    Known::InFile => return Ok(kept(true, false)),
                    Known::Zero => return Ok(kept(false, true)),
                }
            }
        })
    }
}
