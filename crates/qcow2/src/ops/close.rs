//! The end of an open image.
//!
//! Promises: after a close that succeeds everything is on stable storage, reference counts too,
//! bitmaps that record are saved, space that was freed is given back, and the dirty bit is clear.
//! After one that fails the image on the storage is as after a crash: sound, with leaked clusters
//! at most; and the open image can go on: it takes changes, its bitmaps record, and it can be
//! closed again.

use rustix::io::Errno;

use ringdisk_ring::Ring;

use super::bitmaps::{self, Unsaved};
use crate::engine::Qcow2;
use crate::header::DIRTY;
use crate::sync::Ordering;

impl Qcow2 {
    /// Ends the use of the image; to be called when no request runs any more. Later changes are
    /// `EROFS`. A second call does nothing, or tries again what failed. A bitmap that cannot be
    /// saved is lost, which is no error.
    ///
    /// Errors: those of the storage, and `EIO` after an earlier flush that failed. The image can go
    /// on then.
    pub async fn close(&self, ring: &Ring) -> Result<(), Errno> {
        self.close_or(ring, Unsaved::Lost).await
    }

    /// As [`close`](Qcow2::close), before a change that can still be refused: a bitmap that cannot
    /// be saved is an error.
    ///
    /// Errors: as [`close`](Qcow2::close), and those of saving bitmaps.
    pub async fn close_for_change(&self, ring: &Ring) -> Result<(), Errno> {
        self.close_or(ring, Unsaved::Refused).await
    }

    async fn close_or(&self, ring: &Ring, unsaved: Unsaved) -> Result<(), Errno> {
        let Ok(engine) = self.engine() else { return Ok(()) };
        engine.closed.store(true, Ordering::Release);
        let result = self.end(ring, unsaved).await;
        if result.is_err() && !engine.header_unknown.load(Ordering::Acquire) {
            engine.closed.store(false, Ordering::Release);
        }
        result
    }

    async fn end(&self, ring: &Ring, unsaved: Unsaved) -> Result<(), Errno> {
        let engine = self.engine()?;
        if !engine.started.load(Ordering::Acquire) && !engine.half_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.settle(ring).await?;
        bitmaps::save(self, ring, unsaved).await?;
        // The image says from here on that its bitmaps are true. If the rest fails and the image
        // goes on, its next change is a first change again and marks them in use.
        engine.half_closed.store(true, Ordering::Release);
        engine.started.store(false, Ordering::Release);
        self.cut(ring).await;
        self.settle(ring).await?;
        if engine.options.lazy_refcounts && self.info.version >= 3 {
            self.change_header(ring, |header| {
                header.set_incompatible(header.incompatible() & !DIRTY);
            })
            .await?;
        }
        engine.half_closed.store(false, Ordering::Release);
        Ok(())
    }
}
