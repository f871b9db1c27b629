//! Changes the size of the disk while a commit copies it, or while backing files are compared: for
//! clients that append, which do not wait for the end of those.
//!
//! Promises: the top gets its new size as without a commit. The added range is recorded as if it
//! had been written, so it is copied, or compared, too; the base of a commit grows with the top. If
//! the base cannot grow, the commit fails and not the client's request. The last step of the commit
//! cuts a base that is longer than the disk.

use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset, ResizeOptions};
use ringdisk_ring::{Errno, Ring};

use super::commit::grow;
use super::pivot::check_cut;
use super::{again, offline_layer};
use crate::graph::{Drained, Graph};
use crate::layer::Layer;
use crate::{Disk, Error};

impl Disk {
    /// Changes the size of the top image while a commit copies it or layers below it, or while its
    /// backing files are compared.
    ///
    /// * `size`: bytes, a multiple of 512.
    ///
    /// Errors: as [`Disk::resize`]; the disk is as it was.
    pub(super) async fn resize_in_commit(
        &self,
        ring: &Ring,
        drained: &mut Drained<'_>,
        size: Bytes,
        options: ResizeOptions,
    ) -> Result<(), Error> {
        let graph = Arc::clone(drained.graph());
        let before = graph.size();
        let base = base_of(&graph).filter(|_| !self.long.has_commit_below());
        if let Some(base) = base.filter(|_| size < before) {
            check_cut(&graph.layers[base], size)?;
        }
        let below = graph.below(0);
        let resize = async |ring: &Ring, image: &mut ringdisk_qcow2::Qcow2| {
            image.resize(ring, size, &options, &below).await
        };
        let (fresh, result) = offline_layer(ring, self, drained, graph.top(), resize).await?;
        let mut layers = graph.layers.clone();
        layers[0] = Arc::new(fresh);
        let mut tracker = graph.tracker.clone();
        if let (Ok(()), Some(old)) = (&result, &graph.tracker) {
            let next = old.resized(size.max(before));
            next.set(GuestOffset::after(before.min(size)), before.abs_diff(size));
            if let Some(base) = base
                && layers[base].size() < size
                && let Err(error) = self.grow_base(ring, &graph, base, size, &mut layers).await
            {
                tracing::warn!("{error}; the commit will fail");
                next.fail(error.errno().unwrap_or(Errno::IO));
            }
            tracker = Some(Arc::new(next));
        }
        let mut next = graph.with_layers(layers);
        next.tracker = tracker;
        self.put(drained, next, false);
        result
    }

    /// Makes the base as long as the disk.
    async fn grow_base(
        &self,
        ring: &Ring,
        graph: &Graph,
        base: usize,
        size: Bytes,
        layers: &mut [Arc<Layer>],
    ) -> Result<(), Error> {
        let layer = Arc::clone(&layers[base]);
        match grow(self, ring, &layer, size, graph.below(base)).await {
            Ok(grown) => {
                layers[base] = Arc::new(grown);
                Ok(())
            }
            Err(error) => {
                // It may have been closed. Only the end of the commit needs it now.
                if layer.qcow2().is_some()
                    && let Ok(fresh) = again(ring, &layer, self.options(), true).await
                {
                    layers[base] = Arc::new(fresh);
                }
                let name = crate::name::printable_path(layer.name());
                Err(error.context(format!("the base '{name}' cannot grow with the disk")))
            }
        }
    }
}

/// Index of the layer that a commit of the top layer writes to, if there is such a commit, and none
/// of layers below the top.
fn base_of(graph: &Graph) -> Option<usize> {
    graph.tracker.as_ref()?;
    let base = graph.layers.iter().skip(1).position(|layer| layer.is_writable)?;
    Some(base + 1)
}
