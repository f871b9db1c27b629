//! What the changes of a cell do to its disk.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_disk::{
    Backing, BackupOptions, BackupSync, Bytes, CheckpointEnd, CheckpointOptions, CheckpointState,
    CommitOptions, Disk, Errno, Error, ErrorKind, Format, ImageOptions, MirrorControl,
    MirrorOptions, MirrorSync, OnError, OverlayOptions, Progress, ResizeOptions, SnapshotChange,
    StreamOptions,
};
use ringdisk_qcow2::Preallocation;
use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use ringdisk_testkit::process::LIMIT;

use super::clients::FIRST;
use super::world::{Change, LARGE, OVERLAY, SIZE, SMALL, SecondExport};

/// What fits into a fleecing file.
const FLEECE_MAX: Bytes = Bytes(1 << 30);
/// Bytes of a read of the disk while it keeps what it reads.
const PIECE: usize = 64 << 10;
/// Time for clients to meet the middle of a change.
const MIDDLE: Duration = Duration::from_millis(2);

/// What the thread of a change has of the world.
#[derive(Clone)]
pub(super) struct Means {
    pub(super) disk: Arc<Disk>,
    pub(super) beside: SecondExport,
    /// What the disk showed before.
    pub(super) bytes: Arc<[u8]>,
    /// Clients may come now: a checkpoint keeps the state, or the target of a mirror that copies
    /// nothing is in step.
    pub(super) is_in_middle: Arc<AtomicBool>,
}

fn failed(doing: &str, errno: Errno) -> Error {
    Error::new(ErrorKind::Io, format!("{doing}: {errno}"))
}

impl Means {
    /// Makes the change, on the calling thread, with a ring of its own.
    pub(super) fn make(&self, change: Change) -> Result<(), Error> {
        let mut runtime = Runtime::new(Config::default()).unwrap();
        let ring = runtime.ring().clone();
        runtime.block_on(self.change(&ring, change))
    }

    async fn change(&self, ring: &Ring, change: Change) -> Result<(), Error> {
        let disk = &self.disk;
        let resize = async |size: u64, preallocation, shrink| {
            let options = ResizeOptions { shrink, preallocation };
            disk.resize_with(ring, Bytes(size), options).await.map(drop)
        };
        let progress = Arc::new(Progress::new());
        // A change that rests until there is space would never end.
        progress.set_on_error(OnError::Report);
        let commit = |top, base| CommitOptions { top, base, keep_top: false };
        match change {
            Change::External => self.external(ring).await,
            Change::Create => disk.snapshot(ring, SnapshotChange::Create(String::from("s"))).await,
            Change::Apply => disk.snapshot(ring, SnapshotChange::Apply(String::from("old"))).await,
            Change::Delete => {
                disk.snapshot(ring, SnapshotChange::Delete(String::from("old"))).await
            }
            Change::Commit => disk.commit(ring, CommitOptions::TOP, &progress).await,
            Change::CommitThrough => disk.commit(ring, commit(0, 2), &progress).await,
            Change::CommitBelow => disk.commit(ring, commit(1, 2), &progress).await,
            Change::Backing => {
                let backing = Backing { file: b"other.qcow2".to_vec(), format: Format::Qcow2 };
                disk.change_backing(ring, Some(backing), &progress).await
            }
            Change::Stream => disk.stream(ring, StreamOptions { base: None }, &progress).await,
            Change::StreamDown => {
                disk.stream(ring, StreamOptions { base: Some(2) }, &progress).await
            }
            Change::Grow => resize(LARGE, Preallocation::Off, false).await,
            Change::GrowFalloc => resize(LARGE, Preallocation::Falloc, false).await,
            Change::GrowFull => resize(LARGE, Preallocation::Full, false).await,
            Change::Shrink => resize(SMALL, Preallocation::Off, true).await,
            Change::Deactivate => {
                disk.deactivate(ring).await?;
                match disk.activate(ring, Duration::ZERO).await {
                    Ok(()) => Ok(()),
                    // It stays given away, so that this can be tried again.
                    Err(_) => disk.activate(ring, Duration::ZERO).await,
                }
            }
            Change::HandOver => disk.hand_over(ring).await.map(drop),
            Change::Checkpoint => self.checkpoint(ring).await,
            Change::Mirror
            | Change::MirrorRaw
            | Change::MirrorLeft
            | Change::MirrorTop
            | Change::MirrorNone => self.mirror(ring, change, &progress).await,
            Change::Backup | Change::BackupRaw => {
                let target = self.target(ring, change).await?;
                let fleece = self.beside.fleece.storage();
                let options =
                    BackupOptions { sync: BackupSync::Full, fleece, fleece_max: FLEECE_MAX };
                disk.begin_backup(ring, target, options).await?.run(&progress).await
            }
            Change::CopyOnRead => self.copy_on_read(ring).await,
            Change::Close => disk.close(ring).await.map_err(|errno| failed("cannot close", errno)),
        }
    }

    async fn external(&self, ring: &Ring) -> Result<(), Error> {
        let overlay = self.beside.overlay.clone();
        let create = move |path: &Path, _: &ImageOptions| {
            // Only the name.
            std::fs::File::create_new(path).expect("a new file");
            overlay.set_len_behind(0);
            Ok(overlay.storage())
        };
        let (path, options) = (self.beside.place.join(OVERLAY), OverlayOptions::default());
        self.disk.add_overlay_in(ring, path, options, create).await
    }

    async fn target(&self, ring: &Ring, change: Change) -> Result<Arc<Disk>, Error> {
        let images = self.beside.target_images(change);
        Disk::from_storages(ring, images, &self.beside.options()).await
    }

    async fn mirror(
        &self,
        ring: &Ring,
        change: Change,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        let target = self.target(ring, change).await?;
        let control = Arc::new(MirrorControl::new());
        let is_followed = change == Change::MirrorNone;
        if is_followed {
            let (control, is_in_middle) = (Arc::clone(&control), Arc::clone(&self.is_in_middle));
            let handle = ring.clone();
            ring.spawn(async move {
                if control.ready().await {
                    is_in_middle.store(true, Ordering::Release);
                    handle.sleep(MIDDLE).await;
                    control.complete(true).expect("nothing refuses it");
                }
            });
        } else {
            control.complete(change.switches_over()).expect("nothing refuses it yet");
        }
        let sync = match change {
            Change::MirrorTop => MirrorSync::Top,
            Change::MirrorNone => MirrorSync::None,
            _ => MirrorSync::Full,
        };
        let write_blocking = matches!(change, Change::MirrorRaw | Change::MirrorNone);
        let options = MirrorOptions { sync, write_blocking, left: None };
        self.disk.mirror(ring, target, options, progress, &control).await.map(drop)
    }

    /// Reads all of the disk, which keeps what it reads of the layers below in the top.
    async fn copy_on_read(&self, ring: &Ring) -> Result<(), Error> {
        self.disk.set_copy_on_read(true)?;
        let buf = IoBuf::new(PIECE, 4096);
        let mut read = Ok(0);
        let mut at = 0;
        while at < self.disk.size().0 && read.is_ok() {
            read = self.disk.read(ring, at, &buf).await;
            at += PIECE as u64;
        }
        self.disk.set_copy_on_read(false)?;
        read.map(drop).map_err(|errno| failed("cannot read the disk", errno))
    }

    /// Begins a checkpoint, reads what it keeps, and ends it.
    async fn checkpoint(&self, ring: &Ring) -> Result<(), Error> {
        let fleece = &self.beside.fleece;
        let options = CheckpointOptions {
            copy_limit: Duration::from_secs(600),
            ..CheckpointOptions::new(fleece.storage(), FLEECE_MAX)
        };
        let prepared = self.disk.prepare_checkpoint(ring, options).await?;
        let frozen = match self.disk.hold(ring, LIMIT).await {
            Ok(mut held) => held.freeze(&prepared),
            Err(error) => Err(error),
        };
        let checkpoint = match frozen {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                prepared.abandon(ring).await?;
                return Err(error);
            }
        };
        // Clients write now, and what they overwrite is kept first.
        self.is_in_middle.store(true, Ordering::Release);
        for _ in 0..50 {
            if !fleece.log().is_empty() {
                break;
            }
            ring.sleep(Duration::from_millis(1)).await;
        }
        let buf = IoBuf::new(SIZE as usize, 4096);
        let read = checkpoint.disk().read(ring, 0, &buf).await;
        if read == Ok(SIZE as usize) && checkpoint.state() == CheckpointState::Running {
            let mut shown = vec![0; SIZE as usize];
            buf.copy_to_slice(0, &mut shown);
            // The request that was in flight may have come before; all others came after.
            let may_differ = FIRST.indices();
            let differs = (0..SIZE as usize)
                .find(|at| shown[*at] != self.bytes[*at] && !may_differ.contains(at));
            assert_eq!(differs, None, "the frozen state differs at");
        }
        checkpoint.end(ring, CheckpointEnd::Drop).await
    }
}
