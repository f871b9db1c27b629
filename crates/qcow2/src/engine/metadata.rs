//! Writes of metadata that the image refers to already: slices, reference counts, L1 entries, the
//! header.
//!
//! Promises: two writes of one place never overtake each other, even when the request that began
//! the first one was dropped. The kernel may carry out a write after the future that asked for it
//! is gone, and would put the old state over the new one. So each write is a task of its own that
//! goes on to its end; a write whose request is gone is recorded here, and the next write of the
//! same place waits until it has ended.
//!
//! Where the thread of such a task has ended, the reference count of the write's memory says when
//! the kernel is done with it. A write that has not ended after [`ORPHAN_WAIT`] is given up: then
//! nothing can be promised any more, so no flush succeeds until the image is opened again.

use std::cell::RefCell;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use ringdisk_ring::{Ring, SharedMemory};

use super::Qcow2;
use super::space::ALIGN;
use crate::header::HeaderImage;
use crate::sync::{Arc, AtomicU8, Mutex, Ordering, lock};
use crate::units::{Bytes, HostOffset};

/// How long the write of a dropped request is waited for: as long as a disk may take that tries a
/// bad block again.
const ORPHAN_WAIT: Duration = Duration::from_secs(60);
/// First and longest pause between two attempts.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// The task goes on.
const RUNNING: u8 = 0;
/// The write has ended, with success or an error.
const ENDED: u8 = 1;
/// The task was dropped with its ring.
const DROPPED: u8 = 2;

/// Metadata writes in flight whose requests were dropped.
#[derive(Default)]
pub(super) struct Orphans(Mutex<Vec<Orphan>>);

struct Orphan {
    /// Bytes of the image file.
    range: Range<HostOffset>,
    state: Arc<AtomicU8>,
    /// What is written, where that is one piece.
    memory: Option<Arc<SharedMemory>>,
}

impl Orphan {
    fn has_ended(&self) -> bool {
        match self.state.load(Ordering::Acquire) {
            RUNNING => false,
            ENDED => true,
            // Another reference may be the kernel's.
            _ => self.memory.as_ref().is_some_and(|memory| Arc::strong_count(memory) == 1),
        }
    }
}

impl Orphans {
    /// Whether a write in flight overlaps `range`.
    fn overlap(&self, range: &Range<HostOffset>) -> bool {
        let mut orphans = lock(&self.0);
        orphans.retain(|orphan| !orphan.has_ended());
        let overlaps =
            |other: &Range<HostOffset>| other.start < range.end && range.start < other.end;
        orphans.iter().any(|orphan| overlaps(&orphan.range))
    }
}

/// Result of the task, and the waker of the request.
type Outcome = Rc<RefCell<(Option<Result<(), Errno>>, Option<Waker>)>>;

/// What the task holds.
struct TaskSide {
    state: Arc<AtomicU8>,
    outcome: Outcome,
}

impl TaskSide {
    fn end(self, result: Result<(), Errno>) {
        self.state.store(ENDED, Ordering::Release);
        let waker = {
            let mut outcome = self.outcome.borrow_mut();
            outcome.0 = Some(result);
            outcome.1.take()
        };
        waker.into_iter().for_each(Waker::wake);
    }
}

impl Drop for TaskSide {
    fn drop(&mut self) {
        let order = (Ordering::AcqRel, Ordering::Acquire);
        let _ = self.state.compare_exchange(RUNNING, DROPPED, order.0, order.1);
    }
}

/// What the request holds.
struct RequestSide<'a> {
    orphans: &'a Orphans,
    orphan: Option<Orphan>,
}

impl Drop for RequestSide<'_> {
    fn drop(&mut self) {
        if let Some(orphan) = self.orphan.take()
            && !orphan.has_ended()
        {
            lock(&self.orphans.0).push(orphan);
        }
    }
}

impl Qcow2 {
    /// Writes metadata over what is there. Durable after the next flush of the file.
    ///
    /// * `offset`: byte of the image file.
    ///
    /// Errors: those of the storage; `EIO` when an earlier write of this place does not end.
    pub(super) async fn write_metadata(
        &self,
        ring: &Ring,
        offset: HostOffset,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let range = offset..offset + Bytes::of(bytes.len());
        let memory = SharedMemory::new(bytes.len().max(1), ALIGN);
        let (file, handle) = (Arc::clone(&self.file), ring.clone());
        let buf = memory.buffer().slice(0..bytes.len());
        buf.copy_from_slice(0, bytes);
        let work = async move { file.write_all(&handle, offset.0, &buf).await };
        self.to_its_end(ring, range, Some(memory), work).await
    }

    /// Writes the beginning of the header, or all of it where names and extensions were changed.
    ///
    /// Errors: as [`write_metadata`](Qcow2::write_metadata).
    pub(super) async fn write_header(
        &self,
        ring: &Ring,
        header: &HeaderImage,
    ) -> Result<(), Errno> {
        if let Some(sector) = header.first_sector() {
            return self.write_metadata(ring, HostOffset(0), sector).await;
        }
        let (file, handle, header) = (Arc::clone(&self.file), ring.clone(), header.clone());
        let work = async move { header.write_first_sector(&handle, &file).await };
        self.to_its_end(
            ring,
            HostOffset::ZERO..HostOffset::after(self.geometry.cluster_size()),
            None,
            work,
        )
        .await
    }

    /// Runs `work` to its end, even when the caller is dropped, once the earlier writes in flight
    /// of `range` have ended.
    async fn to_its_end(
        &self,
        ring: &Ring,
        range: Range<HostOffset>,
        memory: Option<Arc<SharedMemory>>,
        work: impl Future<Output = Result<(), Errno>> + 'static,
    ) -> Result<(), Errno> {
        let orphans = &self.engine()?.orphans;
        self.wait_for_orphans(ring, &range).await?;
        let state = Arc::new(AtomicU8::new(RUNNING));
        let outcome = Outcome::default();
        let task = TaskSide { state: Arc::clone(&state), outcome: Rc::clone(&outcome) };
        let mut request = RequestSide { orphans, orphan: Some(Orphan { range, state, memory }) };
        ring.spawn(async move {
            let result = work.await;
            task.end(result);
        });
        let result = poll_fn(|context| {
            let mut outcome = outcome.borrow_mut();
            match outcome.0.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    outcome.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        });
        let result = result.await;
        request.orphan = None;
        result
    }

    async fn wait_for_orphans(&self, ring: &Ring, range: &Range<HostOffset>) -> Result<(), Errno> {
        let orphans = &self.engine()?.orphans;
        let began = Instant::now();
        let mut pause = PAUSE_MIN;
        while orphans.overlap(range) {
            if began.elapsed() >= ORPHAN_WAIT {
                self.note_lost(Errno::IO);
                return Err(Errno::IO);
            }
            ring.sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        Ok(())
    }
}
