//! Changes the bitmaps of the top image while the disk is in use.
//!
//! Promises: clients wait while the bitmaps are changed; what was recorded until then is kept, and
//! recording goes on with the first write afterwards. A change that fails leaves the bitmaps as
//! they were.

use std::sync::Arc;

use ringdisk_qcow2::Qcow2;
use ringdisk_ring::Ring;

use super::{again, check_lasting, close_layer, reopen};
use crate::open::of_qcow2;
use crate::{Disk, Error};

impl Disk {
    /// Runs changes of bitmaps on the top image, opened for itself.
    ///
    /// Errors: `PermissionDenied` on a read-only disk; `Unsupported` where the top is no qcow2
    /// image or a temporary overlay; `Busy` during a commit; those of `change`.
    pub(crate) async fn change_bitmaps(
        &self,
        ring: &Ring,
        change: impl AsyncFnOnce(&Ring, &mut Qcow2) -> Result<(), Error> + 'static,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        let run = move |disk: Arc<Disk>, ring: Ring| async move {
            let mut drained = disk.change(&ring).await?;
            let graph = Arc::clone(drained.graph());
            let top = graph.top();
            reopen::check(top)?;
            close_layer(&ring, top).await?;
            drained.begin();
            let result = match reopen::image(&ring, top, disk.options(), true).await {
                Ok(mut image) => {
                    let result = change(&ring, &mut image).await;
                    // The changes are on stable storage; this gives freed space back.
                    let _ = image.close(&ring).await;
                    if let Some(old) = top.qcow2() {
                        old.take_over_names(&image);
                    }
                    result
                }
                Err(error) => Err(error),
            };
            // A change of bitmaps ends the use of the image for requests.
            let fresh = again(&ring, top, disk.options(), true).await?;
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
