//! Reads of the frozen state: from the fleecing file, or from the disk that goes on.
//!
//! Promises: a request reads the disk as a request of a client does, so changes of the disk wait
//! for it and it for them; bytes that may have been overwritten meanwhile are read again from the
//! file.

use std::sync::{Arc, Weak};

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::background::Parts;
use crate::graph::{Fleece, Graph, Known};
use crate::layer::{Frozen, Pending, Piece};
use crate::{BlockStatus, Disk};

/// The frozen state of a disk.
#[derive(Debug)]
pub(super) struct Source {
    live: Weak<Disk>,
    fleece: Arc<Fleece>,
    /// First byte of the window of the disk, in its layers, bytes.
    start: Bytes,
    /// The chain at the instant: its length, and the file on top, which is not kept open by this.
    layers: usize,
    top: Weak<Storage>,
    top_id: Option<(u64, u64)>,
}

impl Source {
    /// * `graph`: at the instant.
    pub(super) fn new(live: Weak<Disk>, fleece: Arc<Fleece>, graph: &Graph) -> Source {
        let file = graph.top().file();
        let (layers, top) = (graph.layers.len(), file.map_or_else(Weak::new, Arc::downgrade));
        let top_id = file.and_then(|file| file.identity());
        Source { live, fleece, start: graph.window.start.from_start(), layers, top, top_id }
    }

    /// Whether the disk has the layers of the instant: depths mean what they meant then.
    fn has_same_chain(&self, graph: &Graph) -> bool {
        let is_top = graph.top().file().is_some_and(|file| {
            let is_same_file = file.identity().is_some() && file.identity() == self.top_id;
            is_same_file || std::ptr::eq(Arc::as_ptr(file), self.top.as_ptr())
        });
        is_top && self.layers == graph.layers.len()
    }

    /// Fills `buf` from where each byte is: the file, or the disk.
    async fn read_part(&self, ring: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        self.fleece.check()?;
        let len = Bytes::of(buf.len());
        let (known, alike) = self.fleece.known(offset, len);
        let is_mixed = known == Known::OnDisk || alike < len;
        // All of it at once: what is kept elsewhere is read over it.
        let on_disk = if is_mixed { self.read_live(ring, offset, buf).await? } else { Ok(()) };
        let mut done = 0;
        while done < buf.len() {
            let at = offset + Bytes::of(done);
            // After the read of the disk: what is not kept now has not changed before it.
            let (known, len) = self.fleece.known(at, Bytes::of(buf.len() - done));
            self.fleece.check()?;
            // Not longer than what is left of the buffer.
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let part = buf.slice(done..buf.len().min(done.saturating_add(len)));
            if part.is_empty() {
                return Err(Errno::IO);
            }
            match known {
                // An error counts only where the disk was the place to look.
                Known::OnDisk => on_disk?,
                Known::InFile => self.fleece.read_file(ring, at, &part).await?,
                Known::Zero => ring.zero(&part).await?,
            }
            done += part.len();
        }
        Ok(())
    }

    /// Reads what the disk has now, which is frozen only where nothing else is kept.
    ///
    /// Errors (outside): EIO where there is no disk any more. (Inside): those of its storage.
    async fn read_live(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<Result<(), Errno>, Errno> {
        let live = self.live.upgrade().ok_or(Errno::IO)?;
        let graph = live.enter_beside_clients().await;
        graph.check().map_err(|_| Errno::IO)?;
        let _graces = graph.graces();
        Ok(graph.chain().fill(ring, offset, buf).await)
    }

    /// What is known about a range that the disk has. `None`: it was overwritten meanwhile.
    async fn piece_live(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Option<Piece>, Errno> {
        let live = self.live.upgrade().ok_or(Errno::IO)?;
        let result = {
            let graph = live.enter_beside_clients().await;
            graph.check().map_err(|_| Errno::IO)?;
            let _graces = graph.graces();
            let is_same = self.has_same_chain(&graph);
            graph.chain().status(ring, offset, len).await.map(|(status, _)| match is_same {
                true => status,
                // A layer that was added or merged since: nobody knows any more which one had it.
                false => BlockStatus { present: true, depth: 0, ..status },
            })
        };
        let len = result.as_ref().map_or(len, |status| status.len);
        let untouched = self.fleece.untouched(offset, len)?;
        if untouched.is_zero() {
            return Ok(None);
        }
        let status = result?;
        let (len, depth) = (untouched.min(status.len), status.depth);
        let (data, zero, present) = (status.data, status.zero, status.present);
        Ok(Some(Piece { len, data, zero, present, depth }))
    }
}

impl Frozen for Source {
    fn read<'a>(&'a self, ring: &'a Ring, offset: GuestOffset, buf: &'a IoBuf) -> Pending<'a, ()> {
        Box::pin(async move {
            let offset = offset + self.start;
            // Without the disk the checkpoint is over.
            let live = self.live.upgrade().ok_or(Errno::IO)?;
            let mut parts = Parts::of_reader(offset, Bytes::of(buf.len()));
            while !parts.is_over() {
                let turn = live.turn(ring).await.of_reader();
                let (at, len) = parts.next(&turn);
                // Not longer than the buffer.
                let place = usize::try_from(at - offset).unwrap_or(usize::MAX);
                let end = place.saturating_add(usize::try_from(len).unwrap_or(usize::MAX));
                self.read_part(ring, at, &buf.slice(place..end.min(buf.len()))).await?;
                parts.done(len, len);
            }
            Ok(())
        })
    }

    fn piece<'a>(&'a self, ring: &'a Ring, offset: GuestOffset, len: Bytes) -> Pending<'a, Piece> {
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
