//! The way of ranges of a disk to the target of a mirror: from its copying task, and from clients
//! whose writes go to the target before they are answered.
//!
//! Promises:
//! - A disk without a mirror pays one branch for each write.
//! - Copies of one range run one after the other ([`Claim`]), and each reads the disk after it has
//!   begun, or writes it while it runs ([`Mirror::write_both`]), so the last one leaves what the
//!   disk has.
//! - A write of a client never fails because of the target, and waits at most [`WAIT_MAX`] for it,
//!   twice: then its range is recorded, and writes are no longer sent before they are answered
//!   until the copying task has caught up ([`Mirror::set_in_step`]).

use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::sync::lock;
use super::{Graph, Mark, Tracker};
use crate::chain::Chain;
use crate::layer::Pending;
use crate::task_join::spawn;

/// Longest time that a client's write waits for another copy of its range, and for its own.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Longer changes of a client (a discard of a whole disk) are left to the copying task, bytes.
const FOLLOWED_MAX: Bytes = Bytes(8 << 20);
/// Bytes of one copy of a client's write.
const PART_BYTES: Bytes = Bytes(1 << 20);
/// Longest write of a client that goes to the disk and to the target at once, bytes: it is copied
/// in memory first.
pub(crate) const BOTH_MAX: usize = 1 << 20;
/// Alignment of the buffers: a page suits every device. Clients claim multiples of it: storage may
/// write whole blocks.
const ALIGN: usize = 4096;

/// What a run of a disk holds.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// So many bytes of zeroes.
    Zero(Bytes),
    /// So many bytes that the target keeps as they are.
    Keep(Bytes),
    Data(IoBuf),
}

impl Content {
    /// Bytes.
    pub(crate) fn len(&self) -> Bytes {
        match self {
            Content::Zero(len) | Content::Keep(len) => *len,
            Content::Data(buf) => Bytes::of(buf.len()),
        }
    }
}

/// Where the copies go.
pub(crate) trait Target: fmt::Debug + Send + Sync {
    /// Writes runs that follow each other.
    ///
    /// Errors: those of the target's storage; a part may have been written.
    fn write<'a>(
        &'a self,
        ring: &'a Ring,
        offset: GuestOffset,
        runs: &'a [Content],
    ) -> Pending<'a, ()>;
}

/// The ranges on their way, and whether clients send theirs.
#[derive(Debug)]
pub(crate) struct Mirror {
    target: Arc<dyn Target>,
    is_in_step: AtomicBool,
    /// A client has flushed the disk since [`Mirror::forget_flushes`].
    was_flushed: AtomicBool,
    /// A client's write was answered while it was on its way to the target.
    was_late: AtomicBool,
    claims: Mutex<Claims>,
}

#[derive(Debug, Default)]
struct Claims {
    /// First byte, and the byte past the last one.
    ranges: Vec<(u64, u64)>,
    waiters: Vec<Waker>,
}

/// The right to copy a range. Given back on drop.
#[derive(Debug)]
pub(crate) struct Claim {
    mirror: Arc<Mirror>,
    range: (u64, u64),
}

impl Mirror {
    pub(crate) fn new(target: Arc<dyn Target>) -> Mirror {
        Mirror {
            target,
            is_in_step: AtomicBool::new(false),
            was_flushed: AtomicBool::new(false),
            was_late: AtomicBool::new(false),
            claims: Mutex::default(),
        }
    }

    pub(crate) fn target(&self) -> &Arc<dyn Target> {
        &self.target
    }

    /// Whether a client's write goes to the target before it is answered.
    pub(crate) fn is_in_step(&self) -> bool {
        self.is_in_step.load(Ordering::Acquire)
    }

    pub(crate) fn set_in_step(&self, is_in_step: bool) {
        self.is_in_step.store(is_in_step, Ordering::Release);
    }

    /// A client flushes the disk: what it had written before is to be durable.
    pub(crate) fn note_flush(&self) {
        self.was_flushed.store(true, Ordering::SeqCst);
    }

    /// Begins to look for flushes anew. Gives whether the target has, or gets before clients are
    /// answered, all that they have written so far; what is recorded excepted.
    pub(crate) fn forget_flushes(&self) -> bool {
        self.was_flushed.store(false, Ordering::SeqCst);
        !self.was_late.load(Ordering::SeqCst)
    }

    /// Whether a client has flushed the disk since.
    pub(crate) fn was_flushed(&self) -> bool {
        self.was_flushed.load(Ordering::SeqCst)
    }

    /// Waits until nobody copies any of these bytes.
    ///
    /// * `range`: first byte, and the byte past the last one: whole granules ([`Tracker::widened`])
    ///   for what the record says; for a client's write what it changes, in multiples of `ALIGN`.
    pub(crate) async fn claim(self: &Arc<Mirror>, range: (u64, u64)) -> Claim {
        poll_fn(|context| {
            let mut claims = lock(&self.claims);
            if claims.ranges.iter().any(|other| other.0 < range.1 && range.0 < other.1) {
                claims.wait(context.waker());
                return Poll::Pending;
            }
            claims.ranges.push(range);
            Poll::Ready(())
        })
        .await;
        Claim { mirror: Arc::clone(self), range }
    }

    /// Whether nothing is on its way.
    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.claims).ranges.is_empty()
    }

    /// Waits until nothing is on its way.
    pub(crate) async fn idle(&self) {
        poll_fn(|context| {
            let mut claims = lock(&self.claims);
            if claims.ranges.is_empty() {
                return Poll::Ready(());
            }
            claims.wait(context.waker());
            Poll::Pending
        })
        .await;
    }

    /// Sends a range that a client has changed to the target. Returns whether the target has it, or
    /// the copying task will send it anyway; otherwise the caller records it.
    ///
    /// * `graph`: of the client's request, which has written.
    pub(crate) async fn follow(
        self: &Arc<Mirror>,
        ring: &Ring,
        graph: &Graph,
        offset: GuestOffset,
        len: Bytes,
    ) -> bool {
        let Some(tracker) = &graph.tracker else { return false };
        if len > FOLLOWED_MAX {
            return false;
        }
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let part = (end - at).min(PART_BYTES);
            // What is recorded now will be read by the copying task after this.
            if !tracker.covers(at, part) && !self.follow_part(ring, graph, tracker, at, part).await
            {
                return false;
            }
            at += part;
        }
        true
    }

    async fn follow_part(
        self: &Arc<Mirror>,
        ring: &Ring,
        graph: &Graph,
        tracker: &Arc<Tracker>,
        offset: GuestOffset,
        len: Bytes,
    ) -> bool {
        let Some(claim) = self.claim_soon(ring, offset, len).await else { return false };
        let Ok(runs) = graph.content(ring, offset, len).await else { return false };
        let copy = Copy::new(tracker, offset, len, claim);
        self.has_arrived(ring, begin_to_send(ring, copy, runs)).await
    }

    /// As [`Mirror::claim`], for a client, who does not wait for long.
    async fn claim_soon(
        self: &Arc<Mirror>,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Option<Arc<Claim>> {
        let align = Bytes::of(ALIGN);
        let end = offset.saturating_add(len).0;
        let range = (offset.align_down(align).0, end.next_multiple_of(align.0));
        let claim = ring.within(WAIT_MAX, self.claim(range)).await;
        claim.inspect_err(|_| self.set_in_step(false)).map(Arc::new).ok()
    }

    /// Writes a range to the disk and to the target at once. Until both have ended nothing else is
    /// copied to it, and no other write of this kind begins, so both have what was written last.
    /// Returns what `write` does. `None`: nothing has begun, and the range is to be sent after the
    /// write ([`Mirror::follow`]).
    ///
    /// * `buf`: of a client, who may change it meanwhile; at most [`BOTH_MAX`].
    /// * `write`: writes its argument, a copy of `buf`, to the disk.
    pub(crate) async fn write_both(
        self: &Arc<Mirror>,
        ring: &Ring,
        graph: &Graph,
        offset: GuestOffset,
        buf: &IoBuf,
        write: impl AsyncFnOnce(&IoBuf) -> Result<usize, Errno>,
    ) -> Option<Result<usize, Errno>> {
        let (tracker, len) = (graph.tracker.as_ref()?, Bytes::of(buf.len()));
        // What is recorded now will be read by the copying task after the write.
        if tracker.covers(offset, len) {
            return None;
        }
        let claim = self.claim_soon(ring, offset, len).await?;
        // Recorded unless both have it.
        let mark = Mark::new(graph, offset, len);
        let data = IoBuf::new(buf.len(), ALIGN);
        if let Err(errno) = ring.copy(buf, &data).await {
            return Some(Err(errno));
        }
        let copy = Copy::new(tracker, offset, len, Arc::clone(&claim));
        let sent = begin_to_send(ring, copy, vec![Content::Data(data.clone())]);
        let done = write(&data).await;
        if self.has_arrived(ring, sent).await && done == Ok(buf.len()) {
            mark.forget();
        }
        // The write to the disk may have been the slower one.
        drop(claim);
        Some(done)
    }

    /// Waits for the target, for a client. Returns whether it has what was sent.
    async fn has_arrived(&self, ring: &Ring, sent: impl Future<Output = Option<bool>>) -> bool {
        let written = ring.within(WAIT_MAX, sent).await;
        let is_done = matches!(written, Ok(Some(true)));
        if !is_done {
            self.was_late.store(true, Ordering::SeqCst);
            self.set_in_step(false);
        }
        is_done
    }
}

/// Sends a copy to the target: in a task of its own, since a write that has begun cannot be taken
/// back when the client stops waiting for it.
fn begin_to_send(
    ring: &Ring,
    copy: Copy,
    runs: Vec<Content>,
) -> impl Future<Output = Option<bool>> {
    let handle = ring.clone();
    spawn(ring, async move { copy.send(&handle, &runs).await.is_ok() })
}

/// A copy of a range on its way. Recorded on drop unless it is done.
pub(crate) struct Copy {
    tracker: Arc<Tracker>,
    offset: GuestOffset,
    len: Bytes,
    is_done: bool,
    // Given back after the range was recorded; also a writer of the disk may hold it.
    claim: Arc<Claim>,
}

impl Copy {
    /// * `claim`: of all of the range.
    pub(crate) fn new(
        tracker: &Arc<Tracker>,
        offset: GuestOffset,
        len: Bytes,
        claim: Arc<Claim>,
    ) -> Copy {
        Copy { tracker: Arc::clone(tracker), offset, len, is_done: false, claim }
    }

    /// Writes it to the target.
    ///
    /// * `runs`: what the disk has there.
    ///
    /// Errors: those of the target's storage.
    pub(crate) async fn send(mut self, ring: &Ring, runs: &[Content]) -> Result<(), Errno> {
        let target = Arc::clone(&self.claim.mirror.target);
        let written = target.write(ring, self.offset, runs).await;
        self.is_done = written.is_ok();
        written
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if !self.is_done {
            self.tracker.set(self.offset, self.len);
        }
    }
}

impl Claims {
    fn wait(&mut self, waker: &Waker) {
        if !self.waiters.iter().any(|other| other.will_wake(waker)) {
            self.waiters.push(waker.clone());
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let waiters = {
            let mut claims = lock(&self.mirror.claims);
            if let Some(at) = claims.ranges.iter().position(|range| *range == self.range) {
                claims.ranges.swap_remove(at);
            }
            std::mem::take(&mut claims.waiters)
        };
        for waker in waiters {
            waker.wake();
        }
    }
}

impl Graph {
    /// What the disk holds in a range; cut at its end.
    ///
    /// Errors: those of the storage.
    pub(crate) async fn content(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Vec<Content>, Errno> {
        self.content_of(ring, self.chain(), offset, len).await
    }

    /// As [`Graph::content`], of the upper layers: what they do not have is to be kept.
    ///
    /// * `above`: the first layers of this graph.
    pub(crate) async fn content_of(
        &self,
        ring: &Ring,
        above: Chain<'_>,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Vec<Content>, Errno> {
        self.check()?;
        let is_all = above.0.len() == self.layers.len();
        let end = offset.saturating_add(len).min(GuestOffset::after(self.size()));
        let _graces = self.graces();
        let mut runs: Vec<(Kind, Bytes)> = Vec::new();
        let mut at = offset;
        while at < end {
            let (status, is_cut) = above.status(ring, at, end - at).await?;
            if status.len.is_zero() {
                return Err(Errno::IO);
            }
            let kind = match (status.zero, status.present || is_cut || is_all) {
                (_, false) => Kind::Keep,
                (true, true) => Kind::Zero,
                (false, true) => Kind::Data,
            };
            match runs.last_mut() {
                Some((last, len)) if *last == kind => *len += status.len,
                _ => runs.push((kind, status.len)),
            }
            at += status.len;
        }
        let mut content = Vec::with_capacity(runs.len());
        let mut at = offset;
        for (kind, len) in runs {
            content.push(match kind {
                Kind::Zero => Content::Zero(len),
                Kind::Keep => Content::Keep(len),
                Kind::Data => {
                    let size = usize::try_from(len).map_err(|_| Errno::NOMEM)?;
                    let buf = IoBuf::new(size, ALIGN);
                    above.fill(ring, at, &buf).await?;
                    Content::Data(buf)
                }
            });
            at += len;
        }
        Ok(content)
    }
}

/// Of a run, see [`Content`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Zero,
    Keep,
    Data,
}
