//! Finds out whether O_DIRECT can be given memory of unknown alignment.
//!
//! The client chooses where the buffer in its pages begins, and the server does not learn it. A
//! device that needs more alignment must answer `EINVAL`; then the request is copied through memory
//! of the server. Some devices do not: they store the data in the wrong place and report success
//! (seen with a RAM disk on Linux 7.3). So it is tried first: reads into memory of every small
//! misalignment, named as a registered buffer as client pages are, must be refused or right, byte
//! for byte, with nothing changed around them.
//!
//! Promises: when in doubt the answer is no. Control thread; blocks for a few dozen small reads.

use std::os::fd::BorrowedFd;

use ringdisk_ring::{Config, Errno, Fd, IoBuf, Ring, Runtime, SharedMemory};

use crate::kinds::Limits;

/// Distances from a page boundary that are tried, bytes.
const OFFSETS: [usize; 14] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 504, 512, 520, 1024, 2056];
/// What the memory holds before a read.
const FILLING: u8 = 0xa5;
/// Bytes of the memory: a read, and room around it.
const MEMORY_BYTES: usize = 65536;
/// Where the reads go, plus the misalignment: a page boundary with room before it.
const TARGET: usize = 16384;
/// Bytes of a read unless blocks are larger: more than a page, so that pages are crossed.
const READ_BYTES: usize = 8192;
/// Places of the file that are searched for suitable bytes.
const PLACES: u64 = 64;

/// * `len`: of the file, bytes.
pub(crate) fn are_safe(fd: BorrowedFd<'_>, len: u64, limits: Limits) -> bool {
    match tried(fd, len, limits) {
        Ok(safe) => safe,
        Err(errno) => {
            tracing::debug!("direct I/O on pages of clients was not tried: {errno}");
            false
        }
    }
}

fn tried(fd: BorrowedFd<'_>, len: u64, limits: Limits) -> Result<bool, Errno> {
    let block = limits.offset_align as usize;
    let bytes = READ_BYTES.next_multiple_of(block);
    if TARGET + OFFSETS[OFFSETS.len() - 1] + bytes > MEMORY_BYTES {
        return Ok(false);
    }
    let mut runtime = Runtime::new(Config { slots: 8, files: 0, ..Config::default() })
        .map_err(|_| Errno::NOSYS)?;
    let ring = runtime.ring().clone();
    let memory = SharedMemory::new(MEMORY_BYTES, 4096);
    ring.register_buffers(Some(&memory), 0)?;
    let fd = Fd::of(&fd);
    runtime.block_on(async {
        let (own, memory) = (IoBuf::new(bytes, 4096), memory.fixed_buffer(0));
        let Some(place) = telling_place(&ring, fd, len, &own).await? else { return Ok(false) };
        let right = own.to_vec();
        for offset in OFFSETS {
            memory.fill(FILLING);
            let start = TARGET + offset;
            match ring.read(fd, place, &memory.slice(start..start + bytes)).await {
                Err(Errno::INVAL) => continue,
                Ok(count) if count as usize == bytes => {}
                _ => return Ok(false),
            }
            let found = memory.to_vec();
            let around = found[..start].iter().chain(&found[start + bytes..]);
            if found[start..start + bytes] != right || around.into_iter().any(|b| *b != FILLING) {
                tracing::debug!("memory {offset} bytes off a page is taken and filled wrongly");
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// Finds a place whose bytes differ from themselves moved by any distance that is tried, and reads
/// it into `own`.
async fn telling_place(ring: &Ring, fd: Fd, len: u64, own: &IoBuf) -> Result<Option<u64>, Errno> {
    let bytes = own.len() as u64;
    let (mut place, step) = (0, (len / PLACES).next_multiple_of(bytes).max(bytes));
    while place + bytes <= len {
        if ring.read(fd, place, own).await? as usize == own.len() {
            let content = own.to_vec();
            let tells = |by: &usize| content[*by..] != content[..content.len() - by];
            if OFFSETS.iter().all(tells) {
                return Ok(Some(place));
            }
        }
        place += step;
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
