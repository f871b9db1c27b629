//! Memory of a guest: mapped, looked up, read and written while the guest does the same.
//!
//! Promises: no byte outside of the memory is reached, whatever addresses a guest gives. The only
//! place of this crate with `unsafe`. What it rests on: a [`mapping::Mapping`] stays mapped,
//! readable and writable, for as long as a reference to it lives; every pointer into one travels
//! with such a reference; no Rust reference to its bytes ever exists; and a fault in one is
//! survived ([`fault`]).

#![allow(unsafe_code)]

mod access;
mod fault;
mod log;
mod mapping;
#[cfg(any(test, feature = "note-reads"))]
pub mod reads;
mod region;
mod table;
#[cfg(test)]
mod tests;
mod view;

pub use access::RingMemory;
#[cfg(test)]
pub(crate) use access::kill;
pub use fault::losses;
pub use log::Log;
pub(crate) use mapping::Mapping;
pub use region::{MEMORY_BYTES_MAX, Region};
pub use table::{Memory, REGIONS_MAX};
pub use view::View;
