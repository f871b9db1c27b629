//! What the changes of a cell do to its disk.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use ringdisk_qcow2::{Bytes, Preallocation};
use ringdisk_ring::{Errno, IoBuf, Ring};
use ringdisk_testkit::sim::SimStorage;

use super::clients::{Effect, write};
use super::world::{BITMAP, CLUSTER, Change, LARGE, OVERLAY, SMALL, Shape, format_of};
use crate::disk::Parts;
use crate::layer::{Layer, Node, Raw};
use crate::open::qcow2_layer;
use crate::{
    Backing, BackupOptions, BackupSync, CheckpointEnd, CheckpointOptions, CommitOptions, Disk,
    Error, Format, ImageOptions, MirrorControl, MirrorOptions, MirrorSync, NewBitmap, OnError,
    OverlayOptions, Progress, ResizeOptions, SnapshotChange, StreamOptions,
};

/// Writes of a client that may fail, one after the other, before it gives up.
const WRITES_MAX: usize = 4;

/// Makes a checkpoint, with bitmaps where the image has one, and gives it up. What must be undone
/// is tried twice, as a caller would.
async fn checkpoint(ring: &Ring, disk: &Disk) -> Result<(), Error> {
    let mut options = CheckpointOptions::new(SimStorage::new(0, 7).storage(), Bytes(1 << 30));
    let bitmaps = disk.layers()[0].qcow2().map(|image| image.info().bitmaps.clone());
    if bitmaps.is_some_and(|bitmaps| bitmaps.iter().any(|one| one.name == BITMAP)) {
        options.bitmap = Some(NewBitmap { name: "new".to_owned(), granularity_bytes: None });
        options.since = Some(BITMAP.to_owned());
    }
    let prepared = disk.prepare_checkpoint(ring, options).await?;
    let frozen = match disk.hold(ring, Duration::from_secs(60)).await {
        Ok(mut held) => held.freeze(&prepared),
        Err(error) => Err(error),
    };
    let checkpoint = match frozen {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            if prepared.abandon(ring).await.is_err() {
                prepared.abandon(ring).await?;
            }
            return Err(error);
        }
    };
    match checkpoint.end(ring, CheckpointEnd::Merge).await {
        Ok(()) => Ok(()),
        Err(_) => checkpoint.end(ring, CheckpointEnd::Merge).await,
    }
}

/// Opens the target of a mirror or a backup.
async fn target(
    change: Change,
    ring: &Ring,
    disk: &Disk,
    place: &Path,
    storage: SimStorage,
) -> Result<Arc<Disk>, Error> {
    let name = change.target().expect("a target");
    let mut layer = if format_of(name) == "qcow2" {
        let open = ringdisk_qcow2::OpenOptions { writable: true, ..Default::default() };
        let image = ringdisk_qcow2::Qcow2::open(ring, storage.storage(), &open).await;
        qcow2_layer(image.map_err(|error| crate::open::of_qcow2(&error))?, true)
    } else {
        Layer::new(Node::Raw(Raw::new(storage.storage())), Bytes(storage.len()))
    };
    layer.is_writable = true;
    layer.name = place.join(name);
    layer.directory = Some(place.to_owned());
    let mut layers = vec![layer];
    if change == Change::MirrorTop {
        for below in &disk.layers()[1..] {
            layers.push(opened_again(ring, below).await?);
        }
    }
    let options = ImageOptions { allow_paths: vec![place.to_owned()], ..ImageOptions::default() };
    Ok(Disk::build(layers, Parts::new(&options)))
}

/// Opens a layer that is read only once more.
async fn opened_again(ring: &Ring, layer: &Layer) -> Result<Layer, Error> {
    let storage = layer.file().expect("an image with a file");
    let mut again = match layer.qcow2() {
        Some(_) => {
            let open = ringdisk_qcow2::OpenOptions::default();
            let image = ringdisk_qcow2::Qcow2::open(ring, Arc::clone(storage), &open).await;
            qcow2_layer(image.map_err(|error| crate::open::of_qcow2(&error))?, false)
        }
        None => Layer::new(Node::Raw(Raw::new(Arc::clone(storage))), layer.size()),
    };
    again.is_writable = false;
    again.name = layer.name().to_owned();
    again.directory.clone_from(&layer.directory);
    Ok(again)
}

/// Backs the disk up to an image that is opened first.
async fn backup(
    ring: &Ring,
    disk: &Disk,
    target: Arc<Disk>,
    progress: &Progress,
) -> Result<(), Error> {
    let fleece = SimStorage::new(0, 7).storage();
    let options = BackupOptions { sync: BackupSync::Full, fleece, fleece_max: Bytes(1 << 30) };
    disk.begin_backup(ring, target, options).await?.run(progress).await
}

/// Mirrors the disk to an image that is opened first.
async fn mirror(
    change: Change,
    ring: &Ring,
    disk: &Disk,
    target: Arc<Disk>,
    progress: &Arc<Progress>,
) -> Result<(), Error> {
    let control = Arc::new(MirrorControl::new());
    if !change.is_followed() {
        control.complete(change.switches_over()).expect("nothing refuses it yet");
    }
    let sync = match change {
        Change::MirrorTop => MirrorSync::Top,
        Change::MirrorNone => MirrorSync::None,
        _ => MirrorSync::Full,
    };
    let write_blocking = matches!(change, Change::MirrorRaw | Change::MirrorNone);
    let options = MirrorOptions { sync, write_blocking, left: None };
    let mirrored = disk.mirror(ring, Arc::clone(&target), options, progress, &control);
    let (mirrored, followed) = join(mirrored, follow(change, ring, disk, &control, progress)).await;
    mirrored?;
    followed?;
    if !change.switches_over() {
        target.close(ring).await.map_err(|errno| Error::os("cannot close the target", errno))?;
    }
    Ok(())
}

/// Writes as soon as the target of a mirror is in step, and has the disk switch over then.
///
/// Errors: none of several writes succeeded, so the mirror was given up.
async fn follow(
    change: Change,
    ring: &Ring,
    disk: &Disk,
    control: &MirrorControl,
    progress: &Progress,
) -> Result<(), Error> {
    if !change.is_followed() || !control.ready().await {
        return Ok(());
    }
    let mut written = Err(Errno::IO);
    for _ in 0..WRITES_MAX {
        written = write(ring, disk, Some(followed())).await;
        if written.is_ok() {
            return control.complete(true);
        }
    }
    progress.cancel();
    written.map_err(|errno| Error::os("a client cannot write", errno))
}

/// What a client writes while a mirror is in step.
pub(super) fn followed() -> Effect {
    Effect { range: 44 * CLUSTER + 512..45 * CLUSTER + 512, byte: 0x51 }
}

/// Reads all of the disk, which keeps what it reads of the layers below in the top.
///
/// Errors: it cannot be read.
async fn read_and_keep(ring: &Ring, disk: &Disk) -> Result<(), Error> {
    disk.set_copy_on_read(true)?;
    let buf = IoBuf::new(CLUSTER, 4096);
    let mut read = Ok(0);
    let mut at = 0;
    while at < disk.size().0 && read.is_ok() {
        read = disk.read(ring, at, &buf).await;
        at += CLUSTER as u64;
    }
    disk.set_copy_on_read(false)?;
    read.map(drop).map_err(|errno| Error::os("cannot read the disk", errno))
}

impl Change {
    /// Makes the change.
    ///
    /// * `new`: for the change that makes an overlay, or needs a target.
    pub(super) async fn make(
        self,
        ring: &Ring,
        disk: &Disk,
        place: &Path,
        new: Option<SimStorage>,
    ) -> Result<(), Error> {
        let resize = |size: usize, preallocation, shrink| {
            disk.resize_with(ring, Bytes::of(size), ResizeOptions { shrink, preallocation })
        };
        let snapshot = |change| disk.snapshot(ring, change);
        let progress = Arc::new(Progress::new());
        // A change that rests until there is space would never end.
        progress.set_on_error(OnError::Report);
        match self {
            Change::External => {
                let overlay = new.expect("a storage for the overlay");
                let create = move |path: &Path, _: &ImageOptions| {
                    // Only the name.
                    std::fs::File::create_new(path).expect("a new file");
                    overlay.set_len_behind(0);
                    Ok(overlay.storage())
                };
                let options = OverlayOptions::default();
                disk.add_overlay_in(ring, place.join(OVERLAY), options, create).await
            }
            Change::Create => snapshot(SnapshotChange::Create("new".to_owned())).await,
            Change::Apply => snapshot(SnapshotChange::Apply("old".to_owned())).await,
            Change::Delete => snapshot(SnapshotChange::Delete("old".to_owned())).await,
            Change::Commit => disk.commit(ring, CommitOptions::TOP, &progress).await,
            Change::CommitThrough => {
                let options = CommitOptions { top: 0, base: 2, keep_top: false };
                disk.commit(ring, options, &progress).await
            }
            Change::CommitBelow => {
                let options = CommitOptions { top: 1, base: 2, keep_top: false };
                disk.commit(ring, options, &progress).await
            }
            Change::Backing => {
                let backing = Backing { file: b"other.qcow2".to_vec(), format: Format::Qcow2 };
                disk.change_backing(ring, Some(backing), &progress).await
            }
            Change::Stream => disk.stream(ring, StreamOptions { base: None }, &progress).await,
            Change::StreamDown => {
                disk.stream(ring, StreamOptions { base: Some(2) }, &progress).await
            }
            Change::Grow => resize(LARGE, Preallocation::Off, false).await.map(drop),
            Change::GrowFalloc => resize(LARGE, Preallocation::Falloc, false).await.map(drop),
            Change::GrowFull => resize(LARGE, Preallocation::Full, false).await.map(drop),
            Change::Shrink => resize(SMALL, Preallocation::Off, true).await.map(drop),
            Change::Deactivate => {
                disk.deactivate(ring).await?;
                match disk.activate(ring, Duration::ZERO).await {
                    Ok(()) => Ok(()),
                    // It stays given away, so that this can be tried again.
                    Err(_) => disk.activate(ring, Duration::ZERO).await,
                }
            }
            Change::HandOver => disk.hand_over(ring).await.map(drop),
            Change::Checkpoint => checkpoint(ring, disk).await,
            Change::Mirror
            | Change::MirrorRaw
            | Change::MirrorLeft
            | Change::MirrorTop
            | Change::MirrorNone => {
                let storage = new.expect("a storage for the target");
                let target = target(self, ring, disk, place, storage).await?;
                mirror(self, ring, disk, target, &progress).await
            }
            Change::Backup | Change::BackupRaw => {
                let storage = new.expect("a storage for the target");
                let target = target(self, ring, disk, place, storage).await?;
                backup(ring, disk, target, &progress).await
            }
            Change::CopyOnRead => read_and_keep(ring, disk).await,
            Change::Close => {
                disk.close(ring).await.map_err(|errno| Error::os("cannot close", errno))
            }
        }
    }

    /// The size of the disk after the change, bytes.
    pub(super) fn size(self, before: usize) -> usize {
        match self {
            Change::Grow | Change::GrowFalloc | Change::GrowFull => LARGE,
            Change::Shrink => SMALL,
            _ => before,
        }
    }

    /// What disks the change is made with.
    pub(super) fn shapes(self) -> &'static [Shape] {
        use Shape::{Chain, Data, DataRaw, Deep, Old, OverRaw, Raw};
        match self {
            Change::External | Change::Deactivate | Change::Close => {
                &[Chain, Old, Data, DataRaw, Raw]
            }
            Change::Grow | Change::GrowFalloc | Change::GrowFull | Change::Shrink => {
                &[Chain, Old, Data, DataRaw, Raw]
            }
            Change::Create | Change::Apply | Change::Delete => &[Chain, Old],
            Change::Commit => &[Chain, Old, Data, OverRaw],
            Change::CommitThrough | Change::CommitBelow | Change::StreamDown => &[Deep],
            Change::Stream => &[Chain, Deep, Old, OverRaw, Data],
            Change::Backing => &[Chain, Old, Data],
            Change::HandOver => &[Chain, Raw],
            Change::Checkpoint => &[Chain, Deep, Data],
            Change::Mirror => &[Chain, Deep, Old, OverRaw, Data, DataRaw, Raw],
            Change::MirrorTop | Change::CopyOnRead => &[Chain, Deep, Old, OverRaw, Data],
            Change::MirrorRaw | Change::MirrorLeft | Change::MirrorNone | Change::BackupRaw => {
                &[Chain, Raw]
            }
            Change::Backup => &[Chain, Deep, Data, DataRaw, Raw],
        }
    }

    /// The former top shows what another image has, or another image shows it.
    pub(super) fn changes_below(self) -> bool {
        self.is_commit() || matches!(self, Change::Backing | Change::Stream | Change::StreamDown)
    }

    /// Whether it may be made while a checkpoint is running, and is not one.
    pub(super) fn can_meet_a_checkpoint(self) -> bool {
        let is_refused =
            matches!(self, Change::Apply | Change::Shrink | Change::Deactivate | Change::HandOver);
        // A switch-over waits for the end of a checkpoint.
        let has_one = matches!(self, Change::Checkpoint | Change::Backup | Change::BackupRaw);
        !is_refused && !has_one && !self.switches_over()
    }

    pub(super) fn switches_over(self) -> bool {
        matches!(self, Change::Mirror | Change::MirrorRaw) || self.is_followed()
    }

    /// Whether a client writes when the target is in step, before the disk switches over.
    pub(super) fn is_followed(self) -> bool {
        matches!(self, Change::MirrorTop | Change::MirrorNone)
    }

    /// Name of the target of a mirror or a backup.
    pub(super) fn target(self) -> Option<&'static str> {
        match self {
            Change::Mirror | Change::MirrorLeft | Change::MirrorTop | Change::Backup => {
                Some("target.qcow2")
            }
            Change::MirrorRaw | Change::MirrorNone | Change::BackupRaw => Some("target.raw"),
            _ => None,
        }
    }

    pub(super) fn is_commit(self) -> bool {
        matches!(self, Change::Commit | Change::CommitThrough | Change::CommitBelow)
    }
}
