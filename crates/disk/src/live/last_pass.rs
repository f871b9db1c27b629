//! How the last pass of a commit or a stream ends early, while no request is in flight.
//!
//! Promises: plain values. A range that failed is copied again beside the clients, who do not wait
//! while the change rests or waits for space.

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Errno;

/// Why the last pass is not over.
pub(super) enum LastPassFailure {
    /// A range could not be copied; it is out of the record.
    Range((GuestOffset, Bytes), Errno),
    /// The change ends.
    Ends(Errno),
}

impl From<Errno> for LastPassFailure {
    fn from(errno: Errno) -> LastPassFailure {
        LastPassFailure::Ends(errno)
    }
}
