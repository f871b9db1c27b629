//! Bitmaps that record writes while an image is open.
//!
//! Promises:
//! - Before the first write the image says, on stable storage, that these bitmaps are in use; after
//!   a crash nobody trusts them.
//! - Every write is recorded before it is made: [`Recording::record`] takes no lock, allocates
//!   nothing and leaves shared cache lines alone where the bits are set already.
//! - A bitmap becomes valid again only by a save that is complete on stable storage. A save that
//!   fails changes nothing: the bitmaps are in use as before and go on recording.
//! - Recording can begin again after a save, at the place where the save has put the directory.
//! - Bitmaps that do not record (not `auto`) stay valid as they are; those that were left in use by
//!   somebody else stay so and are not recorded.

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use super::bits::{self, Bits};
use super::directory::{self, AUTO, Entry, FLAGS_AT, IN_USE};
use super::tables::{self, Place};
use super::update::{self, Update};
use crate::engine::close::Unsaved;
use crate::error::Error;
use crate::header::{Header, write_bytes};
use crate::image::Qcow2;
use crate::info::Bitmap;
use crate::limits::RECORDED_BITMAPS_BYTES_MAX;
use crate::sync::{AtomicBool, AtomicU64, Ordering, lock};

/// The bitmaps of one image that record writes.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    recorded: Vec<Recorded>,
    /// Those that should record, but cannot.
    unreadable: Vec<String>,
    /// They are marked in use on stable storage.
    begun: AtomicBool,
}

#[derive(Debug)]
struct Recorded {
    /// As in the directory. Names are unique.
    name: Vec<u8>,
    /// Host offset of the flags of its entry; a save moves it.
    flags_at: AtomicU64,
    flags: u32,
    bits: Bits,
}

impl Recording {
    /// Reads the bitmaps that have to record from now on.
    ///
    /// * `bitmaps`: what [`read`](super::read) found in the directory.
    ///
    /// Errors: `Corrupt` when the directory breaks the specification, `Io`. A bitmap that cannot be
    /// recorded is no error: see [`all_readable`](Recording::all_readable).
    pub(crate) async fn load(
        ring: &Ring,
        file: &Storage,
        header: &Header,
        bitmaps: &[Bitmap],
    ) -> Result<Recording, Error> {
        let mut recording = Recording::default();
        let Some(directory) = header.extensions.bitmaps else { return Ok(recording) };
        if !bitmaps.iter().any(|bitmap| bitmap.auto && !bitmap.in_use) {
            return Ok(recording);
        }
        let geometry = &header.geometry;
        let place =
            Place { ring, file, cluster_bits: geometry.cluster_bits, size: geometry.virtual_size };
        let entries = directory::read(ring, file, directory, geometry.cluster_size()).await?;
        let positions: Vec<usize> = directory::positions(&entries).collect();
        let mut room = RECORDED_BITMAPS_BYTES_MAX;
        for (entry, position) in entries.into_iter().zip(positions) {
            if !entry.has(AUTO) || entry.has(IN_USE) {
                continue;
            }
            let loaded = match load_one(&place, &entry, &mut room).await {
                Ok(bits) => Ok(bits),
                // Once more: the first change gives up what cannot be read.
                Err(_) => load_one(&place, &entry, &mut room).await,
            };
            match loaded {
                Ok(bits) => recording.recorded.push(Recorded {
                    flags_at: AtomicU64::new(directory.offset + (position + FLAGS_AT) as u64),
                    name: entry.name,
                    flags: entry.flags,
                    bits,
                }),
                Err(reason) => {
                    let (image, name) = (file.name(), entry.shown());
                    tracing::warn!(image, name, reason, "a bitmap cannot record writes");
                    recording.unreadable.push(name);
                }
            }
        }
        if !recording.all_readable() {
            // All bitmaps are given up with the first change: there is nothing to record.
            recording.recorded.clear();
        }
        Ok(recording)
    }

    /// Whether all bitmaps that have to record can. If not, the image must say before its first
    /// change that its bitmaps are not to be trusted (autoclear bit 0).
    pub(crate) fn all_readable(&self) -> bool {
        self.unreadable.is_empty()
    }

    /// Whether a save has something to do.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Marks the bitmaps as in use, on stable storage. To be called before the first change of the
    /// disk; again after an error.
    ///
    /// Errors: what the storage reports.
    pub(crate) async fn begin(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        if self.recorded.is_empty() || self.has_begun() {
            return Ok(());
        }
        for one in &self.recorded {
            // Four bytes of one sector: marked or not, never something else.
            let flags = one.flags | IN_USE;
            let at = one.flags_at.load(Ordering::Acquire);
            write_bytes(ring, file, at, &flags.to_be_bytes()).await?;
        }
        file.flush(ring).await?;
        self.begun.store(true, Ordering::Release);
        Ok(())
    }

    /// Leaves the bitmaps in use on stable storage for good: the disk is changed elsewhere from now on.
    ///
    /// Errors: what the storage reports; they are as they were then, unless that fails too.
    pub(crate) async fn give_up(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        let result = self.begin(ring, file).await;
        if result.is_err() {
            for one in &self.recorded {
                let at = one.flags_at.load(Ordering::Acquire);
                let _ = write_bytes(ring, file, at, &one.flags.to_be_bytes()).await;
            }
            let _ = file.flush(ring).await;
        }
        result
    }

    /// Records a change of `len` bytes of disk at `offset`. Before the change is made.
    pub(crate) fn record(&self, offset: u64, len: u64) {
        for one in &self.recorded {
            one.bits.set(offset, len);
        }
    }

    /// Saves the bitmaps: new contents beside the old, then a new directory, switched by one sector
    /// of the header. To be called when no request runs any more.
    ///
    /// * `unsaved`: what becomes of a bitmap for whose contents there is no room. One that is lost stays in
    ///   use on the storage; that is no error.
    ///
    /// Errors: what the storage reports; nothing has changed then.
    pub(crate) async fn save(
        &self,
        image: &Qcow2,
        ring: &Ring,
        unsaved: Unsaved,
    ) -> Result<(), Errno> {
        if !self.has_begun() || !update::bitmaps_are_valid(image)? {
            return Ok(());
        }
        let Ok(mut entries) = update::entries(image, ring).await else { return Err(Errno::IO) };
        let place = update::place(image, ring);
        let mut update = Update::default();
        let mut saved = 0;
        for one in &self.recorded {
            let Some(entry) = entries.iter_mut().find(|entry| entry.name == one.name) else {
                continue;
            };
            match save_one(image, ring, &place, entry, &one.bits, &mut update).await {
                Ok(()) => saved += 1,
                Err(failure) => {
                    let (file, name, reason) = (image.file.name(), entry.shown(), failure.reason);
                    if unsaved == Unsaved::Refused {
                        tracing::warn!(file, name, reason, "a bitmap cannot be saved");
                        update.cancel(image);
                        return Err(failure.errno);
                    }
                    tracing::warn!(file, name, reason, "a bitmap is lost: it could not be saved");
                }
            }
        }
        if saved > 0 {
            update.publish(image, ring, &entries).await?;
            self.follow(image, &entries)?;
        }
        self.begun.store(false, Ordering::Release);
        Ok(())
    }

    /// Remembers where the entries are in the directory that was just written.
    fn follow(&self, image: &Qcow2, entries: &[Entry]) -> Result<(), Errno> {
        let Some(directory) = lock(&image.engine()?.header).bitmaps() else { return Ok(()) };
        for (entry, position) in entries.iter().zip(directory::positions(entries)) {
            if let Some(one) = self.recorded.iter().find(|one| one.name == entry.name) {
                let at = directory.offset + (position + FLAGS_AT) as u64;
                one.flags_at.store(at, Ordering::Release);
            }
        }
        Ok(())
    }
}

/// Reads one bitmap, if `room` bytes of memory are enough.
async fn load_one(
    place: &Place<'_>,
    entry: &Entry,
    room: &mut u64,
) -> Result<Bits, tables::Unreadable> {
    if let Some(reason) = entry.unusable() {
        return Err(reason.to_owned());
    }
    let needed = bits::count(place.size, entry.granularity_bits.into()).div_ceil(8);
    let Some(left) = room.checked_sub(needed) else {
        return Err(format!(
            "the bitmaps that record need more than {RECORDED_BITMAPS_BYTES_MAX} bytes of memory"
        ));
    };
    let bits = place.load(entry).await?;
    *room = left;
    Ok(bits)
}

/// Why a bitmap was not saved.
struct Failure {
    errno: Errno,
    reason: String,
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure { errno, reason: errno.to_string() }
    }
}

/// Writes the contents of one bitmap to new clusters and lets `entry` point there.
async fn save_one(
    image: &Qcow2,
    ring: &Ring,
    place: &Place<'_>,
    entry: &mut Entry,
    bits: &Bits,
    update: &mut Update,
) -> Result<(), Failure> {
    let old = place.runs(entry).await.map_err(|reason| Failure { errno: Errno::IO, reason })?;
    let mut taken = Vec::new();
    let stored = tables::store(image, ring, bits, &mut taken).await;
    match stored {
        Ok((table_offset, table_entries)) => {
            update.taken.append(&mut taken);
            update.leave(image, old)?;
            entry.table_offset = table_offset;
            entry.table_entries = table_entries;
            entry.flags &= !IN_USE;
            Ok(())
        }
        Err(errno) => {
            update::give_back(image, taken);
            Err(errno.into())
        }
    }
}
