//! The way of ranges of a disk to the target of a mirror: from its copying task, and from clients
//! whose writes go to the target before they are answered.
//!
//! Promises:
//! - A disk without a mirror pays one branch for each write.
//! - Copies of one granule run one after the other ([`Claim`]), and each reads the disk after it
//!   has begun, so the last one leaves what the disk has.
//! - A write of a client never fails because of the target, and waits at most [`WAIT_MAX`] for it,
//!   twice: then its range is recorded, and writes are no longer sent before they are answered
//!   until the copying task has caught up ([`Mirror::set_in_step`]).

use std::fmt;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use ringdisk_qcow2::GuestOffset;
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::sync::lock;
use super::{Graph, Tracker};
use crate::chain::Chain;
use crate::layer::Pending;
use crate::task_join::spawn;

/// Longest time that a client's write waits for another copy of its range, and for its own.
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Longer changes of a client (a discard of a whole disk) are left to the copying task, bytes.
const FOLLOWED_MAX: u64 = 8 << 20;
/// Bytes of one copy of a client's write.
const PART_BYTES: u64 = 1 << 20;
/// Alignment of the buffers: a page suits every device.
const ALIGN: usize = 4096;

/// What a run of a disk holds.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// So many bytes of zeroes.
    Zero(u64),
    /// So many bytes that the target keeps as they are.
    Keep(u64),
    Data(IoBuf),
}

impl Content {
    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Content::Zero(len) | Content::Keep(len) => *len,
            Content::Data(buf) => buf.len() as u64,
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
    claims: Mutex<Claims>,
}

#[derive(Debug, Default)]
struct Claims {
    /// First byte, and the byte past the last one.
    ranges: Vec<(u64, u64)>,
    waiters: Vec<Waker>,
}

/// The right to copy some granules. Given back on drop.
#[derive(Debug)]
pub(crate) struct Claim {
    mirror: Arc<Mirror>,
    range: (u64, u64),
}

impl Mirror {
    pub(crate) fn new(target: Arc<dyn Target>) -> Mirror {
        let (is_in_step, claims) = (AtomicBool::new(false), Mutex::default());
        Mirror { target, is_in_step, claims }
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

    /// Waits until nobody copies any of these bytes.
    ///
    /// * `range`: whole granules ([`Tracker::widened`]).
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
        len: u64,
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
        len: u64,
    ) -> bool {
        let claim = self.claim(tracker.widened(offset, len));
        let Ok(claim) = ring.within(WAIT_MAX, claim).await else {
            self.set_in_step(false);
            return false;
        };
        let Ok(runs) = graph.content(ring, offset, len).await else { return false };
        let copy = Copy::new(tracker, offset, len, claim);
        let handle = ring.clone();
        // A task of its own, since a write that has begun cannot be taken back when the client
        // stops waiting for it.
        let written = spawn(ring, async move { copy.send(&handle, &runs).await.is_ok() });
        let is_done = matches!(ring.within(WAIT_MAX, written).await, Ok(Some(true)));
        if !is_done {
            self.set_in_step(false);
        }
        is_done
    }
}

/// A copy of a range on its way. Recorded on drop unless it is done.
pub(crate) struct Copy {
    tracker: Arc<Tracker>,
    offset: GuestOffset,
    len: u64,
    is_done: bool,
    // Dropped after the range was recorded.
    claim: Claim,
}

impl Copy {
    /// * `claim`: of all granules of the range.
    pub(crate) fn new(tracker: &Arc<Tracker>, offset: GuestOffset, len: u64, claim: Claim) -> Copy {
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
        len: u64,
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
        len: u64,
    ) -> Result<Vec<Content>, Errno> {
        self.check()?;
        let is_all = above.0.len() == self.layers.len();
        let end = GuestOffset(offset.saturating_add(len).0.min(self.size()));
        let _graces = self.graces();
        let mut runs: Vec<(Kind, u64)> = Vec::new();
        let mut at = offset;
        while at < end {
            let (status, is_cut) = above.status(ring, at, end - at).await?;
            if status.len == 0 {
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
