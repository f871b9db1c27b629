//! Buffer pools: many entries, few buffers (Linux 7.3).
//!
//! Promises: made once, before the first entry; a request allocates nothing here. Without pools
//! each entry has a payload of its own. With them each queue has one region; the kernel takes a
//! buffer of it for a request that carries something, says where it lies, and takes it back when
//! the request is committed. So entries, which cost a few hundred bytes, bound the requests in
//! flight, and buffers, which cost 1 MiB, those that carry data through our memory.
//!
//! The arithmetic: a queue has as many buffers as the user wants entries, else those of the
//! rule [`BUFFERS`]; a CPU that is offline has one. All regions are one mapping. With O_DIRECT
//! below it is registered in slot 0 of every ring, so that the kernel does not look its pages up
//! for each request of the device; where that is refused (RLIMIT_MEMLOCK) it serves unregistered.
//! Through the page cache it is not registered: there the kernel copies, and copies slower into
//! registered memory (docs/transports.md).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ringdisk_export::DepthRule;
use ringdisk_ring::SharedMemory;

use super::plan::Plan;

/// Buffers of a queue unless the user asks for more. All of them may be pinned.
const BUFFERS: DepthRule = DepthRule {
    min: 4,
    // As many as its thread copies before the first are free again.
    max: 32,
    memory_bytes: 128 << 20,
};
/// Slots of a ring's table at most (io_uring/rsrc.c, `IORING_MAX_REG_BUFFERS`).
const SLOTS_MAX: usize = 1 << 14;
/// Slot of the memory in the ring of every thread; those of zero-copy entries follow.
pub(super) const MEMORY_SLOT: u16 = 0;
/// Alignment of a buffer: direct I/O of every device.
const PAGE_BYTES: usize = 4096;

/// What the rings do with a pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PoolUses {
    /// Pages of clients are put into slots of the rings.
    pub(crate) zero_copy: bool,
    /// Registered with the rings, if that is allowed.
    pub(crate) pinned: bool,
}

/// The regions of all queues.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(super) memory: Arc<SharedMemory>,
    /// Of each queue, in the memory.
    pub(super) regions: Vec<Range<usize>>,
    /// Bytes of a buffer.
    pub(super) buffer_bytes: usize,
    /// Pages of clients are put into slots of the rings.
    pub(super) zero_copy: bool,
    /// It shall not be registered, or some thread could not.
    unpinned: AtomicBool,
}

impl Pool {
    /// * `asked`: the user said how many requests a queue serves at once.
    /// * `buffer_bytes`: of the largest request.
    ///
    /// `None`: more entries than a ring has slots.
    pub(crate) fn new(
        plan: &Plan,
        asked: bool,
        buffer_bytes: usize,
        uses: PoolUses,
    ) -> Option<Pool> {
        if uses.zero_copy && plan.entries() >= SLOTS_MAX {
            return None;
        }
        let mut regions = Vec::with_capacity(plan.0.len());
        let mut end = 0;
        for buffers in buffers(plan, asked, buffer_bytes) {
            let start = end;
            end += buffers * buffer_bytes;
            regions.push(start..end);
        }
        let memory = SharedMemory::new(end, PAGE_BYTES);
        let PoolUses { zero_copy, pinned } = uses;
        let unpinned = AtomicBool::new(!pinned);
        Some(Pool { memory, regions, buffer_bytes, zero_copy, unpinned })
    }

    /// Address and length of a queue's region, for the kernel.
    pub(super) fn region(&self, queue: u16) -> (u64, u32) {
        let range = self.regions.get(usize::from(queue)).cloned().unwrap_or(0..0);
        let len = u32::try_from(range.len()).unwrap_or(u32::MAX);
        ((self.memory.address() + range.start) as u64, len)
    }

    /// Where the buffer lies that the kernel names, in the memory. `None`: not in this queue's
    /// region.
    ///
    /// * `offset`: from the start of the queue's region, bytes.
    pub(super) fn buffer(&self, queue: u16, offset: u32) -> Option<Range<usize>> {
        let region = self.regions.get(usize::from(queue))?;
        let start = region.start + offset as usize;
        let end = start + self.buffer_bytes;
        (end <= region.end).then_some(start..end)
    }

    /// Slot for the client pages of an entry, by its number among all entries.
    pub(super) fn slot(index: usize) -> u16 {
        // Below `SLOTS_MAX`, as `new` looked.
        u16::try_from(index + 1).unwrap_or(u16::MAX)
    }

    /// Some thread could not register the memory: it serves unregistered.
    pub(super) fn refuse_pin(&self) {
        self.unpinned.store(true, Ordering::Release);
    }

    /// Whether the memory is registered with every ring. Final once the start has gone past that
    /// step.
    pub(crate) fn is_pinned(&self) -> bool {
        !self.unpinned.load(Ordering::Acquire)
    }
}

/// Buffers of each queue.
fn buffers(plan: &Plan, asked: bool, buffer_bytes: usize) -> impl Iterator<Item = usize> + '_ {
    let by_memory = BUFFERS.depth(plan.0.len(), buffer_bytes);
    let most = plan.0.iter().map(|queue| queue.entries).max().unwrap_or(1);
    plan.0.iter().map(move |queue| {
        if queue.entries < most {
            // Fewer than the others: no client runs there now.
            1
        } else if asked {
            queue.entries.max(1)
        } else {
            by_memory.min(queue.entries).max(1)
        }
    })
}

#[cfg(test)]
mod tests;
