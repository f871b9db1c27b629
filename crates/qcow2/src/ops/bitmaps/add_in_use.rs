//! Adds a bitmap while requests of clients run.
//!
//! Promises: no request waits, but the first change of an image that was not changed since it was
//! opened. As with every change of bitmaps, everything new is on stable storage, reference counts
//! too, before one sector of the header makes it true. Where the bitmaps of the image are in use
//! the new one is marked so from the start; where they are not, none is when this returns, and the
//! first change marks all of them. A failure leaves the bitmaps as they were, and no request fails,
//! unless the storage takes neither of two headers.

use ringdisk_ring::{Errno, Ring};

use super::store;
use super::update::{self, Update, Use};
use crate::bitmaps::bits::Bits;
use crate::bitmaps::directory::{self, AUTO, Entry, FLAGS_AT, IN_USE};
use crate::engine::Qcow2;
use crate::error::Error;
use crate::header::write_bytes;
use crate::sync::{Ordering, lock};
use crate::units::{Bytes, HostOffset};

/// Most bitmaps that are added to an open image: each makes each write a little slower. An image
/// that is opened again begins with none.
const ADDED_MAX: usize = 32;

impl Qcow2 {
    /// Whether [`bitmap_add_beside`](Qcow2::bitmap_add_beside) can be used.
    pub fn bitmaps_can_grow(&self) -> bool {
        let engine = self.engine().ok().filter(|engine| engine.overlap.is_none());
        let can = |added: usize| added < ADDED_MAX && self.check_sound().is_ok();
        engine.is_some_and(|engine| can(engine.recording.added().count()))
    }

    /// All bitmaps of the image, as they are listed: those of the directory when it was opened,
    /// and those that were added since.
    pub fn bitmaps(&self) -> Vec<crate::Bitmap> {
        let added = self.engine().ok().into_iter().flat_map(|engine| engine.recording.added());
        self.info.bitmaps.iter().chain(added).cloned().collect()
    }

    /// Adds an empty bitmap that records writes, while requests run. It records those that begin
    /// after this has returned, and may have recorded others.
    ///
    /// Errors: as [`bitmap_add`](Qcow2::bitmap_add); `Io` with `ENOSPC` where no cluster is free at
    /// once, or not [`bitmaps_can_grow`](Qcow2::bitmaps_can_grow).
    pub async fn bitmap_add_beside(
        &self,
        ring: &Ring,
        name: &str,
        granularity_bytes: Option<Bytes>,
    ) -> Result<(), Error> {
        let granularity_bits = self.check_new_bitmap(name, granularity_bytes)?;
        let engine = self.engine().map_err(|errno| self.bitmap_io(errno))?;
        // Who makes the first change waits: it marks bitmaps at places that change here.
        let _claim = engine.start.claim(0, 1).await;
        if engine.closed.load(Ordering::Acquire) {
            return Err(self.bitmap_io(Errno::ROFS));
        }
        if !self.bitmaps_can_grow() {
            return Err(self.bitmap_io(Errno::NOSPC));
        }
        let mut entries = update::entries(self, ring).await?;
        if entries.iter().any(|entry| entry.name == name.as_bytes()) {
            return Err(self.refuse_bitmap(name, "is there already", "choose another name"));
        }
        self.check_recording_room(name, engine.recording.bytes(), granularity_bits)?;
        self.check_room_for_bitmap(&entries, name)?;
        let bits = Bits::new(self.geometry.virtual_size, granularity_bits)
            .ok_or_else(|| self.no_memory_for_bitmap(name))?;
        let added = self.add_beside(ring, (name, granularity_bits), bits, &mut entries).await;
        added.map_err(|errno| self.bitmap_io(errno))
    }

    /// The caller has the claim of the first change.
    async fn add_beside(
        &self,
        ring: &Ring,
        (name, granularity_bits): (&str, u32),
        bits: Bits,
        entries: &mut Vec<Entry>,
    ) -> Result<(), Errno> {
        let engine = self.engine()?;
        let mut update = Update::default();
        let stored = match store::store(self, ring, &bits, &mut update.taken).await {
            Ok(stored) => stored,
            Err(errno) => {
                update.cancel(self);
                return Err(errno);
            }
        };
        entries.push(Entry::new(name, granularity_bits, AUTO, stored));
        let is_changed = engine.started.load(Ordering::Acquire);
        let in_use = is_changed || engine.recording.has_begun();
        // The new directory has all of them in use. If it is not known which header is on the
        // storage, both directories are such that nobody trusts them.
        let flags: Vec<u32> = entries.iter().map(|entry| entry.flags).collect();
        for entry in entries.iter_mut().filter(|entry| entry.has(AUTO)) {
            entry.flags |= IN_USE;
        }
        if let Err(errno) = update.publish_as(self, ring, entries, Use::Running).await {
            if engine.header_is_unknown() && engine.recording.begin(ring, &self.file).await.is_err()
            {
                // The old bitmaps may be trusted, so nothing may be written.
                engine.closed.store(true, Ordering::Release);
            }
            return Err(errno);
        }
        let Some(directory) = lock(&engine.header).bitmaps() else { return Err(Errno::IO) };
        let places = |entries: &[Entry]| -> Vec<HostOffset> {
            let positions = directory::positions(entries);
            positions.map(|at| directory.offset + Bytes::of(at + FLAGS_AT)).collect()
        };
        let places = places(entries);
        engine.recording.follow(directory.offset, entries);
        let new = entries.len() - 1;
        engine.recording.add(&entries[new], places[new], bits, in_use);
        if !in_use && let Err(errno) = self.unmark(ring, entries, &flags, &places).await {
            // Any of them may be marked or not. The first change marks all, and the close after it
            // saves them; without one, those that are marked are lost.
            let image = self.file.name();
            tracing::warn!(image, %errno, "bitmaps may be inconsistent when the image is opened");
        }
        // What was freed is counted so, also where nothing else is written before the close.
        if self.space()?.is_dirty() {
            let _ = self.checkpoint_all(ring).await;
        }
        Ok(())
    }

    /// Takes the marks of bitmaps away that are not in use.
    async fn unmark(
        &self,
        ring: &Ring,
        entries: &[Entry],
        flags: &[u32],
        places: &[HostOffset],
    ) -> Result<(), Errno> {
        for ((entry, flags), place) in entries.iter().zip(flags).zip(places) {
            if entry.flags != *flags {
                write_bytes(ring, &self.file, *place, &flags.to_be_bytes()).await?;
            }
        }
        self.file.flush(ring).await
    }
}
