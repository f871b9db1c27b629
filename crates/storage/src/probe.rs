//! Finds the alignment that O_DIRECT needs on a file.
//!
//! Promises: the alignment was verified by a read. `statx(STATX_DIOALIGN)` answers on most local
//! file systems since Linux 6.1, block devices name their logical block size; either answer is
//! verified by a read with exactly that alignment. Without an answer, reads of growing alignment
//! are tried. A read that works at *any* alignment proves nothing (holes and some network file
//! systems accept every read and then refuse writes), so then a page is assumed, which the
//! strictest file systems accept.
//!
//! Called when storage is opened, on the control thread; blocks for a read or two.

use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, Stat, StatxFlags};
use rustix::io::Errno;

use crate::kinds::{Kind, Limits};

/// What suffices on every file system and device seen so far when nothing better is known.
const SAFE_ALIGN: u32 = 4096;
/// The largest alignment tried: logical blocks above a page exist since Linux 6.15 (up to 64 KiB).
const ALIGN_MAX: u32 = 65536;
/// Alignments tried in turn, powers of two from a sector.
const CANDIDATES: [u32; 8] = [512, 1024, 2048, 4096, 8192, 16384, 32768, ALIGN_MAX];
/// Bounds of `optimal_transfer`, since file systems report anything from 512 bytes to many MiB.
const TRANSFER_MIN: u32 = 4096;
const TRANSFER_MAX: u32 = 1 << 20;

/// The limits of an open file. `direct` says whether O_DIRECT is set on it.
///
/// Errors: `EINVAL` when O_DIRECT does not work on it at all.
pub(crate) fn limits(
    fd: BorrowedFd<'_>,
    kind: Kind,
    stat: &Stat,
    direct: bool,
) -> Result<Limits, Errno> {
    let sector = match kind {
        Kind::BlockDevice => rustix::fs::ioctl_blksszget(fd).ok().filter(|s| s.is_power_of_two()),
        _ => None,
    };
    let transfer = match kind {
        Kind::BlockDevice => rustix::fs::ioctl_blkpbszget(fd).unwrap_or(TRANSFER_MIN),
        _ => u32::try_from(stat.st_blksize).unwrap_or(TRANSFER_MIN),
    };
    let mut limits = Limits {
        optimal_transfer: transfer.clamp(TRANSFER_MIN, TRANSFER_MAX),
        discard_align: sector.unwrap_or(1),
        ..Limits::byte_granular()
    };
    if direct {
        let align = direct_align(fd, sector)?;
        limits.direct = true;
        limits.memory_align = align.memory;
        limits.offset_align = align.offset;
        limits.optimal_transfer = limits.optimal_transfer.max(align.offset);
    }
    Ok(limits)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Align {
    memory: u32,
    offset: u32,
}

fn direct_align(fd: BorrowedFd<'_>, sector: Option<u32>) -> Result<Align, Errno> {
    if let Some(align) = reported_align(fd)? {
        // A device below may ask for more than its file system says.
        let align = Align { offset: align.offset.max(sector.unwrap_or(1)), ..align };
        if works(fd, align) {
            return Ok(align);
        }
        tracing::warn!("O_DIRECT refuses the alignment that statx reports ({align:?}); probing");
    }
    found_by_trial(fd, sector)
}

/// What statx says. `None`: it does not say. Errors: `EINVAL` when it says "no O_DIRECT".
fn reported_align(fd: BorrowedFd<'_>) -> Result<Option<Align>, Errno> {
    let Ok(answer) = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(None);
    };
    if answer.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(None);
    }
    match (answer.stx_dio_mem_align, answer.stx_dio_offset_align) {
        (0, _) | (_, 0) => Err(Errno::INVAL),
        (memory, offset)
            if memory.is_power_of_two() && offset.is_power_of_two() && offset <= ALIGN_MAX =>
        {
            Ok(Some(Align { memory, offset }))
        }
        _ => Ok(None),
    }
}

fn found_by_trial(fd: BorrowedFd<'_>, sector: Option<u32>) -> Result<Align, Errno> {
    let first = Align { memory: ALIGN_MAX, offset: 1 };
    let offset = match sector {
        Some(sector) => sector,
        None if works(fd, first) => SAFE_ALIGN,
        None => CANDIDATES
            .into_iter()
            .find(|&offset| works(fd, Align { offset, ..first }))
            .ok_or(Errno::INVAL)?,
    };
    let memory = if works(fd, Align { memory: 1, offset }) {
        SAFE_ALIGN
    } else {
        CANDIDATES
            .into_iter()
            .find(|&memory| works(fd, Align { memory, offset }))
            .ok_or(Errno::INVAL)?
    };
    Ok(Align { memory, offset })
}

/// Whether a read at exactly this alignment (and at no larger one) is not refused. An I/O error is
/// no refusal: it says nothing about alignment and shows up again when it matters.
fn works(fd: BorrowedFd<'_>, align: Align) -> bool {
    let (memory, offset) = (align.memory as usize, align.offset as usize);
    let mut bytes = vec![0u8; offset + 4 * memory];
    let address = bytes.as_ptr() as usize;
    // The first multiple of twice the alignment, plus the alignment: an odd multiple.
    let start = address.next_multiple_of(2 * memory) + memory - address;
    let read = rustix::io::pread(fd, &mut bytes[start..start + offset], align.offset.into());
    match read {
        Err(Errno::INVAL) => false,
        // At the end of the file the kernel may check nothing; try where there are bytes.
        Ok(0) => rustix::io::pread(fd, &mut bytes[start..start + offset], 0) != Err(Errno::INVAL),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn buffered_file_takes_any_request() {
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let limits = limits(file.as_fd(), Kind::Regular, &stat, false).unwrap();
        assert_eq!((limits.memory_align, limits.offset_align, limits.direct), (1, 1, false));
        assert!(limits.suits(1, 3, 5));
    }

    #[test]
    fn trial_on_a_file_that_takes_everything_assumes_a_page() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let align = found_by_trial(file.as_fd(), None).unwrap();
        assert_eq!(align, Align { memory: SAFE_ALIGN, offset: SAFE_ALIGN });
    }
}
