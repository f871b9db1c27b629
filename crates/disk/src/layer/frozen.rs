//! The state of another disk at one instant, as the only layer of a disk that shows it.
//!
//! Promises: readers get the bytes of the instant or an error. Each request allocates for its
//! future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

/// A request in flight.
pub(crate) type Pending<'a, T> = Pin<Box<dyn Future<Output = Result<T, Errno>> + 'a>>;

/// What gives the bytes of the instant.
pub(crate) trait Frozen: fmt::Debug + Send + Sync {
    /// Fills `buf`; the range lies inside the disk.
    ///
    /// Errors: EIO once the state is not kept any more; those of the storage.
    fn read<'a>(&'a self, ring: &'a Ring, offset: GuestOffset, buf: &'a IoBuf) -> Pending<'a, ()>;

    /// What is known about the start of a range inside the disk.
    ///
    /// * `len`: at least 1.
    ///
    /// Errors: as [`Frozen::read`].
    fn piece<'a>(&'a self, ring: &'a Ring, offset: GuestOffset, len: Bytes) -> Pending<'a, Piece>;
}

/// A run of bytes with one answer; see [`BlockStatus`](crate::BlockStatus).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Length, bytes; at least 1.
    pub(crate) len: Bytes,
    pub(crate) data: bool,
    pub(crate) zero: bool,
    pub(crate) present: bool,
    pub(crate) depth: u32,
}
