//! Live changes of a disk, while clients use it: size, overlays, commits, backing files, snapshots.
//!
//! Promises:
//! - A change waits for the requests in flight and makes new ones wait (they never fail) until it
//!   is done; changes run one after the other. A commit, a stream and a mirror copy, and a change
//!   of the backing file compares, while clients work; clients wait for the last step only. Other
//!   changes are refused meanwhile, except (not during a mirror) those of clients that change the
//!   size of the disk; and a mirror, or a stream, and commits of layers below run at once
//!   ([`LongChange`]).
//! - A change runs to its end when its caller is dropped: it is a task of the ring. If the ring
//!   ends in the middle of it, the images are sound but the chain is unknown, and the disk answers
//!   with errors.
//! - A change of metadata other than by writing runs on an image without requests: it is closed,
//!   opened again on the same storage, changed, closed, and opened for requests.
//! - A change that fails leaves the disk as it was.
//!
//! Control path.

mod backing;
mod bitmaps;
mod commit;
mod copy;
mod detached;
mod last_pass;
mod mirror;
mod overlay;
mod pivot;
mod reopen;
mod resize;
mod resize_in_commit;
mod snapshot;
mod stream;

use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::Qcow2;
use ringdisk_ring::{Errno, Ring};

use crate::graph::{Drained, State};
use crate::layer::{Layer, Node};
pub(crate) use crate::long_changes::{LongChange, Place, busy};
use crate::lost_names::LOST_NAMES_TARGET;
use crate::{Disk, Error, ErrorKind};

pub use backing::Backing;
pub(crate) use backing::snapshots_show_the_same;
pub(crate) use bitmaps::{Marks, bitmap_result, has_bitmap};
pub(crate) use copy::{all_of, buffer, equal, pieces};
use last_pass::LastPassFailure;
pub(crate) use mirror::{Destination, GIVEN_UP_WAIT, check_target, data_bytes, reads_as_zeroes};
pub use mirror::{MirrorControl, MirrorEnd, MirrorLeft, MirrorOptions, MirrorSync};
pub use overlay::OverlayOptions;
pub(crate) use reopen::{again, for_reading, in_mode, named_as};
pub use resize::{NewSize, ResizeOptions, Resized};
pub use snapshot::SnapshotChange;
pub use stream::StreamOptions;

impl Disk {
    /// Waits for other changes and for the requests in flight.
    ///
    /// Errors: `Busy` during a commit.
    async fn change(&self, ring: &Ring) -> Result<Drained<'_>, Error> {
        let turn = self.changes().lock().await;
        self.check_free()?;
        Ok(self.gateway().drain(ring, turn).await)
    }

    /// Whether a change may be made now. The caller holds the lock of changes.
    ///
    /// Errors: `Busy` during a long change and while the disk is not active; `Io` on one that is
    /// broken.
    pub(crate) fn check_free(&self) -> Result<(), Error> {
        self.check_free_for(LongChange::Whole)
    }

    /// As [`Disk::check_free`], for a long change of this kind.
    ///
    /// Errors: as there, but where it may begin beside what is under way.
    pub(crate) fn check_free_for(&self, kind: LongChange) -> Result<(), Error> {
        self.long.check(kind)?;
        match self.graph().state {
            State::Active => Ok(()),
            State::Inactive | State::Quiet => Err(inactive()),
            State::Broken => Err(broken()),
        }
    }

    /// As [`Disk::check_free`], for a change that may also be made while a commit copies or backing
    /// files are compared. Returns whether that is so.
    ///
    /// Errors: as there, but for `Busy` meanwhile.
    pub(crate) fn check_beside_commit(&self) -> Result<bool, Error> {
        let is_busy = self.long.any();
        match self.check_free() {
            Err(_) if is_busy && self.graph().state == State::Active => Ok(true),
            result => result.map(|()| false),
        }
    }

    /// Makes all writes durable and writes cached metadata: the end of an export. Later requests
    /// fail on a writable qcow2 image. Waits for the requests in flight.
    ///
    /// Errors: those of the storage; after one, writes of clients may not be on stable storage.
    pub async fn close(&self, ring: &Ring) -> Result<(), Errno> {
        let turn = self.changes().lock().await;
        let drained = self.gateway().drain(ring, turn).await;
        let graph = drained.graph();
        if let Some(fleece) = &graph.fleece {
            fleece.end(ring).await;
        }
        if matches!(graph.state, State::Inactive | State::Quiet) {
            // Everything was put on stable storage when the disk became inactive.
            return Ok(());
        }
        let mut result = graph.check();
        if self.options().temporary {
            // The overlay vanishes with the disk.
            return result;
        }
        for lost in self.lost_names() {
            tracing::warn!(target: LOST_NAMES_TARGET, "at the end of the disk: {lost}");
        }
        for layer in graph.layers.iter().filter(|layer| layer.is_writable) {
            let closed = match &layer.node {
                // Tried again after a failure; the second attempt gives up data that it cannot
                // save.
                Node::Qcow2(image) => match image.close_for_change(ring).await {
                    Ok(()) => Ok(()),
                    Err(_) => image.close(ring).await,
                },
                Node::Raw(raw) if self.cache() != crate::Cache::Unsafe => {
                    raw.storage.flush(ring).await
                }
                Node::Raw(_) | Node::Null(_) | Node::Frozen(_) => Ok(()),
            };
            result = result.and(closed);
        }
        result
    }

    /// Runs an operation on the top image while no request uses it, and puts the image in place
    /// again.
    ///
    /// Errors: as [`offline_layer`]; those of the operation, which then has changed nothing.
    async fn offline<T>(
        &self,
        ring: &Ring,
        drained: &mut Drained<'_>,
        always_tell: bool,
        operation: impl AsyncFnOnce(&Ring, &mut Qcow2) -> Result<T, ringdisk_qcow2::Error>,
    ) -> Result<T, Error> {
        let graph = Arc::clone(drained.graph());
        let (fresh, result) = offline_layer(ring, self, drained, graph.top(), operation).await?;
        let mut layers = graph.layers.clone();
        layers[0] = Arc::new(fresh);
        self.put(drained, graph.with_layers(layers), always_tell && result.is_ok());
        result
    }
}

/// Runs an operation on the image of a writable layer while no request uses it. Gives the layer,
/// open for requests again, and the result of the operation.
///
/// Errors: `Unsupported` when it is no qcow2 image; the image could not be opened again, so the
/// disk is broken if the change has begun ([`Drained::begin`]).
async fn offline_layer<T>(
    ring: &Ring,
    disk: &Disk,
    drained: &mut Drained<'_>,
    layer: &Layer,
    operation: impl AsyncFnOnce(&Ring, &mut Qcow2) -> Result<T, ringdisk_qcow2::Error>,
) -> Result<(Layer, Result<T, Error>), Error> {
    reopen::check(layer)?;
    close_layer(ring, layer).await?;
    drained.begin();
    offline_on(ring, disk, layer, operation).await
}

/// Closes a writable layer: everything is on stable storage then, and no request may use it. A
/// layer that cannot be closed stays usable as it was, with its bitmaps.
pub(crate) async fn close_layer(ring: &Ring, layer: &Layer) -> Result<(), Error> {
    let result = match &layer.node {
        Node::Qcow2(image) if layer.is_writable => match image.flush(ring).await {
            Ok(()) => image.close_for_change(ring).await,
            Err(errno) => Err(errno),
        },
        Node::Raw(raw) if layer.is_writable => raw.storage.flush(ring).await,
        Node::Qcow2(_) | Node::Raw(_) | Node::Null(_) | Node::Frozen(_) => Ok(()),
    };
    result.map_err(|errno| {
        let doing = format!("cannot write '{}' to stable storage", layer.name().display());
        Error::os(doing, errno)
    })
}

/// As [`offline_layer`], for a layer that was closed.
async fn offline_on<T>(
    ring: &Ring,
    disk: &Disk,
    layer: &Layer,
    operation: impl AsyncFnOnce(&Ring, &mut Qcow2) -> Result<T, ringdisk_qcow2::Error>,
) -> Result<(Layer, Result<T, Error>), Error> {
    let error = match reopen::image(ring, layer, disk.options(), true).await {
        Ok(mut image) => match operation(ring, &mut image).await {
            Ok(value) => return Ok((reopen::layer_of(image, layer), Ok(value))),
            Err(error) => {
                if let Some(old) = layer.qcow2() {
                    old.take_over_names(&image);
                }
                crate::open::of_qcow2(&error)
            }
        },
        Err(error) => error,
    };
    Ok((again(ring, layer, disk.options(), true).await?, Err(error)))
}

/// Marks a long change: meanwhile clients may change the size of the disk, and every other change
/// but those that [`LongChange`] allows is refused. Ends when it is dropped.
struct Busy<'a>(&'a Disk, LongChange);

impl<'a> Busy<'a> {
    /// The caller holds the lock of changes.
    ///
    /// Errors: `Busy`.
    fn begin(disk: &'a Disk, kind: LongChange) -> Result<Busy<'a>, Error> {
        disk.long.begin(kind).map(|()| Busy(disk, kind))
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.long.end(self.1);
    }
}

fn inactive() -> Error {
    Error::new(
        ErrorKind::Busy,
        "the disk is not active: its images are in the hands of another process; change it there",
    )
    .with_errno(Some(Errno::BUSY))
}

/// Longest wait of a quick change for requests in flight and for other changes. Requests that come
/// later wait, too.
pub(crate) const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// The error for requests in flight, or another change, that did not end within `limit`.
pub(crate) fn not_drained(limit: Duration) -> Error {
    Error::new(
        ErrorKind::Busy,
        format!(
            "requests of clients, or another change of the disk, did not end within {} ms; try \
             again when less is going on",
            limit.as_millis()
        ),
    )
}

/// The error for a change that a running checkpoint forbids.
///
/// * `consequence`: `so …`.
pub(crate) fn checkpointed(consequence: &str) -> Error {
    Error::new(
        ErrorKind::Busy,
        format!(
            "a checkpoint of the disk is running, {consequence}; end the checkpoint first, or the \
             backup that has it"
        ),
    )
}

pub(crate) fn broken() -> Error {
    Error::new(
        ErrorKind::Io,
        "an earlier change of the disk ended half way; stop and open it again",
    )
}

/// Refuses a change that must last.
///
/// Errors: `PermissionDenied` on a read-only disk; `Unsupported` on one with a temporary overlay:
/// the overlay vanishes with the disk, so no image may refer to it.
fn check_lasting(disk: &Disk) -> Result<(), Error> {
    if disk.is_read_only() {
        return Err(read_only());
    }
    if disk.options().temporary {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the disk has a temporary overlay, which is dropped at its end; use one that is kept",
        ));
    }
    Ok(())
}

fn read_only() -> Error {
    Error::new(ErrorKind::PermissionDenied, "the disk is open for reading only")
}
