//! Copies the allocated ranges of layers into a layer below them.
//!
//! Promises: ranges that the layers do not hold stay as they are in the target; zeroes are written
//! as zeroes; up to [`COPIES`] ranges are under way at once, each with its own buffer; when one
//! fails the others are waited for.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::CommitOptions;
use crate::chain::Chain;
use crate::graph::Graph;
pub(crate) use crate::graph::fill::{COPY_BYTES, buffer, pieces};
use crate::layer::{Layer, Node};

/// Ranges that are under way at once.
pub(crate) const COPIES: usize = 4;
/// Source and target of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copier<'a> {
    /// The layers that are copied, top first.
    pub(crate) from: Chain<'a>,
    /// The layer to copy to; open for writing.
    pub(crate) target: &'a Layer,
    /// The layers below the target.
    pub(crate) below: Chain<'a>,
}

impl Copier<'_> {
    /// Writes all of `buf`.
    ///
    /// Errors: EPERM for data that would make the target look like another format; those of the
    /// storage.
    pub(crate) async fn write(
        self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> Result<(), Errno> {
        let mut done = 0;
        while done < buf.len() {
            let (at, rest) = (offset + Bytes::of(done), buf.slice(done..buf.len()));
            let written = match &self.target.node {
                Node::Raw(raw) => {
                    let len = rest.len() as u64;
                    let _turn = raw.pass_guard(ring, at, Bytes(len), Some(&rest)).await?;
                    raw.storage.write(ring, raw.host(at).0, &rest).await?
                }
                Node::Qcow2(image) => image.write(ring, at, &rest, &self.below).await?,
                Node::Null(_) | Node::Frozen(_) => return Err(Errno::OPNOTSUPP),
            };
            if written == 0 {
                return Err(Errno::IO);
            }
            done += written;
        }
        Ok(())
    }

    /// Makes a range of the target read as zeroes.
    pub(crate) async fn zero(
        self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<(), Errno> {
        match &self.target.node {
            Node::Raw(raw) => {
                let _turn = raw.pass_guard(ring, offset, len, None).await?;
                raw.storage.write_zeroes(ring, raw.host(offset).0, len.0, true, true).await
            }
            Node::Qcow2(image) => image.write_zeroes(ring, offset, len, true, &self.below).await,
            Node::Null(_) | Node::Frozen(_) => Err(Errno::OPNOTSUPP),
        }
    }

    /// Makes the copied data durable.
    pub(crate) async fn flush(self, ring: &Ring) -> Result<(), Errno> {
        match &self.target.node {
            Node::Raw(raw) => raw.storage.flush(ring).await,
            Node::Qcow2(image) => image.flush(ring).await,
            Node::Null(_) | Node::Frozen(_) => Ok(()),
        }
    }
}

/// Copies one range. The caller holds the graces of the layers that are copied. Gives the bytes of
/// data that were read and written; ranges without data cost next to nothing.
///
/// * `len`: at most [`COPY_BYTES`]; the range lies inside the target.
///
/// Errors: those of the storage; a part may have been copied.
pub(crate) async fn copy_range(
    ring: &Ring,
    copier: Copier<'_>,
    offset: GuestOffset,
    len: Bytes,
) -> Result<Bytes, Errno> {
    let end = offset.saturating_add(len).min(copier.from.end());
    let (mut at, mut copied) = (offset, Bytes::ZERO);
    let mut buf: Option<IoBuf> = None;
    while at < end {
        let (status, is_cut) = copier.from.status(ring, at, end - at).await?;
        if status.len.is_zero() {
            break;
        }
        if status.zero && (status.present || is_cut) {
            copier.zero(ring, at, status.len).await?;
        } else if status.present {
            let buf = buf.get_or_insert_with(|| buffer(len));
            let piece = usize::try_from(status.len).map_or(buf.len(), |len| len.min(buf.len()));
            let piece = buf.slice(0..piece);
            copier.from.fill(ring, at, &piece).await?;
            copier.write(ring, at, &piece).await?;
            at += Bytes::of(piece.len());
            copied += Bytes::of(piece.len());
            continue;
        }
        at += status.len;
    }
    Ok(copied)
}

/// Runs the futures that `next` gives, [`COPIES`] at once, until it gives none or one fails.
///
/// Errors: the first one.
pub(crate) async fn all_of<F: Future<Output = Result<(), Errno>>>(
    mut next: impl FnMut() -> Option<F>,
) -> Result<(), Errno> {
    let mut running: Vec<Pin<Box<F>>> = Vec::with_capacity(COPIES);
    let (mut failure, mut is_over) = (None, false);
    poll_fn(|context| {
        loop {
            while !is_over && failure.is_none() && running.len() < COPIES {
                match next() {
                    Some(future) => running.push(Box::pin(future)),
                    None => is_over = true,
                }
            }
            let before = running.len();
            running.retain_mut(|future| match future.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(result) => {
                    if let Err(errno) = result {
                        failure.get_or_insert(errno);
                    }
                    false
                }
            });
            if running.is_empty() && (is_over || failure.is_some()) {
                return Poll::Ready(failure.map_or(Ok(()), Err));
            }
            if running.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await
}

/// Whether two buffers of one length hold the same bytes.
pub(crate) fn equal(a: &IoBuf, b: &IoBuf) -> bool {
    const STEP: usize = 4096;
    let (mut left, mut right) = ([0; STEP], [0; STEP]);
    let mut at = 0;
    while at < a.len() {
        let len = STEP.min(a.len() - at);
        a.copy_to_slice(at, &mut left[..len]);
        b.copy_to_slice(at, &mut right[..len]);
        if left[..len] != right[..len] {
            return false;
        }
        at += len;
    }
    true
}

/// The layers to copy, and their target.
pub(super) fn copier(graph: &Graph, options: CommitOptions) -> Result<Copier<'_>, Errno> {
    graph.check()?;
    let from = graph.layers.get(options.top..options.base).ok_or(Errno::IO)?;
    Ok(Copier {
        from: Chain(from),
        target: graph.layers.get(options.base).ok_or(Errno::IO)?,
        below: graph.below(options.base),
    })
}
