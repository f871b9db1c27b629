//! [`Below`], the backing chain of an image as a write needs it.
//!
//! Promises: implementations run on the thread of the ring that they are given.

use std::future::Future;

use rustix::io::Errno;

use ringdisk_ring::{IoBuf, Ring};

use crate::units::{Bytes, GuestOffset};

/// The backing chain of an image. Runs on the thread of the ring that it is given.
pub trait Below {
    /// Fills `buf` with what the chain has at `offset` of the disk; zeroes past its end.
    ///
    /// Errors: those of the storage.
    fn read(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        buf: &IoBuf,
    ) -> impl Future<Output = Result<(), Errno>>;

    /// Whether the chain may have anything but zeroes in a range. False is a promise: there is no
    /// chain, or it ends before.
    fn has_data(&self, offset: GuestOffset, len: Bytes) -> bool;

    /// Whether there is a chain. An image that names a backing file and has none here was opened
    /// without it: what is cleared has to stay so when it is opened with it.
    fn is_there(&self) -> bool {
        true
    }
}

/// No backing file.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nothing;

impl Below for Nothing {
    async fn read(&self, _ring: &Ring, _offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        buf.fill(0);
        Ok(())
    }

    fn has_data(&self, _offset: GuestOffset, _len: Bytes) -> bool {
        false
    }

    fn is_there(&self) -> bool {
        false
    }
}
