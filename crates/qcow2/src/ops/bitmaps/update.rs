//! Changing which bitmaps an image has and what is in them.
//!
//! Promises: everything new lies in new clusters and is on stable storage, reference counts too,
//! before one sector of the header makes it true; only then is the old given back. A crash leaves
//! the old bitmaps or the new ones, and leaked clusters at most.

use crate::units::Bytes;
use ringdisk_ring::{Errno, Ring};

use super::store;
use crate::bitmaps::directory::{self, Entry};
use crate::bitmaps::tables::Place;
use crate::engine::Qcow2;
use crate::error::Error;
use crate::extensions::BitmapDirectory;
use crate::header;
use crate::refcounts::Run;
use crate::sync::lock;

/// Autoclear bits that we keep true.
const KNOWN_AUTOCLEAR: u64 = header::BITMAPS | header::RAW_EXTERNAL;

/// Who uses the image meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// No request: its use was ended.
    Closed,
    /// Requests of clients.
    Running,
}

/// The clusters that change hands.
#[derive(Debug, Default)]
pub(crate) struct Update {
    /// New ones, which nothing refers to yet.
    pub(crate) taken: Vec<Run>,
    /// Those that nothing refers to afterwards.
    old: Vec<Run>,
}

impl Update {
    /// Makes `entries` the bitmaps of the image.
    ///
    /// Errors: `ENOSPC` and those of the storage; the image has its old bitmaps then (after an
    /// error of the last write and of taking it back: either).
    pub(crate) async fn publish(
        self,
        image: &Qcow2,
        ring: &Ring,
        entries: &[Entry],
    ) -> Result<(), Errno> {
        self.publish_as(image, ring, entries, Use::Closed).await
    }

    /// As [`Update::publish`], with requests that run or without.
    pub(crate) async fn publish_as(
        mut self,
        image: &Qcow2,
        ring: &Ring,
        entries: &[Entry],
        usage: Use,
    ) -> Result<(), Errno> {
        let prepared = self.prepare(image, ring, entries, usage).await;
        let directory = match prepared {
            Ok(directory) => directory,
            Err(errno) => {
                give_back(image, self.taken);
                return Err(errno);
            }
        };
        let mut arranged = Ok(());
        let changed = image
            .change_header(ring, |header| {
                arranged = header.set_bitmaps(directory);
                if arranged.is_ok() {
                    let valid = if directory.is_some() { header::BITMAPS } else { 0 };
                    let others = header.autoclear() & KNOWN_AUTOCLEAR & !header::BITMAPS;
                    header.set_autoclear(others | valid);
                }
            })
            .await;
        if let Err(errno) = changed {
            // Where it is not known which header is there, what the new one names stays: leaked at
            // most.
            if !image.engine()?.header_is_unknown() {
                give_back(image, self.taken);
            }
            return Err(errno);
        }
        if arranged.is_err() {
            // No room in the first cluster: nothing changed.
            give_back(image, self.taken);
            return Err(Errno::NOSPC);
        }
        give_up(image, ring, self.old).await;
        Ok(())
    }

    /// Nothing of it shall be: gives the new clusters back.
    pub(crate) fn cancel(self, image: &Qcow2) {
        give_back(image, self.taken);
    }

    /// Lets the clusters of a bitmap be freed. Those that other metadata lies on stay as they are.
    pub(crate) fn leave(&mut self, image: &Qcow2, runs: Vec<Run>) -> Result<(), Errno> {
        let space = image.space()?;
        for run in runs {
            if space.first_metadata(run.start, run.count).is_some() {
                let (file, first) = (image.file.name(), run.start.0);
                tracing::warn!(file, first, "a bitmap lies on other metadata: check the image");
            } else {
                self.old.push(run);
            }
        }
        Ok(())
    }

    /// Brings the new directory and all counts to stable storage.
    async fn prepare(
        &mut self,
        image: &Qcow2,
        ring: &Ring,
        entries: &[Entry],
        usage: Use,
    ) -> Result<Option<BitmapDirectory>, Errno> {
        let bits = image.geometry.cluster_bits;
        let old = lock(&image.engine()?.header).bitmaps();
        if let Some(old) = old.filter(|_| bitmaps_are_valid(image) == Ok(true)) {
            let count = old.len.clusters(bits);
            self.old.push(Run::new(old.offset >> bits, count));
        }
        let directory = if entries.is_empty() {
            None
        } else {
            let bytes = directory::to_bytes(entries);
            let offset = store::write_clusters(image, ring, &bytes, &mut self.taken).await?;
            let count = u32::try_from(entries.len()).map_err(|_| Errno::FBIG)?;
            let len = Bytes::of(bytes.len());
            image.space()?.mark_metadata(offset >> bits, len.clusters(bits));
            Some(BitmapDirectory { count, offset, len })
        };
        match usage {
            Use::Closed => image.settle(ring).await?,
            Use::Running => image.checkpoint_all(ring).await?,
        }
        Ok(directory)
    }
}

/// Whether the image says that its bitmaps may be trusted.
pub(crate) fn bitmaps_are_valid(image: &Qcow2) -> Result<bool, Errno> {
    let header = lock(&image.engine()?.header);
    Ok(header.autoclear() & header::BITMAPS != 0 && header.bitmaps().is_some())
}

/// The directory as it is in the image. Empty when it is not to be trusted.
///
/// Errors: as [`directory::read`].
pub(crate) async fn entries(image: &Qcow2, ring: &Ring) -> Result<Vec<Entry>, Error> {
    let io = |errno| Error::io(image.file.name(), "changing bitmaps", errno);
    if !bitmaps_are_valid(image).map_err(io)? {
        return Ok(Vec::new());
    }
    let directory = lock(&image.engine().map_err(io)?.header).bitmaps();
    match directory {
        Some(directory) => {
            let cluster_size = image.geometry.cluster_size();
            directory::read(ring, &image.file, directory, cluster_size).await
        }
        None => Ok(Vec::new()),
    }
}

/// Where the contents of the bitmaps of an open image are.
pub(crate) fn place<'a>(image: &'a Qcow2, ring: &'a Ring) -> Place<'a> {
    Place {
        ring,
        file: &image.file,
        cluster_bits: image.geometry.cluster_bits,
        size: image.geometry.virtual_size,
    }
}

/// Clusters that were taken and that nothing refers to.
pub(crate) fn give_back(image: &Qcow2, taken: Vec<Run>) {
    let Ok(mut space) = image.space() else { return };
    for run in taken {
        space.unmark_metadata(run.start, run.count);
        space.give_back(run.start, run.count, false);
    }
}

/// Frees clusters that nothing refers to any more. What cannot be freed is leaked: the change is
/// made already.
async fn give_up(image: &Qcow2, ring: &Ring, old: Vec<Run>) {
    let mut freed = Vec::new();
    for cluster in old.iter().flat_map(Run::clusters) {
        if image.space().is_ok_and(|space| space.is_contested(cluster)) {
            // It belongs to the entry for data that names it.
            continue;
        }
        let done = match image.refcount(ring, cluster).await {
            // Freed twice, or never counted: the image was wrong before.
            Ok(0) => Err(Errno::INVAL),
            Ok(_) => image.change_refcount(ring, cluster, 1, false, &mut freed).await,
            Err(errno) => Err(errno),
        };
        if let Err(errno) = done {
            tracing::debug!(%cluster, %errno, "a host cluster that is not used stays allocated");
        }
    }
    image.release(ring, freed).await;
}
