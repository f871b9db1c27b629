//! What `bitmap` does to an image that no request uses: add, remove, clear, enable, disable,
//! merge. Names, limits and refusals are those of `qemu-img bitmap`.
//!
//! Promises: each operation is there or not after a crash, and complete on stable storage when it
//! returns (module `update`). It ends the use of the open image for requests: what was recorded
//! until then is saved first, and later changes of the disk are `EROFS` until it is opened again.

use ringdisk_ring::{Errno, Ring};

use super::store;
use super::update::{self, Update};
use crate::bitmaps::bits::Bits;
use crate::bitmaps::directory::{
    self, AUTO, Entry, GRANULARITY_BITS_MAX, GRANULARITY_BITS_MIN, IN_USE,
};
use crate::bitmaps::tables::{self, Place};
use crate::cause::Cause;
use crate::engine::Qcow2;
use crate::error::{Error, ErrorKind};
use crate::header::{self, HeaderImage};
use crate::limits::{
    BITMAP_BYTES_MAX, BITMAP_DIRECTORY_BYTES_MAX, BITMAP_NAME_BYTES_MAX, BITMAPS_MAX,
    RECORDED_BITMAPS_BYTES_MAX,
};
use crate::sync::lock;
use crate::units::{Bytes, GuestOffset};

/// The default granularity is the size of a cluster, but not outside these bounds.
const DEFAULT_GRANULARITY_MIN: Bytes = Bytes(4 << 10);
const DEFAULT_GRANULARITY_MAX: Bytes = Bytes(64 << 10);

/// What a bitmap says, apart from its image.
#[derive(Debug)]
pub struct BitmapContents {
    pub(super) bits: Bits,
}

impl BitmapContents {
    /// Size of the disk in bytes.
    pub fn disk_bytes(&self) -> Bytes {
        self.bits.size()
    }

    /// Bytes of disk for each bit.
    pub fn granularity_bytes(&self) -> Bytes {
        Bytes(1 << self.bits.granularity_bits())
    }

    /// The parts of the disk that are marked, in order: byte ranges, whole units of granularity,
    /// cut at the end of the disk.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<GuestOffset>> + '_ {
        self.bits.ranges()
    }
}

impl Qcow2 {
    /// Adds an empty bitmap that records writes.
    ///
    /// * `granularity_bytes`: bytes of disk for each bit, a power of two from 512 to 2 GiB; `None`:
    ///   the cluster size, but 4 KiB at least and 64 KiB at most.
    ///
    /// Errors: `InvalidRequest` for a name that is there already, empty, or longer than 1023 bytes,
    /// for a granularity that is not allowed or makes the bitmap too large (also for the memory
    /// that all bitmaps may take that record), too many bitmaps, and version 2; `Io`.
    pub async fn bitmap_add(
        &mut self,
        ring: &Ring,
        name: &str,
        granularity_bytes: Option<Bytes>,
    ) -> Result<(), Error> {
        self.add_bitmap(ring, name, granularity_bytes, AUTO).await
    }

    /// Adds an empty bitmap that does not record, so it takes no memory.
    ///
    /// Errors: as [`bitmap_add`](Qcow2::bitmap_add).
    pub async fn bitmap_add_disabled(
        &mut self,
        ring: &Ring,
        name: &str,
        granularity_bytes: Option<Bytes>,
    ) -> Result<(), Error> {
        self.add_bitmap(ring, name, granularity_bytes, 0).await
    }

    async fn add_bitmap(
        &mut self,
        ring: &Ring,
        name: &str,
        granularity_bytes: Option<Bytes>,
        flags: u32,
    ) -> Result<(), Error> {
        let granularity_bits = self.check_new_bitmap(name, granularity_bytes)?;
        let mut entries = self.bitmaps_to_change(ring).await?;
        if entries.iter().any(|entry| entry.name == name.as_bytes()) {
            return Err(self.refuse_bitmap(name, "is there already", "choose another name"));
        }
        if flags & AUTO != 0 {
            let others = tables::recording_bytes(&entries, self.geometry.virtual_size);
            self.check_recording_room(name, others, granularity_bits)?;
        }
        self.check_room_for_bitmap(&entries, name)?;
        let bits = Bits::new(self.geometry.virtual_size, granularity_bits)
            .ok_or_else(|| self.no_memory_for_bitmap(name))?;
        let mut update = Update::default();
        let stored = store::store(self, ring, &bits, &mut update.taken).await;
        let table = self.or_give_back(stored, &mut update)?;
        entries.push(Entry::new(name, granularity_bits, flags, table));
        self.publish_bitmaps(ring, update, &entries).await
    }

    /// Removes a bitmap, also one that is inconsistent.
    ///
    /// Errors: `InvalidRequest` when there is none of that name; `Io`.
    pub async fn bitmap_remove(&mut self, ring: &Ring, name: &str) -> Result<(), Error> {
        let mut entries = self.bitmaps_to_change(ring).await?;
        let at = self.find_bitmap(&entries, name)?;
        let gone = entries.remove(at);
        let mut update = Update::default();
        self.free_contents(ring, &gone, &mut update).await;
        self.publish_bitmaps(ring, update, &entries).await
    }

    /// Removes all bitmaps. Errors: `Io`.
    pub async fn bitmap_remove_all(&mut self, ring: &Ring) -> Result<(), Error> {
        let entries = self.bitmaps_to_change(ring).await?;
        if entries.is_empty() {
            return Ok(());
        }
        let mut update = Update::default();
        for gone in &entries {
            self.free_contents(ring, gone, &mut update).await;
        }
        self.publish_bitmaps(ring, update, &[]).await
    }

    /// Clears all bits of a bitmap.
    ///
    /// Errors: `InvalidRequest` when there is none of that name, or it is inconsistent; `Io`.
    pub async fn bitmap_clear(&mut self, ring: &Ring, name: &str) -> Result<(), Error> {
        let mut entries = self.bitmaps_to_change(ring).await?;
        let at = self.find_usable_bitmap(&entries, name)?;
        let bits = Bits::new(self.geometry.virtual_size, u32::from(entries[at].granularity_bits))
            .ok_or_else(|| self.no_memory_for_bitmap(name))?;
        self.replace_contents(ring, &mut entries, at, &bits).await
    }

    /// Lets a bitmap record writes from now on. Errors: as [`bitmap_clear`](Qcow2::bitmap_clear),
    /// and `InvalidRequest` when the bitmaps that record would take too much memory.
    pub async fn bitmap_enable(&mut self, ring: &Ring, name: &str) -> Result<(), Error> {
        self.set_recording(ring, name, true).await
    }

    /// Lets a bitmap stay as it is from now on. Errors: as [`bitmap_clear`](Qcow2::bitmap_clear).
    pub async fn bitmap_disable(&mut self, ring: &Ring, name: &str) -> Result<(), Error> {
        self.set_recording(ring, name, false).await
    }

    /// Declares all bitmaps that record inconsistent, on stable storage: what the disk shows is
    /// changed elsewhere from now on (in its backing file, after a commit), and no reader may trust
    /// them any more. Needs no space.
    ///
    /// Errors: `Io`; they are as they were then. The image is open for writing and was not written
    /// to.
    pub async fn bitmaps_give_up(&mut self, ring: &Ring) -> Result<(), Error> {
        let given_up = async {
            // Those that cannot record are marked with the others.
            self.engine()?.recording.begin(ring, &self.file).await
        };
        given_up.await.map_err(|errno| self.bitmap_io(errno))?;
        for bitmap in self.info.bitmaps.iter_mut().filter(|bitmap| bitmap.auto) {
            bitmap.in_use = true;
        }
        Ok(())
    }

    /// Adds the bits of `source` to a bitmap. Where granularities differ, each bit stands for the
    /// range that it covers.
    ///
    /// Errors: as [`bitmap_clear`](Qcow2::bitmap_clear), and `InvalidRequest` when `source` is of a
    /// disk of another size.
    pub async fn bitmap_merge(
        &mut self,
        ring: &Ring,
        name: &str,
        source: &BitmapContents,
    ) -> Result<(), Error> {
        let mut entries = self.bitmaps_to_change(ring).await?;
        let at = self.find_usable_bitmap(&entries, name)?;
        let (ours, theirs) = (self.geometry.virtual_size, source.bits.size());
        if ours != theirs {
            let why = format!("is of a disk of {ours} bytes, the source of one of {theirs}");
            return Err(self.refuse_bitmap(name, &why, "merge bitmaps of disks of the same size"));
        }
        let place = update::place(self, ring);
        let bits = place.load(&entries[at]).await.map_err(|why| self.bad_bitmap(name, &why))?;
        bits.merge(&source.bits);
        self.replace_contents(ring, &mut entries, at, &bits).await
    }

    /// Reads a bitmap, of any open image.
    ///
    /// Errors: `InvalidRequest` when there is none of that name, or it is inconsistent; `Corrupt`
    /// when it cannot be read; `TooLarge`; `Io`.
    pub async fn bitmap_contents(&self, ring: &Ring, name: &str) -> Result<BitmapContents, Error> {
        let header = HeaderImage::read(ring, &self.file).await?;
        let valid = header.autoclear() & header::BITMAPS != 0;
        let cluster_size = self.geometry.cluster_size();
        let entries = match header.bitmaps().filter(|_| valid) {
            Some(found) => directory::read(ring, &self.file, found, cluster_size).await?,
            None => Vec::new(),
        };
        let at = self.find_usable_bitmap(&entries, name)?;
        let place = Place {
            ring,
            file: &self.file,
            cluster_bits: self.geometry.cluster_bits,
            size: header.size(),
        };
        let bits = place.load(&entries[at]).await.map_err(|why| self.bad_bitmap(name, &why))?;
        Ok(BitmapContents { bits })
    }

    async fn set_recording(&mut self, ring: &Ring, name: &str, on: bool) -> Result<(), Error> {
        let mut entries = self.bitmaps_to_change(ring).await?;
        let at = self.find_usable_bitmap(&entries, name)?;
        if entries[at].has(AUTO) == on {
            return Ok(());
        }
        if on {
            let others = tables::recording_bytes(&entries, self.geometry.virtual_size);
            self.check_recording_room(name, others, entries[at].granularity_bits.into())?;
        }
        entries[at].flags ^= AUTO;
        self.publish_bitmaps(ring, Update::default(), &entries).await
    }

    /// Saves what was recorded, and gives the directory.
    async fn bitmaps_to_change(&mut self, ring: &Ring) -> Result<Vec<Entry>, Error> {
        if let Err(errno) = self.engine() {
            return Err(Error::io(self.file.name(), "changing bitmaps", errno));
        }
        self.close_for_change(ring).await.map_err(|errno| self.bitmap_io(errno))?;
        if let Some(reason) = self.engine().ok().and_then(|engine| engine.overlap.as_ref()) {
            return Err(Error::corrupt(self.file.name(), reason));
        }
        let entries = update::entries(self, ring).await?;
        self.note_named_clusters(ring).await?;
        Ok(entries)
    }

    /// Log2 of the granularity of a new bitmap.
    pub(super) fn check_new_bitmap(
        &self,
        name: &str,
        granularity: Option<Bytes>,
    ) -> Result<u32, Error> {
        let refuse = |why: &str, advice| Err(self.refuse_bitmap(name, why, advice));
        if self.info.version < 3 {
            let why = "cannot be stored in an image of version 2 (compat 0.10)";
            return refuse(why, "convert the image to compat 1.1");
        }
        if name.is_empty() || name.len() as u64 > u64::from(BITMAP_NAME_BYTES_MAX) {
            let why = format!(
                "cannot be added: the name has {} bytes, and must have 1 to \
                 {BITMAP_NAME_BYTES_MAX}",
                name.len()
            );
            return refuse(&why, "choose another name");
        }
        let size = self.geometry.virtual_size;
        if size == Bytes::ZERO {
            return refuse("cannot be added to a disk without bytes", "resize the disk first");
        }
        let default =
            self.geometry.cluster_size().clamp(DEFAULT_GRANULARITY_MIN, DEFAULT_GRANULARITY_MAX);
        let granularity = granularity.unwrap_or(default);
        let bits = granularity.0.checked_ilog2().unwrap_or(0);
        let allowed = GRANULARITY_BITS_MIN..=GRANULARITY_BITS_MAX;
        if !granularity.is_power_of_two() || !allowed.contains(&bits) {
            let why = format!(
                "cannot have a granularity of {granularity} bytes: it must be a power of two from \
                 512 to 2 GiB"
            );
            return refuse(&why, "64K suits most disks");
        }
        if tables::is_too_large(size, bits) {
            let why = format!(
                "would need more than {BITMAP_BYTES_MAX} bytes with a granularity of {granularity}"
            );
            return refuse(&why, "use a larger granularity");
        }
        Ok(bits)
    }

    pub(super) fn check_room_for_bitmap(&self, entries: &[Entry], name: &str) -> Result<(), Error> {
        let directory_bytes = Bytes::of(directory::to_bytes(entries).len()) + Bytes(2048);
        if entries.len() as u64 >= u64::from(BITMAPS_MAX)
            || directory_bytes > BITMAP_DIRECTORY_BYTES_MAX
        {
            let why = "cannot be added: the image has as many bitmaps as it can hold";
            return Err(self.refuse_bitmap(name, why, "remove some of them"));
        }
        Ok(())
    }

    /// Refuses a bitmap that could not record, since all that record are held in memory.
    ///
    /// * `others`: bytes of memory that the bitmaps take that are there.
    pub(super) fn check_recording_room(
        &self,
        name: &str,
        others: Bytes,
        granularity_bits: u32,
    ) -> Result<(), Error> {
        let size = self.geometry.virtual_size;
        let bytes = tables::content_bytes(size, granularity_bits);
        if others.saturating_add(bytes) <= RECORDED_BITMAPS_BYTES_MAX {
            return Ok(());
        }
        let mib = |bytes: Bytes| bytes.clusters(20);
        let why = format!(
            "with a granularity of {} would take {} MiB of memory while it records, beside {} \
             MiB of other bitmaps: together at most {} MiB",
            1u64 << granularity_bits,
            mib(bytes),
            mib(others),
            mib(RECORDED_BITMAPS_BYTES_MAX)
        );
        Err(self.refuse_bitmap(name, &why, "use a larger granularity, or disable other bitmaps"))
    }

    fn find_bitmap(&self, entries: &[Entry], name: &str) -> Result<usize, Error> {
        entries.iter().position(|entry| entry.name == name.as_bytes()).ok_or_else(|| {
            self.refuse_bitmap(name, "is not there", "`ringdisk info` lists the bitmaps")
                .because(Cause::NoBitmap { name: name.to_owned() })
        })
    }

    /// As [`find_bitmap`](Qcow2::find_bitmap), and refuses one whose contents are wrong.
    fn find_usable_bitmap(&self, entries: &[Entry], name: &str) -> Result<usize, Error> {
        let at = self.find_bitmap(entries, name)?;
        if entries[at].has(IN_USE) {
            let why = "is inconsistent: the program that used it last did not save it";
            return Err(self.refuse_bitmap(name, why, "remove it"));
        }
        if let Some(why) = entries[at].unusable() {
            return Err(self.refuse_bitmap(name, &format!("cannot be used: {why}"), "remove it"));
        }
        Ok(at)
    }

    /// Lets the clusters of a bitmap be freed with the update; leaks them where they are not
    /// known.
    async fn free_contents(&self, ring: &Ring, entry: &Entry, update: &mut Update) {
        let runs = update::place(self, ring).runs(entry).await;
        let left =
            runs.and_then(|runs| update.leave(self, runs).map_err(|errno| errno.to_string()));
        if let Err(reason) = left {
            let (image, name) = (self.file.name(), entry.display_name());
            tracing::warn!(image, name, reason, "clusters of a bitmap are leaked");
        }
    }

    /// Writes new contents of one bitmap.
    async fn replace_contents(
        &mut self,
        ring: &Ring,
        entries: &mut [Entry],
        at: usize,
        bits: &Bits,
    ) -> Result<(), Error> {
        let mut update = Update::default();
        self.free_contents(ring, &entries[at], &mut update).await;
        let stored = store::store(self, ring, bits, &mut update.taken).await;
        let (table_offset, table_entries) = self.or_give_back(stored, &mut update)?;
        entries[at].table_offset = table_offset;
        entries[at].table_entries = table_entries;
        self.publish_bitmaps(ring, update, entries).await
    }

    fn or_give_back<T>(&self, stored: Result<T, Errno>, update: &mut Update) -> Result<T, Error> {
        stored.map_err(|errno| {
            update::give_back(self, std::mem::take(&mut update.taken));
            self.bitmap_io(errno)
        })
    }

    async fn publish_bitmaps(
        &mut self,
        ring: &Ring,
        update: Update,
        entries: &[Entry],
    ) -> Result<(), Error> {
        let done = async {
            update.publish(self, ring, entries).await?;
            self.settle(ring).await?;
            Ok(lock(&self.engine()?.header).autoclear())
        };
        let autoclear = done.await.map_err(|errno| self.bitmap_io(errno))?;
        self.info.autoclear_features = autoclear;
        self.info.bitmaps = entries.iter().map(crate::bitmaps::listed).collect();
        Ok(())
    }

    pub(super) fn refuse_bitmap(&self, name: &str, why: &str, advice: &'static str) -> Error {
        let reason = format!("bitmap '{name}' {why}");
        Error::new(ErrorKind::InvalidRequest, self.file.name(), reason, advice)
    }

    fn bad_bitmap(&self, name: &str, why: &str) -> Error {
        Error::corrupt(self.file.name(), format!("bitmap '{name}' cannot be read: {why}"))
    }

    pub(super) fn no_memory_for_bitmap(&self, name: &str) -> Error {
        Error::too_large(
            self.file.name(),
            format!("there is not enough memory for bitmap '{name}'"),
        )
    }

    pub(super) fn bitmap_io(&self, errno: Errno) -> Error {
        Error::io(self.file.name(), "changing bitmaps", errno)
    }
}
