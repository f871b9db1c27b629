//! The source that a check reads: bytes in memory, or storage with several reads in flight.
//!
//! Promises: bytes past the end of the file read as zeroes, as the last cluster of a file may be
//! cut. The future of a read from memory is ready at once, so the whole check can run without a
//! ring.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::check::stop::Stop;
use crate::units::{Bytes, HostOffset};

/// Bytes of the largest read: long enough that a disk streams.
pub(super) const READ_BYTES: usize = 1 << 20;
/// Reads in flight: together 8 MiB, more than a disk needs to be busy.
const READS: usize = 8;
/// Alignment of buffers: a page suits O_DIRECT everywhere.
const ALIGN: usize = 4096;

/// A piece of the file to be read: offset and length (at most [`READ_BYTES`]).
pub(super) type Piece = (HostOffset, usize);

/// Something that holds an image.
pub(super) trait Source {
    /// Length in bytes.
    fn len(&self) -> Bytes;

    /// Length of the external data file in bytes, where that is known.
    fn data_len(&self) -> Option<Bytes> {
        None
    }

    /// Reads the pieces and hands them to `each` in their order, with their place in the order.
    ///
    /// Errors: those of the storage while reading `what`, and what `each` returns.
    async fn read_all(
        &self,
        what: &'static str,
        pieces: impl Iterator<Item = Piece>,
        each: impl FnMut(usize, &[u8]) -> Result<(), Stop>,
    ) -> Result<(), Stop>;

    /// Reads one range of any length into memory; the caller has bounded it.
    async fn read(
        &self,
        what: &'static str,
        offset: HostOffset,
        len: usize,
    ) -> Result<Vec<u8>, Stop> {
        let mut bytes = Vec::new();
        bytes.try_reserve(len).map_err(|_| Stop::Memory)?;
        self.read_all(what, pieces_of(offset, Bytes::of(len)), |_, piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })
        .await?;
        Ok(bytes)
    }
}

/// Cuts a range into pieces.
pub(super) fn pieces_of(offset: HostOffset, len: Bytes) -> impl Iterator<Item = Piece> {
    let end = offset.saturating_add(len);
    let mut at = offset;
    std::iter::from_fn(move || {
        let size = usize::try_from(end - at).unwrap_or(READ_BYTES).min(READ_BYTES);
        let piece = (at, size);
        at += Bytes::of(size);
        (size > 0).then_some(piece)
    })
}

/// An image that can be read without waiting: a slice, or the simulated storage of the tests.
pub trait ImageBytes {
    /// Length in bytes.
    fn image_len(&self) -> Bytes;
    /// Fills `out` from byte `offset` on; zeroes past the end.
    fn read_into(&self, offset: u64, out: &mut [u8]);
    /// The bytes in place, where they lie in one piece.
    fn slice(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let _ = (offset, len);
        None
    }
}

impl ImageBytes for [u8] {
    fn image_len(&self) -> Bytes {
        Bytes::of(self.len())
    }

    fn read_into(&self, offset: u64, out: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.len());
        let there = out.len().min(self.len() - start);
        out[..there].copy_from_slice(&self[start..start + there]);
        out[there..].fill(0);
    }

    fn slice(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset).ok()?;
        self.get(start..start.checked_add(len)?)
    }
}

/// Reads without waiting.
pub(super) struct Memory<'a, B: ?Sized>(pub(super) &'a B);

impl<B: ImageBytes + ?Sized> Source for Memory<'_, B> {
    fn len(&self) -> Bytes {
        self.0.image_len()
    }

    async fn read_all(
        &self,
        _what: &'static str,
        pieces: impl Iterator<Item = Piece>,
        mut each: impl FnMut(usize, &[u8]) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let mut bytes = Vec::new();
        for (place, (offset, len)) in pieces.enumerate() {
            if let Some(slice) = self.0.slice(offset.0, len) {
                each(place, slice)?;
                continue;
            }
            bytes.resize(len, 0);
            self.0.read_into(offset.0, &mut bytes);
            each(place, &bytes)?;
        }
        Ok(())
    }
}

/// Reads storage through a ring.
pub(super) struct Reader<'a> {
    pub(super) ring: &'a Ring,
    pub(super) storage: &'a Storage,
    /// See [`Source::data_len`].
    pub(super) data_len: Option<Bytes>,
}

type Reading<'a> = Pin<Box<dyn Future<Output = (IoBuf, usize, Result<usize, Errno>)> + 'a>>;

impl Reader<'_> {
    fn start(&self, buf: IoBuf, (offset, len): Piece) -> Reading<'_> {
        Box::pin(async move {
            // What lies past the end is not asked for: the storage may have no such offset.
            let there = self.storage.len().saturating_sub(offset.0);
            let want = usize::try_from(there).unwrap_or(len).min(len);
            // O_DIRECT reads whole blocks into the buffer; the end of a file is short by itself.
            let want = want.next_multiple_of(ALIGN).min(len);
            let result = match want {
                0 => Ok(0),
                _ => self.storage.read(self.ring, offset.0, &buf.slice(0..want)).await,
            };
            (buf, len, result)
        })
    }
}

impl Source for Reader<'_> {
    fn len(&self) -> Bytes {
        Bytes(self.storage.len())
    }

    fn data_len(&self) -> Option<Bytes> {
        self.data_len
    }

    async fn read_all(
        &self,
        what: &'static str,
        mut pieces: impl Iterator<Item = Piece>,
        mut each: impl FnMut(usize, &[u8]) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let mut running: VecDeque<(Reading<'_>, Option<_>)> = VecDeque::new();
        let mut buffers: Vec<IoBuf> = Vec::new();
        let mut bytes = Vec::new();
        let mut place = 0;
        loop {
            while running.len() < READS {
                let Some(piece) = pieces.next() else { break };
                let buf = buffers
                    .pop()
                    .filter(|buf| buf.len() >= piece.1)
                    .unwrap_or_else(|| IoBuf::new(piece.1.next_multiple_of(ALIGN), ALIGN));
                running.push_back((self.start(buf, piece), None));
            }
            // All are polled, so that they run at once; they are taken in order.
            poll_fn(|context| {
                for (future, done) in &mut running {
                    if done.is_none()
                        && let Poll::Ready(result) = future.as_mut().poll(context)
                    {
                        *done = Some(result);
                    }
                }
                match running.front() {
                    Some((_, None)) => Poll::Pending,
                    _ => Poll::Ready(()),
                }
            })
            .await;
            let Some((_, Some((buf, len, result)))) = running.pop_front() else { return Ok(()) };
            let there = result.map_err(|errno| Stop::Io(what, errno))?.min(len);
            bytes.resize(len, 0);
            buf.copy_to_slice(0, &mut bytes[..there]);
            bytes[there..].fill(0);
            buffers.push(buf);
            each(place, &bytes)?;
            place += 1;
        }
    }
}
