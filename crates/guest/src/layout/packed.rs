//! The ring of a packed virtqueue (virtio 1.3, 2.8): offsets, flags and positions.
//!
//! Promises: pure numbers.

use super::descriptor::DESCRIPTOR_BYTES;
use super::event::PACKED_WRAP;

/// An event suppression structure: `off_wrap` and `flags`.
pub(crate) const EVENT_BYTES: usize = 4;
/// Of a descriptor's flags: the driver's lap when it was made available.
pub(crate) const AVAIL: u16 = 1 << 7;
/// The device's lap when it was used; as the driver's before.
pub(crate) const USED: u16 = 1 << 15;
/// Where length, id and flags are in a descriptor.
pub(crate) const LEN_AT: usize = 8;
pub(crate) const ID_AT: usize = 12;
pub(crate) const FLAGS_AT: usize = 14;
/// No entry.
pub(crate) const NONE: u16 = u16::MAX;

/// A place in the ring, and the lap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Place {
    /// `count` places on; at most `size`.
    pub(crate) fn plus(self, count: u16, size: u16) -> Place {
        let index = u32::from(self.index) + u32::from(count);
        match index.checked_sub(u32::from(size)) {
            // Both are less than `size`, which is 16 bits.
            Some(index) => Place { index: u16::try_from(index).unwrap_or(0), wrap: !self.wrap },
            None => Place { index: u16::try_from(index).unwrap_or(0), wrap: self.wrap },
        }
    }

    /// As in a base of the vhost-user protocol.
    pub(crate) fn bits(self) -> u16 {
        self.index | if self.wrap { PACKED_WRAP } else { 0 }
    }

    pub(crate) fn from_bits(bits: u16) -> Place {
        Place { index: bits & !PACKED_WRAP, wrap: bits & PACKED_WRAP != 0 }
    }

    /// Flags of a descriptor that the driver made available in this lap.
    pub(crate) fn is_available(self, flags: u16) -> bool {
        (flags & AVAIL != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }

    /// Flags of one that the device used in this lap.
    pub(crate) fn is_used(self, flags: u16) -> bool {
        (flags & AVAIL != 0) == self.wrap && (flags & USED != 0) == self.wrap
    }

    pub(crate) fn at(self) -> usize {
        usize::from(self.index) * DESCRIPTOR_BYTES
    }
}
