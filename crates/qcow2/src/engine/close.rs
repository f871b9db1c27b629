//! The end of an open image.
//!
//! Promises: after a close that succeeds everything is on stable storage, reference counts too, bitmaps
//! that record are saved, space that was freed is given back, and the dirty bit is clear. After one
//! that fails the image is as after a crash: sound, with leaked clusters at most.

use rustix::io::Errno;

use ringdisk_ring::Ring;

use crate::header::DIRTY;
use crate::image::Qcow2;
use crate::sync::{Ordering, lock};

impl Qcow2 {
    /// Ends the use of the image; to be called when no request runs any more. Later changes are
    /// `EROFS`. A second call does nothing, or tries again what failed.
    ///
    /// Errors: those of the storage, and `EIO` after an earlier flush that failed.
    pub async fn close(&self, ring: &Ring) -> Result<(), Errno> {
        let Ok(engine) = self.engine() else { return Ok(()) };
        engine.closed.store(true, Ordering::Release);
        let result = self.end(ring).await;
        if result.is_err() && !engine.saved.load(Ordering::Acquire) {
            // Nothing is lost yet, and nothing was declared finished: the image can go on.
            engine.closed.store(false, Ordering::Release);
        }
        result
    }

    async fn end(&self, ring: &Ring) -> Result<(), Errno> {
        let engine = self.engine()?;
        if !engine.started.load(Ordering::Acquire) {
            return Ok(());
        }
        self.settle(ring).await?;
        // Once: nothing is recorded any more after it, and nothing changes.
        if !engine.saved.swap(true, Ordering::AcqRel) {
            engine.recording.save(self, ring).await?;
        }
        self.cut(ring).await;
        self.settle(ring).await?;
        if engine.options.lazy_refcounts && self.info.version >= 3 {
            self.change_header(ring, |header| {
                header.set_incompatible(header.incompatible() & !DIRTY);
            })
            .await?;
        }
        engine.started.store(false, Ordering::Release);
        Ok(())
    }

    /// Writes everything, frees what is to be freed, and writes the reference counts that follow
    /// from that.
    pub(crate) async fn settle(&self, ring: &Ring) -> Result<(), Errno> {
        let engine = self.engine()?;
        self.checkpoint_all(ring).await?;
        // Nobody uses the image now, so what requests left behind is free, unless a write of a request that was
        // dropped may still land there: that is leaked.
        let abandoned = std::mem::take(&mut *lock(&engine.abandoned));
        let is_safe = !engine.landings_lost.load(Ordering::Acquire);
        let abandoned = if is_safe { abandoned } else { Vec::new() };
        let mut freed = Vec::new();
        for (start, count) in abandoned {
            self.change_refcount(ring, start, count, false, &mut freed).await?;
        }
        self.release(ring, freed).await;
        // One more round for what the first one freed, and one for its counts.
        for _ in 0..3 {
            if !engine.limbo.is_busy() && !self.space()?.is_dirty() {
                break;
            }
            self.checkpoint_all(ring).await?;
        }
        Ok(())
    }
}
