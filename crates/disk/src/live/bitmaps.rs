//! Changes the bitmaps of the top image while the disk is in use.
//!
//! Promises: clients wait while the bitmaps are changed, but not while one is added; what was
//! recorded until then is kept, and recording goes on with the first write afterwards. A change
//! that fails leaves the bitmaps as they were.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_qcow2::{BitmapContents, Bytes, Qcow2};
use ringdisk_ring::{Errno, Ring};

use super::{DRAIN_LIMIT, again, check_lasting, close_layer, not_drained, reopen};
use crate::graph::Graph;
use crate::name::printable_path;
use crate::open::of_qcow2;
use crate::{Disk, Error, ErrorKind};

/// A new bitmap is on stable storage within this time, or is not added. Clients do not wait.
const ADD_LIMIT: Duration = Duration::from_secs(5);

/// A bitmap of the top image whose marks are asked for at an instant.
#[derive(Clone, Debug)]
pub(crate) struct Marks {
    name: String,
    /// Its content, if it does not record.
    fixed: Option<Arc<BitmapContents>>,
}

impl Marks {
    /// Finds a bitmap of the top image. The caller holds the lock of changes until the instant:
    /// with another bitmap the directory would move.
    ///
    /// Errors: `Unsupported` where the image has no bitmaps; `Invalid` where this one is missing or
    /// inconsistent; `Io`.
    pub(crate) async fn find(disk: &Disk, ring: &Ring, name: String) -> Result<Marks, Error> {
        let graph = disk.enter_beside_clients().await;
        let Some(image) = graph.top_image() else {
            let shown = printable_path(graph.top().name());
            let text = format!("'{shown}' has no bitmaps: they need a qcow2 image; leave them out");
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        if image.bitmap_records(&name) {
            return Ok(Marks { name, fixed: None });
        }
        let contents = bitmap_result(image.bitmap_contents(ring, &name).await)?;
        Ok(Marks { name, fixed: Some(Arc::new(contents)) })
    }

    /// What is marked. No request is in flight. `None`: the bitmap is not there any more, or there
    /// is no memory for the copy.
    pub(crate) fn at_instant(&self, graph: &Graph) -> Option<Arc<BitmapContents>> {
        match &self.fixed {
            Some(contents) => Some(Arc::clone(contents)),
            None => graph.top_image()?.bitmap_recorded(&self.name).map(Arc::new),
        }
    }

    /// The bitmap.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Whether it records what clients write.
    pub(crate) fn records(&self) -> bool {
        self.fixed.is_none()
    }
}

impl Disk {
    /// Adds an empty bitmap to the top image, which records from then on. Clients do not wait,
    /// unless the image has no free space at once, or was given many bitmaps since it was opened:
    /// then as with [`Disk::change_bitmaps`].
    ///
    /// Errors: as there, where there is one of this name, and `Busy` where the storage takes longer
    /// than 5 s. There is no new bitmap then, or it is removed as soon as the storage answers.
    pub(crate) async fn add_bitmap(
        &self,
        ring: &Ring,
        name: String,
        granularity_bytes: Option<Bytes>,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        reopen::check(self.graph().top())?;
        let new = name.clone();
        let is_given_up = Arc::new(AtomicBool::new(false));
        let given_up = Arc::clone(&is_given_up);
        let run = move |disk: Arc<Disk>, ring: Ring| async move {
            let turn = ring.within(DRAIN_LIMIT, disk.changes().lock()).await;
            // No other change of the disk, and no end of it, until this is done.
            let turn = turn.map_err(|_| not_drained(DRAIN_LIMIT))?;
            disk.check_free()?;
            let graph = disk.graph();
            reopen::check(graph.top())?;
            let Some(image) = graph.top().qcow2().filter(|image| image.bitmaps_can_grow()) else {
                return Ok(false);
            };
            match bitmap_result(image.bitmap_add_beside(&ring, &new, granularity_bytes).await) {
                Ok(()) if given_up.load(Ordering::Relaxed) => {
                    drop(turn);
                    let removed = disk.remove_bitmap(&ring, new).await;
                    if let Err(error) = &removed {
                        tracing::warn!("a bitmap that was added too late stays: {error}");
                    }
                    removed.map(|()| true)
                }
                Ok(()) => Ok(true),
                Err(error) if error.errno() == Some(Errno::NOSPC) => Ok(false),
                Err(error) => Err(error),
            }
        };
        match ring.within(ADD_LIMIT, self.detached(ring, run)).await {
            Ok(Err(error)) => return Err(error),
            Ok(Ok(true)) => return Ok(()),
            Ok(Ok(false)) => {}
            Err(_) => {
                // The task is of this thread, so it sees this before it says that it is done.
                is_given_up.store(true, Ordering::Relaxed);
                return Err(not_added());
            }
        }
        let wanted = name.clone();
        let add = async move |ring: &Ring, image: &mut Qcow2| {
            bitmap_result(image.bitmap_add(ring, &name, granularity_bytes).await)
        };
        self.change_bitmaps(ring, add, move |image| has_bitmap(image, &wanted)).await
    }

    /// Removes a bitmap of the top image. Errors: as [`Disk::change_bitmaps`].
    pub(crate) async fn remove_bitmap(&self, ring: &Ring, name: String) -> Result<(), Error> {
        let gone = name.clone();
        let change = async move |ring: &Ring, image: &mut Qcow2| {
            bitmap_result(image.bitmap_remove(ring, &name).await)
        };
        self.change_bitmaps(ring, change, move |image| !has_bitmap(image, &gone)).await
    }

    /// Runs changes of bitmaps on the top image, opened for itself.
    ///
    /// * `is_made`: whether an image is as it shall be. An error may come after a change that was
    ///   made; what the image has when it is opened again decides.
    ///
    /// Errors: `PermissionDenied` on a read-only disk; `Unsupported` where the top is no qcow2
    /// image or a temporary overlay; `Busy` during a commit, and when requests in flight do not end
    /// within 2 s; those of `change`.
    pub(crate) async fn change_bitmaps(
        &self,
        ring: &Ring,
        change: impl AsyncFnOnce(&Ring, &mut Qcow2) -> Result<(), Error> + 'static,
        is_made: impl Fn(&Qcow2) -> bool + 'static,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        reopen::check(self.graph().top())?;
        let run = move |disk: Arc<Disk>, ring: Ring| async move {
            let drained = ring.within(DRAIN_LIMIT, disk.change(&ring)).await;
            let mut drained = drained.map_err(|_| not_drained(DRAIN_LIMIT))??;
            let graph = Arc::clone(drained.graph());
            let top = graph.top();
            reopen::check(top)?;
            close_layer(&ring, top).await?;
            drained.begin();
            let (result, fresh) = match reopen::image(&ring, top, disk.options(), true).await {
                Ok(mut image) => {
                    let result = change(&ring, &mut image).await;
                    // A change of bitmaps ends the use of the image for requests. The next one
                    // takes over which clusters are named from this one, which knows what was
                    // freed; the former one does not.
                    let changed = reopen::layer_of(image, top);
                    (result, again(&ring, &changed, disk.options(), true).await?)
                }
                Err(error) => (Err(error), again(&ring, top, disk.options(), true).await?),
            };
            let was_made = top.qcow2().is_some_and(|image| is_made(image));
            let is_made = fresh.qcow2().is_some_and(|image| is_made(image));
            let result = if is_made && !was_made { Ok(()) } else { result };
            let mut layers = graph.layers.clone();
            layers[0] = Arc::new(fresh);
            disk.put(&mut drained, graph.with_layers(layers), false);
            result
        };
        self.detached(ring, run).await
    }
}

fn not_added() -> Error {
    Error::new(
        ErrorKind::Busy,
        format!(
            "adding a bitmap to the image did not end within {} ms: its storage is slow; try again \
             when less is going on",
            ADD_LIMIT.as_millis()
        ),
    )
}

/// Whether an image has a bitmap of this name.
pub(crate) fn has_bitmap(image: &Qcow2, name: &str) -> bool {
    image.bitmaps().iter().any(|bitmap| bitmap.name == name)
}

/// Runs one change, with its error in terms of this crate.
pub(crate) fn bitmap_result<T>(result: Result<T, ringdisk_qcow2::Error>) -> Result<T, Error> {
    result.map_err(|error| of_qcow2(&error))
}
