//! Violations by which a guest breaks its queue.
//!
//! Promises: a violation ends this queue only.

use std::fmt;

/// Why a queue gives no more chains. The driver has to reset the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Broken {
    /// The avail index is further ahead than the ring is long.
    AvailJump {
        /// The device's index.
        from: u16,
        /// The driver's index.
        to: u16,
    },
    /// The avail ring, or a descriptor, names a descriptor that the table does not have.
    OutOfTable {
        /// The number.
        index: u16,
        /// Descriptors in the table.
        size: u32,
    },
    /// A chain was made available that is still in flight.
    InFlight {
        /// Its first descriptor.
        head: u16,
    },
    /// More descriptors were made available than the ring has.
    RingFull,
    /// A chain has more descriptors than its table, or than the limit: it is a loop.
    Loop {
        /// Descriptors that were read.
        descriptors: u32,
    },
    /// A chain moves 4 GiB or more.
    TooLong,
    /// A chain lies in more pieces of regions than the buffers of any driver do.
    Pieces {
        /// How many are taken.
        limit: usize,
    },
    /// A segment is not in memory.
    Address {
        /// Of the guest.
        addr: u64,
        /// Bytes.
        len: u32,
    },
    /// A readable segment follows a writable one.
    Order,
    /// An indirect table, which was not negotiated.
    IndirectRefused,
    /// An indirect table inside an indirect table, or one with a next descriptor.
    IndirectNested,
    /// An indirect table that is empty or no whole number of descriptors.
    IndirectLength {
        /// Bytes.
        len: u32,
    },
    /// Memory that the rings or buffers lie in is gone: its file was truncated.
    MemoryLost,
    /// A request made no sense to the device.
    Request,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Broken::AvailJump { from, to } => {
                write!(f, "the avail index jumped from {from} to {to}")
            }
            Broken::OutOfTable { index, size } => {
                write!(f, "descriptor {index} was named, the table has {size}")
            }
            Broken::InFlight { head } => {
                write!(f, "descriptor {head} was made available while it is in flight")
            }
            Broken::RingFull => {
                write!(f, "more descriptors were made available than the ring has")
            }
            Broken::Loop { descriptors } => {
                write!(f, "a chain is longer than {descriptors} descriptors: it runs in a circle")
            }
            Broken::TooLong => write!(f, "a chain moves 4 GiB or more"),
            Broken::Pieces { limit } => write!(
                f,
                "a chain lies in more than {limit} pieces: its segments overlap, and go over too \
                 many regions of memory"
            ),
            Broken::Address { addr, len } => {
                write!(f, "{len} bytes at {addr:#x} are not in memory")
            }
            Broken::Order => write!(f, "a segment to read follows one to write"),
            Broken::IndirectRefused => write!(f, "an indirect table, which was not negotiated"),
            Broken::IndirectNested => write!(f, "an indirect table that goes on in another one"),
            Broken::IndirectLength { len } => write!(f, "an indirect table of {len} bytes"),
            Broken::MemoryLost => {
                write!(f, "memory of the guest is gone: its file was truncated")
            }
            Broken::Request => write!(f, "a request makes no sense"),
        }
    }
}

impl std::error::Error for Broken {}
