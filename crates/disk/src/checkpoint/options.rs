//! What a checkpoint is asked for, and what it says.
//!
//! Promises: plain values.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::Bytes;
use ringdisk_storage::Storage;

pub use crate::graph::CheckpointState;

/// Longest time that one request of a client waits for copies, unless it is given. Guests give a
/// request up after 30 s (Linux, SCSI and virtio-blk alike).
const COPY_LIMIT: Duration = Duration::from_secs(10);

/// What [`Disk::prepare_checkpoint`](crate::Disk::prepare_checkpoint) is asked for.
#[derive(Clone, Debug)]
pub struct CheckpointOptions {
    /// Where old data goes before it is overwritten: an empty regular file, open for reading and
    /// writing, that nobody else uses. It becomes as long as the disk, with holes. It needs no name
    /// (O_TMPFILE), so that a crash leaves nothing; flushes are never sent to it.
    pub fleece: Arc<Storage>,
    /// Most bytes of old data in it; when a client writes to more, the checkpoint fails.
    pub fleece_max: Bytes,
    /// Longest time that one request of a client waits for copies; then the checkpoint fails.
    pub copy_limit: Duration,
    /// A bitmap that records writes from the instant on; it must not exist yet.
    pub bitmap: Option<NewBitmap>,
    /// A bitmap of the top image whose content at the instant is kept for readers. It goes on as it
    /// is: one that records also records what comes later.
    pub since: Option<String>,
}

impl CheckpointOptions {
    /// Without bitmaps, and with a limit of 10 s.
    pub fn new(fleece: Arc<Storage>, fleece_max: Bytes) -> CheckpointOptions {
        CheckpointOptions { fleece, fleece_max, copy_limit: COPY_LIMIT, bitmap: None, since: None }
    }
}

/// A bitmap to add.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBitmap {
    /// 1 to 1023 bytes.
    pub name: String,
    /// Bytes of disk for each bit, a power of two from 512 to 2 GiB; `None`: the cluster size, but
    /// 4 KiB at least and 64 KiB at most.
    pub granularity_bytes: Option<Bytes>,
}

/// What becomes of the bitmaps when a checkpoint ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CheckpointEnd {
    /// The backup was made. The new bitmap goes on; where there is one, the old one
    /// ([`CheckpointOptions::since`]) is removed.
    #[default]
    Drop,
    /// The backup was made, and both bitmaps go on.
    Keep,
    /// The backup failed. The new bitmap is removed; the old one has what both recorded, since it
    /// has recorded all the time. An old one that does not record gets the bits of the new one.
    Merge,
}

/// The content of a bitmap at the instant of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyRanges {
    /// Name of the bitmap.
    pub name: String,
    /// Bytes of disk for each bit.
    pub granularity_bytes: Bytes,
    /// The marked runs, in bytes of the frozen disk; in order, not empty, not touching one another.
    pub ranges: Arc<[Range<u64>]>,
}
