//! Where the bytes of a disk are, for those who move them themselves.
//!
//! Promises: when all tables are in memory a look-up takes no lock, allocates nothing and never
//! waits. What it says holds as long as the [`View`] and the [`Mapped`] live: no change of the disk
//! comes in between, and no cluster that was given up meanwhile is used for something else.

use std::sync::Arc;

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use crate::Disk;
use crate::graph::{Graces, Pass};
use crate::layer::{Kind, Node};

/// A request in flight. Changes of the disk wait until it is dropped, so it is held for the time of
/// one request; and who holds one must not ask the disk for anything else.
#[derive(Debug)]
pub struct View<'a>(Pass<'a>);

/// A mapping, and what keeps it true.
#[derive(Debug)]
pub struct Mapped<'a> {
    /// Where the bytes are.
    pub mapping: Mapping<'a>,
    _graces: Graces<'a>,
}

/// Where the first bytes of a range are.
#[derive(Clone, Copy, Debug)]
pub enum Mapping<'a> {
    /// Bytes of a storage. Beyond the end of the storage they read as zeroes.
    Data {
        /// The storage.
        storage: &'a Arc<Storage>,
        /// Where in the storage, bytes.
        offset: u64,
        /// How many, bytes.
        len: u64,
    },
    /// Zeroes.
    Zero {
        /// How many, bytes.
        len: u64,
    },
    /// Bytes that only [`Disk::read`] can make: compressed, or a null disk's (where a read leaves
    /// the buffer alone, after the disk's latency).
    ReadOnly {
        /// How many, bytes.
        len: u64,
    },
    /// The range begins at or after the end of the disk.
    PastEnd,
}

impl Disk {
    /// Begins a request that maps and moves the bytes itself. Waits while the disk is being
    /// changed.
    pub async fn view(&self) -> View<'_> {
        View(self.enter().await)
    }
}

impl View<'_> {
    /// Where the bytes from `offset` on are.
    ///
    /// * `len`: how many bytes are of interest; the answer may be shorter.
    ///
    /// Errors: EIO for a damaged image, and those of the storage.
    pub async fn map(&self, ring: &Ring, offset: u64, len: u64) -> Result<Mapped<'_>, Errno> {
        let graph = &self.0;
        graph.check()?;
        let graces = graph.graces();
        let mapped = |mapping| Ok(Mapped { mapping, _graces: graces });
        let (offset, len) = graph.place(offset, len);
        if len == 0 {
            return mapped(Mapping::PastEnd);
        }
        let chain = graph.chain();
        let found = chain.locate(ring, offset, len).await?;
        let len = found.len;
        match found.kind {
            Kind::Data { offset } => {
                let storage = chain.layer(found.depth)?.data_storage().ok_or(Errno::IO)?;
                mapped(Mapping::Data { storage, offset, len })
            }
            Kind::Zero { .. } if matches!(graph.top().node, Node::Null(_)) => {
                mapped(Mapping::ReadOnly { len })
            }
            Kind::Zero { .. } | Kind::Unallocated => mapped(Mapping::Zero { len }),
            Kind::Compressed(_) | Kind::Untouched => mapped(Mapping::ReadOnly { len }),
        }
    }
}
