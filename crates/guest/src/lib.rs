//! Memory of a guest, and the virtqueues in it.
//!
//! Promises, in this order:
//! 1. **A guest can do its worst.** Whatever it writes into its rings and descriptors, and
//!    whenever, ends its own queue with a reason ([`Broken`]): never the process, never memory that
//!    is not its own. What is checked was copied first.
//! 2. **Memory may go while we use it.** A file that is truncated under a mapping costs that
//!    region, which says so ([`Region::is_lost`]).
//! 3. **Every popped chain is returned exactly once**, also when the process is killed at any
//!    instruction and another one goes on with the same [`inflight`] area.
//! 4. **No allocation, no lock and no system call** for a chain. Used elements and the call are
//!    decided once a batch.
//!
//! Memory is mapped and dropped by control threads; a [`Queue`] and a [`View`] belong to one queue
//! thread. `unsafe` is in `memory` only.

#![deny(unsafe_code)]

#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod error;
pub mod inflight;
mod memory;
mod queue;

pub use error::Error;
#[cfg(any(test, feature = "note-reads"))]
pub use memory::reads;
pub use memory::{Log, MEMORY_BYTES_MAX, Memory, REGIONS_MAX, Region, RingMemory, View, losses};
pub use queue::{
    Areas, Broken, Chain, Layout, PACKED_BASE, Queue, QueueConfig, SEGMENTS_MAX, SIZE_MAX, Segment,
    Token,
};
