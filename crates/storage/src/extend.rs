//! Making a regular file longer while others write to it.
//!
//! Promises: nothing here ever shortens a file or changes a byte that is in it, even while this
//! process, another process, or the kernel (for the clients of a file that is passed through to
//! them) writes to it. (ftruncate(2) does not promise that: it cuts off bytes that were appended
//! after the caller read the length.) So a file may become longer than was asked for. Where the
//! file system has no operation that promises this, growing is refused.
//!
//! Ring threads; what is no io_uring operation runs on a helper thread.

use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringdisk_ring::{Errno, Ring};
use rustix::fs::FallocateFlags;
use rustix::io::ReadWriteFlags;

use crate::file::{File, end_of};
use crate::kinds::{Kind, Preallocation};

/// Zeroes that are written from one place again and again, bytes.
const ZEROES_BYTES: usize = 64 << 10;
static ZEROES: [u8; ZEROES_BYTES] = [0; ZEROES_BYTES];
/// Zeroes that one call appends at most: 1 MiB, so that a helper thread is free again soon.
const PIECES_MAX: usize = 16;

impl File {
    /// As [`crate::Storage::extend`].
    pub(crate) async fn extend(
        &self,
        ring: &Ring,
        from: u64,
        end: u64,
        mode: Preallocation,
        go_on: &dyn Fn() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        self.check_writable()?;
        end_of(end, 0).map_err(|_| Errno::FBIG)?;
        let len = self.ask_len(ring).await?;
        if end <= len {
            return Ok(());
        }
        if self.kind == Kind::BlockDevice {
            return Err(Errno::NOSPC);
        }
        let _pass = self.pass(len, u64::MAX).await;
        let from = from.clamp(len, end);
        match mode {
            Preallocation::Off => self.reach(ring, end).await,
            Preallocation::Falloc => {
                self.reserve(ring, from, end).await?;
                self.reach(ring, end).await
            }
            Preallocation::Full => {
                // Not needed, but no space is found out here before the file has changed.
                match self.reserve(ring, from, end).await {
                    Err(Errno::OPNOTSUPP) => {}
                    other => other?,
                }
                self.append_zeroes(ring, end, go_on).await
            }
        }
    }

    /// Makes the file at least `end` bytes long by reserving its last byte. The caller has a pass.
    /// Errors: `EOPNOTSUPP`.
    pub(crate) async fn reach(&self, ring: &Ring, end: u64) -> Result<(), Errno> {
        self.fallocate(ring, FallocateFlags::empty(), end - 1, 1).await?;
        self.has_grown_to(end);
        Ok(())
    }

    /// Reserves space past the end of the file, which stays as long as it is. Errors: `EOPNOTSUPP`,
    /// `ENOSPC`.
    async fn reserve(&self, ring: &Ring, from: u64, end: u64) -> Result<(), Errno> {
        if from >= end {
            return Ok(());
        }
        // A reservation that fails keeps the space that it got, and only cutting the file would
        // free that space: so it is not begun without enough room.
        let owner = Arc::clone(&self.owner);
        if ring.offload(move || free_bytes(owner.as_fd())).await? < end - from {
            return Err(Errno::NOSPC);
        }
        self.fallocate(ring, FallocateFlags::KEEP_SIZE, from, end - from).await
    }

    /// Writes zeroes at the end until the file is long enough. Each write finds the end itself,
    /// under the lock of the inode, so it never overwrites bytes that another writer has appended.
    /// Errors: `EOPNOTSUPP` with O_DIRECT; those of a write.
    async fn append_zeroes(
        &self,
        ring: &Ring,
        end: u64,
        go_on: &dyn Fn() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        if self.limits.direct {
            return Err(Errno::OPNOTSUPP);
        }
        loop {
            let len = self.ask_len(ring).await?;
            if len >= end {
                return Ok(());
            }
            go_on()?;
            let owner = Arc::clone(&self.owner);
            let work = ring.offload(move || append_zeroes(owner.as_fd(), len, end - len));
            if self.change(work).await? == 0 {
                return Err(Errno::IO);
            }
        }
    }
}

/// Free bytes of the file system, those that are kept for root included. Blocks.
fn free_bytes(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    let stat = rustix::fs::fstatvfs(fd)?;
    Ok(match stat.f_blocks {
        // Some network file systems report nothing.
        0 => u64::MAX,
        _ => stat.f_bfree.saturating_mul(stat.f_frsize),
    })
}

/// One write of at most `count` zeroes to the end of the file. Blocks. Returns the bytes written.
///
/// * `len`: where the end was; only so that no position of the description is used.
fn append_zeroes(fd: BorrowedFd<'_>, len: u64, count: u64) -> Result<usize, Errno> {
    let mut pieces = [IoSlice::new(&[]); PIECES_MAX];
    let mut left = count;
    for piece in &mut pieces {
        // At most ZEROES_BYTES.
        let now = usize::try_from(left).unwrap_or(ZEROES_BYTES).min(ZEROES_BYTES);
        *piece = IoSlice::new(&ZEROES[..now]);
        left -= now as u64;
    }
    loop {
        match rustix::io::pwritev2(fd, &pieces, len, ReadWriteFlags::APPEND) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
