//! Comparing what is there with what may be there.
//!
//! Promises: compares, and changes nothing of what is known. A difference names the sector and what
//! it might have held.

use std::fmt::{self, Display, Formatter, Write};

use super::stamp::{SECTOR, Stamp};
use super::{Begun, Oracle, Version};

/// A sector that holds what it cannot hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Its number.
    pub sector: u64,
    /// What is there and what may be there.
    pub what: String,
}

impl Display for Mismatch {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (sector, offset) = (self.sector, self.sector * SECTOR);
        write!(f, "sector {sector} (byte {offset:#x}): {}", self.what)
    }
}

/// When the bytes were looked at.
#[derive(Clone, Copy)]
enum When {
    /// By a read that began then.
    Read(u64),
    /// After a power cut.
    Crash,
}

impl When {
    /// Whether `new` is sure to be seen in place of everything it hides.
    fn is_sure(self, new: &Version) -> bool {
        match self {
            When::Crash => new.durable,
            When::Read(begin) => new.acknowledged && new.end.is_some_and(|end| end <= begin),
        }
    }
}

impl Oracle {
    /// A read ended with these bytes.
    pub fn end_read(&mut self, begun: &Begun, bytes: &[u8]) -> Result<(), Mismatch> {
        self.forget_read(begun);
        self.compare(begun.range.start, bytes, When::Read(begun.begin))
    }

    /// A read ended with an error.
    pub fn forget_read(&mut self, begun: &Begun) {
        if let Some(count) = self.reads.get_mut(&begun.begin) {
            *count -= 1;
            if *count == 0 {
                self.reads.remove(&begun.begin);
            }
        }
    }

    /// Compares bytes at `offset`, a multiple of 512, of a disk that lost power now.
    pub fn after_crash(&self, offset: u64, bytes: &[u8]) -> Result<(), Mismatch> {
        self.compare(offset, bytes, When::Crash)
    }

    /// Reads everything that was touched from a disk that lost power now.
    ///
    /// * `read`: fills the bytes at an offset.
    pub fn judge_crash(
        &self,
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), String>,
    ) -> Result<(), Mismatch> {
        const PIECE: u64 = 64 << 10;
        let mut buffer = vec![0; usize::try_from(PIECE).unwrap_or(0)];
        for range in self.touched() {
            let mut at = range.start;
            while at < range.end {
                let len = usize::try_from(PIECE.min(range.end - at)).unwrap_or(0);
                let bytes = &mut buffer[..len];
                read(at, bytes).map_err(|what| Mismatch { sector: at / SECTOR, what })?;
                self.after_crash(at, bytes)?;
                at += len as u64;
            }
        }
        Ok(())
    }

    fn compare(&self, offset: u64, bytes: &[u8], when: When) -> Result<(), Mismatch> {
        let mut at = offset;
        let mut rest = bytes;
        while !rest.is_empty() {
            let inside = usize::try_from(at % SECTOR).unwrap_or(0);
            let (piece, next) = rest.split_at(rest.len().min(512 - inside));
            self.sector(at / SECTOR, inside, piece, when)?;
            at += piece.len() as u64;
            rest = next;
        }
        Ok(())
    }

    /// `piece`: bytes of the sector from `inside` on.
    fn sector(&self, sector: u64, inside: usize, piece: &[u8], when: When) -> Result<(), Mismatch> {
        let Some(versions) = self.sectors.get(&sector) else {
            let mut expected = [0; 512];
            self.below.fill(sector * SECTOR, &mut expected);
            if &expected[inside..inside + piece.len()] == piece {
                return Ok(());
            }
            return Err(mismatch(sector, inside, piece, "what was there first"));
        };
        // A read through the page cache beside a write to the same sector may see part of it.
        let is_torn = |version: &Version| match when {
            When::Read(begin) => version.end.is_none_or(|end| end > begin),
            When::Crash => false,
        };
        let whole = versions.iter().all(|v| v.part == (0..512)) && !versions.iter().any(is_torn);
        let good = if whole && piece.len() == 512 {
            versions.iter().any(|v| content_is(v, piece) && possible(v, versions, when, None))
        } else {
            (inside..).zip(piece).all(|(at, byte)| {
                let at = u16::try_from(at).unwrap_or(0);
                versions.iter().any(|v| {
                    let same = v.part.contains(&at) && byte_of(v, at) == *byte;
                    same && possible(v, versions, when, Some(at))
                })
            })
        };
        if good {
            return Ok(());
        }
        let mut may = String::new();
        for version in versions {
            let possible = possible(version, versions, when, None);
            let _ = write!(may, "\n    {}{version:?}", if possible { "" } else { "(gone) " });
        }
        Err(mismatch(sector, inside, piece, &may))
    }
}

/// Whether a version, or its byte at one place, can still be seen.
fn possible(old: &Version, versions: &[Version], when: When, at: Option<u16>) -> bool {
    !versions.iter().any(|new| {
        let there = at.map_or(new.covers(old), |at| new.part.contains(&at));
        there && new.hides(old) && when.is_sure(new) && new.number != old.number
    })
}

fn content_is(version: &Version, bytes: &[u8]) -> bool {
    match version.stamp {
        Some(stamp) => stamp.is_all_of(bytes),
        None => bytes.iter().all(|&byte| byte == 0),
    }
}

fn byte_of(version: &Version, at: u16) -> u8 {
    version.stamp.map_or(0, |stamp| stamp.byte(at))
}

fn mismatch(sector: u64, inside: usize, piece: &[u8], may: &str) -> Mismatch {
    let mut found = Vec::new();
    let first_unit = inside.next_multiple_of(16) - inside;
    for unit in piece.get(first_unit..).unwrap_or_default().chunks_exact(16) {
        let text = match Stamp::of(unit) {
            Some(stamp) if stamp.sector == sector => format!("{stamp:?}"),
            Some(stamp) => format!("FOREIGN {stamp:?}"),
            None if unit.iter().all(|&byte| byte == 0) => "zeroes".to_owned(),
            None => format!("bytes {unit:02x?}"),
        };
        if found.last() != Some(&text) {
            found.push(text);
        }
    }
    found.truncate(6);
    Mismatch { sector, what: format!("holds {found:?}; it may hold {may}") }
}
