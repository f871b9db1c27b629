//! Takes replies from the connection.
//!
//! Promises: one read takes as many replies as there are; long data goes straight into the memory
//! of its request. Every number of the server is checked before it is used, and what does not fit
//! ends the connection. The buffer is the only memory that a server can fill.

use std::future::poll_fn;
use std::task::Poll;

use ringdisk_nbd_protocol::numbers::{EXTENTS_MAX, NAME_BYTES_MAX, chunk, command, errno};
use ringdisk_nbd_protocol::reply::{
    Chunk, DATA_OFFSET_BYTES, ERROR_BYTES, EXTENDED_CHUNK_BYTES, ErrorPayload, HOLE_BYTES, Hole,
    ReplyHead, SIMPLE_BYTES, SimpleReply, parse_data_offset,
};
use ringdisk_nbd_protocol::request::Style;
use ringdisk_nbd_protocol::status::Extent;
use ringdisk_ring::{Errno, IoBuf};
use ringdisk_tls::StreamError;

use super::buffers::BUFFER_BYTES;
use super::driver::Driver;
use super::link::Link;
use super::lost::Lost;
use crate::nbd::slots::Violation;

/// Data of which at least so much is missing goes straight into the memory of its request.
const DIRECT_MIN: usize = 16 << 10;
/// Longest payload of an error: its numbers and its text, and the offset.
const ERROR_BYTES_MAX: usize = ERROR_BYTES + NAME_BYTES_MAX + 8;
/// Bytes of an extent of 32 and of 64 bits.
const EXTENT_BYTES: (usize, usize) = (8, 16);

/// An error of the wire. A server that ends is a lost connection, whose requests are repeated.
fn error_of(error: u32) -> Result<Errno, Lost> {
    match error {
        errno::EPERM => Ok(Errno::PERM),
        errno::ENOMEM => Ok(Errno::NOMEM),
        errno::EINVAL => Ok(Errno::INVAL),
        errno::ENOSPC => Ok(Errno::NOSPC),
        errno::EOVERFLOW => Ok(Errno::OVERFLOW),
        errno::ENOTSUP => Ok(Errno::OPNOTSUPP),
        errno::ESHUTDOWN => Err(Lost::Ended),
        _ => Ok(Errno::IO),
    }
}

fn violation<T>(why: Violation) -> Result<T, Lost> {
    Err(Lost::Violation(why))
}

fn to_usize(len: u64) -> Result<usize, Lost> {
    usize::try_from(len).map_err(|_| Lost::Violation("a length that no request has"))
}

impl Driver {
    /// Takes replies until no request is in flight.
    ///
    /// Errors: the link is lost.
    pub(super) async fn receive_all(&self, link: &Link) -> Result<(), Lost> {
        loop {
            let is_over = poll_fn(|_| {
                let slots = self.slots.borrow();
                if slots.sent() > 0 {
                    return Poll::Ready(false);
                }
                let is_idle = !slots.has_queued() || !self.may_send();
                if is_idle && !self.is_sending.get() { Poll::Ready(true) } else { Poll::Pending }
            })
            .await;
            if is_over {
                // All that came was taken: nothing belongs to the next ring that has the link.
                return match self.input.len() {
                    0 => Ok(()),
                    _ => violation("bytes behind the last reply"),
                };
            }
            self.reply(link).await?;
        }
    }

    /// Reads until there are so many bytes.
    ///
    /// * `count`: not more than the buffer has.
    async fn fill(&self, link: &Link, count: usize) -> Result<(), Lost> {
        while self.input.len() < count {
            let room = self.input.room(count);
            let got = self.read(link, &room).await?;
            self.input.end.set(self.input.end.get() + got);
        }
        Ok(())
    }

    /// Reads some bytes, at least one.
    async fn read(&self, link: &Link, buf: &IoBuf) -> Result<usize, Lost> {
        loop {
            match link.read(&self.ring, buf).await {
                Ok(0) => return Err(Lost::Ended),
                Ok(count) => return Ok(count),
                Err(StreamError::Socket(Errno::INTR | Errno::AGAIN)) => self.ring.yield_now().await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes one simple reply, or one chunk.
    async fn reply(&self, link: &Link) -> Result<(), Lost> {
        let style = link.agreed.style;
        let mut bytes = [0; EXTENDED_CHUNK_BYTES];
        let mut least = SIMPLE_BYTES;
        loop {
            self.fill(link, least).await?;
            let len = self.input.len().min(bytes.len());
            self.input.peek(&mut bytes[..len]);
            match ReplyHead::parse(style, &bytes[..len]).map_err(|why| Lost::Violation(why.0))? {
                Some((head, len)) => {
                    self.input.skip(len);
                    return match head {
                        ReplyHead::Simple(reply) => self.simple(link, reply).await,
                        ReplyHead::Chunk(chunk) => self.chunk(link, chunk).await,
                    };
                }
                None if len == bytes.len() => return violation("a reply without a head"),
                None => least = len + 1,
            }
        }
    }

    async fn simple(&self, link: &Link, reply: SimpleReply) -> Result<(), Lost> {
        let (index, request) = self.of_cookie(reply.cookie)?;
        if reply.error != 0 {
            let error = error_of(reply.error)?;
            return Ok(self.slots.borrow_mut().finish(index, Some(error))?);
        }
        if request.command == command::READ {
            if link.agreed.style != Style::Simple {
                return violation("a simple reply to a read");
            }
            let at = self.slots.borrow_mut().cover(index, request.offset, request.len)?;
            self.data(link, index, at, to_usize(request.len)?).await?;
        }
        Ok(self.slots.borrow_mut().finish(index, None)?)
    }

    fn of_cookie(
        &self,
        cookie: u64,
    ) -> Result<(u16, ringdisk_nbd_protocol::request::Request), Lost> {
        let mut slots = self.slots.borrow_mut();
        let index = slots.find(cookie)?;
        Ok((index, slots.request(index)))
    }

    async fn chunk(&self, link: &Link, head: Chunk) -> Result<(), Lost> {
        let (index, request) = self.of_cookie(head.cookie)?;
        if link.agreed.style == Style::Extended && head.offset != request.offset {
            return violation("a reply with the offset of another request");
        }
        let len = to_usize(head.len)?;
        match head.kind {
            chunk::NONE if head.is_done() && len == 0 => {}
            chunk::OFFSET_DATA if len > DATA_OFFSET_BYTES => {
                self.fill(link, DATA_OFFSET_BYTES).await?;
                let mut bytes = [0; DATA_OFFSET_BYTES];
                self.input.peek(&mut bytes);
                self.input.skip(bytes.len());
                let offset = parse_data_offset(&bytes).map_err(|why| Lost::Violation(why.0))?;
                let len = len - DATA_OFFSET_BYTES;
                let at = self.slots.borrow_mut().cover(index, offset, len as u64)?;
                self.data(link, index, at, len).await?;
            }
            chunk::OFFSET_HOLE if len == HOLE_BYTES => {
                self.fill(link, HOLE_BYTES).await?;
                let mut bytes = [0; HOLE_BYTES];
                self.input.peek(&mut bytes);
                self.input.skip(bytes.len());
                let hole = Hole::parse(&bytes).map_err(|why| Lost::Violation(why.0))?;
                let mut slots = self.slots.borrow_mut();
                let at = slots.cover(index, hole.offset, hole.len.into())?;
                if let Some(buf) = slots.buf(index) {
                    buf.slice(at..at + hole.len as usize).fill(0);
                }
            }
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXTENDED => {
                self.status_chunk(link, index, head.kind, len).await?;
            }
            _ if head.is_error() && (ERROR_BYTES..=ERROR_BYTES_MAX).contains(&len) => {
                self.fill(link, len).await?;
                // Control path: an error has a text.
                let payload = self.input.take(len).to_vec();
                let payload = ErrorPayload::parse(head.kind, &payload)
                    .map_err(|why| Lost::Violation(why.0))?;
                if !payload.text.is_empty() {
                    let text = String::from_utf8_lossy(payload.text);
                    tracing::debug!("'{}': {}", self.shared.name, text.escape_debug());
                }
                let error = error_of(payload.error)?;
                self.slots.borrow_mut().fail(index, error)?;
            }
            _ => return violation("a chunk of an unknown kind, or of a wrong length"),
        }
        if head.is_done() {
            self.slots.borrow_mut().finish(index, None)?;
        }
        Ok(())
    }

    /// Takes the data of a read.
    ///
    /// * `at`: where it belongs in the request.
    async fn data(&self, link: &Link, index: u16, at: usize, len: usize) -> Result<(), Lost> {
        let mut done = 0;
        while done < len {
            let target = self.slots.borrow_mut().buf(index);
            let here = self.input.len().min(len - done);
            if here > 0 {
                let bytes = self.input.take(here);
                if let Some(target) = target {
                    target.copy_from_buf(at + done, &bytes);
                }
                done += here;
                continue;
            }
            match target {
                Some(target) if len - done >= DIRECT_MIN => {
                    self.direct.set(Some(index));
                    let rest = target.slice(at + done..at + len);
                    let got = self.read(link, &rest).await;
                    self.direct.set(None);
                    done += got?;
                }
                _ => self.fill(link, (len - done).min(BUFFER_BYTES / 2)).await?,
            }
        }
        Ok(())
    }

    /// Takes the extents of block status.
    async fn status_chunk(
        &self,
        link: &Link,
        index: u16,
        kind: u16,
        len: usize,
    ) -> Result<(), Lost> {
        let is_extended = kind == chunk::BLOCK_STATUS_EXTENDED;
        let each = if is_extended { EXTENT_BYTES.1 } else { EXTENT_BYTES.0 };
        // The number of the context, and of the extents.
        let head = if is_extended { 8 } else { 4 };
        let count = len.checked_sub(head).filter(|rest| rest % each == 0).map(|rest| rest / each);
        let Some(count) = count.filter(|count| (1..=EXTENTS_MAX).contains(count)) else {
            return violation("block status of a wrong length");
        };
        if is_extended != (link.agreed.style == Style::Extended) {
            return violation("block status of the wrong kind");
        }
        let mut bytes = [0; 16];
        self.fill(link, head).await?;
        self.input.peek(&mut bytes[..head]);
        self.input.skip(head);
        let number = |at: usize| {
            bytes.get(at..at + 4).and_then(|it| it.try_into().ok()).map(u32::from_be_bytes)
        };
        if number(0) != link.agreed.context() {
            return violation("block status of a context that was not chosen");
        }
        if is_extended && number(4).is_none_or(|said| said as usize != count) {
            return violation("block status with another number of extents than it says");
        }
        self.slots.borrow_mut().begin_status(index)?;
        let wanted = self.slots.borrow_mut().request(index).len;
        let mut sum = 0u64;
        for _ in 0..count {
            self.fill(link, each).await?;
            self.input.peek(&mut bytes[..each]);
            self.input.skip(each);
            let extent = if is_extended {
                let (len, flags) = bytes.split_at(8);
                let number = |it: &[u8]| it.try_into().map_or(0, u64::from_be_bytes);
                Extent { len: number(len), flags: number(flags) }
            } else {
                let number = |it: &[u8]| it.try_into().map_or(0, u32::from_be_bytes);
                Extent { len: number(&bytes[..4]).into(), flags: number(&bytes[4..8]).into() }
            };
            if extent.len == 0 || sum >= wanted {
                return violation("block status past the end of what was asked for, or empty");
            }
            sum = sum.saturating_add(extent.len);
            self.slots.borrow_mut().add_extent(index, extent);
        }
        Ok(())
    }
}
