//! Stream: fills the top image of a disk in use from the layers below it, which it then no longer
//! needs.
//!
//! Promises: the disk reads the same at every moment, also after a crash: what is copied is what
//! the top shows already, it is on stable storage before the header of the top changes, and the
//! header names the base in one write. A write of a client is never overwritten: only what the top
//! has nothing of is written, under the claim that every write to a new cluster needs. Clients wait
//! for the beginning and the last step only. A stream that is cancelled or fails leaves the chain
//! as it was; what was copied stays in the top.
//!
//! Internal snapshots of the top show the backing file wherever they have nothing. A stream is
//! refused where they would show other bytes over the base.
//!
//! Layers below the base may be committed meanwhile ([`LongChange::Stream`]), unless the top has
//! internal snapshots: those are compared with the layers of the beginning.

use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};

use super::backing::{NextBacking, snapshots_show_the_same, start_recording, stop_recording};
use super::copy::all_of;
use super::pivot::name_of_base;
use super::{Busy, LastPassFailure, LongChange, check_lasting, reopen};
use crate::background::{Parts, unit_of};
use crate::chain::Chain;
use crate::graph::Graph;
use crate::graph::fill::{FillFailure, Filler, pieces};
use crate::progress::Tries;
use crate::{CommitOptions, Disk, Error, ErrorKind, Progress, lost_names};

/// The last pass begins when no more than this was changed by clients, bytes. It reads tables, and
/// copies what clients have uncovered.
const LAST_PASS_BYTES: Bytes = Bytes(4 << 20);
/// Or after so many passes.
const PASSES_MAX: u32 = 16;

/// Which layers are brought up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Index in [`Disk::layers`] of the layer that becomes the backing file; the layers between the
    /// top and it are brought up. `None`: all of them, and the top has no backing file afterwards.
    pub base: Option<usize>,
}

impl Disk {
    /// Copies the content of layers below into the top image wherever it has nothing of its own,
    /// while clients work, and drops them from the chain.
    ///
    /// * `progress`: can be cancelled until the last step. Its speed limit counts what is copied;
    ///   its total is the size of the disk.
    ///
    /// Errors: `Invalid` when there is no such base, or an internal snapshot would show other bytes
    /// over it; `Unsupported` when the top is no qcow2 image; `Busy` during another change of this
    /// kind; `Cancelled`; `NotFound` when the name of the base does not lead to it any more; those
    /// of the storage. The chain is as it was.
    pub async fn stream(
        &self,
        ring: &Ring,
        options: StreamOptions,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        let progress = Arc::clone(progress);
        let change = move |disk: Arc<Disk>, ring: Ring| async move {
            disk.stream_now(&ring, options, &progress).await
        };
        self.detached(ring, change).await
    }

    async fn stream_now(
        &self,
        ring: &Ring,
        options: StreamOptions,
        progress: &Progress,
    ) -> Result<(), Error> {
        let turn = self.changes().lock().await;
        let graph = self.graph();
        let kind = kind_of(&graph, options);
        self.check_free_for(kind)?;
        reopen::check(graph.top())?;
        let base = check_base(&graph, options)?;
        check_names(&graph, &backing_of(&graph, base)?)?;
        let drained = self.gateway().drain(ring, turn).await;
        // Clients may change the size meanwhile; other changes are refused.
        let busy = Busy::begin(self, kind)?;
        start_recording(drained);
        let mut filled = self.fill_beside_clients(ring, &graph, base, progress).await;
        let (filled, mut drained) = loop {
            let turn = self.changes().lock().await;
            let drained = self.gateway().drain(ring, turn).await;
            let failed = match filled {
                Ok(()) => fill_recorded(ring, drained.graph(), base, progress).await,
                Err(error) => break (Err(error), drained),
            };
            match failed {
                Ok(()) => break (Ok(()), drained),
                Err(LastPassFailure::Ends(errno)) => break (Err(refusal(errno)), drained),
                Err(LastPassFailure::Range(range, errno)) => {
                    drop(drained);
                    let again = self.fill_failed(ring, base, range, errno, progress).await;
                    filled = again.map_err(refusal);
                }
            }
        };
        stop_recording(&mut drained);
        // With the layers as a commit below has left them.
        let next = filled.and_then(|()| backing_of(drained.graph(), base));
        let done = match next {
            Ok(next) => self.put_backing(ring, &mut drained, next).await,
            Err(error) => Err(error),
        };
        if done.is_ok() {
            self.long.dropped(1, base);
            progress.finish();
        }
        // Before the gate opens: the next change must not find this one still under way.
        drop(busy);
        done
    }

    /// Everything that happens while clients work.
    ///
    /// * `graph`: of the beginning.
    async fn fill_beside_clients(
        &self,
        ring: &Ring,
        graph: &Graph,
        base: usize,
        progress: &Progress,
    ) -> Result<(), Error> {
        if let Some(image) = graph.top_image() {
            let (old, new) = (graph.below(0), Chain(&graph.layers[base..]));
            snapshots_show_the_same(ring, image, old, new, progress).await?;
        }
        self.fill_all(ring, base, progress).await.map_err(refusal)?;
        self.catch_up_stream(ring, base, progress).await.map_err(refusal)
    }

    /// Fills the range at which the last pass failed beside the clients, where the stream rests
    /// after errors, or waits for space; then what they changed meanwhile.
    ///
    /// Errors: `errno` where the stream ends with it; `ECANCELED`.
    async fn fill_failed(
        &self,
        ring: &Ring,
        base: usize,
        range: (GuestOffset, Bytes),
        errno: Errno,
        progress: &Progress,
    ) -> Result<(), Errno> {
        let mut tries = Tries::default();
        progress.failed(ring, &mut tries, errno).await?;
        self.fill_one(ring, base, range, progress, tries).await?;
        self.catch_up_stream(ring, base, progress).await
    }

    /// Fills everything.
    async fn fill_all(&self, ring: &Ring, base: usize, progress: &Progress) -> Result<(), Errno> {
        let size = self.graph().size();
        progress.set_total(size);
        let mut ranges = pieces(GuestOffset(0), GuestOffset::after(size));
        all_of(|| {
            let (offset, len) = ranges.next()?;
            Some(async move {
                self.fill_one(ring, base, (offset, len), progress, Tries::default()).await?;
                progress.add_done(len);
                Ok(())
            })
        })
        .await
    }

    /// Looks at what clients changed meanwhile, until little is left, and makes what was filled
    /// durable, so that the flush of the last step is short.
    async fn catch_up_stream(
        &self,
        ring: &Ring,
        base: usize,
        progress: &Progress,
    ) -> Result<(), Errno> {
        let mut before = Bytes::MAX;
        for _ in 0..PASSES_MAX {
            // A change of the size puts another tracker in place.
            let Some(tracker) = self.graph().tracker.clone() else { break };
            let left = tracker.bytes();
            if left <= LAST_PASS_BYTES || left > before / 2 {
                break;
            }
            before = left;
            let mut at = GuestOffset(0);
            all_of(|| {
                let (offset, len) = tracker.take(at)?;
                at = offset + len;
                Some(async move {
                    for (offset, len) in pieces(offset, offset + len) {
                        let range = (offset, len);
                        self.fill_one(ring, base, range, progress, Tries::default()).await?;
                    }
                    Ok(())
                })
            })
            .await?;
        }
        let pass = self.enter_beside_clients().await;
        pass.flush(ring).await
    }

    /// Fills one piece, in turns beside the clients. After an error of the top it is tried again
    /// where the progress says so.
    async fn fill_one(
        &self,
        ring: &Ring,
        base: usize,
        (offset, len): (GuestOffset, Bytes),
        progress: &Progress,
        mut tries: Tries,
    ) -> Result<(), Errno> {
        let mut parts = Parts::new(offset, len, unit_of(self.graph().top()));
        while !parts.is_over() {
            progress.pace_try(ring, &tries).await?;
            let turn = self.turn(ring).await;
            let (at, len) = parts.next(&turn);
            let filled = {
                let pass = self.enter_beside_clients().await;
                let filled = Filler::new(&pass, base).piece(ring, at, len).await;
                if let Some(image) = pass.top_image() {
                    self.look_after(ring, image);
                }
                filled
            };
            drop(turn);
            match filled {
                Ok(copied) => {
                    progress.written(&mut tries);
                    parts.done(len, copied);
                    // Counted afterwards, when it is known: this one waits for those before it.
                    if !copied.is_zero() {
                        progress.pace(ring, copied).await?;
                    }
                }
                Err(FillFailure::Source(errno)) => return Err(errno),
                Err(FillFailure::Target(errno)) => {
                    progress.failed(ring, &mut tries, errno).await?;
                }
            }
        }
        Ok(())
    }
}

/// Looks at what clients changed, while no request is in flight: a discard, or a larger size, may
/// have uncovered what is below.
async fn fill_recorded(
    ring: &Ring,
    graph: &Graph,
    base: usize,
    progress: &Progress,
) -> Result<(), LastPassFailure> {
    let Some(tracker) = &graph.tracker else { return Err(LastPassFailure::Ends(Errno::IO)) };
    let mut at = GuestOffset(0);
    while let Some((offset, len)) = tracker.take(at) {
        progress.check()?;
        for (at, count) in pieces(offset, offset + len) {
            let filled = Filler::new(graph, base).piece(ring, at, count).await;
            filled.map_err(|failure| match failure {
                FillFailure::Source(errno) => LastPassFailure::Ends(errno),
                FillFailure::Target(errno) => LastPassFailure::Range((offset, len), errno),
            })?;
        }
        at = offset + len;
    }
    Ok(progress.check()?)
}

/// Which changes may run beside it.
fn kind_of(graph: &Graph, options: StreamOptions) -> LongChange {
    let has_snapshots = graph.top_image().is_some_and(|image| !image.info().snapshots.is_empty());
    match options.base.filter(|_| !has_snapshots) {
        Some(base) => LongChange::Stream(base),
        None => LongChange::Whole,
    }
}

/// Index of the first layer that stays below the top; the number of layers: none does.
///
/// Errors: `Invalid`.
fn check_base(graph: &Graph, options: StreamOptions) -> Result<usize, Error> {
    let count = graph.layers.len();
    match options.base {
        None if count > 1 => Ok(count),
        Some(base) if (1..count).contains(&base) => Ok(base),
        None => Err(Error::new(
            ErrorKind::Invalid,
            "the disk has no backing file, so there is nothing to stream",
        )),
        Some(base) => Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "layer {base} of {count} cannot be the base of a stream: the base must be a layer \
                 below the top"
            ),
        )),
    }
}

/// What the top names afterwards.
///
/// Errors: `Unsupported` where the base has no name that is right for the top.
fn backing_of(graph: &Graph, base: usize) -> Result<NextBacking, Error> {
    if base == graph.layers.len() {
        return Ok(NextBacking { named: None, full: None, below: Vec::new() });
    }
    let named = name_of_base(graph, CommitOptions { top: 1, base, keep_top: false })?;
    Ok(NextBacking {
        named: Some(named),
        full: graph.layers[base - 1].full_backing_name.clone(),
        below: graph.layers[base..].to_vec(),
    })
}

/// Errors: as [`lost_names::check`] for the top and the base. The layers between may have lost
/// their names: the stream saves their content.
fn check_names(graph: &Graph, next: &NextBacking) -> Result<(), Error> {
    let named = std::iter::once(graph.top()).chain(next.below.iter());
    lost_names::check("stream", named.map(|layer| &**layer))
}

fn refusal(errno: Errno) -> Error {
    match errno {
        Errno::CANCELED => {
            Error::new(ErrorKind::Cancelled, "the stream was cancelled").with_errno(Some(errno))
        }
        errno => Error::os("cannot fill the top image from the layers below", errno),
    }
}
