//! The block device that a guest sees (virtio 1.3, section 5.2): its numbers, its configuration,
//! and what it does with a request.

pub(crate) mod config;
pub(crate) mod features;
pub(crate) mod request;
pub(crate) mod serve;

/// The unit of virtio-blk: sectors of requests and limits, whatever the block size. Bytes.
pub(crate) const SECTOR_BYTES: u64 = 512;
/// Length of the answer to GET_ID, bytes; shorter names are padded with zeroes.
pub(crate) const SERIAL_BYTES: usize = 20;
