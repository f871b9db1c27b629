//! The location of the bytes of a disk, for transports that read or write the storage themselves.
//!
//! Promises: when all tables are in memory a look-up takes no lock, allocates nothing and never
//! waits. The answer holds as long as the [`View`] and the [`Mapped`] live: the disk does not
//! change, and a cluster that is freed meanwhile is not used again.

use ringdisk_qcow2::Bytes;
use std::sync::Arc;

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use crate::Disk;
use crate::graph::{Graces, Pass};
use crate::layer::{Kind, Node};

/// A request in flight. Changes of the disk wait until it is dropped, so hold it for the time of
/// one request only, and do not start another request of the disk on the same task meanwhile.
#[derive(Debug)]
pub struct View<'a> {
    graph: Pass<'a>,
    disk: &'a Disk,
}

/// A mapping, with the guards that keep it valid.
#[derive(Debug)]
pub struct Mapped<'a> {
    /// Location of the bytes.
    pub mapping: Mapping<'a>,
    _graces: Graces<'a>,
}

/// Location of the first bytes of a range.
#[derive(Clone, Copy, Debug)]
pub enum Mapping<'a> {
    /// Bytes of a storage. Beyond the end of the storage they read as zeroes.
    Data {
        /// The storage.
        storage: &'a Arc<Storage>,
        /// Offset in the storage, bytes.
        offset: u64,
        /// Length, bytes.
        len: Bytes,
    },
    /// Zeroes.
    Zero {
        /// Length, bytes.
        len: Bytes,
    },
    /// Bytes that only [`Disk::read`] can give: compressed, of a frozen disk, or a null disk's
    /// (where a read leaves the buffer alone, after the disk's latency).
    ReadOnly {
        /// Length, bytes.
        len: Bytes,
    },
    /// The range begins at or after the end of the disk.
    PastEnd,
}

impl Disk {
    /// Begins a request whose caller reads or writes the storage itself. Waits while the disk is
    /// being changed.
    pub async fn view(&self) -> View<'_> {
        View { graph: self.enter().await, disk: self }
    }
}

impl View<'_> {
    /// Maps the bytes from `offset` on.
    ///
    /// * `len`: how many bytes are of interest; the answer may be shorter.
    ///
    /// Errors: EIO for a damaged image, and those of the storage.
    pub async fn map(&self, ring: &Ring, offset: u64, len: Bytes) -> Result<Mapped<'_>, Errno> {
        let graph = &self.graph;
        graph.check()?;
        if self.disk.copies_on_read() {
            Box::pin(self.disk.keep_what_is_read(ring, graph, offset, len)).await;
        }
        let graces = graph.graces();
        let mapped = |mapping| Ok(Mapped { mapping, _graces: graces });
        let (offset, len) = graph.place(offset, len);
        if len.is_zero() {
            return mapped(Mapping::PastEnd);
        }
        if let Node::Frozen(frozen) = &graph.top().node {
            let piece = frozen.piece(ring, offset, len).await?;
            let len = piece.len;
            return mapped(match piece.zero {
                true => Mapping::Zero { len },
                false => Mapping::ReadOnly { len },
            });
        }
        let chain = graph.chain();
        let found = chain.locate(ring, offset, len).await?;
        let len = found.len;
        match found.kind {
            Kind::Data { offset } => {
                let storage = chain.layer(found.depth)?.data_storage().ok_or(Errno::IO)?;
                mapped(Mapping::Data { storage, offset: offset.0, len })
            }
            Kind::Zero { .. } if matches!(graph.top().node, Node::Null(_)) => {
                mapped(Mapping::ReadOnly { len })
            }
            Kind::Zero { .. } | Kind::Unallocated => mapped(Mapping::Zero { len }),
            Kind::Compressed(_) | Kind::Untouched => mapped(Mapping::ReadOnly { len }),
        }
    }
}
