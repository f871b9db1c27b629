//! A backing chain: look-up, reading and block status in a stack of layers.
//!
//! Promises: a look-up loops over the layers, so the depth of a chain costs time but no stack; when
//! all tables are in memory it takes no lock, allocates nothing and never waits.
//!
//! A layer below that is shorter than the one above ends with zeroes: layers further down are not
//! asked beyond its end.

mod below;
mod read;
mod status;

use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};

use crate::layer::{Kind, Layer, Node, of_extent};

pub use read::PIECES_MAX;
pub use status::BlockStatus;

/// Layers on top of each other, top first; may be empty, which reads as zeroes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chain<'a>(pub(crate) &'a [Arc<Layer>]);

/// The answer of a chain for the start of a range.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    /// Index of the layer that answered.
    pub(crate) depth: usize,
    /// Length of the run, bytes; at least 1.
    pub(crate) len: Bytes,
    /// `Unallocated`: no layer has it. With `is_cut` that is final, else a layer below the chain
    /// may.
    pub(crate) kind: Kind,
    /// A shorter layer hides what is below it: the run reads as zeroes.
    pub(crate) is_cut: bool,
}

/// Position of a look-up.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    depth: usize,
    offset: GuestOffset,
    len: Bytes,
}

/// One step of a look-up.
enum Step {
    Found(Found),
    /// The layer under the cursor has to load a table.
    Load,
}

impl<'a> Chain<'a> {
    /// Size of the top layer, bytes; 0 without one.
    pub(crate) fn size(self) -> Bytes {
        self.0.first().map_or(Bytes::ZERO, |top| top.size())
    }

    /// The end of the top layer.
    pub(crate) fn end(self) -> GuestOffset {
        GuestOffset::after(self.size())
    }

    /// The layer at a depth that a look-up named.
    pub(crate) fn layer(self, depth: usize) -> Result<&'a Layer, Errno> {
        self.0.get(depth).map(|layer| &**layer).ok_or(Errno::IO)
    }

    /// The answer for the start of a range.
    ///
    /// * `len`: at least 1; the range lies inside the top layer.
    pub(crate) async fn locate(
        self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Found, Errno> {
        let mut cursor = Cursor::new(offset, len);
        loop {
            match self.walk(&mut cursor)? {
                Step::Found(found) => return Ok(found),
                Step::Load => {
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

    /// As [`Chain::locate`], `None` when a table has to be loaded first.
    pub(crate) fn locate_cached(
        self,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<Option<Found>, Errno> {
        let mut cursor = Cursor::new(offset, len);
        match self.walk(&mut cursor)? {
            Step::Found(found) => Ok(Some(found)),
            Step::Load => Ok(None),
        }
    }

    /// Goes down the chain while the tables are in memory.
    fn walk(self, cursor: &mut Cursor) -> Result<Step, Errno> {
        loop {
            let layer = self.layer(cursor.depth)?;
            let Some((len, kind)) = layer.look(cursor.offset, cursor.len)? else {
                return Ok(Step::Load);
            };
            if let Some(found) = self.take(cursor, len, kind)? {
                return Ok(Step::Found(found));
            }
        }
    }

    /// Takes the answer of the layer under the cursor: it ends the look-up, or the cursor moves to
    /// the layer below.
    fn take(self, cursor: &mut Cursor, len: Bytes, kind: Kind) -> Result<Option<Found>, Errno> {
        // An empty run would never end; a damaged image must not get us there.
        if len.is_zero() {
            return Err(Errno::IO);
        }
        cursor.len = cursor.len.min(len);
        let mut is_cut = false;
        if matches!(kind, Kind::Unallocated)
            && let Some(below) = self.0.get(cursor.depth + 1)
        {
            let left = below.end().saturating_sub(cursor.offset);
            if !left.is_zero() {
                cursor.len = cursor.len.min(left);
                cursor.depth += 1;
                return Ok(None);
            }
            is_cut = true;
        }
        Ok(Some(Found { depth: cursor.depth, len: cursor.len, kind, is_cut }))
    }
}

impl Cursor {
    fn new(offset: GuestOffset, len: Bytes) -> Cursor {
        Cursor { depth: 0, offset, len }
    }
}
