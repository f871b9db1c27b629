//! Reference counts inside the bytes of a refcount block, for every width.
//!
//! Promises: pure arithmetic on the bytes as they are on disk. Source: qcow2 specification,
//! "Refcount blocks": big-endian integers of 1 to 64 bits; of widths below a byte, the first entry
//! lies in the lowest bits.

/// Width of the reference counts of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Width {
    /// log2 of the bits of a count: 0 to 6.
    order: u32,
}

/// Bytes that are compared together when a block is searched.
const CHUNK_BYTES: usize = 64;

impl Width {
    /// * `order`: 0 to 6, checked when the header was read.
    pub(super) fn new(order: u32) -> Width {
        debug_assert!(order <= 6);
        Width { order: order.min(6) }
    }

    /// Largest count.
    pub(super) fn max(self) -> u64 {
        u64::MAX >> (64 - (1u32 << self.order))
    }

    /// log2 of the counts in a block of `1 << cluster_bits` bytes.
    pub(super) fn block_bits(self, cluster_bits: u32) -> u32 {
        cluster_bits + 3 - self.order
    }

    /// Count number `index` of `bytes`.
    pub(super) fn get(self, bytes: &[u8], index: usize) -> u64 {
        match self.order {
            4 => u64::from(u16::from_be_bytes([bytes[2 * index], bytes[2 * index + 1]])),
            3 => u64::from(bytes[index]),
            5 => u64::from(u32::from_be_bytes(word(bytes, index))),
            6 => u64::from_be_bytes(word(bytes, index)),
            _ => {
                let (at, shift) = self.bits(index);
                u64::from(bytes[at] >> shift) & self.max()
            }
        }
    }

    /// Sets count number `index` of `bytes`. `value` is at most [`max`](Width::max).
    pub(super) fn set(self, bytes: &mut [u8], index: usize, value: u64) {
        debug_assert!(value <= self.max());
        let raw = value.to_be_bytes();
        match self.order {
            3..=6 => {
                let len = 1usize << (self.order - 3);
                bytes[index * len..(index + 1) * len].copy_from_slice(&raw[8 - len..]);
            }
            _ => {
                let (at, shift) = self.bits(index);
                // At most 15: the mask of a count below a byte.
                #[allow(clippy::cast_possible_truncation)]
                let mask = (self.max() as u8) << shift;
                bytes[at] = bytes[at] & !mask | (raw[7] << shift) & mask;
            }
        }
    }

    /// Byte and shift of a count below a byte.
    fn bits(self, index: usize) -> (usize, u32) {
        let per_byte_bits = 3 - self.order;
        let in_byte = index & ((1 << per_byte_bits) - 1);
        // Below 8.
        #[allow(clippy::cast_possible_truncation)]
        let shift = (in_byte as u32) << self.order;
        (index >> per_byte_bits, shift)
    }

    /// Bytes `[start, end)` that hold the counts `from..to`.
    pub(super) fn bytes_of(self, from: usize, to: usize) -> (usize, usize) {
        if self.order >= 3 {
            (from << (self.order - 3), to << (self.order - 3))
        } else {
            (from >> (3 - self.order), to.div_ceil(1 << (3 - self.order)))
        }
    }

    /// The first count in `from..to` that is 0, or `to`.
    pub(super) fn next_zero(self, bytes: &[u8], from: usize, to: usize) -> usize {
        let per_chunk = (CHUNK_BYTES * 8) >> self.order;
        let mut index = from;
        while index < to {
            if index.is_multiple_of(per_chunk) && index + per_chunk <= to {
                let at = index / per_chunk * CHUNK_BYTES;
                if self.all_used(&bytes[at..at + CHUNK_BYTES]) {
                    index += per_chunk;
                    continue;
                }
            }
            if self.get(bytes, index) == 0 {
                return index;
            }
            index += 1;
        }
        to
    }

    /// The first count in `from..to` that is not 0, or `to`.
    pub(super) fn next_used(self, bytes: &[u8], from: usize, to: usize) -> usize {
        let per_chunk = (CHUNK_BYTES * 8) >> self.order;
        let mut index = from;
        while index < to {
            if index.is_multiple_of(per_chunk) && index + per_chunk <= to {
                let at = index / per_chunk * CHUNK_BYTES;
                if bytes[at..at + CHUNK_BYTES].iter().fold(0, |all, byte| all | byte) == 0 {
                    index += per_chunk;
                    continue;
                }
            }
            if self.get(bytes, index) != 0 {
                return index;
            }
            index += 1;
        }
        to
    }

    /// Whether certainly no count of a chunk is 0; `false` does not mean the opposite. Written so
    /// that the usual width is compared many at a time.
    fn all_used(self, chunk: &[u8]) -> bool {
        match self.order {
            3 => chunk.iter().fold(true, |used, byte| used & (*byte != 0)),
            4 => {
                chunk.as_chunks::<2>().0.iter().fold(true, |used, count| used & (*count != [0; 2]))
            }
            _ => false,
        }
    }
}

/// Word number `index` of `bytes`.
fn word<const LEN: usize>(bytes: &[u8], index: usize) -> [u8; LEN] {
    let mut raw = [0; LEN];
    raw.copy_from_slice(&bytes[index * LEN..(index + 1) * LEN]);
    raw
}
