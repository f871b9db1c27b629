//! The block device that a guest sees (virtio 1.3, section 5.2): its numbers, its configuration,
//! and its requests.
//!
//! Promises: pure: what a request does is in [`crate::worker`].

pub(crate) mod config;
pub(crate) mod features;
pub(crate) mod request;

/// The unit of virtio-blk: sectors of requests and limits, whatever the block size. Bytes.
pub(crate) const SECTOR_BYTES: u64 = ringdisk_disk::operations::SECTOR_BYTES.0;
/// Length of the answer to GET_ID, bytes; shorter names are padded with zeroes.
pub(crate) const SERIAL_BYTES: usize = 20;
/// Data segments of a request, as drivers are told: with header and status they fit the smallest
/// queue that front ends make by default (QEMU: 128 entries).
pub(crate) const SEGMENTS_MAX: u32 = 126;
