//! Empties an image: the disk then shows its backing file.
//!
//! Promises: where there is room for the new metadata the change is atomic, as all of them. Where
//! there is none (the file system is full, which is why images are emptied) it is made in place and
//! takes no space: the L1 table is overwritten with zeroes and made durable, then the reference
//! counts follow. A crash on that way leaves a part of the old mapping, and leaked clusters. So
//! a caller that cannot accept that makes the backing file show what the image shows first, as a
//! commit does.

use crate::units::Bytes;
use ringdisk_ring::Ring;

use crate::engine::Qcow2;
use crate::error::Error;
use crate::header::{BITMAPS, RAW_EXTERNAL, write_bytes};
use crate::limits::{SECTOR, SECTOR_LEN};
use crate::refcounts::Run;

use super::active::Active;
use super::bitmaps;
use super::resize::ResizeOptions;
use super::transaction::Transaction;

impl Qcow2 {
    /// Takes away everything that the disk holds itself: all of it is what the backing file has, or
    /// zeroes. Snapshots keep theirs.
    ///
    /// Errors: `InvalidRequest` when it is open for reading only; `Corrupt`, `Io`. Where there was
    /// no room for new metadata (see the module) a part may be gone then.
    pub async fn make_empty(&mut self, ring: &Ring) -> Result<(), Error> {
        self.finish_use(ring).await?;
        let old_len = Bytes(self.file.len());
        let result = beside(ring, self).await;
        match self.reopen(ring, result).await {
            Ok(()) => {}
            Err(error) if error.is_out_of_space() => {
                tracing::info!("no room for new metadata, so the image is emptied in place");
                self.finish_use(ring).await?;
                let result = in_place(ring, self).await;
                self.reopen(ring, result).await?;
            }
            Err(error) => return Err(error),
        }
        self.compact(ring, old_len).await
    }

    /// Makes the disk at least `size` bytes long; what is added shows the backing file. (A resize
    /// adds zeroes.)
    ///
    /// * `size`: bytes, rounded up to 512.
    ///
    /// Errors: as [`Qcow2::resize`].
    pub async fn uncover(&mut self, ring: &Ring, size: Bytes) -> Result<(), Error> {
        let size = size.next_multiple_of(SECTOR);
        if size <= self.virtual_size() {
            return Ok(());
        }
        self.check_resize(size, &ResizeOptions::default())?;
        self.finish_use(ring).await?;
        let result = uncover(ring, self, size).await;
        self.reopen(ring, result).await
    }
}

/// By a transaction, which needs space for what it writes.
async fn beside(ring: &Ring, image: &mut Qcow2) -> Result<(), Error> {
    let mut tx = Transaction::begin(ring, image)?;
    tx.note_all_named().await?;
    let mut active = Active::load(&tx).await?;
    active.drop_all(&mut tx).await?;
    let entries = active.l1.len();
    active.finish(&mut tx, entries).await?;
    tx.drop_blocks = true;
    tx.shorten_file();
    tx.commit().await
}

/// Without any new cluster.
async fn in_place(ring: &Ring, image: &mut Qcow2) -> Result<(), Error> {
    let overlap = image.engine.as_deref().and_then(|engine| engine.overlap.clone());
    let mut tx = Transaction::begin(ring, image)?;
    if let Some(reason) = overlap {
        return Err(tx.corrupt(reason));
    }
    tx.stay_in_place();
    let mut active = Active::load(&tx).await?;
    let run = active.run();
    for cluster in run.clusters() {
        if tx.count(cluster).await? != 1 {
            return Err(tx.corrupt("the L1 table is not counted once, so it is not overwritten"));
        }
    }
    // All counts are changed in memory first: nothing is overwritten yet where something else needs
    // what this frees.
    tx.keep_in_memory();
    let old_l1 = active.l1.clone();
    active.drop_all(&mut tx).await?;
    tx.refuse_lost_by_others().await?;
    // What the bits promise must not be true by accident.
    let known = tx.header.autoclear() & (BITMAPS | RAW_EXTERNAL);
    if known != tx.header.autoclear() {
        tx.header.set_autoclear(known);
        let written = tx.header.write_first_sector(ring, &tx.file).await;
        written.map_err(|errno| tx.io("writing the header", errno))?;
        tx.flush().await?;
    }
    zero_l1(&tx, run, &old_l1).await?;
    tx.flush().await?;
    // The disk is empty, durably. The rest gives space back.
    let freed = async {
        // What its tables name counts for nothing any more.
        tx.forget_named();
        tx.note_named_by_others().await?;
        tx.finish_in_place().await
    };
    if let Err(error) = freed.await {
        tracing::warn!(
            %error,
            "the image is empty, but its space could not be freed; `ringdisk check --repair leaks` \
             does that"
        );
    }
    Ok(())
}

/// Writes zeroes where the active L1 table has entries, and nowhere else: what was never written,
/// of the table or behind it in its last cluster, may be a hole of the file, which a write would
/// have to fill.
async fn zero_l1(tx: &Transaction<'_>, run: Run, l1: &[u64]) -> Result<(), Error> {
    let start = run.start << tx.geometry.cluster_bits;
    let zeroes = [0; SECTOR_LEN];
    for (index, entries) in l1.chunks(SECTOR_LEN / 8).enumerate() {
        if entries.iter().any(|entry| *entry != 0) {
            let at = start + Bytes::of(index * SECTOR_LEN);
            let written = write_bytes(tx.ring, &tx.file, at, &zeroes).await;
            written.map_err(|errno| tx.io("writing the L1 table", errno))?;
        }
    }
    Ok(())
}

async fn uncover(ring: &Ring, image: &mut Qcow2, size: Bytes) -> Result<(), Error> {
    let old = image.virtual_size();
    let entries = image.l1_needed(size).max(u64::from(image.info.l1_entries));
    let mut tx = Transaction::begin(ring, image)?;
    tx.note_all_named().await?;
    let active = Active::load(&tx).await?;
    bitmaps::resize(&mut tx, old, size).await?;
    tx.header.set_size(size);
    // At most 2^22: checked before.
    active.finish(&mut tx, usize::try_from(entries).unwrap_or(0)).await?;
    tx.commit().await
}
