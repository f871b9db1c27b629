//! One io_uring for each thread: operations as futures, and the tasks of the thread.
//!
//! ```
//! use ringdisk_ring::{Config, Fd, IoBuf, Runtime};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = tempfile::tempfile()?;
//! let mut runtime = Runtime::new(Config::default())?;
//! let ring = runtime.ring().clone();
//! let read = runtime.block_on(async move {
//!     let hello = IoBuf::new(5, 16);
//!     hello.copy_from_slice(0, b"hello");
//!     ring.write(Fd::of(&file), 0, &hello).await?;
//!     ring.fsync(Fd::of(&file), true).await?;
//!     let buf = IoBuf::new(4096, 4096);
//!     let count = ring.read(Fd::of(&file), 0, &buf).await? as usize;
//!     Ok::<_, ringdisk_ring::Errno>(buf.slice(0..count).to_vec())
//! });
//! assert_eq!(read?, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! Promises, in this order:
//! 1. **Memory the kernel may still write is never freed.** An operation owns a local reference
//!    on its buffer until its completion arrives, also when the future was dropped.
//! 2. **One thread, one ring.** A [`Ring`] is a handle that never leaves its thread; other threads
//!    reach it through [`Remote`] only.
//! 3. **No allocation, no lock and no system call for an operation.** Slots are made at start-up,
//!    entries are batched, and one `io_uring_enter` submits, waits and collects.
//! 4. **Polling is adaptive.** A thread may poll before it sleeps, learns whether that paid, and
//!    never polls on an idle export ([`SpinPolicy`]).
//!
//! This is the only crate that touches submission queue entries; `io-uring` is hidden inside.
//! `ring` holds the handle with its tasks and operations; the modules beside it know nothing of it.

mod buffer;
mod config;
mod counters;
mod cpus;
mod handoff;
mod interrupt;
mod mailbox;
#[cfg(test)]
mod model;
mod nap;
mod numa;
mod offload;
mod opset;
mod parker;
mod placement;
mod restrict;
mod ring;
mod runtime;
mod setup;
mod slots;
mod source;
mod spin;
mod sync;
#[cfg(test)]
mod tests;
mod topology;
mod uring;

pub use buffer::{IoBuf, Scatter, SharedMemory};
pub use config::Config;
pub use counters::{Counters, CountersSnapshot};
pub use cpus::{CpuList, CpuListError};
pub use interrupt::Interrupt;
pub use numa::{NodePages, move_to_node, pages_by_node, stack_of_thread};
pub use opset::OpSet;
pub use parker::Parker;
pub use placement::{cpus_of_thread, pin_thread_to_cpus, pin_to_cpus};
pub use ring::{Fd, Op, POLL_IN, RawCommand, Readiness, Remote, Ring, Sleep, Timeout};
pub use runtime::Runtime;
pub use rustix::io::Errno;
pub use setup::SetupError;
pub use source::Source;
pub use spin::SpinPolicy;
pub use topology::{Node, Topology};
