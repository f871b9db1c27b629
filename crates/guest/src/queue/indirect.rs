//! Tables of descriptors in buffers of the guest (feature INDIRECT_DESC).
//!
//! Promises: each descriptor is copied once, as 16 bytes, and the copy is what is checked and used;
//! a table adds at most [`SEGMENTS_LIMIT`] segments.

use crate::layout::descriptor::{DESCRIPTOR_BYTES, Descriptor, INDIRECT, NEXT, WRITE};
use crate::memory::{RingMemory, View};

use super::broken::Broken;
use super::chain::{Chain, SEGMENTS_LIMIT};

/// [`DESCRIPTOR_BYTES`], in the type of the lengths of segments.
const DESCRIPTOR_LEN: u32 = 16;

/// A table in memory of the guest, all of which was there when it was looked up.
struct Table<'a> {
    view: &'a View,
    addr: u64,
    entries: u32,
    /// When it lies in one region, as good as always.
    window: Option<(&'a RingMemory, usize)>,
}

impl<'a> Table<'a> {
    fn new(view: &'a View, descriptor: &Descriptor) -> Result<Table<'a>, Broken> {
        let (addr, len) = (descriptor.addr, descriptor.len);
        if len == 0 || !(len as usize).is_multiple_of(DESCRIPTOR_BYTES) {
            return Err(Broken::IndirectLength { len });
        }
        let window = view.window(addr, len as usize);
        if window.is_none() && !view.contains(addr, len as usize) {
            return Err(Broken::Address { addr, len });
        }
        Ok(Table { view, addr, entries: len / DESCRIPTOR_LEN, window })
    }

    fn get(&self, index: u32) -> Result<[u8; DESCRIPTOR_BYTES], Broken> {
        let at = index as usize * DESCRIPTOR_BYTES;
        if let Some((area, start)) = self.window {
            return Ok(area.read_array(start + at));
        }
        let (addr, mut bytes) = (self.addr + at as u64, [0; DESCRIPTOR_BYTES]);
        match self.view.read(addr, &mut bytes) {
            true => Ok(bytes),
            false => Err(Broken::Address { addr, len: DESCRIPTOR_LEN }),
        }
    }
}

/// Adds the chain of a split ring's indirect table (virtio 1.3, 2.7.5.3).
pub(super) fn add_split(chain: &mut Chain, view: &View, of: &Descriptor) -> Result<(), Broken> {
    let table = Table::new(view, of)?;
    let limit = table.entries.min(SEGMENTS_LIMIT);
    let mut index = 0;
    for _ in 0..limit {
        let descriptor = Descriptor::split(table.get(index)?);
        if descriptor.has(INDIRECT) {
            return Err(Broken::IndirectNested);
        }
        chain.push(view, descriptor.addr, descriptor.len, descriptor.has(WRITE))?;
        if !descriptor.has(NEXT) {
            return Ok(());
        }
        index = u32::from(descriptor.other);
        if index >= table.entries {
            return Err(Broken::OutOfTable { index: descriptor.other, size: table.entries });
        }
    }
    Err(Broken::Loop { descriptors: limit })
}

/// Adds all descriptors of a packed ring's indirect table (virtio 1.3, 2.8.7).
pub(super) fn add_packed(chain: &mut Chain, view: &View, of: &Descriptor) -> Result<(), Broken> {
    let table = Table::new(view, of)?;
    if table.entries > SEGMENTS_LIMIT {
        return Err(Broken::Loop { descriptors: SEGMENTS_LIMIT });
    }
    for index in 0..table.entries {
        let descriptor = Descriptor::packed(table.get(index)?);
        if descriptor.has(INDIRECT) {
            return Err(Broken::IndirectNested);
        }
        chain.push(view, descriptor.addr, descriptor.len, descriptor.has(WRITE))?;
    }
    Ok(())
}
