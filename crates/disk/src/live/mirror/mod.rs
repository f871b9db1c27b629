//! Mirror: copies a disk in use to another one, stays in step with it, and ends by switching over
//! to the copy or by leaving it.
//!
//! ```text
//! copy everything ──► copy what clients changed meanwhile ──► ready: stay in step
//!                        ▲                                     │ complete
//!                        └── the target failed ◄── last step ◄─┘ (no request in flight)
//! ```
//!
//! Promises:
//! - A mirror that is given up ends, also where the target does not answer (a server that hangs):
//!   what is on its way is left behind then, with a message.
//! - Clients never wait for the target longer than a fixed time, and never fail because of it
//!   (`graph/mirror.rs`). What was not sent is recorded and sent later.
//! - Until the last step has succeeded the disk is what it was; a mirror that is cancelled or fails
//!   leaves an incomplete target and nothing else.
//! - In the last step the rest is read while no request is in flight, and is in the target before
//!   clients go on; what a client has flushed is on its stable storage. If the target takes longer
//!   than a fixed time for that, clients go on with the disk as it was, and the step is tried
//!   again.
//! - After a switch-over the disk has the layers of the target, and the target [`Disk`] is empty.
//!   The former images are closed; they hold what the disk held at that moment. A target to which
//!   the disk does not switch over is closed at the end, unless another process goes on with it.
//!
//! The size of the disk, and the chains of both, do not change meanwhile: such changes are refused,
//! also those of clients. Only a commit of layers below the top may run beside it, since the disk
//! reads the same then; a switch-over waits for its end.

mod checks;
mod control;
mod copy;
mod finish;
mod missing_ranges;

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::GuestOffset;
use ringdisk_ring::{Errno, Ring};

use super::{Busy, LongChange};
use crate::graph::{Content, Graph, Mirror, Target, Tracker};
use crate::layer::Pending;
use crate::name::is_export;
use crate::{Disk, Error, ErrorKind, Format, ImageOptions, Progress, Source};

pub(crate) use checks::{check_target, is_empty as reads_as_zeroes};
pub use control::MirrorControl;
pub(crate) use copy::{GIVEN_UP_WAIT, data_bytes};
use missing_ranges::Begun;
pub use missing_ranges::MirrorLeft;

/// What is copied at the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MirrorSync {
    /// All of the disk.
    #[default]
    Full,
    /// What the top image has. The target has the content of the layers below already, by a backing
    /// file of its own.
    Top,
    /// Nothing: the target has the content of the disk already.
    None,
    /// What this bitmap of the top image has marked when the mirror begins, in whole granules of
    /// the record of changes (64 KiB on most disks). The target has the rest already. The bitmap
    /// goes on as it is.
    Bitmap(String),
}

/// Options of a mirror.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MirrorOptions {
    /// What is copied at the beginning.
    pub sync: MirrorSync,
    /// What the target does not have of that, where an earlier mirror to it was suspended. What
    /// clients changed since is recorded ([`Disk::record_changes`]); where it is not, all is
    /// copied. `None`: the target has nothing of it.
    pub left: Option<MirrorLeft>,
    /// After the first copy each write of a client goes to the target before it is answered.
    /// Otherwise that is so only while the mirror completes, and while clients write faster than
    /// the target takes it.
    pub write_blocking: bool,
}

/// How a mirror ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MirrorEnd {
    /// The disk has switched over to the target.
    Pivoted,
    /// The target holds what the disk held at the end.
    Copied,
}

/// The disk that is written.
#[derive(Debug)]
pub(crate) struct Destination(pub(crate) Arc<Disk>);

impl Target for Destination {
    fn write<'a>(
        &'a self,
        ring: &'a Ring,
        offset: GuestOffset,
        runs: &'a [Content],
    ) -> Pending<'a, ()> {
        Box::pin(async move {
            let mut at = offset.0;
            for run in runs {
                match run {
                    Content::Keep(_) => {}
                    Content::Zero(len) => self.0.write_zeroes(ring, at, *len, true).await?,
                    Content::Data(buf) => self.0.write_all(ring, at, buf).await?,
                }
                at += run.len().0;
            }
            Ok(())
        })
    }
}

/// A mirror that runs.
struct Run<'a> {
    disk: &'a Disk,
    ring: &'a Ring,
    target: &'a Arc<Disk>,
    options: MirrorOptions,
    progress: &'a Progress,
    control: &'a MirrorControl,
    mirror: Arc<Mirror>,
    tracker: Arc<Tracker>,
    /// What the first copy has not copied yet.
    first: Tracker,
    /// The target reads as zeroes where nothing was sent to it.
    is_new: bool,
    /// The target did not answer in time when it was given up.
    hangs: Cell<bool>,
    /// It has stopped for another process, or another mirror, to go on.
    is_suspended: Cell<bool>,
    /// Taken before the gate opens in the last step: the next change must not find this one still
    /// under way.
    busy: Cell<Option<Busy<'a>>>,
}

impl Disk {
    /// Opens an image to mirror this disk to: as the disk itself was opened, for writing, and
    /// whole. Images of the disk may lie below it. Changes nothing: who asks for the mirror has the
    /// rights to make notes at the file, and has made them.
    ///
    /// * `path`: of a file or device, or the address of an NBD export.
    /// * `protect_raw`: as [`ImageOptions::protect_raw`].
    ///
    /// Errors: as [`Disk::open`].
    pub async fn open_mirror(
        &self,
        ring: &Ring,
        path: &Path,
        format: Option<Format>,
        protect_raw: bool,
    ) -> Result<Arc<Disk>, Error> {
        let options = self.mirror_options(format, protect_raw);
        Disk::open(ring, Source::Path(path.to_owned()), &options).await
    }

    /// The options of a target.
    pub(crate) fn mirror_options(&self, format: Option<Format>, protect_raw: bool) -> ImageOptions {
        let layers = self.layers();
        let names = layers.iter().filter_map(|layer| layer.file().map(|_| layer.name()));
        let files = names.filter(|name| !is_export(name) && name.exists());
        ImageOptions {
            format,
            ask_for_raw: true,
            protect_raw,
            raw_is_noted: true,
            note_names: false,
            read_only: false,
            auto_read_only: false,
            window_offset: 0,
            window_size: None,
            partition: None,
            known_paths: files.map(Path::to_owned).collect(),
            overlay: None,
            temporary: false,
            inactive: false,
            wait_for_locks: None,
            without_backing: false,
            internal_snapshot: None,
            force_share: false,
            ..self.options().clone()
        }
    }

    /// Whether [`Disk::mirror`] to this target can begin, and end as asked.
    ///
    /// * `pivots`: it is to end with a switch-over.
    ///
    /// Errors: as there.
    pub fn check_mirror(&self, target: &Arc<Disk>, pivots: bool) -> Result<(), Error> {
        checks::check(self, target)?;
        match checks::pivot_refusal(self, target).filter(|_| pivots) {
            Some(why) => Err(control::cannot_switch(&why)),
            None => Ok(()),
        }
    }

    /// Copies the disk to another one while clients work, and stays in step with it until
    /// [`MirrorControl::complete`] is called.
    ///
    /// * `target`: opened for writing by the caller, for this mirror only; for a switch-over, with
    ///   the options that the disk is to have.
    /// * `progress`: can be cancelled until the last step. Its speed limit counts bytes that are
    ///   sent; [`Progress::on_error`] says what an error of the target does.
    /// * `control`: a new one.
    ///
    /// Errors: `Invalid` where the target is too small, is an image of this disk, or lies above
    /// one, and for a bitmap that is missing or inconsistent; `PermissionDenied` where it is
    /// read-only; `Unsupported` for a disk that is a part of its image, or that the kernel writes
    /// itself, and for a bitmap of an image that has none; `Busy` during another change of this
    /// kind, of either; `Cancelled`; those of the storage. The disk is as it was.
    pub async fn mirror(
        &self,
        ring: &Ring,
        target: Arc<Disk>,
        options: MirrorOptions,
        progress: &Arc<Progress>,
        control: &Arc<MirrorControl>,
    ) -> Result<MirrorEnd, Error> {
        let (progress, shared) = (Arc::clone(progress), Arc::clone(control));
        let change = move |disk: Arc<Disk>, ring: Ring| async move {
            disk.mirror_now(&ring, &target, options, &progress, &shared).await
        };
        let result = self.detached(ring, change).await;
        control.end();
        result
    }

    async fn mirror_now(
        &self,
        ring: &Ring,
        target: &Arc<Disk>,
        options: MirrorOptions,
        progress: &Progress,
        control: &MirrorControl,
    ) -> Result<MirrorEnd, Error> {
        checks::check(self, target)?;
        let turn = self.changes().lock().await;
        self.check_free_for(LongChange::Mirror)?;
        let (other, is_new) = {
            let _turn = target.changes().lock().await;
            target.check_free()?;
            checks::check(self, target)?;
            let is_empty = checks::is_empty(ring, target);
            let is_new = match options.sync {
                MirrorSync::Full if options.left.is_none() => {
                    progress.or_given_up(ring, copy::GIVEN_UP_WAIT, is_empty).await
                }
                _ => Some(false),
            };
            (
                Busy::begin(target, LongChange::Whole)?,
                is_new.ok_or_else(|| refusal(Errno::CANCELED))?,
            )
        };
        let marks = missing_ranges::marks_of(self, ring, &options).await?;
        control.begin(checks::pivot_refusal(self, target));
        let mut drained = self.gateway().drain(ring, turn).await;
        let busy = Busy::begin(self, LongChange::Mirror)?;
        let (mut options, mut is_new) = (options, is_new);
        let graph = drained.graph();
        let begun = Begun::of(graph, (&mut options, &mut is_new), marks.as_ref())?;
        let Begun { changed, first } = begun;
        let tracker = Arc::new(changed);
        let mirror = Arc::new(Mirror::new(Arc::new(Destination(Arc::clone(target)))));
        let mut graph = Graph::clone(drained.graph());
        graph.tracker = Some(Arc::clone(&tracker));
        graph.mirror = Some(Arc::clone(&mirror));
        drained.replace(graph);
        drop(drained);
        let disk = self;
        let busy = Cell::new(Some(busy));
        let run = Run {
            disk,
            ring,
            target,
            options,
            progress,
            control,
            mirror,
            tracker,
            first,
            is_new,
            hangs: Cell::new(false),
            is_suspended: Cell::new(false),
            busy,
        };
        let result = run.run().await;
        // What was sent is not taken back, and is waited for. What a target that hangs does not
        // answer keeps its storage, and the locks of it, until it does.
        let wait = if run.hangs.get() { Duration::ZERO } else { copy::GIVEN_UP_WAIT };
        let is_idle = ring.within(wait, run.mirror.idle()).await.is_ok();
        if !is_idle {
            tracing::warn!(
                "the target of a mirror that was given up does not answer: what is on its way to \
                 it may still come there"
            );
        }
        drop(other);
        let is_left = !matches!(result, Ok(MirrorEnd::Pivoted)) && !run.is_suspended.get();
        if is_idle && is_left && !run.hangs.get() {
            close_left(ring, target).await;
        }
        result
    }
}

/// Closes a target that this process uses no longer: otherwise a qcow2 image keeps space that
/// nothing in it uses. What was to be durable is so already.
async fn close_left(ring: &Ring, target: &Disk) {
    let why = match ring.within(copy::GIVEN_UP_WAIT, target.close(ring)).await {
        Ok(Ok(())) => return,
        Ok(Err(errno)) => errno.to_string(),
        Err(_) => String::from("it does not answer"),
    };
    tracing::warn!(
        "the target of a mirror was not closed: {why}; a qcow2 image may have space that nothing \
         uses (`ringdisk check -r leaks` gives it back)"
    );
}

impl Run<'_> {
    /// All of it; takes the records out of the graph at the end, also after an error.
    async fn run(&self) -> Result<MirrorEnd, Error> {
        let error = match self.until_complete().await {
            Ok(end) => {
                self.progress.finish();
                return Ok(end);
            }
            Err(error) => error,
        };
        let turn = self.disk.changes().lock().await;
        let mut drained = self.disk.gateway().drain(self.ring, turn).await;
        // Asked once: a hand-over may begin while a mirror that has failed ends.
        self.is_suspended.set(self.progress.was_suspended(&error));
        if self.is_suspended.get() {
            self.note_left().await;
        }
        self.forget(&mut drained);
        drop(self.busy.take());
        Err(error)
    }
}

fn refusal(errno: Errno) -> Error {
    match errno {
        Errno::CANCELED => {
            Error::new(ErrorKind::Cancelled, "the mirror was cancelled").with_errno(Some(errno))
        }
        errno => Error::os("cannot mirror the disk", errno),
    }
}
