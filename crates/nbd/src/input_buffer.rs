//! The bytes that a client has sent and that were not used yet.
//!
//! Promises: one buffer for each connection, made at its start; a read takes all that is there and
//! fits. Only the task that owns it reads the socket.

use std::rc::Rc;

use ringdisk_ring::IoBuf;

use crate::end_reason::{End, within_a_message};
use crate::transport::Transport;

/// Bytes of the buffer: many small requests, or the start of a large one, by one system call.
pub(crate) const INPUT_BYTES: usize = 256 << 10;

/// So few unused bytes are moved to the front before any read.
const MOVED_BYTES: usize = 4 << 10;
/// More are moved where less room than this is left for a read, bytes.
const ROOM_BYTES: usize = INPUT_BYTES / 2;

/// See the module.
#[derive(Debug)]
pub(crate) struct Input {
    transport: Rc<Transport>,
    memory: IoBuf,
    /// Where the unused bytes begin and end.
    start: usize,
    end: usize,
}

impl Input {
    pub(crate) fn new(transport: &Rc<Transport>) -> Input {
        let memory = IoBuf::new(INPUT_BYTES, 4096);
        Input { transport: Rc::clone(transport), memory, start: 0, end: 0 }
    }

    /// Unused bytes that are there.
    pub(crate) fn len(&self) -> usize {
        self.end - self.start
    }

    /// The first unused bytes, which stay unused. Panics when there are fewer.
    pub(crate) fn peek(&self, out: &mut [u8]) {
        assert!(out.len() <= self.len(), "{} of {} bytes", out.len(), self.len());
        self.memory.copy_to_slice(self.start, out);
    }

    /// Uses up bytes. Panics when there are fewer.
    pub(crate) fn skip(&mut self, count: usize) {
        assert!(count <= self.len(), "{count} of {} bytes", self.len());
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Moves the first unused bytes to the start of `to`, as many as are there and fit. Gives their
    /// number.
    pub(crate) fn move_to(&mut self, to: &IoBuf) -> usize {
        let count = self.len().min(to.len());
        to.copy_from_buf(0, &self.memory.slice(self.start..self.start + count));
        self.skip(count);
        count
    }

    /// Reads once. Panics when the buffer is full.
    ///
    /// Errors: the client has closed its socket: [`End::Clean`] where nothing is unused, otherwise
    /// [`End::Truncated`]; those of the socket.
    pub(crate) async fn read(&mut self) -> Result<(), End> {
        let is_short = self.len() <= MOVED_BYTES;
        if self.start > 0 && (is_short || INPUT_BYTES - self.end < ROOM_BYTES) {
            self.move_to_front();
        }
        assert!(self.end < INPUT_BYTES, "unused bytes fill the buffer");
        let room = self.memory.slice(self.end..INPUT_BYTES);
        match self.transport.read(&room).await? {
            0 if self.len() == 0 => Err(End::Clean),
            0 => Err(End::Truncated),
            count => {
                self.end += count;
                Ok(())
            }
        }
    }

    /// Moves the unused bytes to the front, so that there is room behind them.
    fn move_to_front(&mut self) {
        let rest = self.memory.slice(self.start..self.end);
        self.memory.copy_from_buf(0, &rest);
        (self.start, self.end) = (0, rest.len());
    }

    /// Takes all bytes that were not used yet, those that are not read from the socket among them.
    pub(crate) fn take_all(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.peek(&mut bytes);
        (self.start, self.end) = (0, 0);
        bytes.append(&mut self.transport.take_back());
        bytes
    }

    /// Reads until so many bytes are there, at most [`INPUT_BYTES`].
    ///
    /// Errors: as [`Input::read`].
    pub(crate) async fn fill(&mut self, count: usize) -> Result<(), End> {
        if self.start + count > INPUT_BYTES {
            self.move_to_front();
        }
        while self.len() < count {
            self.read().await?;
        }
        Ok(())
    }

    /// The next `N` bytes, used up.
    ///
    /// Errors: as [`Input::read`].
    pub(crate) async fn take<const N: usize>(&mut self) -> Result<[u8; N], End> {
        self.fill(N).await?;
        let mut out = [0; N];
        self.peek(&mut out);
        self.skip(N);
        Ok(out)
    }

    /// Uses up bytes, also those that are not there yet.
    ///
    /// Errors: as [`Input::read`]; the end of the client is [`End::Truncated`].
    pub(crate) async fn discard(&mut self, count: u64) -> Result<(), End> {
        let mut left = count;
        while left > 0 {
            let here = usize::try_from(left).unwrap_or(usize::MAX).min(self.len());
            self.skip(here);
            left -= here as u64;
            if left > 0 {
                self.read().await.map_err(within_a_message)?;
            }
        }
        Ok(())
    }

    /// Fills `to` from its byte `done` on, which counts what is there: what comes is read straight
    /// into it.
    ///
    /// Errors: as [`Input::discard`].
    pub(crate) async fn read_into(&mut self, to: &IoBuf, done: &mut usize) -> Result<(), End> {
        while *done < to.len() {
            match self.transport.read(&to.slice(*done..to.len())).await? {
                0 => return Err(End::Truncated),
                count => *done += count,
            }
        }
        Ok(())
    }
}
