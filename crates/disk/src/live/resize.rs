//! Changes the size of a disk that is in use.
//!
//! Promises: a raw disk grows while clients work: the file first, then the size that clients see.
//! It shrinks, and a qcow2 image changes its size in either direction, while no request is in
//! flight. Clients never see a size that the storage does not have.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ringdisk_qcow2::{Bytes, GuestOffset, Preallocation};
use ringdisk_ring::{Errno, Ring};

use super::{busy, checkpointed};
use crate::graph::{Graph, Window};
use crate::layer::{Layer, Node, Raw};
use crate::limits::SECTOR_BYTES;
use crate::{Disk, Error, ErrorKind, Progress};

/// Zeroes that are written between two checks for a cancellation, bytes.
const PREPARED_BYTES: Bytes = Bytes(16 << 20);

/// Options of a change of the size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeOptions {
    /// The new size may be smaller; the bytes past it are lost.
    pub shrink: bool,
    /// Preallocation of the grown part.
    pub preallocation: Preallocation,
}

/// A requested size, bytes. A relative one counts from the size at the moment of the change: other
/// changes, and clients that append, may come before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// Exactly this size.
    To(Bytes),
    /// This many bytes more.
    Grow(Bytes),
    /// This many bytes less.
    Shrink(Bytes),
}

impl From<Bytes> for NewSize {
    fn from(size: Bytes) -> NewSize {
        NewSize::To(size)
    }
}

impl NewSize {
    /// The new size of a disk of `before` bytes.
    ///
    /// Errors: `Invalid` for a size below zero, or larger than any disk can be.
    pub fn apply(self, before: Bytes) -> Result<Bytes, Error> {
        let invalid = |text: String| Error::new(ErrorKind::Invalid, text);
        match self {
            NewSize::To(size) => Ok(size),
            NewSize::Grow(by) => {
                before.checked_add(by).filter(|size| i64::try_from(size.0).is_ok()).ok_or_else(
                    || invalid(format!("{before} bytes and {by} more are too large for any disk")),
                )
            }
            NewSize::Shrink(by) => {
                before.checked_sub(by).filter(|size| !size.is_zero() || by.is_zero()).ok_or_else(
                    || invalid(format!("the disk has {before} bytes, so it cannot lose {by}")),
                )
            }
        }
    }
}

/// Result of a change of the size, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// The size before the change.
    pub before: Bytes,
    /// The size after it.
    pub after: Bytes,
}

/// The origin of a change of the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Requester {
    /// A client sets the size.
    Client,
    /// A client needs at least this size.
    ClientAtLeast,
    /// The control path.
    Control,
}

/// A change of the size, as it is carried out. Its sizes are those that clients see.
#[derive(Clone, Copy, Debug)]
struct Change {
    size: NewSize,
    options: ResizeOptions,
    requester: Requester,
    /// Start of the preallocated space, if not the old end; EOPNOTSUPP when that is inside the
    /// disk. Bytes.
    from: Option<GuestOffset>,
}

impl Change {
    fn new(size: NewSize, options: ResizeOptions, requester: Requester) -> Change {
        Change { size, options, requester, from: None }
    }

    /// The new size of a disk of `before` bytes, both of the whole disk; `None`: no change.
    ///
    /// Errors: `Invalid` for a smaller one that was not allowed, EOPNOTSUPP where the space would
    /// begin inside the disk, EFBIG.
    fn decide(&self, window: Window, before: Bytes) -> Result<Option<Bytes>, Error> {
        let size =
            window.start.saturating_add(self.size.apply(window.visible(before))?).from_start();
        if i64::try_from(size.0).is_err() {
            return Err(Error::os("cannot change the size", Errno::FBIG));
        }
        if self.from.is_some_and(|from| from.from_start() < window.visible(before)) {
            return Err(Error::os("a disk does not reserve space inside", Errno::OPNOTSUPP));
        }
        if self.requester == Requester::ClientAtLeast && size <= before {
            return Ok(None);
        }
        if size < before && !self.options.shrink {
            return Err(would_shrink(window, before, size));
        }
        Ok(Some(size))
    }

    /// Checks for a cancellation after a wait, before anything is changed. Messages that have
    /// arrived meanwhile are handled first, so that a process that was stopped (SIGSTOP) does not
    /// carry out a change that its client has cancelled.
    ///
    /// Errors: `Cancelled`.
    async fn check_cancelled(&self, ring: &Ring, progress: &Progress) -> Result<(), Error> {
        if self.requester == Requester::Control {
            ring.sleep(Duration::from_nanos(1)).await;
        }
        progress.check().map_err(|errno| Error::os("cannot change the size", errno))
    }

    /// Start of the preallocated space in the whole disk, bytes.
    fn start(&self, window: Window, before: Bytes) -> GuestOffset {
        let end = GuestOffset::after(before);
        self.from.map_or(end, |from| window.start.saturating_add(from.from_start())).max(end)
    }
}

impl Disk {
    /// Changes the size; a grown part reads as zeroes. Concurrent changes run one after the other.
    ///
    /// * `size`: bytes; it may be smaller, then the rest is lost.
    ///
    /// Errors: EOPNOTSUPP where the size is fixed (null, a block device, a window or partition of
    /// given size, an image whose bitmaps or snapshots forbid it, or a base of a commit under way
    /// that cannot be cut); EROFS; those of the storage (EFBIG, ENOSPC).
    pub async fn resize(&self, ring: &Ring, size: Bytes) -> Result<(), Errno> {
        let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
        self.set_len_for_client(ring, Change::new(NewSize::To(size), options, Requester::Client))
            .await
    }

    /// As [`Disk::resize`], but never shrinks it.
    ///
    /// Errors: as [`Disk::resize`]; EINVAL when the disk is larger.
    pub async fn lengthen(&self, ring: &Ring, size: Bytes) -> Result<(), Errno> {
        let change = Change::new(NewSize::To(size), ResizeOptions::default(), Requester::Client);
        self.set_len_for_client(ring, change).await
    }

    /// Makes the disk at least `size` bytes long; never shrinks it. For writes past the end:
    /// concurrent ones grow the disk to the largest end, in any order.
    ///
    /// Errors: as [`Disk::resize`].
    pub async fn grow(&self, ring: &Ring, size: Bytes) -> Result<(), Errno> {
        if size <= self.size() {
            return Ok(());
        }
        let change =
            Change::new(NewSize::To(size), ResizeOptions::default(), Requester::ClientAtLeast);
        self.set_len_for_client(ring, change).await
    }

    /// Makes the disk `offset + len` bytes long and allocates space from `offset` on.
    ///
    /// * `offset`: bytes, at or past the end of the disk.
    ///
    /// Errors: as [`Disk::resize`]; EOPNOTSUPP for an offset inside the disk, and where space
    /// cannot be preallocated; ENOSPC. The disk is as it was then, except that the kernel may have
    /// lengthened one that is lent.
    pub async fn allocate(&self, ring: &Ring, offset: u64, len: Bytes) -> Result<(), Errno> {
        let offset = GuestOffset(offset);
        let size = offset.checked_add(len).ok_or(Errno::FBIG)?.from_start();
        let options = ResizeOptions { shrink: false, preallocation: Preallocation::Falloc };
        let change = Change::new(NewSize::To(size), options, Requester::ClientAtLeast);
        self.set_len_for_client(ring, Change { from: Some(offset), ..change }).await
    }

    /// As [`Disk::resize`], for the control path.
    ///
    /// Errors: `Invalid` for a smaller size without `shrink`; `Busy` during a commit; the others
    /// with their reasons.
    pub async fn resize_with(
        &self,
        ring: &Ring,
        size: impl Into<NewSize>,
        options: ResizeOptions,
    ) -> Result<Resized, Error> {
        self.set_len(ring, Change::new(size.into(), options, Requester::Control), &Arc::default())
            .await
    }

    /// As [`Disk::resize_with`], but can be cancelled: preallocated space is cut off again then.
    ///
    /// * `progress`: only its cancellation is used.
    ///
    /// Errors: as [`Disk::resize_with`]; `Cancelled`.
    pub async fn resize_unless_cancelled(
        &self,
        ring: &Ring,
        size: impl Into<NewSize>,
        options: ResizeOptions,
        progress: &Arc<Progress>,
    ) -> Result<Resized, Error> {
        let result = self
            .set_len(ring, Change::new(size.into(), options, Requester::Control), progress)
            .await;
        // Another failure is reported even after a cancellation: the size may be the new one.
        result.map_err(|error| match error.errno() {
            Some(Errno::CANCELED) => Error::os("cannot change the size", Errno::CANCELED),
            _ => error,
        })
    }

    async fn set_len_for_client(&self, ring: &Ring, change: Change) -> Result<(), Errno> {
        let result = self.set_len(ring, change, &Arc::default()).await;
        result.map(drop).map_err(|error| errno_of(&error))
    }

    async fn set_len(
        &self,
        ring: &Ring,
        change: Change,
        progress: &Arc<Progress>,
    ) -> Result<Resized, Error> {
        if self.is_read_only() {
            return Err(Error::os("cannot change the size", Errno::ROFS));
        }
        if self.graph().window.is_fixed() {
            return Err(fixed_window());
        }
        loop {
            let graph = self.graph();
            let done = match &graph.top().node {
                Node::Null(_) | Node::Frozen(_) => return Err(fixed()),
                Node::Raw(raw) => {
                    if !raw.can_resize() {
                        return Err(fixed());
                    }
                    match change.requester {
                        // Requests of clients are tasks of the ring, so they run to their end.
                        Requester::Client | Requester::ClientAtLeast => {
                            self.set_len_raw(ring, change, progress).await?
                        }
                        Requester::Control => {
                            let progress = Arc::clone(progress);
                            let run = move |disk: Arc<Disk>, ring: Ring| async move {
                                disk.set_len_raw(&ring, change, &progress).await
                            };
                            self.detached(ring, run).await?
                        }
                    }
                }
                Node::Qcow2(_) => {
                    let progress = Arc::clone(progress);
                    let run = move |disk: Arc<Disk>, ring: Ring| async move {
                        disk.set_len_qcow2(&ring, change, &progress).await
                    };
                    self.detached(ring, run).await?
                }
            };
            if let Some(done) = done {
                return Ok(done);
            }
        }
    }

    /// `None`: nothing was done, since another change has put an overlay on top.
    async fn set_len_raw(
        &self,
        ring: &Ring,
        change: Change,
        progress: &Progress,
    ) -> Result<Option<Resized>, Error> {
        let turn = self.changes().lock().await;
        self.check_free()?;
        change.check_cancelled(ring, progress).await?;
        let asked = self.follow_length(ring).await;
        asked.map_err(|errno| Error::os("cannot ask for the length", errno))?;
        let graph = self.graph();
        if !matches!(graph.top().node, Node::Raw(_)) {
            return Ok(None);
        }
        let (window, before) = (graph.window, graph.size());
        let Some(size) = change.decide(window, before)? else {
            return Ok(Some(resized(window, before, before)));
        };
        let prepared = (change.start(window, before), change.options.preallocation);
        check_cut(&graph, size)?;
        if size < before {
            let drained = self.gateway().drain(ring, turn).await;
            change.check_cancelled(ring, progress).await?;
            let layer = Arc::clone(drained.graph().top());
            self.move_end(ring, &layer, (before, size), prepared, progress).await?;
        } else {
            // The lock of changes excludes other changes; a longer file does not disturb requests
            // in flight.
            let result = self.move_end(ring, graph.top(), (before, size), prepared, progress).await;
            drop(turn);
            result?;
        }
        Ok(Some(Resized { before: window.visible(before), after: self.size() }))
    }

    /// Moves the end of a raw layer.
    async fn move_end(
        &self,
        ring: &Ring,
        layer: &Layer,
        (before, size): (Bytes, Bytes),
        (from, preallocation): (GuestOffset, Preallocation),
        progress: &Progress,
    ) -> Result<(), Error> {
        let Node::Raw(raw) = &layer.node else { return Err(fixed()) };
        let failed = |errno| Error::os("cannot change the size of the file", errno);
        let prepared = (from, mode_of(preallocation)?);
        if self.is_lent() {
            let moved = self.move_lent_end(ring, raw, (before, size), prepared, progress).await;
            return moved.map_err(|errno| match errno {
                Errno::OPNOTSUPP => cannot_lengthen(),
                other => failed(other),
            });
        }
        let known = |size: Bytes| {
            layer.size.store(size.0, Ordering::Release);
            self.set_size(self.graph().window.visible(size));
        };
        // Requests never see a size that the storage does not have: smaller first, larger last.
        known(size.min(before));
        if let Err(errno) = set_end(ring, raw, (before, size), prepared, progress).await {
            known(before);
            return Err(failed(errno));
        }
        known(size);
        if size != before {
            self.watchers().notify(self.size());
        }
        Ok(())
    }

    /// `None`: nothing was done, since a commit has made a raw image the top.
    async fn set_len_qcow2(
        &self,
        ring: &Ring,
        change: Change,
        progress: &Progress,
    ) -> Result<Option<Resized>, Error> {
        let turn = self.changes().lock().await;
        let in_commit = match change.requester {
            Requester::Client | Requester::ClientAtLeast => {
                let in_commit = self.check_beside_commit()?;
                // The target of a mirror would have another size.
                if self.graph().mirror.is_some() {
                    return Err(busy());
                }
                in_commit
            }
            Requester::Control => self.check_free().map(|()| false)?,
        };
        let mut drained = self.gateway().drain(ring, turn).await;
        change.check_cancelled(ring, progress).await?;
        if drained.graph().top_image().is_none() {
            return Ok(None);
        }
        let (window, before) = (drained.graph().window, drained.graph().size());
        let Some(size) = change.decide(window, before)? else {
            return Ok(Some(resized(window, before, before)));
        };
        // The format counts in sectors; a client may write past the end at any byte.
        let size = if change.requester == Requester::ClientAtLeast {
            size.next_multiple_of(SECTOR_BYTES)
        } else {
            size
        };
        if size == before {
            return Ok(Some(resized(window, before, before)));
        }
        check_cut(drained.graph(), size)?;
        let options = ringdisk_qcow2::ResizeOptions {
            shrink: change.options.shrink,
            preallocation: change.options.preallocation,
        };
        if in_commit {
            self.resize_in_commit(ring, &mut drained, size, options).await?;
            return Ok(Some(resized(window, before, size)));
        }
        let gap_end = change.start(window, before).align_down(SECTOR_BYTES).from_start();
        let graph = Arc::clone(drained.graph());
        self.offline(ring, &mut drained, false, async |ring, image| {
            let cancelled = || progress.is_cancelled();
            let below = graph.below(0);
            // No space is preallocated between the old end and the reserved part.
            let off = ringdisk_qcow2::ResizeOptions::default();
            if gap_end > before {
                image.resize_unless(ring, gap_end, &off, &below, &cancelled).await?;
            }
            let result = image.resize_unless(ring, size, &options, &below, &cancelled).await;
            if result.is_err() && gap_end > before {
                let back = ringdisk_qcow2::ResizeOptions { shrink: true, ..off };
                if let Err(error) = image.resize(ring, before, &back, &below).await {
                    tracing::warn!(%error, "the disk stays longer than it was");
                }
            }
            result
        })
        .await?;
        Ok(Some(resized(window, before, size)))
    }
}

/// * `before`, `after`: sizes of the whole disk, bytes.
fn resized(window: Window, before: Bytes, after: Bytes) -> Resized {
    Resized { before: window.visible(before), after: window.visible(after) }
}

fn mode_of(mode: Preallocation) -> Result<ringdisk_storage::Preallocation, Error> {
    match mode {
        Preallocation::Off | Preallocation::Falloc | Preallocation::Full => Ok(mode.of_data()),
        Preallocation::Metadata => Err(Error::new(
            ErrorKind::Invalid,
            "a raw image has no metadata that could be prepared; write off, falloc or full",
        )),
    }
}

/// Changes the length of a raw file that only this process writes to, and preallocates the added
/// part. A file that another program has made longer than the disk is not cut when the disk grows.
///
/// * `before`, `size`: the old and the new size of the disk, bytes.
/// * `from`: start of the preallocated part in the disk, bytes.
async fn set_end(
    ring: &Ring,
    raw: &Raw,
    (before, size): (Bytes, Bytes),
    (from, mode): (GuestOffset, ringdisk_storage::Preallocation),
    progress: &Progress,
) -> Result<(), Errno> {
    use ringdisk_storage::Preallocation as Mode;
    let end = raw.offset.checked_add(size).ok_or(Errno::FBIG)?.0;
    if size < before {
        return raw.storage.set_len(ring, end).await;
    }
    let asked = Arc::clone(&raw.storage);
    let file_len = ring.offload(move || asked.refresh_len()).await?;
    if mode == Mode::Off {
        return if file_len < end { raw.storage.set_len(ring, end).await } else { Ok(()) };
    }
    let piece = if mode == Mode::Full { PREPARED_BYTES } else { Bytes::MAX };
    let mut at = from;
    let stop = GuestOffset::after(size);
    while at < stop {
        let len = (stop - at).min(piece);
        let result = match progress.check() {
            Ok(()) => raw.storage.preallocate(ring, raw.host(at).0, len.0, mode).await,
            cancelled => cancelled,
        };
        if let Err(errno) = result {
            // No client has seen the new part yet. Also where the length is unchanged: space may be
            // allocated past the end.
            let _ = raw.storage.set_len(ring, file_len).await;
            return Err(errno);
        }
        at += len;
    }
    Ok(())
}

fn cannot_lengthen() -> Error {
    Error::os(
        "the kernel writes to the image itself (--passthrough), and its file system has no way to \
         make a file longer beside other writers (fallocate)",
        Errno::OPNOTSUPP,
    )
}

fn would_shrink(window: Window, before: Bytes, size: Bytes) -> Error {
    let (before, size) = (window.visible(before), window.visible(size));
    Error::new(
        ErrorKind::Invalid,
        format!(
            "{size} bytes are less than the disk has ({before}); what lies behind would be lost, \
             so shrinking must be asked for with `--shrink`"
        ),
    )
}

/// Refuses a size that would cut off what a running checkpoint has not copied.
///
/// * `size`: of the whole disk, bytes.
///
/// Errors: `Busy`.
fn check_cut(graph: &Graph, size: Bytes) -> Result<(), Error> {
    match graph.running_fleece() {
        Some(fleece) if size < fleece.size() => {
            Err(checkpointed("so the disk cannot become smaller than it was then"))
        }
        _ => Ok(()),
    }
}

fn fixed_window() -> Error {
    let text = "the disk is a part of its image (--size or --partition), so its size is fixed; \
        resize the whole disk";
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
