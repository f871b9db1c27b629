//! The bitmaps of a checkpoint.
//!
//! The new one is added before the instant and cleared at it, so that it has what is written from
//! the instant on. The old one is copied at the instant and records on. So it also has everything
//! when the backup fails, and a crash of the server finds all bitmaps as a crash always does:
//! marked in use, if anything was written since the image was opened.
//!
//! Promises: nothing here changes a bitmap that the caller did not name.

use std::sync::Arc;

use ringdisk_qcow2::{BitmapContents, Qcow2};
use ringdisk_ring::Ring;

use super::checks::changed;
use super::{CheckpointEnd, DirtyRanges, NewBitmap};
use crate::graph::Graph;
use crate::live::{DRAIN_LIMIT, Marks, bitmap_result, has_bitmap as has, not_drained};
use crate::name::printable_path;
use crate::{Disk, Error, ErrorKind};

/// What was asked for, and is there.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    added: Option<String>,
    /// The old bitmap.
    since: Option<Marks>,
}

/// The bitmaps of a running checkpoint.
#[derive(Debug, Default)]
pub(super) struct Chosen {
    added: Option<String>,
    since: Option<(Marks, Arc<BitmapContents>)>,
    /// First byte of the window of the disk, bytes.
    start: u64,
}

impl Wanted {
    /// Errors: as [`Disk::prepare_checkpoint`]; nothing has changed then.
    pub(super) async fn prepare(
        disk: &Disk,
        ring: &Ring,
        new: Option<NewBitmap>,
        since: Option<String>,
    ) -> Result<Wanted, Error> {
        let since = match since {
            Some(name) => Some(find(disk, ring, name).await?),
            None => None,
        };
        let Some(NewBitmap { name, granularity_bytes }) = new else {
            return Ok(Wanted { added: None, since });
        };
        disk.add_bitmap(ring, name.clone(), granularity_bytes).await?;
        Ok(Wanted { added: Some(name), since })
    }

    /// Removes the new bitmap.
    pub(super) async fn undo(&self, disk: &Disk, ring: &Ring) -> Result<(), Error> {
        match &self.added {
            Some(name) => disk.remove_bitmap(ring, name.clone()).await,
            None => Ok(()),
        }
    }

    /// Copies the old bitmap. No request is in flight.
    ///
    /// Errors: `Busy` where one of the bitmaps is not there any more.
    pub(super) fn at_instant(&self, graph: &Graph) -> Result<Chosen, Error> {
        if let Some(name) = &self.added
            && !graph.top_image().is_some_and(|image| image.bitmap_records(name))
        {
            return Err(changed("its bitmaps"));
        }
        let since = match &self.since {
            None => None,
            Some(since) => {
                let contents = since.at_instant(graph).ok_or_else(|| changed("its bitmaps"))?;
                Some((since.clone(), contents))
            }
        };
        Ok(Chosen { added: self.added.clone(), since, start: graph.window.start.0 })
    }
}

impl Chosen {
    /// The new bitmap begins. No request is in flight.
    pub(super) fn begin(&self, graph: &Graph) {
        if let (Some(name), Some(image)) = (&self.added, graph.top_image()) {
            image.bitmap_clear_recorded(name);
        }
    }

    /// The old bitmap at the instant, inside the window of the frozen disk.
    pub(super) fn dirty(&self, frozen: &Disk) -> Option<DirtyRanges> {
        let (since, contents) = self.since.as_ref()?;
        let inside = |at: u64| at.saturating_sub(self.start).min(frozen.size().0);
        let ranges = contents
            .ranges()
            .map(|range| inside(range.start.0)..inside(range.end.0))
            .filter(|range| !range.is_empty())
            .collect();
        let granularity_bytes = contents.granularity_bytes();
        Some(DirtyRanges { name: since.name().to_owned(), granularity_bytes, ranges })
    }

    /// Treats the bitmaps as `end` says.
    ///
    /// Errors: as [`Disk::change_bitmaps`]; `Unsupported` where they are not in the top image any
    /// more.
    pub(super) async fn end(
        &self,
        disk: &Disk,
        ring: &Ring,
        end: CheckpointEnd,
    ) -> Result<(), Error> {
        let since = self.since.as_ref().map(|(since, _)| since);
        match (end, &self.added, since) {
            (CheckpointEnd::Drop, Some(_), Some(since)) => {
                check_top(disk, since.name())?;
                disk.remove_bitmap(ring, since.name().to_owned()).await
            }
            (CheckpointEnd::Merge, Some(added), since) => {
                check_top(disk, added)?;
                match since.filter(|since| !since.records()) {
                    Some(since) => merge(disk, ring, added.clone(), since.name().to_owned()).await,
                    None => disk.remove_bitmap(ring, added.clone()).await,
                }
            }
            _ => Ok(()),
        }
    }
}

/// Finds a bitmap of the top image.
///
/// Errors: `Unsupported` where the image has no bitmaps; `Invalid` where it is missing or
/// inconsistent; `Busy` where another change of the disk does not end within 2 s; `Io`.
async fn find(disk: &Disk, ring: &Ring, name: String) -> Result<Marks, Error> {
    let turn = ring.within(DRAIN_LIMIT, disk.changes().lock()).await;
    let _turn = turn.map_err(|_| not_drained(DRAIN_LIMIT))?;
    Marks::find(disk, ring, name).await
}

/// Checks that a bitmap is in the top image: an overlay that was put above it has none of its
/// bitmaps.
///
/// Errors: `Unsupported`.
fn check_top(disk: &Disk, name: &str) -> Result<(), Error> {
    let graph = disk.graph();
    if graph.top_image().is_some_and(|image| has(image, name)) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "the bitmap '{name}' is not in '{}', the top image of the disk now, so it stays as it \
             is; change it with `ringdisk bitmap` when its image is not in use",
            printable_path(graph.top().name())
        ),
    ))
}

/// Adds what the new bitmap has recorded to the old one, and removes the new one.
async fn merge(disk: &Disk, ring: &Ring, added: String, since: String) -> Result<(), Error> {
    let gone = added.clone();
    let change = async move |ring: &Ring, image: &mut Qcow2| {
        // What it has recorded was saved when the image was closed.
        let contents = bitmap_result(image.bitmap_contents(ring, &added).await)?;
        bitmap_result(image.bitmap_merge(ring, &since, &contents).await)?;
        bitmap_result(image.bitmap_remove(ring, &added).await)
    };
    // The new one is removed last.
    disk.change_bitmaps(ring, change, move |image| !has(image, &gone)).await
}
