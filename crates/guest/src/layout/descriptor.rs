//! A descriptor of a virtqueue, in both layouts.
//!
//! Promises: pure; a descriptor is decoded from a copy of its 16 bytes, and the copy is what is
//! checked and used.

/// Bytes of a descriptor.
pub(crate) const DESCRIPTOR_BYTES: usize = 16;
/// The chain goes on in the next descriptor.
pub(crate) const NEXT: u16 = 1;
/// The device writes the segment.
pub(crate) const WRITE: u16 = 2;
/// The segment is a table of descriptors.
pub(crate) const INDIRECT: u16 = 4;

/// A descriptor as it was copied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descriptor {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    /// Split rings: the next descriptor. Packed rings: the buffer's id.
    pub(crate) other: u16,
}

impl Descriptor {
    /// virtio 1.3, 2.7.5: addr, len, flags, next.
    pub(crate) fn split(bytes: [u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let (addr, len, third, fourth) = fields(bytes);
        Descriptor { addr, len, flags: third, other: fourth }
    }

    /// virtio 1.3, 2.8.13: addr, len, id, flags.
    pub(crate) fn packed(bytes: [u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let (addr, len, third, fourth) = fields(bytes);
        Descriptor { addr, len, flags: fourth, other: third }
    }

    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

fn fields(bytes: [u8; DESCRIPTOR_BYTES]) -> (u64, u32, u16, u16) {
    let all = u128::from_le_bytes(bytes);
    #[allow(clippy::cast_possible_truncation, reason = "the fields, cut out of the whole")]
    (all as u64, (all >> 64) as u32, (all >> 96) as u16, (all >> 112) as u16)
}
