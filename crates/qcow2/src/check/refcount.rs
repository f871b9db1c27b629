//! Reads and writes the counts in a refcount block of any width.
//!
//! Promises: pure; an index past the end of the block reads as 0 and is not written.
//!
//! Source: qcow2 specification, "Host cluster management": counts of less than 8 bits fill a byte
//! from the low bits up, wider ones are big-endian.

/// The count with this index. 0 past the end of `block`.
#[inline]
pub(super) fn get(block: &[u8], order: u32, index: usize) -> u64 {
    match order {
        4 => match block.as_chunks::<2>().0.get(index) {
            Some(raw) => u64::from(u16::from_be_bytes(*raw)),
            None => 0,
        },
        0..=2 => {
            let per_byte_bits = 3 - order;
            let byte = block.get(index >> per_byte_bits).copied().unwrap_or(0);
            let shift = (index & ((1 << per_byte_bits) - 1)) << order;
            u64::from(byte >> shift) & ((1 << (1u32 << order)) - 1)
        }
        3 => u64::from(block.get(index).copied().unwrap_or(0)),
        5 => match block.as_chunks::<4>().0.get(index) {
            Some(raw) => u64::from(u32::from_be_bytes(*raw)),
            None => 0,
        },
        _ => match block.as_chunks::<8>().0.get(index) {
            Some(raw) => u64::from_be_bytes(*raw),
            None => 0,
        },
    }
}

/// Sets the count with this index; `value` must fit the width. Nothing past the end of `block`.
pub(super) fn set(block: &mut [u8], order: u32, index: usize, value: u64) {
    // The width bounds the value, so the low bytes are all of it.
    let bytes = value.to_be_bytes();
    if order < 3 {
        let per_byte_bits = 3 - order;
        let shift = (index & ((1 << per_byte_bits) - 1)) << order;
        let mask = ((1u8 << (1u32 << order)) - 1) << shift;
        if let Some(byte) = block.get_mut(index >> per_byte_bits) {
            *byte = *byte & !mask | (bytes[7] << shift) & mask;
        }
        return;
    }
    let len = 1usize << (order - 3);
    if let Some(target) = block.get_mut(index * len..index * len + len) {
        target.copy_from_slice(&bytes[8 - len..]);
    }
}
