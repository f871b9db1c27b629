//! Copies bytes to and from pages of a client that only the kernel can reach.
//!
//! Promises: a pipe belongs to one copy at a time, and is made when none is free; after an error it
//! is not used again. Ring thread only.
//!
//! The kernel moves bytes between such pages ([`IoBuf::client_pages`]) and files: a pipe carries
//! bytes of this process, `/dev/zero` gives zeroes. That costs two copies, so it is for data that
//! no extent of an image holds unchanged: compressed data, zeroes, clusters that a write completes,
//! memory whose alignment a device refuses.

use std::cell::{OnceCell, RefCell};
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use crate::{Errno, Fd, IoBuf, Ring};

/// Requested capacity: as much as one request moves.
const PIPE_BYTES: usize = 1 << 20;
/// Capacity of a pipe that could not be made larger.
const PIPE_BYTES_MIN: usize = 65536;
/// Alignment of a copy: suits every device.
const PAGE_BYTES: usize = 4096;

/// An empty pipe.
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    /// Capacity, bytes, if every page is full.
    capacity: usize,
}

/// Pipes that are free, and the source of zeroes.
#[derive(Default)]
pub(crate) struct Pipes {
    free: RefCell<Vec<Pipe>>,
    zeroes: OnceCell<OwnedFd>,
}

impl Pipes {
    fn take(&self) -> Result<Pipe, Errno> {
        if let Some(pipe) = self.free.borrow_mut().pop() {
            return Ok(pipe);
        }
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let capacity = fcntl_setpipe_size(&write, PIPE_BYTES).unwrap_or(PIPE_BYTES_MIN);
        Ok(Pipe { read, write, capacity })
    }

    fn zeroes(&self) -> Result<&OwnedFd, Errno> {
        if let Some(zeroes) = self.zeroes.get() {
            return Ok(zeroes);
        }
        let opened =
            rustix::fs::open("/dev/zero", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(self.zeroes.get_or_init(|| opened))
    }
}

impl Ring {
    /// Copies `from` to the start of `to`; either may be pages of a client. Panics when it does not
    /// fit.
    ///
    /// Errors: `EFAULT` for missing pages, and for the wrong direction (pages of a READ are only
    /// written, pages of a WRITE only read); `EMFILE` and `ENFILE` when there is no descriptor for
    /// a pipe.
    pub async fn copy(&self, from: &IoBuf, to: &IoBuf) -> Result<(), Errno> {
        let to = to.slice(0..from.len());
        if from.is_ours() && to.is_ours() {
            to.copy_from_buf(0, from);
            return Ok(());
        }
        // Rare: the memory of a plain request's future stays small.
        Box::pin(self.copy_by_pipe(from, &to)).await
    }

    /// The bytes in memory of this process: `buf` itself, or a copy of a client's pages. Allocates
    /// for the copy.
    ///
    /// Errors: as [`Ring::copy`].
    pub async fn in_memory(&self, buf: &IoBuf) -> Result<IoBuf, Errno> {
        if buf.is_ours() {
            return Ok(buf.clone());
        }
        let ours = IoBuf::new(buf.len(), PAGE_BYTES);
        self.copy(buf, &ours).await?;
        Ok(ours)
    }

    async fn copy_by_pipe(&self, from: &IoBuf, to: &IoBuf) -> Result<(), Errno> {
        let pipe = self.0.pipes.take()?;
        let (write, read) = (Fd::of(&pipe.write), Fd::of(&pipe.read));
        let (mut sent, mut received) = (0, 0);
        // After an error the pipe may hold something: it is not used again.
        while received < from.len() {
            let some = from.slice(sent..from.len().min(sent + pipe.capacity));
            if !some.is_empty() {
                sent += self.write(write, 0, &some).await? as usize;
            }
            while received < sent {
                match self.read(read, 0, &to.slice(received..sent)).await? {
                    0 => return Err(Errno::IO),
                    count => received += count as usize,
                }
            }
        }
        self.0.pipes.free.borrow_mut().push(pipe);
        Ok(())
    }

    /// Sets all bytes to 0, also in pages of a client.
    ///
    /// Errors: as [`Ring::copy`].
    pub async fn zero(&self, buf: &IoBuf) -> Result<(), Errno> {
        if buf.is_ours() {
            buf.fill(0);
            return Ok(());
        }
        Box::pin(self.zero_pages(buf)).await
    }

    async fn zero_pages(&self, buf: &IoBuf) -> Result<(), Errno> {
        let zeroes = Fd::of(self.0.pipes.zeroes()?);
        let mut done = 0;
        while done < buf.len() {
            match self.read(zeroes, 0, &buf.slice(done..buf.len())).await? {
                0 => return Err(Errno::IO),
                count => done += count as usize,
            }
        }
        Ok(())
    }
}
