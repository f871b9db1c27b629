//! Finds zeroes in memory.
//!
//! Promises: pure.

use std::ops::Range;

use ringdisk_ring::IoBuf;

/// Bytes that are tested together: they stay in the first-level cache.
const BLOCK: usize = 4096;

static ZEROES: [u8; BLOCK] = [0; BLOCK];

/// A part of a buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) range: Range<usize>,
    pub(super) is_zero: bool,
}

/// Cuts a buffer into data and zeroes.
///
/// * `sparse`: shortest run of zeroes that counts, bytes; 0: no run counts. Runs are found in steps
///   of this size, at most 4 KiB.
/// * `parts`: is overwritten; in order, covers the buffer.
pub(super) fn scan(buf: &IoBuf, sparse: usize, parts: &mut Vec<Part>) {
    parts.clear();
    let len = buf.len();
    if sparse == 0 {
        parts.push(Part { range: 0..len, is_zero: false });
        return;
    }
    let step = sparse.min(BLOCK);
    let mut block = [0; BLOCK];
    let mut at = 0;
    while at < len {
        let end = len.min(at + step);
        let bytes = &mut block[..end - at];
        buf.copy_to_slice(at, bytes);
        push(parts, Part { range: at..end, is_zero: is_zero(bytes) }, sparse);
        at = end;
    }
}

/// Adds the next part; a run of zeroes that ends and is too short becomes data. (A run at the end
/// of the buffer may continue past it, so it stays.)
fn push(parts: &mut Vec<Part>, next: Part, sparse: usize) {
    if let Some(last) = parts.last()
        && last.is_zero
        && !next.is_zero
        && last.range.len() < sparse
    {
        let short = Part { is_zero: false, ..last.clone() };
        parts.pop();
        join(parts, short);
    }
    join(parts, next);
}

/// Adds the next part to the last one, if both are of one kind.
fn join(parts: &mut Vec<Part>, next: Part) {
    match parts.last_mut() {
        Some(last) if last.is_zero == next.is_zero => last.range.end = next.range.end,
        _ => parts.push(next),
    }
}

/// Whether all bytes are 0.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(BLOCK).all(|chunk| *chunk == ZEROES[..chunk.len()])
}
