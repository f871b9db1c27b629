//! The open image: look-ups and writes, while any number of requests run.
//!
//! Promises:
//! - Only requests that change the mapping of the same guest cluster wait for one another
//!   ([`registry`](crate::concurrent::registry)); a write to space that is already there waits for
//!   nothing and takes no lock.
//! - Nothing is linked on stable storage before what it links is ([`checkpoint`]); nothing is used
//!   again while a request can refer to it ([`unlinked`](crate::concurrent::unlinked),
//!   [`grace`](crate::concurrent::grace)).
//! - A write is answered when its data is written and its mapping is changed in memory; a flush
//!   makes all that was answered before it durable, with two barriers for any number of changes.
//!
//! `docs/qcow2.md` describes the order of all steps.

pub(crate) mod action;
pub(crate) mod below;
mod checkpoint;
mod copy;
mod data_write;
mod decompress;
mod fault;
mod fill;
mod group;
mod grow_ahead;
mod guard;
mod image;
mod map;
mod metadata;
mod pack;
mod reclaim;
mod scratch;
mod space;
mod start;
mod tables;
#[cfg(test)]
mod tests;
mod write;
mod zero;

use std::collections::BTreeSet;

use ringdisk_storage::Storage;
use rustix::io::Errno;

use crate::bitmaps::Recording;
use crate::concurrent::grace::Graces;
use crate::concurrent::registry::Registry;
use crate::concurrent::unlinked::UnlinkedClusters;
use crate::header::HeaderImage;
use crate::refcounts::{Marks, Refcounts};
use crate::sync::{Arc, AtomicBool, AtomicU64, Mutex};
use crate::units::HostCluster;

use checkpoint::Checkpoints;
use fault::Fault;
use grow_ahead::Ahead;
use metadata::Orphans;
use pack::Packer;

pub use checkpoint::WriteBack;
pub(crate) use group::grows_with_zeroes;
pub use image::{CacheCounters, Discard, OpenOptions, Qcow2};

/// What a writable image has beside what every image has.
pub(crate) struct Engine {
    /// Requests that may use a mapping.
    pub(crate) graces: Graces,
    /// Guest clusters whose mapping is being changed.
    clusters: Registry,
    /// L1 entries whose table is being made.
    tables: Registry,
    /// Refcount blocks that are being loaded.
    blocks: Registry,
    /// Held while a refcount block is made.
    growth: Registry,
    /// Reference counts and free space.
    pub(crate) refcounts: Mutex<Refcounts>,
    /// Its marks of metadata: asked without its lock before data is written in place.
    marks: Arc<Marks>,
    /// Clusters that are not free yet.
    pub(crate) unlinked: UnlinkedClusters,
    /// Number of times that clusters became free.
    times_freed: AtomicU64,
    /// L1 entries that differ from the image.
    l1_dirty: Mutex<BTreeSet<usize>>,
    /// The header as it is in the image.
    pub(crate) header: Mutex<HeaderImage>,
    /// Held while the header is written.
    header_write: Registry,
    checkpoints: Checkpoints,
    /// Metadata writes in flight whose requests were dropped.
    orphans: Orphans,
    fault: Fault,
    /// The first change of the image is prepared.
    pub(crate) started: AtomicBool,
    pub(crate) start: Registry,
    /// Bitmaps that record writes.
    pub(crate) recording: Recording,
    packer: Packer,
    ahead: Ahead,
    /// Clusters of requests that were dropped in the middle: their I/O may still be under way.
    abandoned: Mutex<Vec<(HostCluster, u64)>>,
    /// A request was dropped while its write was under way, so nothing is freed any more.
    write_abandoned: AtomicBool,
    pub(crate) options: EngineOptions,
    /// Metadata that lies on other metadata, as the open found it.
    pub(crate) overlap: Option<String>,
    pub(crate) closed: AtomicBool,
    /// A close has saved the bitmaps and did not get to its end.
    pub(crate) half_closed: AtomicBool,
    /// A write of the header failed, and so did the write of the old one: either may be on the
    /// storage.
    pub(crate) header_unknown: AtomicBool,
    /// Allocations so far.
    pub(crate) allocations: AtomicU64,
    /// Changes of the mapping in memory so far; counted under the lock of what is changed, before
    /// it is.
    changed: AtomicU64,
    /// So many of them are on stable storage.
    settled: AtomicU64,
}

/// What the user chose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineOptions {
    pub(crate) discard: Discard,
    /// Discarded clusters keep their place in the image file.
    pub(crate) discard_no_unref: bool,
    /// Reference counts are written at the end only; the dirty bit is set meanwhile.
    pub(crate) lazy_refcounts: bool,
}

impl Engine {
    pub(crate) fn new(
        file: &Storage,
        refcounts: Refcounts,
        header: HeaderImage,
        recording: Recording,
        options: EngineOptions,
        overlap: Option<String>,
    ) -> Engine {
        Engine {
            graces: Graces::new(),
            clusters: Registry::new(),
            tables: Registry::new(),
            blocks: Registry::new(),
            growth: Registry::new(),
            marks: refcounts.marks(),
            refcounts: Mutex::new(refcounts),
            unlinked: UnlinkedClusters::default(),
            times_freed: AtomicU64::new(0),
            l1_dirty: Mutex::new(BTreeSet::new()),
            header: Mutex::new(header),
            header_write: Registry::new(),
            checkpoints: Checkpoints::new(),
            orphans: Orphans::default(),
            fault: Fault::default(),
            started: AtomicBool::new(false),
            start: Registry::new(),
            recording,
            packer: Packer::new(),
            ahead: Ahead::new(file),
            abandoned: Mutex::new(Vec::new()),
            write_abandoned: AtomicBool::new(false),
            options,
            overlap,
            closed: AtomicBool::new(false),
            half_closed: AtomicBool::new(false),
            header_unknown: AtomicBool::new(false),
            allocations: AtomicU64::new(0),
            changed: AtomicU64::new(0),
            settled: AtomicU64::new(0),
        }
    }
}

impl Engine {
    /// Whether it is unknown which of two headers is on the storage.
    pub(crate) fn header_is_unknown(&self) -> bool {
        self.header_unknown.load(crate::sync::Ordering::Acquire)
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Qcow2 {
    /// The engine. Errors: `EROFS` when the image is open for reading only.
    pub(crate) fn engine(&self) -> Result<&Engine, Errno> {
        self.engine.as_deref().ok_or(Errno::ROFS)
    }
}
