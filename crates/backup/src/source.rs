//! What a backup reads: the kept state of disks, which other processes serve or nobody does.
//!
//! Promises: what was begun is ended by [`Readers::end`], for all disks, whatever happened.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::control::checkpoint::round::fleecing_file;
use ringdisk_daemon::control::protocol::checkpoint::Bitmaps;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::name::is_export;
use ringdisk_disk::{
    Bytes, CheckpointOptions, Disk, Format, ImageOptions, NewBitmap, Source as DiskSource,
};
use ringdisk_images::inspect;
use ringdisk_images::named::Pool;
use ringdisk_ring::Runtime;
use ringdisk_storage::{Lock, OpenOptions, Storage};

use crate::checkpoint::{Bitmap, Checkpoint, Image, Ranges};

/// An image of our own is held at once: nobody else uses it.
const HOLD_LIMIT: Duration = Duration::from_secs(10);

/// A disk that can be read as it was at the instant.
#[derive(Debug)]
pub(super) struct Reader {
    pub(super) disk: Arc<Disk>,
    /// What the bitmap that was asked for has marked.
    pub(super) dirty: Option<Ranges>,
}

/// A disk whose image nobody serves.
#[derive(Debug)]
pub(super) struct Offline {
    path: PathBuf,
    options: ImageOptions,
    pub(super) image: Image,
}

/// One that is open.
#[derive(Debug)]
pub(super) struct Own {
    live: Arc<Disk>,
    path: PathBuf,
    checkpoint: Option<Arc<ringdisk_disk::Checkpoint>>,
}

/// All disks of a backup.
#[derive(Debug, Default)]
pub(super) struct Readers {
    /// Those of our own, each with its number.
    own: Vec<(usize, Own)>,
    /// Those of other processes, with the numbers of the disks.
    served: Option<(Vec<usize>, Checkpoint)>,
}

/// Whether a path that no process of ours serves may be an image.
pub(super) fn may_be_image(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    let is_file = |meta: std::fs::Metadata| meta.is_file() || meta.file_type().is_block_device();
    is_export(path) || std::fs::metadata(path).is_ok_and(is_file)
}

impl Offline {
    /// Looks what bitmaps the image has.
    ///
    /// Errors: it cannot be opened; another process uses it.
    pub(super) fn look(
        runtime: &mut Runtime,
        path: &Path,
        pool: &Pool,
    ) -> Result<Offline, Failure> {
        let options = ImageOptions {
            read_only: true,
            allow_paths: pool.allow_path.clone(),
            allow_hosts: pool.allow_host.clone(),
            reconnect: pool.reconnect,
            ..ImageOptions::default()
        };
        let ring = runtime.ring().clone();
        let opened = Disk::open(&ring, DiskSource::Path(path.to_owned()), &options);
        let disk = runtime.block_on(opened)?;
        let layers = disk.layers();
        let top = layers.first();
        let bitmaps = top.and_then(|top| top.qcow2()).map(|image| {
            let all = image.info().bitmaps.iter().map(|bitmap| Bitmap {
                name: bitmap.name.clone(),
                records: bitmap.auto,
                inconsistent: bitmap.in_use,
            });
            all.collect::<Vec<Bitmap>>()
        });
        let image = Image { has_bitmaps: bitmaps.is_some(), bitmaps: bitmaps.unwrap_or_default() };
        let format: Option<Format> = top.and_then(|top| top.format());
        Ok(Offline { path: path.to_owned(), options: ImageOptions { format, ..options }, image })
    }

    /// Keeps the state of the disk. Where bitmaps are changed, the image is opened for that.
    ///
    /// Errors: as [`Offline::look`]; a bitmap that is not there, or is there already.
    pub(super) fn begin(
        self,
        runtime: &mut Runtime,
        bitmap: Option<String>,
        since: Option<String>,
        fleece_dir: &Path,
    ) -> Result<Own, Failure> {
        let ring = runtime.ring().clone();
        let has_bitmaps = bitmap.is_some() || since.is_some();
        let options = ImageOptions { read_only: !has_bitmaps, ..self.options };
        let opened = Disk::open(&ring, DiskSource::Path(self.path.clone()), &options);
        let live = runtime.block_on(opened)?;
        let mut own = Own { live, path: self.path, checkpoint: None };
        if has_bitmaps {
            let options = OpenOptions { lock: Lock::None, no_flush: true, ..Default::default() };
            let file = fleecing_file(fleece_dir)?;
            let fleece = Arc::new(Storage::from_fd(file, "the fleecing file", &options)?);
            let options = CheckpointOptions {
                bitmap: bitmap.map(|name| NewBitmap { name, granularity_bytes: None }),
                since,
                // Nobody writes.
                ..CheckpointOptions::new(fleece, Bytes::MAX)
            };
            let begun = runtime.block_on(async {
                let prepared = own.live.prepare_checkpoint(&ring, options).await?;
                let frozen = match own.live.hold(&ring, HOLD_LIMIT).await {
                    Ok(mut held) => held.freeze(&prepared),
                    Err(error) => Err(error),
                };
                if frozen.is_err() {
                    let _ = prepared.abandon(&ring).await;
                }
                frozen
            });
            match begun {
                Ok(checkpoint) => own.checkpoint = Some(checkpoint),
                Err(error) => {
                    let path = own.path.clone();
                    let closed: Result<(), Failure> =
                        inspect::close(runtime, &own.live, &path, Err(error.into()));
                    closed?;
                }
            }
        }
        Ok(own)
    }
}

impl Readers {
    /// A disk of our own.
    pub(super) fn push(&mut self, number: usize, own: Own) {
        self.own.push((number, own));
    }

    /// Disks of other processes.
    pub(super) fn serve(&mut self, numbers: Vec<usize>, checkpoint: Checkpoint) {
        self.served = Some((numbers, checkpoint));
    }

    /// Opens a disk.
    ///
    /// Errors: its readers are not served any more.
    pub(super) fn open(&mut self, runtime: &mut Runtime, number: usize) -> Result<Reader, Failure> {
        if let Some((_, own)) = self.own.iter().find(|(own, _)| *own == number) {
            let Some(checkpoint) = &own.checkpoint else {
                return Ok(Reader { disk: Arc::clone(&own.live), dirty: None });
            };
            let dirty = checkpoint.dirty().map(|dirty| dirty.ranges);
            return Ok(Reader { disk: Arc::clone(checkpoint.disk()), dirty });
        }
        let served = self.served.as_mut().and_then(|(numbers, checkpoint)| {
            let place = numbers.iter().position(|served| *served == number)?;
            Some((place, checkpoint))
        });
        let Some((place, checkpoint)) = served else {
            return Err(Failure::new(Exit::General, "a disk of the backup was not begun"));
        };
        let dirty = checkpoint.dirty(place)?;
        let uri = PathBuf::from(&checkpoint.disks[place].begin.uri);
        let options =
            ImageOptions { format: Some(Format::Raw), read_only: true, ..ImageOptions::default() };
        let ring = runtime.ring().clone();
        let disk = runtime.block_on(Disk::open(&ring, DiskSource::Path(uri), &options))?;
        Ok(Reader { disk, dirty })
    }

    /// Why reading has failed, as far as the server knows better.
    pub(super) fn explain(&mut self, failure: Failure) -> Failure {
        let why = self.served.as_mut().and_then(|(_, checkpoint)| checkpoint.failed());
        match why {
            Some(why) => Failure::new(Exit::Storage, format!("the backup failed: {why}"))
                .hint("--fleece-max and --fleece-dir give old data more room"),
            None => failure,
        }
    }

    /// Ends all of them.
    ///
    /// Errors: bitmaps could not be changed, or an image not be written to the end; the first
    /// reason.
    pub(super) fn end(self, runtime: &mut Runtime, bitmaps: Bitmaps) -> Result<(), Failure> {
        let mut result = self.served.map_or(Ok(()), |(_, checkpoint)| checkpoint.end(bitmaps));
        let ring = runtime.ring().clone();
        for (_, Own { live, path, checkpoint }) in self.own {
            let ended = match &checkpoint {
                Some(checkpoint) => runtime.block_on(checkpoint.end(&ring, bitmaps.into())),
                None => Ok(()),
            };
            let closed = inspect::close(runtime, &live, &path, ended.map_err(Failure::from));
            result = result.and(closed);
        }
        result
    }
}
