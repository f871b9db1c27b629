//! What a process needs to go on with a mount of another process.
//!
//! Promises: plain values; no descriptor is read or written here.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use ringdisk_disk::HandOver;

use crate::abi::flags::INIT_HAS_RESEND;
use crate::file::record::FileState;
use crate::negotiate::{Negotiated, Profile};

/// What a mount was made with; the same for all processes that serve it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Absolute path of the file.
    pub mountpoint: PathBuf,
    /// Number of the connection.
    pub connection: u32,
    /// Sizes and caching.
    pub profile: Profile,
    /// The answer to INIT.
    pub negotiated: Negotiated,
    /// Queues; each has a descriptor of its own where cloning is allowed.
    pub queues: usize,
}

impl Terms {
    /// Whether the kernel sends unanswered requests again (Linux 6.9).
    #[must_use]
    pub fn can_resend(&self) -> bool {
        self.negotiated.offered & INIT_HAS_RESEND != 0
    }
}

/// A mount, ready to be kept by a helper process.
#[derive(Debug)]
pub struct Parked {
    /// What it was made with.
    pub terms: Terms,
    /// Descriptors of the connection, in the order of the queues; one if they share it.
    pub devices: Vec<OwnedFd>,
}

/// A mount that a live process hands over: it stands still, and every request that was read has its
/// reply.
#[derive(Debug)]
pub struct HandedMount {
    /// The mount, with the first descriptor of its connection only: no request is tied to any.
    pub parked: Parked,
    /// The file.
    pub file: FileState,
    /// The disk.
    pub disk: HandOver,
}

/// A mount to be taken over from a live process, which stands still.
#[derive(Debug)]
pub struct TakenMount {
    /// The mount; of the descriptors the first one counts.
    pub parked: Parked,
    /// The file.
    pub file: FileState,
}
