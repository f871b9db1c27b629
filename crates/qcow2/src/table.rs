//! Reads tables from the image: whole ones, and those of variable-length entries piece by piece.
//!
//! Promises: memory stays at one piece, and nothing is read beyond the limit that the caller gave,
//! whatever the lengths inside the table say. Used at open only.

use ringdisk_ring::{IoBuf, Ring};
use ringdisk_storage::Storage;

use crate::error::Error;
use crate::units::{Bytes, HostOffset};

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 64 << 10;
/// Alignment of the buffer: a page suits O_DIRECT everywhere.
const ALIGN: usize = 4096;

/// Reads up to `len` bytes at `offset`; short only at the end of the file.
pub(crate) async fn read(
    ring: &Ring,
    storage: &Storage,
    offset: HostOffset,
    len: usize,
    what: &str,
) -> Result<Vec<u8>, Error> {
    let buf = IoBuf::new(len.max(1).next_multiple_of(ALIGN), ALIGN).slice(0..len);
    match storage.read(ring, offset.0, &buf).await {
        Ok(done) => {
            let mut bytes = buf.to_vec();
            bytes.truncate(done);
            Ok(bytes)
        }
        Err(errno) => Err(Error::io(storage.name(), &format!("reading {what}"), errno)),
    }
}

/// A table that is read from front to back.
pub(crate) struct TableReader<'a> {
    ring: &'a Ring,
    storage: &'a Storage,
    what: &'static str,
    /// Host offset of the first byte that is not in `bytes`.
    offset: HostOffset,
    /// Host offset at which the table must end.
    end: HostOffset,
    bytes: Vec<u8>,
    at: usize,
}

impl<'a> TableReader<'a> {
    /// * `what`: "the snapshot table", for messages.
    /// * `offset`, `len_max`: the bytes that may be read.
    pub(crate) fn new(
        ring: &'a Ring,
        storage: &'a Storage,
        what: &'static str,
        offset: HostOffset,
        len_max: Bytes,
    ) -> TableReader<'a> {
        let end = offset.saturating_add(len_max).min(HostOffset(storage.len()));
        TableReader { ring, storage, what, offset, end, bytes: Vec::new(), at: 0 }
    }

    /// The next `len` bytes (at most [`PIECE_BYTES`] and a bit: the caller bounds its entries).
    ///
    /// Errors: `Corrupt` when the table ends before.
    pub(crate) async fn take(&mut self, len: usize) -> Result<&[u8], Error> {
        while self.bytes.len() - self.at < len {
            self.bytes.drain(..self.at);
            self.at = 0;
            let left = self.end.saturating_sub(self.offset);
            let want = usize::try_from(left).unwrap_or(usize::MAX).min(PIECE_BYTES);
            let piece = read(self.ring, self.storage, self.offset, want, self.what).await?;
            if piece.is_empty() {
                return Err(Error::corrupt(
                    self.storage.name(),
                    format!("{} is not complete at byte {}", self.what, self.end),
                ));
            }
            self.offset += Bytes::of(piece.len());
            self.bytes.extend_from_slice(&piece);
        }
        let start = self.at;
        self.at += len;
        Ok(&self.bytes[start..start + len])
    }

    /// Skips the padding between entries: the last entry of a table may have none.
    pub(crate) async fn align(&mut self) -> Result<(), Error> {
        let position = self.position();
        let padding = usize::from(position.0.to_le_bytes()[0] % 8).wrapping_neg() % 8;
        self.take(padding).await.map(drop)
    }

    /// Host offset of the byte that [`take`](TableReader::take) gives next.
    pub(crate) fn position(&self) -> HostOffset {
        self.offset - Bytes::of(self.bytes.len() - self.at)
    }
}

/// The big-endian words of a table, in the byte order of the machine.
pub(crate) fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|raw| u64::from_be_bytes(*raw)).collect()
}

/// A table as it is on disk.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}
