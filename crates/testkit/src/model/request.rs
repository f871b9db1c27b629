//! Requests of virtio-blk, and how they are cut into segments.
//!
//! Promises: plain values; equal seeds cut equally.

use crate::sim::Prng;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[expect(missing_docs, reason = "the names are those of the specification")]
pub enum Kind {
    Read = 0,
    Write = 1,
    Flush = 4,
    GetId = 8,
    Discard = 11,
    WriteZeroes = 13,
    SecureErase = 14,
    Unknown = 77,
}

/// Where a request is cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Header, data, status.
    Plain,
    /// Data in so many pieces, header and status by themselves, as drivers do.
    Pieces(usize),
    /// Anywhere, header and status too: into at most so many segments, at addresses of any
    /// alignment.
    Anywhere(usize),
}

/// A request.
#[derive(Clone, Debug)]
pub struct Request {
    /// What it does.
    pub kind: Kind,
    /// Where, in units of 512 bytes.
    pub sector: u64,
    /// Bytes behind the header.
    pub out: Vec<u8>,
    /// Bytes to read, without the status.
    pub room: usize,
    /// Segments.
    pub cut: Cut,
    /// Where there is a choice, an indirect table.
    pub indirect: bool,
}

impl Request {
    fn new(kind: Kind, sector: u64, out: Vec<u8>, room: usize) -> Request {
        Request { kind, sector, out, room, cut: Cut::Plain, indirect: false }
    }

    /// Reads `len` bytes.
    #[must_use]
    pub fn read(sector: u64, len: usize) -> Request {
        Request::new(Kind::Read, sector, Vec::new(), len)
    }

    /// Writes bytes.
    #[must_use]
    pub fn write(sector: u64, bytes: Vec<u8>) -> Request {
        Request::new(Kind::Write, sector, bytes, 0)
    }

    /// Makes what was written durable.
    #[must_use]
    pub fn flush() -> Request {
        Request::new(Kind::Flush, 0, Vec::new(), 0)
    }

    /// Reads the serial number.
    #[must_use]
    pub fn get_id(room: usize) -> Request {
        Request::new(Kind::GetId, 0, Vec::new(), room)
    }

    /// Discards or zeroes ranges: see [`range`].
    #[must_use]
    pub fn ranges(kind: Kind, ranges: &[[u8; 16]]) -> Request {
        Request::new(kind, 0, ranges.concat(), 0)
    }

    /// With segments cut so.
    #[must_use]
    pub fn cut(self, cut: Cut) -> Request {
        Request { cut, ..self }
    }

    /// In an indirect table.
    #[must_use]
    pub fn indirect(self) -> Request {
        Request { indirect: true, ..self }
    }

    /// The header and what follows.
    pub(super) fn readable(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(16 + self.out.len());
        bytes.extend((self.kind as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.sector.to_le_bytes());
        bytes.extend(&self.out);
        bytes
    }

    /// Lengths of the segments to read, and of those to write; none is 0.
    pub(super) fn segments(&self, prng: &mut Prng) -> (Vec<usize>, Vec<usize>) {
        let (out, room) = (self.out.len(), self.room);
        let even = |len: usize, pieces: usize| -> Vec<usize> {
            let step = len.div_ceil(pieces.max(1)).max(1);
            (0..len).step_by(step).map(|at| step.min(len - at)).collect()
        };
        match self.cut {
            Cut::Plain | Cut::Pieces(_) => {
                let pieces = if let Cut::Pieces(pieces) = self.cut { pieces } else { 1 };
                let mut readable = vec![16];
                readable.extend(even(out, pieces));
                let mut writable = even(room, pieces);
                writable.push(1);
                (readable, writable)
            }
            Cut::Anywhere(most) => {
                let halves = (most / 2).max(1);
                (random(prng, 16 + out, halves), random(prng, room + 1, halves))
            }
        }
    }
}

/// Cuts `len` bytes into 1 to `most` pieces.
fn random(prng: &mut Prng, len: usize, most: usize) -> Vec<usize> {
    let pieces = 1 + prng.below(most as u64);
    let mut cuts: Vec<usize> =
        (1..pieces).map(|_| usize::try_from(prng.below(len as u64)).expect("64 bits")).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// A range of a discard or of a request to write zeroes.
///
/// * `flags`: 1: the space may be given back.
#[must_use]
pub fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}
