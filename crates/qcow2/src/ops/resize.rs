//! Changes the size of the disk.
//!
//! Promises: what is added reads as zeroes, also over a longer backing file and behind an old end
//! in the middle of a cluster. What is cut off is given back. The new size shows with everything
//! else that belongs to it, or not at all.

use ringdisk_ring::{Errno, Ring};

use crate::create::Preallocation;
use crate::engine::Qcow2;
use crate::engine::below::Below;
use crate::error::{Error, ErrorKind};
use crate::limits::{L1_BYTES_MAX, SECTOR};
use crate::units::{Bytes, GuestOffset, HostOffset};

use super::active::Active;
use super::bitmaps;
use super::grow::Growth;
use super::transaction::Transaction;

/// How to resize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeOptions {
    /// The disk may become smaller; what is cut off is lost.
    pub shrink: bool,
    /// What is prepared in the part that is added.
    pub preallocation: Preallocation,
}

impl Qcow2 {
    /// Gives the disk another size.
    ///
    /// * `size`: bytes, a multiple of 512.
    /// * `below`: the backing chain, [`Nothing`](crate::Nothing) without one.
    ///
    /// Errors: `InvalidRequest` for a size or options that do not fit the image (smaller without
    /// `shrink`, version 2 with snapshots, inconsistent bitmaps, larger without the backing file
    /// that it names, …), `TooLarge`, `Corrupt`, `Io`.
    pub async fn resize<B: Below>(
        &mut self,
        ring: &Ring,
        size: Bytes,
        options: &ResizeOptions,
        below: &B,
    ) -> Result<(), Error> {
        self.resize_unless(ring, size, options, below, &|| false).await
    }

    /// As [`Qcow2::resize`], with an end on the way.
    ///
    /// * `cancelled`: asked between two steps while the disk grows, and before the change is made
    ///   true; `true` gives up, and what was prepared is cut off again.
    ///
    /// Errors: as [`Qcow2::resize`]; `Io` with `ECANCELED`.
    pub async fn resize_unless<B: Below>(
        &mut self,
        ring: &Ring,
        size: Bytes,
        options: &ResizeOptions,
        below: &B,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        self.check_resize(size, options)?;
        if size == self.virtual_size() {
            return Ok(());
        }
        if size > self.virtual_size() {
            if self.info.backing_file.is_some() && !below.is_there() {
                return Err(self.refused(
                    "it names a backing file and is open without it, so nobody knows what of that \
                     would show in the part that is added",
                    "open it with its backing file, or remove the name first (ringdisk rebase -u \
                     -b '')",
                ));
            }
            // Damage there is found while the image is still in use, and goes on to be readable.
            self.meet_tail(ring).await?;
        }
        self.finish_use(ring).await?;
        if size < self.virtual_size() {
            let old_len = Bytes(self.file.len());
            let result = self.shrink(ring, size, cancelled).await;
            self.reopen(ring, result).await?;
            return self.compact(ring, old_len).await;
        }
        let result = self.grow(ring, size, options.preallocation, below, cancelled).await;
        self.reopen(ring, result).await
    }

    /// Whether [`Qcow2::resize`] would refuse this. Errors: as there.
    pub fn check_resize(&self, size: Bytes, options: &ResizeOptions) -> Result<(), Error> {
        let old = self.virtual_size();
        if !size.is_multiple_of(SECTOR) || i64::try_from(size.0).is_err() {
            return Err(self.refused(
                format!("the new size of {size} bytes is not a multiple of 512 below 2^63"),
                "choose a multiple of 512",
            ));
        }
        if size < old && !options.shrink {
            return Err(self.refused(
                format!("the disk has {old} bytes, {size} bytes are less"),
                "allow shrinking (--shrink) if the data behind the new end is not needed any more",
            ));
        }
        if size <= old && options.preallocation != Preallocation::Off {
            return Err(
                self.refused("preallocation needs a disk that grows", "leave preallocation off")
            );
        }
        if self.info.version < 3 && !self.info.snapshots.is_empty() && size != old {
            return Err(self.refused(
                "an image of version 2 (compat 0.10) with snapshots cannot be resized: a snapshot \
                 does not record the size of its disk",
                "delete the snapshots, or convert the image to compat 1.1",
            ));
        }
        if let Some(bitmap) = self.info.bitmaps.iter().find(|bitmap| bitmap.in_use) {
            return Err(self.refused(
                format!(
                    "the bitmap '{}' is inconsistent, so it cannot be resized",
                    bitmap.name.escape_debug()
                ),
                "remove the bitmap first",
            ));
        }
        if self.info.external_data_file && self.data_file.is_none() {
            return Err(self.refused("the data file is missing", "name the data file"));
        }
        if Bytes(self.l1_needed(size) * 8) > L1_BYTES_MAX {
            return Err(Error::new(
                ErrorKind::TooLarge,
                self.file.name(),
                format!(
                    "a disk of {size} bytes is too large for qcow2 with clusters of {} bytes",
                    self.geometry.cluster_size()
                ),
                "copy it into an image with larger clusters",
            ));
        }
        Ok(())
    }

    /// Entries of an L1 table for `size` bytes.
    pub(super) fn l1_needed(&self, size: Bytes) -> u64 {
        size.clusters(self.geometry.table_shift())
    }

    async fn shrink(
        &mut self,
        ring: &Ring,
        size: Bytes,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let entries = self.l1_needed(size);
        let old = self.virtual_size();
        let mut tx = Transaction::begin(ring, self)?;
        tx.note_all_named().await?;
        let mut active = Active::load(&tx).await?;
        active.cut(&mut tx, GuestOffset::after(size)).await?;
        bitmaps::resize(&mut tx, old, size).await?;
        tx.header.set_size(size);
        // At most 2^22.
        active.finish(&mut tx, usize::try_from(entries.max(1)).unwrap_or(0)).await?;
        tx.drop_blocks = true;
        tx.shorten_file();
        give_up_if(cancelled, &tx)?;
        tx.commit().await?;
        // The disk has its new size, and nothing refers to what is behind it: an error would say
        // that it has not.
        if let Some(data) = &self.data_file
            && let Err(errno) = data.set_len(ring, size.0).await
            && self.info.data_file_raw
            && errno != Errno::OPNOTSUPP
        {
            let name = data.name();
            tracing::warn!("the disk is smaller, its data file '{name}' is not: {errno}");
        }
        Ok(())
    }

    async fn grow<B: Below>(
        &mut self,
        ring: &Ring,
        size: Bytes,
        preallocation: Preallocation,
        below: &B,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let old = self.virtual_size();
        let entries = self.l1_needed(size).max(u64::from(self.info.l1_entries));
        let tail = self.tail(ring, below, preallocation != Preallocation::Off).await?;
        if let Some(reason) = self.fault() {
            return Err(Error::corrupt(self.file.name(), reason));
        }
        let reserved = (tail.is_none()).then_some(preallocation);
        let preallocation = match preallocation {
            // A reader that ignores the metadata and one that follows it see the same.
            Preallocation::Off if self.info.data_file_raw => Preallocation::Metadata,
            other => other,
        };
        let data_file = self.data_file.clone();
        let (file, file_len) = (self.file.clone(), self.file.len());
        let data_len = data_file.as_ref().map_or(0, |data| data.len());
        let undo = async |error: Error| {
            // Nothing on disk refers to what was prepared. A failure costs space only.
            if file.len() > file_len {
                let _ = file.set_len(ring, file_len).await;
            }
            if let Some(data) = &data_file
                && data.len() > data_len
            {
                let _ = data.set_len(ring, data_len).await;
            }
            error
        };
        if let Err(error) = self.grow_data_file(ring, size, preallocation, cancelled).await {
            return Err(undo(error).await);
        }
        if let Some(mode) = reserved
            && let Err(error) =
                self.reserve_tail(ring, GuestOffset::after(size), mode, cancelled).await
        {
            return Err(undo(error).await);
        }
        let mut tx = Transaction::begin(ring, self)?;
        // At most 2^22.
        let entries = usize::try_from(entries).unwrap_or(0);
        let prepared = async {
            tx.note_all_named_once().await?;
            let mut active = Active::load(&tx).await?;
            active.cut(&mut tx, GuestOffset::after(old)).await?;
            active.l1.resize(entries, 0);
            let growth = Growth {
                old: GuestOffset::after(old),
                size: GuestOffset::after(size),
                preallocation,
                data_file: data_file.clone(),
                cancelled,
            };
            growth.run(&mut tx, &mut active, tail, below).await?;
            bitmaps::resize(&mut tx, old, size).await?;
            tx.header.set_size(size);
            active.finish(&mut tx, entries).await?;
            give_up_if(cancelled, &tx)
        };
        match prepared.await {
            Ok(()) => match tx.commit_or_tell().await {
                Ok(()) => Ok(()),
                Err((error, true)) => Err(undo(error).await),
                Err((error, false)) => Err(error),
            },
            Err(error) => Err(undo(error).await),
        }
    }

    /// Gives the data file the new length, and zeroes the part where the disk grows: what lies
    /// there belongs to no cluster.
    async fn grow_data_file(
        &self,
        ring: &Ring,
        size: Bytes,
        preallocation: Preallocation,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let Some(data) = &self.data_file else { return Ok(()) };
        let old = self.virtual_size();
        let failed = |errno| Error::io(data.name(), "growing the data file", errno);
        let len = Bytes(data.len());
        if len > old {
            let end = len.min(size.next_multiple_of(self.geometry.cluster_size()));
            data.write_zeroes(ring, old.0, (end - old).0, true, true).await.map_err(failed)?;
        }
        match preallocation {
            Preallocation::Off | Preallocation::Metadata => {}
            Preallocation::Falloc => {
                data.write_zeroes(ring, old.0, (size - old).0, false, true)
                    .await
                    .map_err(failed)?;
            }
            Preallocation::Full => {
                let end = HostOffset::after(old);
                super::grow::write_zero_bytes(ring, data, end, size - old, cancelled)
                    .await
                    .map_err(failed)?;
            }
        }
        match data.set_len(ring, size.0).await {
            // A block device has the length that it has.
            Err(Errno::OPNOTSUPP) if data.refresh_len().map_err(failed)? < size.0 => {
                return Err(failed(Errno::NOSPC));
            }
            Ok(()) | Err(Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(failed(errno)),
        }
        data.flush(ring).await.map_err(failed)
    }
}

/// The last moment at which a change can be given up. Errors: `Io` with `ECANCELED`.
fn give_up_if(cancelled: &dyn Fn() -> bool, tx: &Transaction<'_>) -> Result<(), Error> {
    if cancelled() { Err(tx.io("changing the size of the disk", Errno::CANCELED)) } else { Ok(()) }
}
