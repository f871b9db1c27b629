//! Writing a file.
//!
//! Promises: a request that suits the limits is one ring operation from the caller's buffer: no
//! allocation, no lock, no copy. Any other request is cut into pieces: whole blocks (copied only
//! when the memory is not one aligned piece), and parts of blocks, which are read, changed and
//! written back while no other write runs there (see `gate`). The part of a block at the end of a
//! regular file goes through a buffered descriptor of the same file, so that the file never gets
//! longer than what was written. Ring threads.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_ring::{Errno, Fd, IoBuf, Ring};

use crate::file::{File, OFFSET_MAX, end_of};
use crate::kinds::Kind;
use crate::read::BOUNCE_MAX;
use crate::retry::{Retry, is_passing, once};

/// Around a write through the page cache no direct write may run, since the cache writes back
/// whole pages. Pages and the blocks of file systems have at most this many bytes.
const PAGE_CACHE_UNIT: u64 = 65536;

/// How far a transfer got.
struct Progress {
    done: usize,
    result: Result<(), Errno>,
}

impl Progress {
    /// Bytes count more than the error after them: the error comes again when the client goes on.
    fn into_result(self) -> Result<usize, Errno> {
        match self.result {
            Err(errno) if self.done == 0 => Err(errno),
            _ => Ok(self.done),
        }
    }
}

impl File {
    /// Writes `buf`; a regular file grows when it must. Short when an error came after some
    /// progress. Errors: the kernel's (`ENOSPC`, `EIO`, …), `EROFS`; `EINVAL` past the largest
    /// offset; `ENOSPC` past the end of a block device.
    pub(crate) async fn write(
        &self,
        ring: &Ring,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<usize, Errno> {
        self.check_writable()?;
        let end = end_of(offset, buf.len() as u64)?;
        if !self.suits(offset, buf) {
            return Box::pin(self.write_in_pieces(ring, offset, buf)).await;
        }
        let pass = match &self.gate {
            None => None,
            Some(gate) => match gate.try_shared() {
                Some(pass) => Some(pass),
                None => Some(Box::pin(gate.shared(offset, end)).await),
            },
        };
        let len = buf.len();
        if len == 0 {
            return Ok(0);
        }
        match self.change(once(ring.write(self.fd, offset, buf))).await {
            Ok(n) if n as usize >= len => {
                self.has_grown_to(end);
                Ok(len)
            }
            // The device does not take the alignment of this client's pages, or of these pieces.
            Err(Errno::INVAL) if !buf.is_contiguous() => {
                drop(pass);
                Box::pin(self.write_in_pieces(ring, offset, buf)).await
            }
            Err(errno) if !is_passing(errno) => Err(errno),
            other => {
                let done = other.unwrap_or(0) as usize;
                Box::pin(self.write_rest(ring, self.fd, offset, buf, done)).await.into_result()
            }
        }
    }

    /// Goes on after a short transfer of `done` bytes (0: starts).
    async fn write_rest(
        &self,
        ring: &Ring,
        fd: Fd,
        offset: u64,
        buf: &IoBuf,
        mut done: usize,
    ) -> Progress {
        let mut result = Ok(());
        let mut retry = Retry::default();
        while done < buf.len() {
            let rest = buf.slice(done..buf.len());
            match self.change(once(ring.write(fd, offset + done as u64, &rest))).await {
                // No progress and no error: nothing the kernel promises to do.
                Ok(0) => {
                    result = Err(Errno::IO);
                    break;
                }
                Ok(n) => done += n as usize,
                Err(errno) if retry.after(ring, errno).await => {}
                Err(errno) => {
                    result = Err(errno);
                    break;
                }
            }
        }
        if done > 0 {
            self.has_grown_to(offset + done as u64);
        }
        Progress { done, result }
    }

    async fn write_in_pieces(&self, ring: &Ring, offset: u64, buf: &IoBuf) -> Result<usize, Errno> {
        let buf = &ring.in_memory(buf).await?;
        let align = u64::from(self.limits.offset_align);
        let end = offset + buf.len() as u64;
        let mut total = Progress { done: 0, result: Ok(()) };
        while total.done < buf.len() && total.result.is_ok() {
            let at = offset + total.done as u64;
            let block_end = (at / align + 1) * align;
            let (stop, whole) = if at.is_multiple_of(align) && block_end <= end {
                ((end / align * align).min(at + BOUNCE_MAX as u64), true)
            } else {
                (block_end.min(end), false)
            };
            let Ok(len) = usize::try_from(stop - at) else { return Err(Errno::INVAL) };
            let piece = buf.slice(total.done..total.done + len);
            let progress = if whole {
                self.write_whole_blocks(ring, at, &piece).await
            } else {
                self.write_part_of_block(ring, at, &piece).await
            };
            total.done += progress.done;
            total.result = progress.result;
        }
        total.into_result()
    }

    /// Offset and length are aligned, the memory may not be.
    async fn write_whole_blocks(&self, ring: &Ring, offset: u64, piece: &IoBuf) -> Progress {
        let end = offset + piece.len() as u64;
        let _pass = match &self.gate {
            None => None,
            Some(gate) => Some(gate.shared(offset, end).await),
        };
        if piece.is_aligned(self.limits.memory_align as usize) {
            return self.write_rest(ring, self.fd, offset, piece, 0).await;
        }
        let bounce = self.bounce(piece.len());
        bounce.copy_from_buf(0, piece);
        self.write_rest(ring, self.fd, offset, &bounce, 0).await
    }

    /// `piece` lies inside one block and is not all of it.
    async fn write_part_of_block(&self, ring: &Ring, offset: u64, piece: &IoBuf) -> Progress {
        let failed = |errno| Progress { done: 0, result: Err(errno) };
        let align = u64::from(self.limits.offset_align);
        let block = offset / align * align;
        let Some(gate) = &self.gate else { return failed(Errno::INVAL) };
        {
            let _pass = gate.exclusive(block, block + align).await;
            if block + align <= self.len() || self.kind != Kind::Regular {
                match self.modify_block(ring, block, offset, piece).await {
                    // The file ends inside this block after all.
                    Ok(None) => {}
                    Ok(Some(progress)) => return progress,
                    Err(errno) => return failed(errno),
                }
            }
        }
        let _pass = gate.exclusive(block / PAGE_CACHE_UNIT * PAGE_CACHE_UNIT, OFFSET_MAX).await;
        let len = match self.ask_len(ring).await {
            Ok(len) => len,
            Err(errno) => return failed(errno),
        };
        match &self.buffered_twin {
            Some(twin) => {
                self.uses_page_cache.store(true, Ordering::Relaxed);
                self.write_rest(ring, Fd::of(twin), offset, piece, 0).await
            }
            None => match self.write_padded(ring, block, offset, piece, len).await {
                Ok(progress) => progress,
                Err(errno) => failed(errno),
            },
        }
    }

    /// Reads a block, changes it, writes it. `None`: the block could not be read whole, and this is
    /// a regular file.
    async fn modify_block(
        &self,
        ring: &Ring,
        block: u64,
        offset: u64,
        piece: &IoBuf,
    ) -> Result<Option<Progress>, Errno> {
        let bounce = self.bounce(self.limits.offset_align as usize);
        let got = self.read_fitting(ring, block, &bounce).await?;
        if got < bounce.len() {
            return if self.kind == Kind::Regular { Ok(None) } else { Err(Errno::NOSPC) };
        }
        self.write_changed(ring, block, offset, piece, &bounce).await.map(Some)
    }

    async fn write_changed(
        &self,
        ring: &Ring,
        block: u64,
        offset: u64,
        piece: &IoBuf,
        bounce: &IoBuf,
    ) -> Result<Progress, Errno> {
        let skip = usize::try_from(offset - block).map_err(|_| Errno::INVAL)?;
        bounce.copy_from_buf(skip, piece);
        let written = self.write_rest(ring, self.fd, block, bounce, 0).await;
        let done = written.done.saturating_sub(skip).min(piece.len());
        let result = if done == piece.len() { Ok(()) } else { written.result };
        Ok(Progress { done, result })
    }

    /// Writes the last block of a file padded with zeroes and cuts the file to its right length
    /// again: only where no buffered descriptor could be had (no /proc, no permission to open the
    /// file a second time). For a moment the file is longer. `len`: length of the file, read under
    /// the gate.
    async fn write_padded(
        &self,
        ring: &Ring,
        block: u64,
        offset: u64,
        piece: &IoBuf,
        len: u64,
    ) -> Result<Progress, Errno> {
        let right_len = len.max(offset + piece.len() as u64);
        // New memory is zeroed, and the read leaves what is beyond the end alone.
        let bounce = self.bounce(self.limits.offset_align as usize);
        if block < len {
            self.read_fitting(ring, block, &bounce).await?;
        }
        let progress = self.write_changed(ring, block, offset, piece, &bounce).await?;
        self.truncate(ring, right_len).await?;
        Ok(progress)
    }
}

impl File {
    /// ftruncate(2) on the ring, or on a helper thread where the kernel's io_uring has none.
    pub(crate) async fn truncate(&self, ring: &Ring, len: u64) -> Result<(), Errno> {
        let mut retry = Retry::default();
        let result = loop {
            let tried = match self.change(once(ring.ftruncate(self.fd, len))).await {
                Err(Errno::INVAL) => {
                    let owner = Arc::clone(&self.owner);
                    let work = ring.offload(move || rustix::fs::ftruncate(owner.as_fd(), len));
                    self.change(work).await
                }
                other => other.map(drop),
            };
            match tried {
                Err(errno) if retry.after(ring, errno).await => {}
                result => break result,
            }
        };
        if result.is_ok() {
            self.len.store(len, Ordering::Relaxed);
        }
        result
    }
}
