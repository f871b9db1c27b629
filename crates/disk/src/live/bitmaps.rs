//! Changes the bitmaps of the top image while the disk is in use.
//!
//! Promises: clients wait while the bitmaps are changed; what was recorded until then is kept, and
//! recording goes on with the first write afterwards. A change that fails leaves the bitmaps as
//! they were.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::Qcow2;
use ringdisk_ring::Ring;

use super::{again, check_lasting, close_layer, not_drained, reopen};
use crate::open::of_qcow2;
use crate::{Disk, Error};

/// Longest wait for requests in flight and for other changes. Requests that come later wait, too.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

impl Disk {
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

/// Runs one change, with its error in terms of this crate.
pub(crate) fn bitmap_result<T>(result: Result<T, ringdisk_qcow2::Error>) -> Result<T, Error> {
    result.map_err(|error| of_qcow2(&error))
}
