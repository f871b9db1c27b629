//! Changes of an image while no request uses it: internal snapshots, size, emptying, backing file
//! name, bitmaps, the close.
//!
//! Promises:
//! - A change is there as a whole or not at all, whenever the power fails: everything new is
//!   written beside the old, and one write of the first 512 bytes of the header switches over
//!   ([`transaction`]). No cluster leaks on the way. (One exception for a full file system:
//!   [`empty`].)
//! - Until the switch the image on disk stays what it was, so every error before it leaves it
//!   whole.
//! - What the image says is checked before it is used: a table that is unaligned, outside the file
//!   or not counted is refused with a message.
//!
//! The image is closed first and opened again afterwards, in place; when that fails too, all
//! further changes are `EROFS` and the caller opens it anew. The caller makes sure that no request
//! runs, and calls from a ring thread.

mod active;
mod bitmaps;
mod close;
mod cluster_kind;
mod compact;
mod edit;
mod empty;
mod entries;
mod grow;
mod mappings;
mod resize;
mod snapshot;
mod snapshot_map;
mod snapshot_table;
#[cfg(test)]
mod tests;
mod transaction;

use ringdisk_ring::Ring;

use crate::engine::Qcow2;
use crate::error::{Error, ErrorKind};
use crate::refcounts::Named;
use crate::sync::lock;

pub use bitmaps::BitmapContents;
pub use resize::ResizeOptions;
pub use snapshot_map::{SnapshotMap, SnapshotNeed};

impl Qcow2 {
    /// Ends the use of the image before a change: afterwards the file is all there is to know.
    ///
    /// Errors: `InvalidRequest` when it is open for reading only; `Corrupt` when it was found to
    /// be; `Io`.
    async fn finish_use(&mut self, ring: &Ring) -> Result<(), Error> {
        if self.engine.is_none() {
            return Err(self.refused("the image is open for reading only", "open it for writing"));
        }
        if let Some(reason) = self.fault() {
            return Err(Error::corrupt(self.file.name(), reason));
        }
        let closed = self.close_for_change(ring).await;
        closed.map_err(|errno| Error::io(self.file.name(), "closing it", errno))
    }

    /// Opens the image again after a change, and passes on how the change went. Tries twice: a
    /// change that was made must not be reported as refused on account of one read that failed.
    async fn reopen<T>(&mut self, ring: &Ring, result: Result<T, Error>) -> Result<T, Error> {
        let options = self.options.clone();
        let opened = match Qcow2::open(ring, self.file.clone(), &options).await {
            Ok(image) => Ok(image),
            Err(error) => {
                tracing::warn!(%error, "opening the image again after a change; trying once more");
                Qcow2::open(ring, self.file.clone(), &options).await
            }
        };
        match opened {
            Ok(mut image) => {
                image.data_file = self.data_file.take();
                image.take_over_names(self);
                *self = image;
                result
            }
            Err(error) => result.and(Err(error)),
        }
    }

    /// What the former image of the same file, which is closed, knows of clusters that L2 entries
    /// name is known to this one, too, in whichever mode each of them is open. Nothing that is
    /// known to be named becomes free because the file was opened again.
    pub fn take_over_names(&self, from: &Qcow2) {
        let named = match from.engine.as_deref() {
            Some(engine) => lock(&engine.refcounts).named(),
            None => lock(&from.named).clone(),
        };
        match self.engine.as_deref() {
            Some(engine) => lock(&engine.refcounts).add_named(named),
            None => lock(&self.named).add_all(named),
        }
    }

    /// Another process has changed the file since: forgets which clusters entries named.
    pub fn forget_names(&self) {
        match self.engine.as_deref() {
            Some(engine) => lock(&engine.refcounts).forget_named(),
            None => *lock(&self.named) = Named::default(),
        }
    }

    /// A request that does not fit the image.
    pub(crate) fn refused(&self, reason: impl Into<String>, advice: &'static str) -> Error {
        Error::new(ErrorKind::InvalidRequest, self.file.name(), reason, advice)
    }
}
