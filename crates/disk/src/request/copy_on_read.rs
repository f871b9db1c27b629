//! Copy-on-read: what a client reads of the layers below is kept in the top image, so that it is
//! read there the next time.
//!
//! Promises: the client gets the same bytes as without; a piece that cannot be kept is read from
//! below. Whole clusters of the top are filled before the client is served, so a layer that is far
//! away is asked once. A disk that does not keep what is read looks at one flag for each request.
//! One that does allocates memory for each.

use std::sync::atomic::Ordering;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::Ring;

use crate::Disk;
use crate::graph::Graph;
use crate::graph::fill::{FillFailure, Filler, pieces};
use crate::{Error, ErrorKind};

impl Disk {
    /// Whether what clients read of the layers below is kept in the top image.
    #[inline]
    pub fn copies_on_read(&self) -> bool {
        self.copy_on_read.is_on.load(Ordering::Relaxed)
    }

    /// Bytes that were kept since the disk was opened.
    pub fn kept_on_read(&self) -> Bytes {
        Bytes(self.copy_on_read.kept.load(Ordering::Relaxed))
    }

    /// Begins or ends it, for requests from now on. Any thread.
    ///
    /// Errors: `PermissionDenied` for a disk that is not written; `Unsupported` to begin it where
    /// the top is no qcow2 image, which has nothing below it.
    pub fn set_copy_on_read(&self, is_on: bool) -> Result<(), Error> {
        if is_on {
            if self.is_read_only() {
                let why = "what is read cannot be kept: the disk is read-only";
                return Err(Error::new(ErrorKind::PermissionDenied, why));
            }
            if self.graph().top_image().is_none() {
                let why = "what is read cannot be kept: the image on top is no qcow2 image, so \
                           nothing is below it";
                return Err(Error::new(ErrorKind::Unsupported, why));
            }
        }
        self.copy_on_read.switch(is_on);
        Ok(())
    }

    /// It is what a command has made it in a process before this one, whatever the image on top is
    /// by now: reads of a disk whose top keeps nothing stay as they are.
    pub fn follow_copy_on_read(&self, is_on: bool) {
        self.copy_on_read.switch(is_on);
    }

    /// Calls `watch` with each change that a command makes ([`Disk::set_copy_on_read`]), on its
    /// thread. The first one stays.
    pub fn watch_copy_on_read(&self, watch: impl Fn(bool) + Send + Sync + 'static) {
        self.copy_on_read.watch(Box::new(watch));
    }

    /// Fills the clusters of the top that a read touches and that the top has nothing of.
    ///
    /// * `graph`: active; of the request. No grace is held.
    pub(super) async fn keep_what_is_read(
        &self,
        ring: &Ring,
        graph: &Graph,
        offset: u64,
        len: Bytes,
    ) {
        let Some(image) = graph.top_image().filter(|_| graph.layers.len() > 1) else { return };
        let (start, len) = graph.place(offset, len);
        if len.is_zero() || self.is_read_only() {
            return;
        }
        let cluster = image.info().cluster_size();
        let end = (start + len).next_multiple_of(cluster).min(GuestOffset::after(graph.size()));
        let filler = Filler::new(graph, graph.layers.len());
        let mut kept = Bytes::ZERO;
        for (at, len) in pieces(start.align_down(cluster), end) {
            match filler.piece(ring, at, len).await {
                Ok(copied) => kept += copied,
                // The client's own read gets it, too.
                Err(FillFailure::Source(_)) => break,
                Err(FillFailure::Target(errno)) => {
                    if !self.copy_on_read.is_failing.swap(true, Ordering::Relaxed) {
                        let name = graph.top().name.display();
                        tracing::warn!(
                            "what is read cannot be kept in '{name}': {errno}; it is read from the \
                             images below as long as that lasts"
                        );
                    }
                    break;
                }
            }
        }
        if !kept.is_zero() {
            self.copy_on_read.kept.fetch_add(kept.0, Ordering::Relaxed);
            self.copy_on_read.is_failing.store(false, Ordering::Relaxed);
            self.look_after(ring, image);
        }
    }
}
