//! The buffers of a connection: for replies that have come, and for the batch that is being sent.
//!
//! Promises: they are made once for each ring; nothing is allocated for a request.

use std::cell::Cell;

use ringdisk_ring::{IoBuf, Scatter};

/// Bytes that are read ahead: a batch of short replies.
pub(super) const BUFFER_BYTES: usize = 256 << 10;
/// Memory for heads and short payloads of one batch, bytes: the usual room of a socket.
pub(super) const BATCH_BYTES: usize = 256 << 10;
/// Payloads of one batch that are sent from where they are: each takes two pieces of a vector,
/// which has at most 1024.
pub(super) const DIRECT_MAX: usize = 128;

/// Bytes that have come and were not taken yet.
pub(super) struct Input {
    pub(super) buf: IoBuf,
    pub(super) start: Cell<usize>,
    pub(super) end: Cell<usize>,
}

impl Input {
    pub(super) fn new() -> Input {
        let buf = IoBuf::new(BUFFER_BYTES, 4096);
        Input { buf, start: Cell::new(0), end: Cell::new(0) }
    }

    pub(super) fn clear(&self) {
        self.start.set(0);
        self.end.set(0);
    }

    pub(super) fn len(&self) -> usize {
        self.end.get() - self.start.get()
    }

    /// Copies bytes from the front, and leaves them there.
    pub(super) fn peek(&self, bytes: &mut [u8]) {
        self.buf.copy_to_slice(self.start.get(), bytes);
    }

    pub(super) fn skip(&self, count: usize) {
        self.start.set(self.start.get() + count);
    }

    /// The next `count` bytes.
    pub(super) fn take(&self, count: usize) -> IoBuf {
        let start = self.start.get();
        self.skip(count);
        self.buf.slice(start..start + count)
    }

    /// The room behind the bytes, with `count` bytes at least counted from the first one that was
    /// not taken.
    pub(super) fn room(&self, count: usize) -> IoBuf {
        let (start, end) = (self.start.get(), self.end.get());
        if start == end {
            self.clear();
        } else if start + count > BUFFER_BYTES {
            self.buf.copy_from_buf(0, &self.buf.slice(start..end));
            self.start.set(0);
            self.end.set(end - start);
        }
        self.buf.slice(self.end.get()..BUFFER_BYTES)
    }
}

/// The batch that is being sent.
pub(super) struct Output {
    pub(super) heads: IoBuf,
    pub(super) pieces: Scatter,
}

impl Output {
    pub(super) fn new() -> Output {
        Output {
            heads: IoBuf::new(BATCH_BYTES, 4096),
            pieces: Scatter::with_capacity(2 * DIRECT_MAX + 2),
        }
    }
}
