//! Reading from a chain of layers.
//!
//! Promises: a read whose mapping is cached takes no lock and allocates nothing; a read that lies
//! in one run is one storage operation. A read over several runs has up to [`PIECES_MAX`] of them
//! in flight. When one of them fails the others are waited for, so no operation uses the buffer any
//! more once the read has returned.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::{Chain, Found};
use crate::layer::{Kind, Node};

/// Runs of one request that are in flight at once. A 1 MiB request over 64 KiB clusters has at
/// most 16 runs; each slot costs its future's size in the memory of every entry.
pub const PIECES_MAX: usize = 4;
/// Alignment of the buffer for a client whose pages this process does not own: a page.
const COPY_ALIGN: usize = 4096;

impl Chain<'_> {
    /// Fills `buf`. The caller holds the graces.
    ///
    /// * `offset`: the range lies inside the top layer.
    ///
    /// Errors: those of the storage; EIO for a damaged image.
    pub(crate) async fn fill(
        self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        let wanted = Bytes::of(buf.len());
        if wanted.is_zero() {
            return Ok(());
        }
        let first = match self.locate_cached(offset, wanted)? {
            Some(found) => found,
            None => self.locate(ring, offset, wanted).await?,
        };
        if first.len == wanted {
            self.read_piece(ring, first, offset, buf.clone(), Bytes::ZERO).await
        } else {
            self.read_pieces(ring, first, offset, buf).await
        }
    }

    /// Reads one run.
    ///
    /// * `buf`: as long as the run.
    /// * `ahead`: bytes of the request behind this run.
    pub(crate) async fn read_piece(
        self,
        ring: &Ring,
        found: Found,
        offset: GuestOffset,
        buf: IoBuf,
        ahead: Bytes,
    ) -> Result<(), Errno> {
        match found.kind {
            Kind::Data { offset: at } => {
                let storage = self.layer(found.depth)?.data_storage().ok_or(Errno::IO)?;
                let done = storage.read(ring, at.0, &buf).await?;
                // The last cluster of an image may be longer than its file; a file may have been
                // cut. Both read as zeroes.
                if done < buf.len() {
                    ring.zero(&buf.slice(done..buf.len())).await?;
                }
                Ok(())
            }
            Kind::Compressed(cluster) => {
                let Node::Qcow2(image) = &self.layer(found.depth)?.node else {
                    return Err(Errno::IO);
                };
                if buf.is_ours() {
                    return image.read_compressed_of(ring, cluster, offset, &buf, ahead).await;
                }
                let ours = IoBuf::new(buf.len(), COPY_ALIGN);
                let read = image.read_compressed_of(ring, cluster, offset, &ours, ahead);
                Box::pin(read).await?;
                ring.copy(&ours, &buf).await
            }
            Kind::Zero { .. } | Kind::Unallocated => ring.zero(&buf).await,
            Kind::Untouched => Ok(()),
        }
    }

    /// Reads a range of several runs.
    ///
    /// * `first`: the run that the range begins with.
    async fn read_pieces(
        self,
        ring: &Ring,
        first: Found,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        let (mut a, mut b, mut c, mut d) = (pin!(None), pin!(None), pin!(None), pin!(None));
        let mut slots: [_; PIECES_MAX] = [a.as_mut(), b.as_mut(), c.as_mut(), d.as_mut()];
        let mut known = Some(first);
        let mut at = 0;
        let mut failure = None;
        loop {
            while at < buf.len()
                && failure.is_none()
                && let Some(free) = slots.iter().position(|slot| slot.is_none())
            {
                let from = offset + Bytes::of(at);
                let left = Bytes::of(buf.len() - at);
                let found = match known.take() {
                    Some(found) => Ok(found),
                    None => match self.locate_cached(from, left) {
                        Ok(Some(found)) => Ok(found),
                        Ok(None) => {
                            // The pieces so far are submitted before this task waits for a table.
                            poll_fn(|cx| {
                                let _ = poll_slots(&mut slots, &mut failure, cx);
                                Poll::Ready(())
                            })
                            .await;
                            self.locate(ring, from, left).await
                        }
                        Err(errno) => Err(errno),
                    },
                };
                match found {
                    Ok(found) => {
                        // The run is not longer than what is left of a buffer.
                        let len = usize::try_from(found.len).unwrap_or(usize::MAX);
                        let end = buf.len().min(at.saturating_add(len));
                        let piece = buf.slice(at..end);
                        at = end;
                        let is_zero = matches!(found.kind, Kind::Zero { .. } | Kind::Unallocated);
                        if is_zero && piece.is_ours() {
                            piece.fill(0);
                        } else {
                            let ahead = Bytes::of(buf.len() - end);
                            let future = self.read_piece(ring, found, from, piece, ahead);
                            slots[free].set(Some(future));
                        }
                    }
                    Err(errno) => failure = Some(errno),
                }
            }
            let busy = poll_fn(|cx| poll_slots(&mut slots, &mut failure, cx)).await;
            if !busy && (failure.is_some() || at == buf.len()) {
                return failure.map_or(Ok(()), Err);
            }
        }
    }
}

/// Polls every piece; ready when one has ended or none is there. The answer says whether any is
/// still in flight. The first error is kept.
fn poll_slots<F: Future<Output = Result<(), Errno>>>(
    slots: &mut [Pin<&mut Option<F>>],
    failure: &mut Option<Errno>,
    cx: &mut Context<'_>,
) -> Poll<bool> {
    let (mut busy, mut ended) = (false, false);
    for slot in slots {
        let Some(piece) = slot.as_mut().as_pin_mut() else {
            continue;
        };
        match piece.poll(cx) {
            Poll::Ready(result) => {
                slot.set(None);
                ended = true;
                if let Err(errno) = result {
                    failure.get_or_insert(errno);
                }
            }
            Poll::Pending => busy = true,
        }
    }
    if busy && !ended {
        return Poll::Pending;
    }
    Poll::Ready(busy)
}
