//! Moves metadata from the end of the file to the front after a disk became smaller, so that the
//! file can end after the last data.
//!
//! Promises: the image is whole before and after; an error costs space only. A change writes its
//! new metadata after everything else, since it may not overwrite the old. This second change
//! brings it into the space that the first one made free. Data stays where it is.

use std::collections::HashSet;

use ringdisk_ring::Ring;
use ringdisk_storage::Kind;

use crate::engine::Qcow2;
use crate::error::Error;
use crate::units::{Bytes, HostCluster};

use super::active::Active;
use super::bitmaps;
use super::transaction::Transaction;

/// The file must become shorter by one part of so many, or it is not worth the writes.
const WORTH: u64 = 8;
/// The first round makes room for everything that could move; a second one finds that most of it is
/// not needed any more.
const ROUNDS: u32 = 3;

impl Qcow2 {
    /// Shortens the file. Whatever goes wrong costs space only: the image is whole before and
    /// after.
    ///
    /// * `old_len`: its length before the disk became smaller, in bytes. It does not stay longer
    ///   where its metadata finds room further in front.
    pub(super) async fn compact(&mut self, ring: &Ring, old_len: Bytes) -> Result<(), Error> {
        if self.file.kind() == Kind::BlockDevice {
            return Ok(());
        }
        for _ in 0..ROUNDS {
            self.finish_use(ring).await?;
            tracing::debug!("metadata moves to the front of the image file");
            let result = compact(ring, self, old_len).await;
            if let Err(error) = &result {
                tracing::warn!(%error, "the image file does not get shorter");
            }
            self.reopen(ring, Ok(())).await?;
            if !matches!(result, Ok(true)) {
                break;
            }
        }
        Ok(())
    }
}

/// Returns whether the file got shorter.
async fn compact(ring: &Ring, image: &mut Qcow2, old_len: Bytes) -> Result<bool, Error> {
    let longer = Bytes(image.file.len()) > old_len;
    let mut tx = Transaction::begin(ring, image)?;
    let mut active = Active::load(&tx).await?;
    let bits = tx.geometry.cluster_bits;
    let old_l1 = active.run();
    let mut movable: HashSet<HostCluster> = tx.refcount_clusters().into_iter().collect();
    movable.extend(old_l1.clusters());
    let mut tables = Vec::new();
    for index in 0..active.l1.len() {
        if let Some(offset) = active.table_offset(&tx, index)? {
            tables.push((index, offset >> bits));
        }
    }
    movable.extend(tables.iter().map(|(_, cluster)| *cluster));
    let others = movable.len() as u64;
    // Their clusters stay where they are unless they lie at the end, or one of them cannot be read.
    let mut of_bitmaps = HashSet::new();
    let all = bitmaps::walk(&mut tx, |_, _, run| {
        of_bitmaps.extend(run.clusters());
        Ok(())
    });
    let bitmaps = matches!(all.await, Ok(true)).then_some(of_bitmaps);
    movable.extend(bitmaps.iter().flatten());

    let end = tx.end_of_clusters() >> bits;
    let mut kept = end;
    while kept > HostCluster(1) && (movable.contains(&(kept - 1)) || tx.is_unused(kept - 1).await?)
    {
        kept = kept - 1;
    }
    // Room for what moves.
    let (kept, least) = if longer {
        // What the first change has just written: the refcounts that change now are among that.
        let needed = movable.iter().filter(|cluster| **cluster >= kept).count() as u64;
        (kept + needed - holes(&mut tx, kept, needed).await?, 1)
    } else {
        let behind = bitmaps.iter().flatten().filter(|cluster| **cluster >= kept).count() as u64;
        (kept + others + behind, end.0 / WORTH + 1)
    };
    if kept.saturating_add(least) > end {
        return Ok(false);
    }
    tx.search_below(kept).await?;
    for (index, cluster) in tables {
        if cluster >= kept
            && let Some(words) = active.table(&mut tx, index).await?
        {
            active.replace(&mut tx, index, &words).await?;
        }
    }
    if old_l1.start >= kept {
        active.move_l1();
    }
    if bitmaps.is_some() {
        bitmaps::move_behind(&mut tx, kept).await?;
    }
    tx.move_blocks_behind(kept).await?;
    let entries = active.l1.len();
    active.finish(&mut tx, entries).await?;
    tx.drop_blocks = true;
    tx.shorten_file();
    tx.commit().await.map(|()| true)
}

/// Free clusters below `end`; counts up to `most` of them.
async fn holes(tx: &mut Transaction<'_>, end: HostCluster, most: u64) -> Result<u64, Error> {
    let mut found = 0;
    for cluster in HostCluster(1).up_to(end) {
        if found == most {
            break;
        }
        found += u64::from(tx.count(cluster).await? == 0);
    }
    Ok(found)
}
