//! Prepares an image for its first change: removes the marks that a change would make untrue.
//!
//! Promises: on stable storage before the first byte changes: autoclear bits that we do not know
//! are cleared, bitmaps that will not be kept up to date are declared invalid, bitmaps that record
//! are marked in use, and the dirty bit is set when reference counts are kept back. An image that
//! is opened for writing and not written stays as it is.

use rustix::io::Errno;

use ringdisk_ring::Ring;

use super::Qcow2;
use crate::header::{DIRTY, KNOWN_AUTOCLEAR};
use crate::sync::Ordering;
use crate::units::{Bytes, GuestOffset};

use crate::concurrent::grace::Grace;

impl Qcow2 {
    /// A request begins that uses a mapping: until the answer is dropped, no cluster that it may
    /// find is used for anything else. Two atomic operations, no lock, no allocation.
    pub fn enter(&self) -> Grace<'_> {
        match self.engine.as_deref() {
            Some(engine) => engine.graces.enter(),
            None => Grace::none(),
        }
    }

    /// For every change of the disk, before it is made.
    pub(super) async fn begin_change(
        &self,
        ring: &Ring,
        offset: GuestOffset,
        len: Bytes,
    ) -> Result<(), Errno> {
        self.begin_write(ring).await?;
        self.engine()?.recording.record(offset, len);
        Ok(())
    }

    /// For a write that leaves the content of the disk as it is, so no bitmap records it.
    pub(super) async fn begin_write(&self, ring: &Ring) -> Result<(), Errno> {
        let engine = self.engine()?;
        if !engine.started.load(Ordering::Acquire) {
            Box::pin(self.start(ring)).await?;
        }
        if self.is_corrupted() || engine.closed.load(Ordering::Relaxed) {
            return Err(Errno::ROFS);
        }
        if self.info.external_data_file && self.data_file.is_none() {
            // Nothing may land in the image file instead.
            return Err(Errno::IO);
        }
        Ok(())
    }

    /// Prepares the first change.
    pub(crate) async fn start(&self, ring: &Ring) -> Result<(), Errno> {
        let engine = self.engine()?;
        let _claim = engine.start.claim(0, 1).await;
        if engine.started.load(Ordering::Acquire) {
            return Ok(());
        }
        if engine.closed.load(Ordering::Acquire) {
            return Err(Errno::ROFS);
        }
        if let Some(reason) = &engine.overlap {
            return Err(self.mark_corrupt(ring, reason).await);
        }
        if self.info.version >= 3 {
            let (old_autoclear, old_incompatible) = {
                let header = crate::sync::lock(&engine.header);
                (header.autoclear(), header.incompatible())
            };
            let autoclear = old_autoclear & KNOWN_AUTOCLEAR;
            let mut incompatible = old_incompatible;
            if engine.options.lazy_refcounts {
                incompatible |= DIRTY;
            }
            if (autoclear, incompatible) != (old_autoclear, old_incompatible) {
                self.change_header(ring, |header| {
                    header.set_autoclear(autoclear);
                    header.set_incompatible(incompatible);
                })
                .await?;
            }
        }
        engine.recording.begin(ring, &self.file).await?;
        engine.started.store(true, Ordering::Release);
        Ok(())
    }
}
