//! The image that a repair changes.
//!
//! Promises: each write is of whole pieces of metadata and says what it was for when it fails.

use ringdisk_ring::Ring;
use ringdisk_storage::{Kind, Storage};

use crate::check::source::Reader;
use crate::check::source::Source;
use crate::check::stop::Stop;
use crate::header::{self, Header, HeaderImage, Subject, write_bytes};
use crate::units::{Bytes, HostOffset};

/// The image that is repaired.
#[derive(Clone, Copy, Debug)]
pub(super) struct Image<'a> {
    pub(super) ring: &'a Ring,
    pub(super) storage: &'a Storage,
    pub(super) header: &'a Header,
    /// Length of the external data file in bytes, where that is known.
    pub(super) data_len: Option<Bytes>,
}

impl Image<'_> {
    pub(super) fn reader(&self) -> Reader<'_> {
        Reader { ring: self.ring, storage: self.storage, data_len: self.data_len }
    }

    pub(super) async fn write(&self, offset: HostOffset, bytes: &[u8]) -> Result<(), Stop> {
        let written = write_bytes(self.ring, self.storage, offset, bytes).await;
        written.map_err(|errno| Stop::Io("writing new metadata", errno))
    }

    pub(super) async fn flush(&self) -> Result<(), Stop> {
        let flushed = self.storage.flush(self.ring).await;
        flushed.map_err(|errno| Stop::Io("flushing new metadata", errno))
    }

    /// The header as bytes.
    pub(super) async fn head(&self) -> Result<HeaderImage, Stop> {
        let len =
            usize::try_from(Bytes(self.storage.len()).min(self.header.geometry.cluster_size()));
        let len = len.map_err(|_| Stop::Memory)?;
        let bytes = self.reader().read("reading the qcow2 header", HostOffset(0), len).await?;
        // As when it was read for the check: tables may lie past the end.
        let subject = Subject { name: self.storage.name(), len: Bytes(i64::MAX.unsigned_abs()) };
        Ok(HeaderImage::parse(&bytes, subject)?)
    }

    /// Cuts the file to the length that it had before new structures were written that nothing
    /// refers to. Only a matter of space.
    pub(super) async fn cut(&self, len: Bytes) {
        // When the header may already lead to them, they have to stay.
        let kept = self.head().await.is_ok_and(|head| {
            let (table, clusters) = head.refcount_table();
            let header = self.header;
            table == header.refcount_table.start && clusters == header.refcount_table_clusters
        });
        if kept && self.storage.kind() != Kind::BlockDevice && Bytes(self.storage.len()) > len {
            let _ = self.storage.set_len(self.ring, len.0).await;
        }
    }

    /// Clears the autoclear bits that we do not know: before the first write in place.
    pub(super) async fn clear_unknown(&self) -> Result<(), Stop> {
        let head = self.head().await?;
        let unknown = head.autoclear() & !header::KNOWN_AUTOCLEAR;
        if unknown == 0 { Ok(()) } else { self.switch(&head).await }
    }

    /// Makes what was written durable, then the header, then that. Autoclear bits that we do not
    /// know are cleared on the way.
    pub(super) async fn switch(&self, head: &HeaderImage) -> Result<(), Stop> {
        let mut head = head.clone();
        head.set_autoclear(head.autoclear() & header::KNOWN_AUTOCLEAR);
        self.flush().await?;
        let written = head.write_first_sector(self.ring, self.storage).await;
        written.map_err(|errno| Stop::Io("writing the qcow2 header", errno))?;
        self.flush().await
    }
}
