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
//! - One that should record and cannot is lost by itself: it is marked in use with the others and
//!   stays so. The others go on recording.

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use super::bits::Bits;
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
    lost: Vec<Lost>,
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

/// A bitmap that changes make wrong.
#[derive(Debug)]
struct Lost {
    /// As in the directory.
    name: Vec<u8>,
    /// Host offset of the flags of its entry; a save moves it.
    flags_at: AtomicU64,
    flags: u32,
}

impl Recording {
    /// Reads the bitmaps that have to record from now on.
    ///
    /// * `bitmaps`: what [`read`](super::read) found in the directory.
    ///
    /// Errors: `Corrupt` when the directory breaks the specification, `Io`. A bitmap that cannot be
    /// recorded is no error: it is marked in use for good with the first change, and a warning says
    /// so.
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
        let positions = directory::positions(&entries).collect::<Vec<_>>();
        let mut wanted: Vec<(Entry, usize)> = entries.into_iter().zip(positions).collect();
        wanted.retain(|(entry, _)| entry.has(AUTO) && !entry.has(IN_USE));
        // The small ones first: a large one that does not fit costs no other its place.
        wanted.sort_by_key(|(entry, _)| std::cmp::Reverse(entry.granularity_bits));
        let mut room = RECORDED_BITMAPS_BYTES_MAX;
        for (entry, position) in wanted {
            let flags_at = AtomicU64::new(directory.offset + (position + FLAGS_AT) as u64);
            let (name, flags) = (entry.name.clone(), entry.flags);
            let loaded = match load_one(&place, &entry, &mut room).await {
                Ok(bits) => Ok(bits),
                // Once more: the first change gives up what cannot be read.
                Err(_) => load_one(&place, &entry, &mut room).await,
            };
            match loaded {
                Ok(bits) => recording.recorded.push(Recorded { flags_at, name, flags, bits }),
                Err(reason) => {
                    let (image, shown) = (file.name(), entry.shown());
                    tracing::warn!(
                        image,
                        name = shown,
                        reason,
                        "a bitmap cannot record writes, so the next write makes it inconsistent"
                    );
                    recording.lost.push(Lost { flags_at, name, flags });
                }
            }
        }
        Ok(recording)
    }

    /// Whether a save has something to do.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Marks the bitmaps as in use, on stable storage. To be called before the first change of the
    /// disk; again after an error.
    ///
    /// Errors: what the storage reports; they are as they were then, unless that cannot be written
    /// either.
    pub(crate) async fn begin(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        if self.recorded.is_empty() && self.lost.is_empty() || self.has_begun() {
            return Ok(());
        }
        let result = self.mark(ring, file).await;
        if result.is_err() {
            // Nothing has changed, and a mark that got there all the same would lose the bitmap at
            // the next open. Those that cannot record stay in use: they may have missed changes
            // before.
            for one in &self.recorded {
                let at = one.flags_at.load(Ordering::Acquire);
                let _ = write_bytes(ring, file, at, &one.flags.to_be_bytes()).await;
            }
            let _ = file.flush(ring).await;
            return result;
        }
        self.begun.store(true, Ordering::Release);
        Ok(())
    }

    async fn mark(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        let recorded = self.recorded.iter().map(|one| (&one.flags_at, one.flags));
        let lost = self.lost.iter().map(|one| (&one.flags_at, one.flags));
        for (flags_at, flags) in recorded.chain(lost) {
            // Four bytes of one sector: marked or not, never something else.
            let at = flags_at.load(Ordering::Acquire);
            write_bytes(ring, file, at, &(flags | IN_USE).to_be_bytes()).await?;
        }
        file.flush(ring).await
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
    /// * `unsaved`: what becomes of a bitmap for whose contents there is no room. One that is lost
    ///   stays in use on the storage; that is no error.
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
            let at = directory.offset + (position + FLAGS_AT) as u64;
            if let Some(one) = self.recorded.iter().find(|one| one.name == entry.name) {
                one.flags_at.store(at, Ordering::Release);
            }
            if let Some(one) = self.lost.iter().find(|one| one.name == entry.name) {
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
    let needed = tables::content_bytes(place.size, entry.granularity_bits.into());
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
