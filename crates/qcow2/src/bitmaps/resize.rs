//! Bitmaps of a disk that gets another size.
//!
//! Promises: new contents and a new directory lie in new clusters, on stable storage; the caller
//! switches to them together with the size, in one sector of the header, and only then is the old
//! given back. What was cut off is gone; what was added is clean.

use ringdisk_ring::Ring;

use super::directory::IN_USE;
use super::tables;
use super::update::{self, Update};
use crate::error::{Error, ErrorKind};
use crate::extensions::BitmapDirectory;
use crate::image::Qcow2;

/// Bitmaps of the new size, which nothing refers to yet.
#[derive(Debug)]
pub(crate) struct ResizedBitmaps {
    /// For [`set_bitmaps`](crate::header::HeaderImage::set_bitmaps). `None`: the image has no bitmaps;
    /// its header stays as it is.
    pub(crate) directory: Option<BitmapDirectory>,
    update: Update,
}

impl ResizedBitmaps {
    /// The header names the new directory, on stable storage: gives the old clusters back.
    pub(crate) async fn finish(self, image: &Qcow2, ring: &Ring) {
        update::give_up(image, ring, self.update.old).await;
    }

    /// The header was not changed: gives the new clusters back.
    pub(crate) fn abandon(self, image: &Qcow2) {
        update::give_back(image, self.update.taken);
    }
}

impl Qcow2 {
    /// Makes the bitmaps of a disk of `size` bytes. To be called after
    /// [`close`](Qcow2::close), which saves what was recorded.
    ///
    /// Errors: `InvalidRequest` for a bitmap that is inconsistent, as `qemu-img resize` refuses it,
    /// or would be too large; `Corrupt` for one that cannot be read; `Io`.
    pub(crate) async fn resized_bitmaps(
        &self,
        ring: &Ring,
        size: u64,
    ) -> Result<ResizedBitmaps, Error> {
        let mut update = Update::default();
        match self.resize_bitmaps(ring, size, &mut update).await {
            Ok(directory) => Ok(ResizedBitmaps { directory, update }),
            Err(error) => {
                update::give_back(self, update.taken);
                Err(error)
            }
        }
    }

    async fn resize_bitmaps(
        &self,
        ring: &Ring,
        size: u64,
        update: &mut Update,
    ) -> Result<Option<BitmapDirectory>, Error> {
        let file = self.file.name();
        let mut entries = update::entries(self, ring).await?;
        if entries.is_empty() {
            return Ok(None);
        }
        let place = update::place(self, ring);
        let io = |errno| Error::io(file, "resizing bitmaps", errno);
        for entry in &mut entries {
            let name = entry.shown();
            let refuse = |why: &str| {
                let reason = format!("bitmap '{name}' cannot be resized: {why}");
                Error::new(ErrorKind::InvalidRequest, file, reason, "remove the bitmap first")
            };
            if entry.has(IN_USE) {
                return Err(refuse("it is inconsistent"));
            }
            if let Some(why) = entry.unusable() {
                return Err(refuse(why));
            }
            if size == 0 || tables::is_too_large(size, entry.granularity_bits.into()) {
                return Err(refuse("it does not suit a disk of that size"));
            }
            let bad = |why| Error::corrupt(file, format!("bitmap '{name}' cannot be read: {why}"));
            let bits = place.load(entry).await.map_err(bad)?;
            let bits = bits.resized(size).ok_or_else(|| refuse("there is not enough memory"))?;
            update.old.extend(place.runs(entry).await.map_err(bad)?);
            let stored = tables::store(self, ring, &bits, &mut update.taken).await;
            (entry.table_offset, entry.table_entries) = stored.map_err(io)?;
        }
        update.prepare(self, ring, &entries).await.map_err(io)
    }
}
