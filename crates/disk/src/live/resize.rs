//! The size of a disk that is in use.
//!
//! A raw disk grows while clients work: the file first, then what they see. It shrinks, and a qcow2 image
//! changes its size in either direction, while nobody works on it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_qcow2::Preallocation;
use ringdisk_ring::{Errno, Ring};

use crate::layer::{Layer, Node, Raw};
use crate::window::Window;
use crate::write::resizable;
use crate::{Disk, Error, ErrorKind, Progress};

/// Sizes of qcow2 images are multiples of this, bytes.
const SECTOR: u64 = 512;

/// Zeroes that are written between two looks at whether to go on, bytes.
const PREPARED_BYTES: u64 = 16 << 20;

/// How a disk changes its size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeOptions {
    /// The new size may be smaller; what lies behind it is lost.
    pub shrink: bool,
    /// What is prepared in the grown part.
    pub preallocation: Preallocation,
}

/// Who wants another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// A client names the size.
    Client,
    /// A client needs so much room; more than that is fine.
    Room,
    /// The control path.
    Control,
}

impl Disk {
    /// Changes the size; a grown part reads as zeroes. Concurrent changes take turns.
    ///
    /// * `size`: bytes; smaller is what was asked for, so the rest is lost.
    ///
    /// Errors: EOPNOTSUPP where the size is fixed (null, a block device, a window or partition of given size, an
    /// image whose bitmaps or snapshots forbid it, or a base of a commit under way that cannot be cut); EROFS; those of the storage
    /// (EFBIG, ENOSPC).
    pub async fn resize(&self, ring: &Ring, size: u64) -> Result<(), Errno> {
        let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        let progress = Arc::default();
        self.set_len(ring, size, options, Wish::Client, &progress)
            .await
            .map_err(|error| errno_of(&error))
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
        let progress = Arc::default();
        self.set_len(ring, size, options, Wish::Room, &progress)
            .await
            .map_err(|error| errno_of(&error))
    }

    /// As [`Disk::resize`], for the control path.
    ///
    /// Errors: `Invalid` for a smaller size without `shrink`; `Busy` during a commit; the others with their reasons.
    pub async fn resize_with(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
    ) -> Result<(), Error> {
        self.set_len(ring, size, options, Wish::Control, &Arc::default()).await
    }

    /// As [`Disk::resize_with`], with an end on the way: what was prepared is cut off again then.
    ///
    /// * `progress`: looked at for a cancel, not counted in.
    ///
    /// Errors: as [`Disk::resize_with`]; `Cancelled`.
    pub async fn resize_unless_cancelled(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        let result = self.set_len(ring, size, options, Wish::Control, progress).await;
        result.map_err(|error| match progress.is_cancelled() {
            true => Error::os("cannot change the size", Errno::CANCELED),
            false => error,
        })
    }

    async fn set_len(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
        wish: Wish,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        if self.is_read_only() {
            return Err(Error::os("cannot change the size", Errno::ROFS));
        }
        let graph = self.graph();
        if graph.window.is_fixed() {
            return Err(fixed_window());
        }
        // From here on sizes are those of the whole disk.
        let size = graph.window.start.saturating_add(size);
        if i64::try_from(size).is_err() {
            return Err(Error::os("cannot change the size", Errno::FBIG));
        }
        loop {
            let graph = self.graph();
            let is_done = match &graph.top().node {
                Node::Null(_) => return Err(fixed()),
                Node::Raw(raw) => {
                    if !resizable(raw) {
                        return Err(fixed());
                    }
                    self.set_len_raw(ring, size, options, wish, progress).await?
                }
                Node::Qcow2(_) => {
                    let progress = Arc::clone(progress);
                    let change = move |disk: Arc<Disk>, ring: Ring| async move {
                        disk.set_len_qcow2(&ring, size, options, wish, &progress).await
                    };
                    self.detached(ring, change).await?
                }
            };
            if is_done {
                return Ok(());
            }
        }
    }

    /// `false`: when its turn came the top was not raw any more (an overlay was added), and nothing was done.
    async fn set_len_raw(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
        wish: Wish,
        progress: &Progress,
    ) -> Result<bool, Error> {
        let turn = self.turns().enter().await;
        self.check_free()?;
        if !matches!(self.graph().top().node, Node::Raw(_)) {
            return Ok(false);
        }
        let before = self.graph().size();
        if wish == Wish::Room && size <= before {
            return Ok(true);
        }
        if size < before {
            if !options.shrink {
                return Err(would_shrink(self.graph().window, before, size));
            }
            let drained = self.gateway().drain(ring, turn).await;
            let layer = Arc::clone(drained.graph().top());
            return self.move_end(ring, &layer, size, options, progress).await.map(|()| true);
        }
        // The turn keeps other changes away; requests in flight do not mind a longer file.
        let layer = Arc::clone(self.graph().top());
        let result = self.move_end(ring, &layer, size, options, progress).await;
        drop(turn);
        result.map(|()| true)
    }

    /// Moves the end of a raw layer.
    async fn move_end(
        &self,
        ring: &Ring,
        layer: &Layer,
        size: u64,
        options: ResizeOptions,
        progress: &Progress,
    ) -> Result<(), Error> {
        let Node::Raw(raw) = &layer.node else { return Err(fixed()) };
        let failed = |errno| Error::os("cannot change the size of the file", errno);
        let end = raw.offset.checked_add(size).ok_or(Errno::FBIG).map_err(failed)?;
        let before = layer.size();
        let known = |size: u64| {
            layer.size.store(size, Ordering::Release);
            self.set_size(self.graph().window.visible(size));
        };
        // Requests never see a size that the storage does not have: smaller first, larger last.
        known(size.min(before));
        if let Err(errno) = set_end(ring, raw, before..size, end, options, progress).await {
            known(before);
            return Err(failed(errno));
        }
        known(size);
        if size != before {
            self.watchers().notify(self.size());
        }
        Ok(())
    }

    /// `false`: when its turn came the top was not a qcow2 image any more (a commit has ended), and nothing was done.
    async fn set_len_qcow2(
        &self,
        ring: &Ring,
        size: u64,
        options: ResizeOptions,
        wish: Wish,
        progress: &Progress,
    ) -> Result<bool, Error> {
        // The format counts in sectors; a client that writes past the end need not.
        let size = if wish == Wish::Room { size.next_multiple_of(SECTOR) } else { size };
        let turn = self.turns().enter().await;
        let in_commit = match wish {
            Wish::Client | Wish::Room => self.check_beside_commit()?,
            Wish::Control => self.check_free().map(|()| false)?,
        };
        let mut drained = self.gateway().drain(ring, turn).await;
        if drained.graph().top_image().is_none() {
            return Ok(false);
        }
        let before = drained.graph().size();
        if size == before || (wish == Wish::Room && size < before) {
            return Ok(true);
        }
        if size < before && !options.shrink {
            return Err(would_shrink(drained.graph().window, before, size));
        }
        let options = ringdisk_qcow2::ResizeOptions {
            shrink: options.shrink,
            preallocation: options.preallocation,
        };
        if in_commit {
            return self.resize_in_commit(ring, &mut drained, size, options).await.map(|()| true);
        }
        let graph = Arc::clone(drained.graph());
        self.offline(ring, &mut drained, false, async |ring, image| {
            let cancelled = || progress.is_cancelled();
            image.resize_unless(ring, size, &options, &graph.below(0), &cancelled).await
        })
        .await
        .map(|()| true)
    }
}

/// Changes the length of a raw file, and prepares what was added.
///
/// * `disk`: its old and its new size, bytes.
async fn set_end(
    ring: &Ring,
    raw: &Raw,
    disk: Range<u64>,
    end: u64,
    options: ResizeOptions,
    progress: &Progress,
) -> Result<(), Errno> {
    use ringdisk_storage::Preallocation as Theirs;
    let mode = match options.preallocation {
        Preallocation::Off => Theirs::Off,
        Preallocation::Falloc => Theirs::Falloc,
        Preallocation::Full => Theirs::Full,
        Preallocation::Metadata => return Err(Errno::INVAL),
    };
    if disk.end > disk.start && mode != Theirs::Off {
        let file_len = raw.storage.len();
        let piece = if mode == Theirs::Full { PREPARED_BYTES } else { u64::MAX };
        let mut at = disk.start;
        while at < disk.end {
            let len = (disk.end - at).min(piece);
            let result = match progress.check() {
                Ok(()) => raw.storage.preallocate(ring, raw.offset + at, len, mode).await,
                cancelled => cancelled,
            };
            if let Err(errno) = result {
                // A failure costs space only: nobody sees it yet.
                if raw.storage.len() > file_len {
                    let _ = raw.storage.set_len(ring, file_len).await;
                }
                return Err(errno);
            }
            at += len;
        }
        return Ok(());
    }
    raw.storage.set_len(ring, end).await
}

fn would_shrink(window: Window, before: u64, size: u64) -> Error {
    let (before, size) = (window.visible(before), window.visible(size));
    Error::new(
        ErrorKind::Invalid,
        format!(
            "{size} bytes are less than the disk has ({before}); what lies behind would be lost, so \
             shrinking must be asked for with `--shrink`"
        ),
    )
}

fn fixed_window() -> Error {
    let text = "the disk is a part of its image (--size or --partition), so its size is fixed; resize the whole disk";
    Error::new(ErrorKind::Unsupported, text).with_errno(Some(Errno::OPNOTSUPP))
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
