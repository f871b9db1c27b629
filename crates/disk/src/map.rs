//! Where the bytes of a disk are.
//!
//! Promises: a look-up loops over the layers, so the depth of a chain costs time but no stack; when
//! all tables are in memory it takes no lock, allocates nothing and never waits.
//!
//! A layer below that is shorter than the one above ends with zeroes: layers further down are not
//! asked beyond its end.

use std::sync::Arc;

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use crate::Disk;
use crate::layer::{Kind, Layer, Node, of_extent};

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

/// The answer of a chain for the start of a range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Index of the layer that answered.
    pub(crate) depth: usize,
    /// Length of the run, bytes; at least 1.
    pub(crate) len: u64,
    pub(crate) kind: Kind,
}

/// How far a look-up has come.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    depth: usize,
    offset: u64,
    len: u64,
}

/// One turn of a look-up.
enum Turn {
    Found(Found),
    /// The layer under the cursor has to load a table.
    Load,
}

impl Disk {
    /// Where the bytes from `offset` on are.
    ///
    /// * `len`: how many bytes are of interest; the answer may be shorter.
    ///
    /// Errors: EIO for a damaged image, and those of the storage.
    pub async fn map(&self, ring: &Ring, offset: u64, len: u64) -> Result<Mapping<'_>, Errno> {
        let len = len.min(self.size().saturating_sub(offset));
        if len == 0 {
            return Ok(Mapping::PastEnd);
        }
        let found = self.locate(ring, offset, len).await?;
        let len = found.len;
        match found.kind {
            Kind::Data { offset } => {
                let layer = self.layer(found.depth)?;
                let storage = layer.data_storage().ok_or(Errno::IO)?;
                Ok(Mapping::Data { storage, offset, len })
            }
            Kind::Zero { .. } if matches!(self.top().node, Node::Null(_)) => {
                Ok(Mapping::ReadOnly { len })
            }
            Kind::Zero { .. } | Kind::Unallocated => Ok(Mapping::Zero { len }),
            Kind::Compressed(_) | Kind::Untouched => Ok(Mapping::ReadOnly { len }),
        }
    }

    /// The layer at a depth that a look-up named.
    pub(crate) fn layer(&self, depth: usize) -> Result<&Layer, Errno> {
        self.layers().get(depth).ok_or(Errno::IO)
    }

    /// The chain's answer for the start of a range.
    ///
    /// * `len`: at least 1; the range lies inside the disk.
    pub(crate) async fn locate(&self, ring: &Ring, offset: u64, len: u64) -> Result<Found, Errno> {
        let mut cursor = Cursor::new(offset, len);
        loop {
            match self.walk(&mut cursor)? {
                Turn::Found(found) => return Ok(found),
                Turn::Load => {
                    let Node::Qcow2(image) = &self.layer(cursor.depth)?.node else {
                        return Err(Errno::IO);
                    };
                    let extent = image.map(ring, cursor.offset, cursor.len).await?;
                    let (len, kind) = of_extent(extent);
                    if let Some(found) = self.take(&mut cursor, len, kind)? {
                        return Ok(found);
                    }
                }
            }
        }
    }

    /// As [`Disk::locate`], `None` when a table has to be loaded first.
    pub(crate) fn locate_cached(&self, offset: u64, len: u64) -> Result<Option<Found>, Errno> {
        let mut cursor = Cursor::new(offset, len);
        match self.walk(&mut cursor)? {
            Turn::Found(found) => Ok(Some(found)),
            Turn::Load => Ok(None),
        }
    }

    /// Goes down the chain while the tables are in memory.
    fn walk(&self, cursor: &mut Cursor) -> Result<Turn, Errno> {
        loop {
            let layer = self.layer(cursor.depth)?;
            let Some((len, kind)) = layer.look(cursor.offset, cursor.len)? else {
                return Ok(Turn::Load);
            };
            if let Some(found) = self.take(cursor, len, kind)? {
                return Ok(Turn::Found(found));
            }
        }
    }

    /// Takes the answer of the layer under the cursor: it ends the look-up, or the cursor moves to
    /// the layer below.
    fn take(&self, cursor: &mut Cursor, len: u64, kind: Kind) -> Result<Option<Found>, Errno> {
        // An empty run would never end; a damaged image must not get us there.
        if len == 0 {
            return Err(Errno::IO);
        }
        cursor.len = cursor.len.min(len);
        if matches!(kind, Kind::Unallocated)
            && let Some(below) = self.layers().get(cursor.depth + 1)
        {
            let left = below.size().saturating_sub(cursor.offset);
            if left > 0 {
                cursor.len = cursor.len.min(left);
                cursor.depth += 1;
                return Ok(None);
            }
        }
        Ok(Some(Found { depth: cursor.depth, len: cursor.len, kind }))
    }
}

impl Cursor {
    fn new(offset: u64, len: u64) -> Cursor {
        Cursor { depth: 0, offset, len }
    }
}
