//! Bytes that say where they belong.
//!
//! Promises: pure; equal stamps mean the same operation on the same sector of the same disk, below
//! 2^48 of each.

/// Bytes of a sector: what a medium writes in one piece.
pub const SECTOR: u64 = 512;
/// Bytes of a stamp, repeated all over its sector.
const UNIT: usize = 16;
const MAGIC: [u8; 2] = *b"Rd";

/// Which write of which sector of which disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Number of the disk in the test.
    pub disk: u16,
    /// Sector of the disk, in units of 512 bytes.
    pub sector: u64,
    /// Number of the operation; 0: what was there first.
    pub number: u64,
}

impl Stamp {
    fn unit(&self) -> [u8; UNIT] {
        let mut unit = [0; UNIT];
        unit[..2].copy_from_slice(&MAGIC);
        unit[2..4].copy_from_slice(&self.disk.to_le_bytes());
        // Test disks have fewer than 2^48 sectors and operations.
        unit[4..10].copy_from_slice(&self.sector.to_le_bytes()[..6]);
        unit[10..].copy_from_slice(&self.number.to_le_bytes()[..6]);
        unit
    }

    /// The byte at this place of the sector.
    pub(super) fn byte(&self, at: u16) -> u8 {
        self.unit()[usize::from(at) % UNIT]
    }

    /// Whether `bytes`, a whole sector, carry this stamp.
    pub(super) fn is_all_of(&self, bytes: &[u8]) -> bool {
        let unit = self.unit();
        bytes.chunks(UNIT).all(|chunk| chunk == &unit[..chunk.len()])
    }

    /// The stamp of the 16 bytes at the start of a unit.
    pub(super) fn of(bytes: &[u8]) -> Option<Stamp> {
        let unit: &[u8; UNIT] = bytes.first_chunk()?;
        let six = |at: usize| (0..6).rev().fold(0, |n, i| n << 8 | u64::from(unit[at + i]));
        (unit[..2] == MAGIC).then(|| Stamp {
            disk: u16::from_le_bytes([unit[2], unit[3]]),
            sector: six(4),
            number: six(10),
        })
    }
}

/// Fills `bytes`, which begin at byte `offset` of a disk, with the stamps of operation `number`.
pub fn fill(bytes: &mut [u8], offset: u64, disk: u16, number: u64) {
    let mut at = offset;
    let mut rest = bytes;
    while !rest.is_empty() {
        let inside = usize::try_from(at % SECTOR).unwrap_or(0);
        let len = rest.len().min(512 - inside);
        let (piece, next) = rest.split_at_mut(len);
        let unit = Stamp { disk, sector: at / SECTOR, number }.unit();
        for (place, byte) in piece.iter_mut().enumerate() {
            *byte = unit[(inside + place) % UNIT];
        }
        at += len as u64;
        rest = next;
    }
}
