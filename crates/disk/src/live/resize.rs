//! The size of a disk that is in use.
//!
//! A raw disk grows while clients work: the file first, then what they see. It shrinks, and a qcow2 image
//! changes its size in either direction, while nobody works on it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_qcow2::Preallocation;
use ringdisk_ring::{Errno, Ring};

use super::busy;
use crate::layer::{Layer, Node, Raw};
use crate::write::resizable;
use crate::{Disk, Error, ErrorKind};

/// Sizes of qcow2 images are multiples of this, bytes.
const SECTOR: u64 = 512;

/// How a disk changes its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeOptions {
    /// The new size may be smaller; what lies behind it is lost.
    pub shrink: bool,
    /// What is prepared in the grown part.
    pub preallocation: Preallocation,
}

impl Disk {
    /// Changes the size; a grown part reads as zeroes. Concurrent changes take turns.
    ///
    /// * `size`: bytes; smaller is what was asked for, so the rest is lost.
    ///
    /// Errors: EOPNOTSUPP where the size is fixed (null, a block device, a window of given size, an
    /// image whose bitmaps or snapshots forbid it); EROFS; EBUSY during a commit; those of the storage
    /// (EFBIG, ENOSPC).
    pub async fn resize(&self, ring: &Ring, size: u64) -> Result<(), Errno> {
        let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        self.set_len(ring, size, options, false).await.map_err(|error| errno_of(&error))
    }

    /// Makes the disk at least `size` bytes long; never shrinks it. For writes past the end: those
    /// that come at once grow to the largest end, in any order.
    ///
    /// Errors: as [`Disk::resize`].
    pub async fn grow(&self, ring: &Ring, size: u64) -> Result<(), Errno> {
        if size <= self.size() {
            return Ok(());
        }
        let options = ResizeOptions::default();
        self.set_len(ring, size, options, true).await.map_err(|error| errno_of(&error))
    }

    /// As [`Disk::resize`], for the control path.
    ///
    /// Errors: `Invalid` for a smaller size without `shrink`; the others with their reasons.
    pub async fn resize_with(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
    ) -> Result<(), Error> {
        self.set_len(ring, size, options, false).await
    }

    async fn set_len(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
        grow_only: bool,
    ) -> Result<(), Error> {
        if self.is_read_only() {
            return Err(Error::os("cannot change the size", Errno::ROFS));
        }
        if i64::try_from(size).is_err() {
            return Err(Error::os("cannot change the size", Errno::FBIG));
        }
        let graph = self.graph();
        match &graph.top().node {
            Node::Null(_) => Err(fixed()),
            Node::Raw(raw) => {
                if !resizable(raw) {
                    return Err(fixed());
                }
                self.set_len_raw(ring, size, options, grow_only).await
            }
            Node::Qcow2(_) => {
                let change = move |disk: Arc<Disk>, ring: Ring| async move {
                    disk.set_len_qcow2(&ring, size, options, grow_only).await
                };
                self.detached(ring, change).await
            }
        }
    }

    async fn set_len_raw(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
        grow_only: bool,
    ) -> Result<(), Error> {
        let turn = self.turns().enter().await;
        if self.is_busy.load(Ordering::Acquire) {
            return Err(busy());
        }
        let before = self.size();
        if grow_only && size <= before {
            return Ok(());
        }
        if size < before {
            if !options.shrink {
                return Err(would_shrink(before, size));
            }
            let drained = self.gateway().drain(ring, turn).await;
            let layer = Arc::clone(drained.graph().top());
            return self.move_end(ring, &layer, size, options).await;
        }
        // The turn keeps other changes away; requests in flight do not mind a longer file.
        let layer = Arc::clone(self.graph().top());
        let result = self.move_end(ring, &layer, size, options).await;
        drop(turn);
        result
    }

    /// Moves the end of a raw layer.
    async fn move_end(
        &self,
        ring: &Ring,
        layer: &Layer,
        size: u64,
        options: ResizeOptions,
    ) -> Result<(), Error> {
        let Node::Raw(raw) = &layer.node else { return Err(fixed()) };
        let failed = |errno| Error::os("cannot change the size of the file", errno);
        let end = raw.offset.checked_add(size).ok_or(Errno::FBIG).map_err(failed)?;
        let before = layer.size();
        let known = |size: u64| {
            layer.size.store(size, Ordering::Release);
            self.set_size(size);
        };
        // Requests never see a size that the storage does not have: smaller first, larger last.
        known(size.min(before));
        if let Err(errno) = set_end(ring, raw, before, size, end, options).await {
            known(before);
            return Err(failed(errno));
        }
        known(size);
        if size != before {
            self.watchers().notify(size);
        }
        Ok(())
    }

    async fn set_len_qcow2(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
        grow_only: bool,
    ) -> Result<(), Error> {
        // The format counts in sectors; a client that writes past the end need not.
        let size = if grow_only { size.next_multiple_of(SECTOR) } else { size };
        let mut drained = self.change(ring).await?;
        let before = drained.graph().size();
        if size == before || (grow_only && size < before) {
            return Ok(());
        }
        if size < before && !options.shrink {
            return Err(would_shrink(before, size));
        }
        let options = ringdisk_qcow2::ResizeOptions {
            shrink: options.shrink,
            preallocation: options.preallocation,
        };
        let graph = Arc::clone(drained.graph());
        self.offline(ring, &mut drained, false, async |ring, image| {
            image.resize(ring, size, &options, &graph.below(0)).await
        })
        .await
    }
}

/// Changes the length of a raw file, and prepares what was added.
async fn set_end(
    ring: &Ring,
    raw: &Raw,
    before: u64,
    size: u64,
    end: u64,
    options: ResizeOptions,
) -> Result<(), Errno> {
    use ringdisk_storage::Preallocation as Theirs;
    let mode = match options.preallocation {
        Preallocation::Off => Theirs::Off,
        Preallocation::Falloc => Theirs::Falloc,
        Preallocation::Full => Theirs::Full,
        Preallocation::Metadata => return Err(Errno::INVAL),
    };
    if size > before && mode != Theirs::Off {
        return raw.storage.preallocate(ring, raw.offset + before, size - before, mode).await;
    }
    raw.storage.set_len(ring, end).await
}

fn would_shrink(before: u64, size: u64) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!(
            "{size} bytes are less than the disk has ({before}); what lies behind would be lost, so \
             shrinking must be asked for with `--shrink`"
        ),
    )
}

fn fixed() -> Error {
    Error::os("the size of this disk cannot be changed", Errno::OPNOTSUPP)
}

/// The errno that a client gets for an error of the control path.
fn errno_of(error: &Error) -> Errno {
    error.errno().unwrap_or(match error.kind() {
        ErrorKind::Busy => Errno::BUSY,
        ErrorKind::Invalid => Errno::INVAL,
        ErrorKind::Unsupported => Errno::OPNOTSUPP,
        ErrorKind::PermissionDenied => Errno::ROFS,
        _ => Errno::IO,
    })
}
