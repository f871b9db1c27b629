//! Memory of a guest, and the virtqueues in it.
//!
//! ```
//! use ringdisk_guest::{Areas, Chain, Layout, Memory, PACKED_BASE};
//! use ringdisk_guest::{Queue, QueueConfig, Region, View};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The front end's announcement: a file with the memory, and its addresses.
//! let file = tempfile::tempfile()?;
//! file.set_len(1 << 20)?;
//! let region = Region::map(file.into(), 0x10_0000, 0x7f00_0000_0000, 1 << 20, 0)?;
//! let memory = Memory::new(vec![region])?;
//!
//! // A packed queue of 8 descriptors at the start of it.
//! let start = 0x7f00_0000_0000;
//! let areas = Areas::find(&memory, Layout::Packed, 8, false, [start, start + 128, start + 132])?;
//! let mut queue = Queue::new(QueueConfig {
//!     layout: Layout::Packed,
//!     size: 8,
//!     areas,
//!     event_idx: false,
//!     indirect: false,
//!     base: PACKED_BASE,
//!     inflight: None,
//!     log: None,
//!     log_addr: None,
//! })?;
//!
//! // The driver has added nothing yet.
//! let view = View::new(memory.into());
//! let mut chain = Chain::new();
//! assert_eq!(queue.pop(&view, &mut chain)?, None);
//! # Ok(())
//! # }
//! ```
//!
//! Promises, in this order:
//! 1. **A guest is not trusted.** Whatever it writes into its rings and descriptors, and whenever,
//!    ends its own queue with a reason ([`Broken`]): never the process, and never touches other
//!    memory. Values are copied before they are checked.
//! 2. **Memory may be lost during use.** A file that is truncated under a mapping costs that region
//!    ([`Region::is_lost`]).
//! 3. **Every popped chain is returned exactly once**, also when the process is killed at any
//!    instruction and a successor continues with the same [`inflight`] area.
//! 4. **No allocation, no lock and no system call** for a chain. Used elements and the call are
//!    published once for a batch.
//!
//! Modules use one another in one direction only: queue ► inflight ► layout, memory.
//!
//! Memory is mapped and dropped by control threads; a [`Queue`] and a [`View`] belong to one queue
//! thread. `unsafe` is in `memory` only.

#![deny(unsafe_code)]

#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod error;
pub mod inflight;
mod layout;
mod memory;
mod queue;

pub use error::Error;
pub use layout::{Layout, SIZE_MAX};
#[cfg(any(test, feature = "note-reads"))]
pub use memory::reads;
pub use memory::{Log, MEMORY_BYTES_MAX, Memory, REGIONS_MAX, Region, RingMemory, View, losses};
pub use queue::{
    Areas, Broken, Chain, PACKED_BASE, Queue, QueueConfig, SEGMENTS_MAX, Segment, Token,
};
