//! Keeps the state of a disk at one instant: old data is copied to a fleecing file before a client
//! overwrites it.
//!
//! ```text
//! client's write ──► granules kept? ──no──► read them from the disk, mark them ──► written to the
//!                         │ yes                       │                            file behind it
//!                         ▼                           ▼
//!                    write to the disk ◄──────────────┘
//! ```
//!
//! Promises:
//! - A disk without a checkpoint pays one branch for each write. With one, a write whose granules
//!   are kept takes no lock and allocates nothing; any other allocates a buffer of at most
//!   [`COPY_MAX`] bytes (or of one granule) at a time. A client waits for the read of the old data,
//!   and for the file only while [`BEHIND_MAX`] bytes are on their way to it (`deferred_copy.rs`).
//! - Where a granule is kept its content at the instant can be read from the file; where it is not,
//!   the disk has it, so a reader reads the disk and looks again afterwards (`reading.rs`).
//! - A write never fails because of the file. What goes wrong there ends the checkpoint: from then
//!   on nothing is copied, every reader gets EIO, and the file's space is given back.
//! - Two writers of one granule copy it once, and the second waits for the first; a writer that is
//!   dropped while it copies lets the next one copy.

mod copy;
mod deferred_copy;
mod reading;
mod states;

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use super::Graph;
use super::sync::lock;
use super::tracker::granule_of;
pub(crate) use states::Known;
use states::{Granule, States};

/// Smallest granule, bytes: the usual size of a small write, for which nothing else is copied then.
pub(crate) const GRANULE_MIN: Bytes = Bytes(4 << 10);
/// Most granules: their states take 32 MiB. Disks above 512 GiB have larger granules.
const GRANULES_MAX: u64 = 1 << 27;
/// Most bytes that are on their way to the file while clients go on.
const BEHIND_MAX: Bytes = Bytes(8 << 20);
/// Most bytes that are copied at once, unless one granule is larger.
const COPY_MAX: Bytes = Bytes(1 << 20);

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
    size: Bytes,
    granule_bits: u32,
    states: States,
    /// Bytes of old data in the file, and the most that it may hold.
    used: AtomicU64,
    max: Bytes,
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
    /// What is on its way to the file: first byte and length; and the bytes of all of it.
    behind: Vec<(GuestOffset, Bytes)>,
    behind_bytes: Bytes,
    /// Writers that wait for a copy, and tasks that wait for the end.
    waiters: Vec<Waker>,
}

impl Fleece {
    /// * `size`: of the disk, bytes.
    /// * `file`: see `CheckpointOptions::fleece`.
    /// * `max`: bytes of old data in it.
    /// * `limit`: longest time that one request waits for copies.
    ///
    /// Errors: ENOMEM.
    pub(crate) fn new(
        size: Bytes,
        file: Arc<Storage>,
        max: Bytes,
        limit: Duration,
    ) -> Result<Fleece, Errno> {
        let granule = granule_of(size, GRANULES_MAX, GRANULE_MIN);
        Ok(Fleece {
            size,
            granule_bits: granule.ilog2(),
            states: States::new(size.div_ceil(granule))?,
            used: AtomicU64::new(0),
            max,
            limit,
            is_over: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            shared: Mutex::new(Shared {
                file: Some(file),
                state: CheckpointState::Running,
                behind: Vec::new(),
                behind_bytes: Bytes::ZERO,
                waiters: Vec::new(),
            }),
        })
    }

    /// Size of the disk at the instant, bytes.
    pub(crate) fn size(&self) -> Bytes {
        self.size
    }

    /// Bytes of old data in the file.
    pub(crate) fn used(&self) -> Bytes {
        Bytes(self.used.load(Ordering::Relaxed))
    }

    /// Most bytes of old data in the file.
    pub(crate) fn max(&self) -> Bytes {
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
        self.wait(|_| !self.is_running()).await;
        self.state()
    }

    /// Ends it, unless [`Fleece::fail`] or this was called before.
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

    /// Sets the last state, lets the file go and wakes all waiters. Returns whether this call did.
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
        self.close(ring, file).await;
        true
    }

    /// Closes the file of a checkpoint that is over.
    async fn close(&self, ring: &Ring, file: Option<Arc<Storage>>) {
        let _ = ring.within(self.limit, self.all_in_file()).await;
        let closed = ring.offload(move || drop(file));
        let _ = ring.within(self.limit, closed).await;
        self.is_closed.store(true, Ordering::SeqCst);
        self.wake();
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

    /// Waits until `is_ready`, which is asked again after each copy and at the end, and must not
    /// take the lock.
    async fn wait(&self, is_ready: impl Fn(&Shared) -> bool) {
        poll_fn(|context| {
            let mut shared = lock(&self.shared);
            if is_ready(&shared) {
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
    fn granules(&self, offset: GuestOffset, len: Bytes) -> std::ops::Range<u64> {
        let end = offset.saturating_add(len).min(GuestOffset::after(self.size));
        if offset >= end {
            return 0..0;
        }
        offset.0 >> self.granule_bits..((end - Bytes(1)).0 >> self.granule_bits) + 1
    }

    /// The bytes of some granules, cut at the end of the disk: first byte and length.
    fn bytes(&self, granules: &std::ops::Range<u64>) -> (GuestOffset, Bytes) {
        let start = GuestOffset(granules.start << self.granule_bits);
        let end = GuestOffset(granules.end << self.granule_bits);
        let end = end.min(GuestOffset::after(self.size));
        (start, end.saturating_sub(start))
    }

    /// Whether a change of a range has to wait for copies.
    #[inline]
    fn is_due(&self, offset: GuestOffset, len: Bytes) -> bool {
        self.is_running() && !self.states.are_kept(self.granules(offset, len))
    }
}

impl Graph {
    /// Keeps what a change of a range is about to overwrite, where a checkpoint wants it. Never
    /// fails: the checkpoint does.
    ///
    /// * `offset`, `len`: in the layers, inside the disk.
    #[inline]
    pub(crate) async fn keep(&self, ring: &Ring, offset: GuestOffset, len: Bytes) {
        if let Some(fleece) = &self.fleece
            && fleece.is_due(offset, len)
        {
            // Boxed: the future of a plain write stays small.
            Box::pin(fleece.keep(ring, self, offset, len)).await;
        }
    }

    /// A client's write found no space. The fleecing file may have what it needs: gives that up,
    /// and waits until its space is free. Returns whether the write is worth another attempt.
    ///
    /// * `was_made`: of this request; a second attempt is not worth a third.
    #[cold]
    pub(crate) async fn make_room(&self, ring: &Ring, was_made: &mut bool) -> bool {
        let Some(fleece) = self.fleece.as_ref().filter(|fleece| !fleece.used().is_zero()) else {
            return false;
        };
        if std::mem::replace(was_made, true) {
            return false;
        }
        let reason = "a client's write found no space left on the storage of the image; use \
                      another file system for the fleecing file";
        Box::pin(async {
            if fleece.is_running() {
                fleece.fail(ring, reason.to_owned()).await;
            }
            // Another writer, or one behind the clients, may have been first.
            let is_closed = fleece.wait(|_| fleece.is_closed.load(Ordering::SeqCst));
            let _ = ring.within(fleece.limit, is_closed).await;
        })
        .await;
        true
    }
}
