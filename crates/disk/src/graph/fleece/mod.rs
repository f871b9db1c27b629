//! Keeps the state of a disk at one instant: old data is copied to a fleecing file before a client
//! overwrites it.
//!
//! ```text
//! client's write ──► granules kept? ──no──► read them from the disk, write them to the file,
//!                         │ yes             mark them ──┐
//!                         ▼                             ▼
//!                    write to the disk ◄────────────────┘
//! ```
//!
//! Promises:
//! - A disk without a checkpoint pays one branch for each write. With one, a write whose granules
//!   are kept takes no lock and allocates nothing; any other allocates a buffer of at most
//!   [`COPY_MAX`] bytes (or of one granule) at a time.
//! - Where a granule is kept its content at the instant can be read from the file; where it is not,
//!   the disk has it, so a reader reads the disk and looks again afterwards (`reading.rs`).
//! - A write never fails because of the file. What goes wrong there ends the checkpoint: from then
//!   on nothing is copied, every reader gets EIO, and the file's space is given back.
//! - Two writers of one granule copy it once, and the second waits for the first; a writer that is
//!   dropped while it copies lets the next one copy.

mod copy;
mod reading;
mod states;

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use ringdisk_qcow2::GuestOffset;
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use super::Graph;
use super::sync::lock;
pub(crate) use states::Known;
use states::{Granule, States};

/// Smallest granule, bytes: a cluster of the usual size.
pub(crate) const GRANULE_MIN: u64 = 64 << 10;
/// Most granules: their states take 32 MiB. Disks above 8 TiB have larger granules.
const GRANULES_MAX: u64 = 1 << 27;
/// Most bytes that are copied at once, unless one granule is larger.
const COPY_MAX: u64 = 1 << 20;

/// Whether the frozen state of a checkpoint can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointState {
    /// It can.
    Running,
    /// It cannot any more, for this reason: old data could not be kept.
    Failed(String),
    /// The checkpoint was ended, or its disk was closed.
    Ended,
}

/// The record of one checkpoint.
#[derive(Debug)]
pub(crate) struct Fleece {
    /// Size of the disk at the instant, bytes. What lies past it is not kept.
    size: u64,
    granule_bits: u32,
    states: States,
    /// Bytes of old data in the file, and the most that it may hold.
    used: AtomicU64,
    max: u64,
    /// Longest time that one request waits for copies.
    limit: Duration,
    /// Nothing is kept any more. Set before a client goes on with a write whose granules are not
    /// kept, and read after each read of the disk.
    is_over: AtomicBool,
    /// Its space is free, as far as that is up to us.
    is_closed: AtomicBool,
    shared: Mutex<Shared>,
}

/// What changes rarely.
#[derive(Debug)]
struct Shared {
    /// `None`: let go.
    file: Option<Arc<Storage>>,
    state: CheckpointState,
    /// Writers that wait for a copy, and tasks that wait for the end.
    waiters: Vec<Waker>,
}

impl Fleece {
    /// * `size`: of the disk, bytes.
    /// * `cluster`: bytes that the image writes at once; a power of two.
    /// * `file`: see `CheckpointOptions::fleece`.
    /// * `max`: bytes of old data in it.
    /// * `limit`: longest time that one request waits for copies.
    ///
    /// Errors: ENOMEM.
    pub(crate) fn new(
        size: u64,
        cluster: u64,
        file: Arc<Storage>,
        max: u64,
        limit: Duration,
    ) -> Result<Fleece, Errno> {
        let granule = size.div_ceil(GRANULES_MAX).next_power_of_two();
        let granule = granule.max(cluster.next_power_of_two()).max(GRANULE_MIN);
        Ok(Fleece {
            size,
            granule_bits: granule.trailing_zeros(),
            states: States::new(size.div_ceil(granule))?,
            used: AtomicU64::new(0),
            max,
            limit,
            is_over: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            shared: Mutex::new(Shared {
                file: Some(file),
                state: CheckpointState::Running,
                waiters: Vec::new(),
            }),
        })
    }

    /// Size of the disk at the instant, bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of old data in the file.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Most bytes of old data in the file.
    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    pub(crate) fn state(&self) -> CheckpointState {
        lock(&self.shared).state.clone()
    }

    /// Whether it keeps what is overwritten.
    pub(crate) fn is_running(&self) -> bool {
        !self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until it has failed or ended.
    pub(crate) async fn over(&self) -> CheckpointState {
        self.wait(|fleece| !fleece.is_running()).await;
        self.state()
    }

    /// Ends it. Whoever called [`Fleece::fail`] or this before was first.
    pub(crate) async fn end(&self, ring: &Ring) {
        self.finish(ring, CheckpointState::Ended).await;
    }

    /// Ends it because old data could not be kept.
    ///
    /// * `reason`: a clause for `the checkpoint failed: …`.
    pub(crate) async fn fail(&self, ring: &Ring, reason: String) {
        if self.finish(ring, CheckpointState::Failed(reason.clone())).await {
            tracing::warn!("a checkpoint failed, and clients go on without it: {reason}");
        }
    }

    /// Sets the last state, lets the file go and wakes everybody. Returns whether this call did.
    ///
    /// The space of the file may be what the client's own write needs, so its descriptor is closed
    /// before this returns (on a helper thread, since that can take long), unless a reader or
    /// another writer is in the middle of a request to it.
    async fn finish(&self, ring: &Ring, state: CheckpointState) -> bool {
        let file = {
            let mut shared = lock(&self.shared);
            if !self.is_running() {
                return false;
            }
            shared.state = state;
            self.is_over.store(true, Ordering::SeqCst);
            shared.file.take()
        };
        self.wake();
        let closed = ring.offload(move || drop(file));
        let _ = ring.within(self.limit, closed).await;
        self.is_closed.store(true, Ordering::SeqCst);
        self.wake();
        true
    }

    /// The file. Errors: EIO once it is over.
    fn file(&self) -> Result<Arc<Storage>, Errno> {
        lock(&self.shared).file.clone().ok_or(Errno::IO)
    }

    /// Wakes all that wait.
    fn wake(&self) {
        let waiters = std::mem::take(&mut lock(&self.shared).waiters);
        for waker in waiters {
            waker.wake();
        }
    }

    /// Waits until `is_ready`, which is asked again after each copy and at the end.
    async fn wait(&self, is_ready: impl Fn(&Fleece) -> bool) {
        poll_fn(|context| {
            if is_ready(self) {
                return Poll::Ready(());
            }
            let mut shared = lock(&self.shared);
            // Once more, since it may have come to pass before the lock was taken.
            if is_ready(self) {
                return Poll::Ready(());
            }
            if !shared.waiters.iter().any(|waker| waker.will_wake(context.waker())) {
                shared.waiters.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// The granules that a range touches; may be empty.
    fn granules(&self, offset: GuestOffset, len: u64) -> std::ops::Range<u64> {
        let end = offset.0.saturating_add(len).min(self.size);
        if offset.0 >= end {
            return 0..0;
        }
        offset.0 >> self.granule_bits..((end - 1) >> self.granule_bits) + 1
    }

    /// The bytes of some granules, cut at the end of the disk: first byte and length.
    fn bytes(&self, granules: &std::ops::Range<u64>) -> (GuestOffset, u64) {
        let start = granules.start << self.granule_bits;
        let end = (granules.end << self.granule_bits).min(self.size);
        (GuestOffset(start), end.saturating_sub(start))
    }

    /// Whether a change of a range has to wait for copies.
    #[inline]
    fn is_due(&self, offset: GuestOffset, len: u64) -> bool {
        self.is_running() && !self.states.are_kept(self.granules(offset, len))
    }
}

impl Graph {
    /// Keeps what a change of a range is about to overwrite, where a checkpoint wants it. Never
    /// fails: the checkpoint does.
    ///
    /// * `offset`, `len`: in the layers, inside the disk.
    #[inline]
    pub(crate) async fn keep(&self, ring: &Ring, offset: GuestOffset, len: u64) {
        if let Some(fleece) = &self.fleece
            && fleece.is_due(offset, len)
        {
            // Boxed: the future of a plain write stays small.
            Box::pin(fleece.keep(ring, self, offset, len)).await;
        }
    }

    /// A client's write found no space. The fleecing file may have what it needs: gives that up.
    /// Returns whether the write is worth another attempt; not a second time.
    #[cold]
    pub(crate) async fn make_room(&self, ring: &Ring) -> bool {
        let Some(fleece) = self.running_fleece().filter(|fleece| fleece.used() > 0) else {
            return false;
        };
        let reason = "a client's write found no space left on the storage of the image; use \
                      another file system for the fleecing file";
        Box::pin(async {
            fleece.fail(ring, reason.to_owned()).await;
            // Another writer may have been first.
            let is_closed = fleece.wait(|fleece| fleece.is_closed.load(Ordering::SeqCst));
            let _ = ring.within(fleece.limit, is_closed).await;
        })
        .await;
        true
    }
}
