//! Saving the bitmaps that record, when the use of the image ends.
//!
//! Promises: new contents go beside the old ones, then a new directory, and one sector of the
//! header switches over. A save that fails changes nothing: the bitmaps are in use as before and go
//! on recording.

use ringdisk_ring::{Errno, Ring};

use super::store;
use super::update::{self, Update};
use crate::bitmaps::bits::Bits;
use crate::bitmaps::directory::{Entry, IN_USE};
use crate::bitmaps::tables::Place;
use crate::engine::Qcow2;
use crate::sync::lock;

/// What becomes of a bitmap for whose bits there is no room, or whose old place cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unsaved {
    /// It is given up, with a warning: the close cannot be tried again.
    Lost,
    /// The close fails, and the bitmap goes on recording.
    Refused,
}

/// Saves the bitmaps of an image that record. To be called when no request runs any more.
///
/// * `unsaved`: what becomes of a bitmap for whose contents there is no room. One that is lost
///   stays in use on the storage; that is no error.
///
/// Errors: those of the storage; nothing has changed then.
pub(crate) async fn save(image: &Qcow2, ring: &Ring, unsaved: Unsaved) -> Result<(), Errno> {
    let recording = &image.engine()?.recording;
    if !recording.has_begun() || !update::bitmaps_are_valid(image)? {
        return Ok(());
    }
    let Ok(mut entries) = update::entries(image, ring).await else { return Err(Errno::IO) };
    let place = update::place(image, ring);
    let mut update = Update::default();
    let mut saved = 0;
    for (name, bits) in recording.contents() {
        let Some(entry) = entries.iter_mut().find(|entry| entry.name == name) else {
            continue;
        };
        match save_one(image, ring, &place, entry, bits, &mut update).await {
            Ok(()) => saved += 1,
            Err(failure) => {
                let (file, name, reason) =
                    (image.file.name(), entry.display_name(), failure.reason);
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
        let directory = lock(&image.engine()?.header).bitmaps();
        if let Some(directory) = directory {
            recording.follow(directory.offset, &entries);
        }
    }
    recording.end();
    Ok(())
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
    let stored = store::store(image, ring, bits, &mut taken).await;
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
