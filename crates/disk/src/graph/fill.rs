//! Fills the top image from the layers below it: pieces of a stream, and what clients read.
//!
//! Promises: the disk reads the same at every moment. Only what the top has nothing of is written,
//! under the claim that every write to a new cluster needs, so a write of a client is never
//! overwritten.

use ringdisk_qcow2::{Below, Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::Graph;
use crate::chain::Chain;

/// Bytes of one copy: large enough for sequential I/O, small enough that a change of the disk does
/// not wait long for it.
pub(crate) const COPY_BYTES: Bytes = Bytes(1 << 20);
/// Alignment of the buffers: a page suits every device.
const ALIGN: usize = 4096;

/// The storage at fault when a piece was not copied.
pub(crate) enum FillFailure {
    /// A layer below, or the disk as a whole.
    Source(Errno),
    /// The top.
    Target(Errno),
}

/// Fills the top from the layers between it and the base.
pub(crate) struct Filler<'a> {
    graph: &'a Graph,
    between: Chain<'a>,
    /// The base, and what is below it.
    rest: Chain<'a>,
}

impl<'a> Filler<'a> {
    pub(crate) fn new(graph: &'a Graph, base: usize) -> Filler<'a> {
        let (above, rest) = graph.layers.split_at(base.min(graph.layers.len()));
        Filler { graph, between: Chain(above.get(1..).unwrap_or_default()), rest: Chain(rest) }
    }

    /// Fills a piece. Returns how many bytes were copied.
    ///
    /// * `len`: at most a piece. Bytes past the end of the disk are left out.
    pub(crate) async fn piece(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Bytes, FillFailure> {
        let graph = self.graph;
        graph.check().map_err(FillFailure::Source)?;
        if self.between.0.is_empty() {
            // The base is the backing file already.
            return Ok(Bytes::ZERO);
        }
        let end = (offset + len).min(GuestOffset::after(graph.size()));
        let top = Chain(&graph.layers[..1]);
        let mut at = offset;
        let mut copied = Bytes::ZERO;
        while at < end {
            // A hint: whether it is so is decided when it is written.
            let (own, _) = top.status(ring, at, end - at).await.map_err(FillFailure::Target)?;
            if own.len.is_zero() {
                break;
            }
            if !own.present {
                copied += self.run(ring, at, own.len).await?;
            }
            at += own.len;
        }
        Ok(copied)
    }

    /// Fills a run of which the top has nothing.
    async fn run(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Bytes, FillFailure> {
        let Some(image) = self.graph.top_image() else {
            return Err(FillFailure::Source(Errno::IO));
        };
        let (end, below) = (offset + len, self.graph.below(0));
        let mut at = offset;
        let mut copied = Bytes::ZERO;
        let mut buf: Option<IoBuf> = None;
        while at < end {
            let inside = self.between.end().saturating_sub(at).min(end - at);
            // What is past the end of the layers reads as zeroes, whatever the base has there.
            let (mut run, mut is_data, mut is_zero) = (end - at, false, true);
            // A commit may be writing to one of the layers: what is found there stays until it is
            // read.
            let graces = self.between.graces();
            if !inside.is_zero() {
                let status = self.between.status(ring, at, inside).await;
                let (status, is_cut) = status.map_err(FillFailure::Source)?;
                if status.len.is_zero() {
                    return Err(FillFailure::Source(Errno::IO));
                }
                run = status.len;
                is_data = status.present && !status.zero;
                is_zero = status.zero && (status.present || is_cut);
            }
            if is_data {
                let buf = buf.get_or_insert_with(|| buffer(len));
                let part = usize::try_from(run).map_or(buf.len(), |run| run.min(buf.len()));
                let part = buf.slice(0..part);
                self.between.fill(ring, at, &part).await.map_err(FillFailure::Source)?;
                drop(graces);
                let written = image.write_unallocated(ring, at, &part, &below).await;
                copied += written.map_err(FillFailure::Target)?;
                run = Bytes::of(part.len());
            } else if is_zero && self.rest.has_data(at, run) {
                drop(graces);
                let zeroed = image.zero_unallocated(ring, at, run, &below).await;
                zeroed.map_err(FillFailure::Target)?;
            }
            at += run;
        }
        Ok(copied)
    }
}

/// A buffer of at least one byte and at most [`COPY_BYTES`].
pub(crate) fn buffer(len: Bytes) -> IoBuf {
    let len = usize::try_from(len.clamp(Bytes(1), COPY_BYTES)).unwrap_or(ALIGN);
    IoBuf::new(len, ALIGN)
}

/// The pieces of a range, each at most [`COPY_BYTES`] long and ending at a multiple of it.
pub(crate) fn pieces(
    start: GuestOffset,
    end: GuestOffset,
) -> impl Iterator<Item = (GuestOffset, Bytes)> {
    let mut at = start;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let stop = (at.align_down(COPY_BYTES) + COPY_BYTES).min(end);
            let piece = (at, stop - at);
            at = stop;
            piece
        })
    })
}
