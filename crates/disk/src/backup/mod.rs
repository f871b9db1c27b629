//! Backup: copies the state of a disk at one instant to another disk, while clients go on writing.
//!
//! ```text
//! begin (requests wait for a moment) ──► run: copy the state of that instant ──► let it go
//! ```
//!
//! Promises:
//! - The target gets the bytes of the instant at which [`Disk::begin_backup`] had the disk for
//!   itself, whatever clients and other changes of the disk do afterwards.
//! - A request of a client never fails because of a backup. When old data can no longer be kept
//!   (`checkpoint`) the backup fails. Clients never wait for the target.
//! - The disk is not changed: nothing switches over, and its bitmaps go on as they are.
//! - A backup that is cancelled or fails says that its target is incomplete. It ends, also where
//!   the target does not answer: what is on its way is left behind then.
//!
//! Control path: one task of a ring.

mod copy;

use ringdisk_qcow2::Bytes;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::Storage;

use crate::checkpoint::{Checkpoint, CheckpointEnd, CheckpointOptions};
use crate::layer::Node;
use crate::live::{GIVEN_UP_WAIT, LongChange, check_target, reads_as_zeroes};
use crate::name::printable_path;
use crate::{Disk, Error, ErrorKind, Progress};

/// Longest wait for requests in flight at the instant. Requests that come later wait, too.
const HOLD_LIMIT: Duration = Duration::from_secs(2);

/// What is copied.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BackupSync {
    /// All of the disk.
    #[default]
    Full,
    /// What the image on top has. The target has the content of the layers below already, by a
    /// backing file of its own.
    Top,
    /// What this bitmap of the image on top has marked. The target has the rest already. The bitmap
    /// goes on as it is.
    Bitmap(String),
}

/// What [`Disk::begin_backup`] is asked for.
#[derive(Clone, Debug)]
pub struct BackupOptions {
    /// What is copied.
    pub sync: BackupSync,
    /// As [`CheckpointOptions::fleece`].
    pub fleece: Arc<Storage>,
    /// As [`CheckpointOptions::fleece_max`], bytes.
    pub fleece_max: Bytes,
}

/// A backup that has begun: the state of the instant is kept for it until it is dropped. Bound to
/// the thread of its ring.
#[derive(Debug)]
pub struct Backup {
    disk: Arc<Disk>,
    target: Arc<Disk>,
    checkpoint: Arc<Checkpoint>,
    /// What is copied, in bytes of the frozen disk.
    ranges: Arc<[Range<u64>]>,
    is_top: bool,
    /// The target reads as zeroes where nothing was sent to it.
    is_new: bool,
    /// Writes to the target that have not ended.
    in_flight: Rc<()>,
    ring: Ring,
}

impl Disk {
    /// Whether [`Disk::begin_backup`] to this target can begin.
    ///
    /// Errors: as there.
    pub fn check_backup(&self, target: &Arc<Disk>) -> Result<(), Error> {
        if matches!(self.graph().top().node, Node::Null(_) | Node::Frozen(_)) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "only a disk of images can be backed up; copy this one with `ringdisk convert`",
            ));
        }
        check_target(self, target, self.size())
    }

    /// Keeps the state of the disk at an instant before this returns, for [`Backup::run`].
    ///
    /// * `target`: opened for writing by the caller, for this backup only; [`Backup::run`] closes
    ///   it. At least as large as the disk.
    ///
    /// Errors: `Invalid` where the target is too small, is an image of this disk, or lies above the
    /// one on top, and for a bitmap that is missing or inconsistent; `PermissionDenied` where the
    /// target is read-only; `Unsupported` for a null disk, one that the kernel writes itself, and
    /// for a bitmap of an image that has none; `Busy` where a checkpoint or another backup of the
    /// disk is running, where the target is in use, and when requests in flight do not end within
    /// 2 s; those of the storage. Nothing is left of it.
    pub async fn begin_backup(
        &self,
        ring: &Ring,
        target: Arc<Disk>,
        options: BackupOptions,
    ) -> Result<Backup, Error> {
        let Some(disk) = self.weak().upgrade() else {
            return Err(Error::new(ErrorKind::Busy, "the disk is being closed"));
        };
        self.check_backup(&target)?;
        {
            let _turn = target.changes().lock().await;
            target.check_free()?;
            target.long.begin(LongChange::Whole)?;
        }
        // Dropped below unless all goes well.
        let in_use = InUse(Some(&target));
        let is_new = match &options.sync {
            // One that does not answer is found out below.
            BackupSync::Full => {
                let is_empty = ring.within(GIVEN_UP_WAIT, reads_as_zeroes(ring, &target)).await;
                is_empty.unwrap_or(false)
            }
            BackupSync::Top | BackupSync::Bitmap(_) => false,
        };
        let since = match &options.sync {
            BackupSync::Bitmap(name) => Some(name.clone()),
            BackupSync::Full | BackupSync::Top => None,
        };
        let wanted = CheckpointOptions {
            since,
            ..CheckpointOptions::new(options.fleece, options.fleece_max)
        };
        let prepared = self.prepare_checkpoint(ring, wanted).await?;
        let checkpoint = {
            let mut held = self.hold(ring, HOLD_LIMIT).await?;
            check_target(self, &target, self.size())?;
            held.freeze(&prepared)?
        };
        self.backups.fetch_add(1, Ordering::AcqRel);
        let ranges = match checkpoint.dirty() {
            Some(dirty) => dirty.ranges,
            None => std::iter::once(0..checkpoint.disk().size().0).collect(),
        };
        let is_top = options.sync == BackupSync::Top;
        in_use.keep();
        let (in_flight, ring) = (Rc::new(()), ring.clone());
        Ok(Backup { disk, target, checkpoint, ranges, is_top, is_new, in_flight, ring })
    }
}

/// Gives a target back unless it is kept.
struct InUse<'a>(Option<&'a Arc<Disk>>);

impl InUse<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if let Some(target) = self.0 {
            target.long.end(LongChange::Whole);
        }
    }
}

impl Backup {
    /// Copies the state of the instant, makes it durable and closes the target.
    ///
    /// * `progress`: can be cancelled until the target is whole. Its speed limit counts bytes that
    ///   are sent; [`Progress::on_error`] says what an error of the target does.
    ///
    /// Errors: `Cancelled`; `Io` where old data could no longer be kept, with the reason; `Busy`
    /// where the disk is handed over ([`Progress::suspend`]): this point in time is lost then;
    /// those of the storage. The target is incomplete.
    pub async fn run(self, progress: &Progress) -> Result<(), Error> {
        let copied = self.copy(progress).await;
        // From here on clients copy nothing away any more.
        if let Err(error) = self.checkpoint.end(&self.ring, CheckpointEnd::Keep).await {
            tracing::warn!("the end of a backup: {error}");
        }
        let closed = match copied {
            Ok(()) => self.close(progress).await,
            Err(error) => {
                self.let_go().await;
                Err(error)
            }
        };
        if closed.is_ok() {
            progress.finish();
        }
        closed.map_err(|error| {
            let name = printable_path(self.target.graph().top().name());
            let (kind, errno) = (error.kind(), error.errno());
            let text = format!("{error}; the target '{name}' is incomplete, so do not use it");
            Error::new(kind, text).with_errno(errno)
        })
    }

    /// The disk as it was at the instant.
    pub fn frozen(&self) -> &Arc<Disk> {
        self.checkpoint.disk()
    }

    /// The disk that is written.
    pub fn target(&self) -> &Arc<Disk> {
        &self.target
    }
}

impl Drop for Backup {
    fn drop(&mut self) {
        self.target.long.end(LongChange::Whole);
        let over = Over(Arc::clone(&self.disk));
        if !self.checkpoint.is_running() {
            return;
        }
        // It was given up before it ran, or in the middle.
        let (checkpoint, ring) = (Arc::clone(&self.checkpoint), self.ring.clone());
        self.ring.spawn(async move {
            let _over = over;
            let _ = checkpoint.end(&ring, CheckpointEnd::Keep).await;
        });
    }
}

/// Counts a backup as over when the state of its instant is kept no longer.
struct Over(Arc<Disk>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.backups.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What a failed backup says.
fn refusal(doing: &str, errno: Errno) -> Error {
    match errno {
        Errno::CANCELED => {
            Error::new(ErrorKind::Cancelled, "the backup was cancelled").with_errno(Some(errno))
        }
        errno => Error::os(doing.to_owned(), errno),
    }
}
