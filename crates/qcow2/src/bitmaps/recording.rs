//! Bitmaps that record writes while an image is open.
//!
//! Promises:
//! - Before the first write the image says, on stable storage, that these bitmaps are in use; after
//!   a crash no program trusts them.
//! - Every write is recorded before it is made: [`Recording::record`] takes no lock, allocates
//!   nothing and leaves shared cache lines alone where the bits are set already.
//! - A bitmap becomes valid again only by a save that is complete on stable storage. A save that
//!   fails changes nothing: the bitmaps are in use as before and go on recording.
//! - Recording can begin again after a save, at the place where the save has put the directory.
//! - Bitmaps that do not record (not `auto`) stay valid as they are; those that were left in use by
//!   another program stay so and are not recorded.
//! - One that should record and cannot is lost by itself: it is marked in use with the others and
//!   stays so. The others go on recording.
//! - A bitmap that is added while requests run records what begins after [`Recording::add`].

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use super::bits::Bits;
use super::directory::{self, AUTO, Entry, FLAGS_AT, IN_USE};
use super::tables::{self, Place};
use crate::error::Error;
use crate::header::{Header, write_bytes};
use crate::info::Bitmap;
use crate::limits::RECORDED_BITMAPS_BYTES_MAX;
use crate::sync::{AtomicBool, AtomicU64, OnceLock, Ordering};
use crate::units::{Bytes, GuestOffset, HostOffset};

/// The bitmaps of one image that record writes.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// Those that were there when the image was opened.
    recorded: Vec<Recorded>,
    /// Those that were added since.
    added: Added,
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

/// Bitmaps that were added while requests run: a list that only grows, so that a request walks it
/// without a lock. Its length is bounded by the number of bitmaps that an image can have.
#[derive(Debug, Default)]
struct Added(OnceLock<Box<Node>>);

#[derive(Debug)]
struct Node {
    one: Recorded,
    /// As in the directory when it was added.
    listed: Bitmap,
    next: Added,
}

impl Added {
    fn iter(&self) -> impl Iterator<Item = &Node> {
        std::iter::successors(self.0.get(), |node| node.next.0.get()).map(|node| &**node)
    }

    /// Puts one at the end. Callers take turns.
    fn push(&self, one: Recorded, listed: Bitmap) {
        let mut end = &self.0;
        while let Some(node) = end.get() {
            end = &node.next.0;
        }
        let _ = end.set(Box::new(Node { one, listed, next: Added::default() }));
    }
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
            let flags_at = AtomicU64::new((directory.offset + Bytes::of(position + FLAGS_AT)).0);
            let (name, flags) = (entry.name.clone(), entry.flags);
            let loaded = match load_one(&place, &entry, &mut room).await {
                Ok(bits) => Ok(bits),
                // Once more: the first change gives up what cannot be read.
                Err(_) => load_one(&place, &entry, &mut room).await,
            };
            match loaded {
                Ok(bits) => recording.recorded.push(Recorded { flags_at, name, flags, bits }),
                Err(reason) => {
                    let (image, shown) = (file.name(), entry.display_name());
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

    /// Names and contents of the bitmaps that record.
    pub(crate) fn contents(&self) -> impl Iterator<Item = (&[u8], &Bits)> {
        self.all().map(|one| (&one.name[..], &one.bits))
    }

    fn all(&self) -> impl Iterator<Item = &Recorded> {
        self.recorded.iter().chain(self.added.iter().map(|node| &node.one))
    }

    /// Those that were added since the image was opened, as a list shows them.
    pub(crate) fn added(&self) -> impl Iterator<Item = &Bitmap> {
        self.added.iter().map(|node| &node.listed)
    }

    /// Bytes that all of them take in memory.
    pub(crate) fn bytes(&self) -> Bytes {
        self.all().fold(Bytes::ZERO, |sum, one| sum.saturating_add(one.bits.bytes()))
    }

    /// Lets one more bitmap record. Its entry is in the directory that [`Recording::follow`] was
    /// given last, in use if the others are. Callers take turns.
    ///
    /// * `flags_at`: host offset of the flags of its entry.
    /// * `in_use`: all of them are marked in use on stable storage.
    pub(crate) fn add(&self, entry: &Entry, flags_at: HostOffset, bits: Bits, in_use: bool) {
        let (name, flags) = (entry.name.clone(), entry.flags & !IN_USE);
        let listed = Bitmap { in_use: false, ..super::listed(entry) };
        let flags_at = AtomicU64::new(flags_at.0);
        self.added.push(Recorded { name, flags_at, flags, bits }, listed);
        self.begun.store(in_use, Ordering::Release);
    }

    /// Whether none records, and none should.
    pub(crate) fn is_empty(&self) -> bool {
        self.recorded.is_empty() && self.lost.is_empty() && self.added.0.get().is_none()
    }

    /// Remembers where the entries are in a directory that was just written.
    ///
    /// * `start`: host offset of the directory.
    pub(crate) fn follow(&self, start: HostOffset, entries: &[Entry]) {
        for (entry, position) in entries.iter().zip(directory::positions(entries)) {
            let at = start + Bytes::of(position + FLAGS_AT);
            if let Some(one) = self.all().find(|one| one.name == entry.name) {
                one.flags_at.store(at.0, Ordering::Release);
            }
            if let Some(one) = self.lost.iter().find(|one| one.name == entry.name) {
                one.flags_at.store(at.0, Ordering::Release);
            }
        }
    }

    /// The bitmaps were saved: they are not in use any more, until the next change.
    pub(crate) fn end(&self) {
        self.begun.store(false, Ordering::Release);
    }

    /// Whether a save has something to do.
    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::Acquire)
    }

    /// Marks the bitmaps as in use, on stable storage. To be called before the first change of the
    /// disk; again after an error.
    ///
    /// Errors: those of the storage; they are as they were then, unless that cannot be written
    /// either.
    pub(crate) async fn begin(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        if self.is_empty() || self.has_begun() {
            return Ok(());
        }
        let result = self.mark(ring, file).await;
        if result.is_err() {
            // Nothing has changed, and a mark that got there all the same would lose the bitmap at
            // the next open. Those that cannot record stay in use: they may have missed changes
            // before.
            for one in self.all() {
                let at = HostOffset(one.flags_at.load(Ordering::Acquire));
                let _ = write_bytes(ring, file, at, &one.flags.to_be_bytes()).await;
            }
            let _ = file.flush(ring).await;
            return result;
        }
        self.begun.store(true, Ordering::Release);
        Ok(())
    }

    async fn mark(&self, ring: &Ring, file: &Storage) -> Result<(), Errno> {
        let recorded = self.all().map(|one| (&one.flags_at, one.flags));
        let lost = self.lost.iter().map(|one| (&one.flags_at, one.flags));
        for (flags_at, flags) in recorded.chain(lost) {
            // Four bytes of one sector: marked or not, never something else.
            let at = HostOffset(flags_at.load(Ordering::Acquire));
            write_bytes(ring, file, at, &(flags | IN_USE).to_be_bytes()).await?;
        }
        file.flush(ring).await
    }

    /// Records a change of `len` bytes of disk at `offset`. Before the change is made.
    pub(crate) fn record(&self, offset: GuestOffset, len: Bytes) {
        for one in self.all() {
            one.bits.set(offset, len);
        }
    }
}

/// Reads one bitmap, if `room` bytes of memory are enough.
async fn load_one(
    place: &Place<'_>,
    entry: &Entry,
    room: &mut Bytes,
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
