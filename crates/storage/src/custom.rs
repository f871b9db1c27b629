//! Storage that is not a file: a trait that the simulation of the test kit implements.
//!
//! Promises: futures stay on the thread of their ring. They are boxed, so each operation allocates.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;

use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::kinds::{Allocation, Kind, Limits, Preallocation};

/// A boxed future of a data path result, bound to its thread.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Errno>> + 'a>>;

/// What [`crate::Storage::custom`] takes. Methods mean what those of [`crate::Storage`] mean;
/// `read` and `write` may be short anywhere ([`crate::Storage`] goes on after them), any offset,
/// length and memory address must be accepted. Buffers are in our memory, perhaps scattered.
pub trait CustomStorage: Send + Sync + Debug {
    /// For messages.
    fn name(&self) -> &str;
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Whether the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Whether writing is refused.
    fn is_read_only(&self) -> bool;
    /// What its users treat it as. One that claims to be a block device keeps to what
    /// [`crate::Storage`] says of block devices.
    fn kind(&self) -> Kind {
        Kind::Custom
    }
    /// What requests suit it best.
    fn limits(&self) -> Limits;
    /// See [`crate::Storage::allocated_bytes`].
    fn allocated_bytes(&self) -> u64;
    /// See [`crate::Storage::read`]. 0 bytes at or past the end only.
    fn read<'a>(&'a self, ring: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize>;
    /// See [`crate::Storage::write`].
    fn write<'a>(&'a self, ring: &'a Ring, offset: u64, buf: &'a IoBuf) -> LocalFuture<'a, usize>;
    /// See [`crate::Storage::flush`].
    fn flush<'a>(&'a self, ring: &'a Ring) -> LocalFuture<'a, ()>;
    /// See [`crate::Storage::discard`].
    fn discard<'a>(&'a self, ring: &'a Ring, offset: u64, len: u64) -> LocalFuture<'a, ()>;
    /// See [`crate::Storage::write_zeroes`].
    fn write_zeroes<'a>(
        &'a self,
        ring: &'a Ring,
        offset: u64,
        len: u64,
        may_unmap: bool,
        fallback: bool,
    ) -> LocalFuture<'a, ()>;
    /// See [`crate::Storage::set_len`].
    fn set_len<'a>(&'a self, ring: &'a Ring, len: u64) -> LocalFuture<'a, ()>;
    /// See [`crate::Storage::preallocate`].
    fn preallocate<'a>(
        &'a self,
        ring: &'a Ring,
        offset: u64,
        len: u64,
        mode: Preallocation,
    ) -> LocalFuture<'a, ()>;
    /// See [`crate::Storage::allocation`].
    fn allocation<'a>(
        &'a self,
        ring: &'a Ring,
        offset: u64,
        len: u64,
    ) -> LocalFuture<'a, (Allocation, u64)>;
}
