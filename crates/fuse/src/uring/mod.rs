//! Transport `uring`: requests and replies travel in the queue's own io_uring.
//!
//! The kernel has one queue for every possible CPU and puts a request into the queue of the CPU
//! that its caller runs on. Each queue has entries: a header and a payload in our memory. REGISTER
//! gives an entry to the kernel and completes when a request is in it; COMMIT_AND_FETCH takes the
//! reply and completes with the next one. So one `io_uring_enter` carries replies, fetches and the
//! disk's own I/O.
//!
//! Promises: a request allocates nothing, and takes no lock. The classic reader (`dev`) goes on
//! beside it: FORGET, INTERRUPT and what was queued before the rings were ready come there, and it
//! serves everything when the rings cannot be started.
//!
//! Rooms: [`plan`] says how many entries there are, [`memory`] is what they share with the kernel,
//! [`pool`] the buffers that queues have instead of payloads on newer kernels, [`nodes`] on which
//! node all that is, [`mode`] how far a mount goes, [`entry`] the life of an entry, [`rings`] what
//! all threads know together, [`ownership`] what of that they agree on without a lock, [`start`]
//! the order in which a mount goes live, [`switch`] whether the kernel allows it, [`balance`] where
//! threads and entries are, [`policy`] the rule by which they move with the load.

mod balance;
mod entry;
mod fuzzing;
mod memory;
mod mode;
mod nodes;
mod ownership;
mod plan;
mod policy;
mod pool;
mod queue;
mod rings;
mod start;
mod switch;
mod sync;

// The model builds `ownership.rs` a second time, on simulated primitives.
#[cfg(test)]
mod model;

pub use fuzzing::RingEntries;
pub use mode::{RingMode, ZeroCopy};
pub(crate) use plan::Plan;
pub use policy::Stay;
pub(crate) use pool::PoolUses;
pub(crate) use queue::RingQueue;
pub use rings::Refuse;
pub(crate) use rings::Rings;
pub(crate) use start::{Refused, Starting, register};
pub(crate) use switch::{SwitchWatch, is_enabled};

/// A message from one queue thread to another: the entry with this number, and the request in it,
/// is yours now.
pub(crate) const MESSAGE_ENTRY: u32 = 1 << 31;

pub(crate) use entry::take_over;

/// Bytes of the buffers that pools have for a plan. Arguments: see [`pool::Pool::new`].
#[cfg(test)]
pub(crate) fn pool_bytes(plan: &Plan, asked: bool, buffer_bytes: usize) -> usize {
    pool::Pool::new(plan, asked, buffer_bytes, PoolUses::default())
        .map_or(0, |pool| pool.memory.len())
}
