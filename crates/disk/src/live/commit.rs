//! Commit of a disk that is in use: layers are merged into a layer below them, the base.
//!
//! Promises: the chain reads the same at every moment, also after a crash: the copied bytes are
//! those that the layers above show already, and they are on stable storage before anything refers
//! to them. Clients wait for the beginning and the last step only. When the top layer is merged,
//! ranges that clients write meanwhile are recorded and copied again, in passes that get shorter;
//! the last pass runs while no request is in flight. A commit that is paused, slowed down, or rests
//! after an error of the base ([`Progress::pace`]) holds up no request.
//!
//! After a commit of the top layer the base is the new top. The merged layers are emptied before
//! the first write to the base (`pivot.rs`), so a program that opens them again by their old names
//! sees the content of the base. Clients may change the size of the disk meanwhile
//! (`resize_in_commit.rs`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};

use super::copy::{all_of, copier, copy_range, pieces};
use super::pivot::{Last, Named, check_cut, merged_size, name_of_base};
use super::reopen::kept_for_writing;
use super::{
    LastPassFailure, LongChange, Place, check_lasting, close_layer, for_reading, in_mode,
    offline_on,
};
use crate::background::{Parts, Turn, unit_of};
use crate::chain::Chain;
use crate::graph::{Drained, Graph, Tracker};
use crate::layer::{Layer, Node};
use crate::limits::SECTOR_BYTES;
use crate::name::{printable, printable_path};
use crate::progress::Tries;
use crate::{CommitOptions, Disk, Error, ErrorKind, Progress, lost_names};

/// The last pass begins when no more than this is left to copy, bytes: it takes some ten
/// milliseconds.
const LAST_PASS_BYTES: Bytes = Bytes(4 << 20);
/// Or after so many passes: clients that write faster than the copy wait a little longer then.
const PASSES_MAX: u32 = 16;

impl Disk {
    /// Merges layers into one below, while clients work.
    ///
    /// * `progress`: can be cancelled until the last step; the chain is as it was then.
    ///
    /// Errors: `Busy` during another change of this kind; `Cancelled`; `Locked` when another
    /// process uses the base or a merged layer; `Unsupported` where an internal snapshot of a
    /// merged layer needs what is below, or the base is too long and cannot be cut; those of the
    /// storage. The chain is as it was.
    pub async fn commit(
        &self,
        ring: &Ring,
        options: CommitOptions,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        self.commit_placed(ring, move |_| Ok(options), progress).await
    }

    /// As [`Disk::commit`], where another change may come before this one.
    ///
    /// * `place`: gets the chain when no other change is under way, and gives the layers of it that
    ///   are merged.
    ///
    /// Errors: as there, and those of `place`.
    pub async fn commit_placed(
        &self,
        ring: &Ring,
        place: impl FnOnce(&[Arc<Layer>]) -> Result<CommitOptions, Error> + 'static,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        let progress = Arc::clone(progress);
        let change = move |disk: Arc<Disk>, ring: Ring| async move {
            run(&disk, &ring, place, &progress).await
        };
        self.detached(ring, change).await
    }
}

async fn run(
    disk: &Disk,
    ring: &Ring,
    place: impl FnOnce(&[Arc<Layer>]) -> Result<CommitOptions, Error>,
    progress: &Progress,
) -> Result<(), Error> {
    let turn = disk.changes().lock().await;
    let options = place(&disk.graph().layers)?;
    disk.check_free_for(LongChange::commit(options))?;
    check(&disk.graph(), options)?;
    check_new_top(disk, options)?;
    check_names(&disk.graph().layers, options)?;
    // The lock of changes excludes every other change, so no snapshot is created after this.
    check_snapshots(ring, &disk.graph(), options).await?;
    let new_name = match options.top {
        0 => None,
        _ => Some(name_of_base(&disk.graph(), options)?),
    };
    let mut drained = disk.gateway().drain(ring, turn).await;
    let merging = Merging::begin(disk, options)?;
    open_layers(disk, ring, &mut drained, options).await?;
    drop(drained);

    let mut copied = copy_all(&merging, ring, progress).await;
    loop {
        if copied.is_ok() {
            copied = catch_up(&merging, ring, progress).await;
        }
        // Not `change`, which would refuse because this commit is under way.
        let turn = disk.changes().lock().await;
        let mut drained = disk.gateway().drain(ring, turn).await;
        let finished = match copied {
            Ok(()) => last_pass(ring, &drained, merging.options(), progress).await,
            Err(errno) => Err(LastPassFailure::Ends(errno)),
        };
        if let Err(LastPassFailure::Range(range, errno)) = finished {
            drop(drained);
            copied = copy_failed(&merging, ring, range, errno, progress).await;
            continue;
        }
        let done = end(&merging, ring, &mut drained, (finished, new_name)).await;
        if done.is_ok() {
            progress.finish();
        }
        // Before the gate opens: the next change must not find this one still under way.
        drop(merging);
        return done;
    }
}

/// Copies the range at which the last pass failed beside the clients, where the commit rests after
/// errors, or waits for space.
///
/// Errors: `errno` where the commit ends with it; `ECANCELED`.
async fn copy_failed(
    merging: &Merging<'_>,
    ring: &Ring,
    range: (GuestOffset, Bytes),
    errno: Errno,
    progress: &Progress,
) -> Result<(), Errno> {
    let mut tries = Tries::default();
    progress.failed(ring, &mut tries, errno).await?;
    copy_again(merging, ring, range, progress, (false, tries)).await?;
    progress.add_done(range.1);
    Ok(())
}

/// The last step, while no request is in flight.
///
/// * `finished`: whether all was copied.
/// * `named`: as of [`Last::run`].
///
/// Errors: as [`Disk::commit`].
async fn end(
    merging: &Merging<'_>,
    ring: &Ring,
    drained: &mut Drained<'_>,
    (finished, named): (Result<(), LastPassFailure>, Option<Named>),
) -> Result<(), Error> {
    let (disk, options) = (merging.disk, merging.options());
    if let Err(LastPassFailure::Ends(errno) | LastPassFailure::Range(_, errno)) = finished {
        let error = match errno {
            Errno::CANCELED => {
                Error::new(ErrorKind::Cancelled, "the commit was cancelled").with_errno(Some(errno))
            }
            errno => match drained.graph().bottom_guard().filter(|_| errno == Errno::PERM) {
                Some(guard) => {
                    let text = format!("cannot commit: {}", guard.reason());
                    Error::new(ErrorKind::PermissionDenied, text).with_errno(Some(errno))
                }
                None => Error::os("cannot commit", errno),
            },
        };
        Last::new(disk, ring, drained, options).go_back().await?;
        return Err(error);
    }
    // Copying takes long. From here on the merged layers are emptied, so the base must still have
    // its name.
    if let Err(error) = check_names(&drained.graph().layers, options) {
        Last::new(disk, ring, drained, options).go_back().await?;
        return Err(error);
    }
    Last::new(disk, ring, drained, options).run(named).await
}

/// A commit that is under way. Ends when it is dropped.
struct Merging<'a> {
    disk: &'a Disk,
    place: Arc<Place>,
}

impl<'a> Merging<'a> {
    /// The caller holds the lock of changes.
    ///
    /// Errors: `Busy`.
    fn begin(disk: &'a Disk, options: CommitOptions) -> Result<Merging<'a>, Error> {
        Ok(Merging { disk, place: disk.long.begin_commit(options)? })
    }

    /// As [`Place::options`].
    fn options(&self) -> CommitOptions {
        self.place.options()
    }
}

impl Drop for Merging<'_> {
    fn drop(&mut self) {
        self.disk.long.end_commit(&self.place);
    }
}

/// Whether the layers can be merged.
fn check(graph: &Graph, options: CommitOptions) -> Result<(), Error> {
    let CommitOptions { top, base, .. } = options;
    if top >= base || base >= graph.layers.len() {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "layer {top} cannot be merged into layer {base} of {}: the base must be below the \
                 top",
                graph.layers.len()
            ),
        ));
    }
    check_sizes(graph, options)
}

/// Checks the new top image for the watcher of the chain ([`Disk::watch_chain`]), which opens it by
/// its name later.
///
/// Errors: `Unsupported` for a base whose name leads to another image, or to none.
fn check_new_top(disk: &Disk, options: CommitOptions) -> Result<(), Error> {
    let graph = disk.graph();
    let base = &graph.layers[options.base];
    if options.top > 0 {
        return Ok(());
    }
    disk.chain_watch().check(base).map_err(|why| {
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "the base '{}' would be the image on top, which the next process of a kept mount \
                 opens by its name, and {why}; or unmount the disk and use `ringdisk commit`",
                printable_path(base.name())
            ),
        )
    })
}

/// Whether the layers can be emptied, and the base can be cut to the size of the disk. Reads only
/// data that is in memory.
fn check_sizes(graph: &Graph, options: CommitOptions) -> Result<(), Error> {
    let CommitOptions { top, base, keep_top } = options;
    for layer in graph.layers[top..base].iter().filter(|_| !keep_top) {
        if layer.qcow2().is_some_and(|image| image.info().corrupt) {
            let name = printable_path(layer.name());
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "'{name}' is marked as corrupt, so it cannot be emptied; repair it first \
                     (`ringdisk check --repair all`)"
                ),
            ));
        }
    }
    let size = merged_size(graph, options);
    if top == 0 && graph.layers[base].size() > size {
        check_cut(&graph.layers[base], size)?;
    }
    for layer in graph.layers[top..base].iter().filter(|_| !keep_top) {
        let Some(image) = layer.qcow2() else { continue };
        if layer.size() < size {
            let long = size.next_multiple_of(SECTOR_BYTES);
            let result = image.check_resize(long, &ringdisk_qcow2::ResizeOptions::default());
            result.map_err(|error| crate::open::of_qcow2(&error))?;
        }
    }
    Ok(())
}

/// Refuses a commit whose base, or the layer above the merged ones, has lost its name. The merged
/// layers may have lost theirs: the commit saves their content.
///
/// Errors: as [`lost_names::check`].
fn check_names(layers: &[Arc<Layer>], options: CommitOptions) -> Result<(), Error> {
    let above = options.top.checked_sub(1).and_then(|above| layers.get(above));
    let used = above.into_iter().chain(layers.get(options.base));
    lost_names::check("commit", used.map(|layer| &**layer))
}

/// Internal snapshots show what is below their image wherever they hold nothing. The base gets the
/// bytes of the disk as it is now, so they would show those.
///
/// Errors: `Unsupported` when a snapshot of a merged layer relies on what is below it.
async fn check_snapshots(ring: &Ring, graph: &Graph, options: CommitOptions) -> Result<(), Error> {
    for layer in &graph.layers[options.top..options.base] {
        let Some(image) = layer.qcow2() else { continue };
        let need = image.snapshots_need_backing(ring, Bytes::MAX).await;
        let Some(need) = need.map_err(|error| crate::open::of_qcow2(&error))? else { continue };
        let name = printable_path(layer.name());
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "'{name}' holds the internal snapshot '{}', which shows the image below from byte \
                 {} on; a commit would put the present bytes of the disk there. Delete the \
                 snapshot (`ringdisk snapshot -d`) if it is not needed, or keep the chain",
                printable(need.name.as_bytes()),
                need.range.start
            ),
        ));
    }
    Ok(())
}

/// Makes the base writable and large enough, locks the layers that will be emptied for writing, and
/// begins to record writes to the top.
async fn open_layers(
    disk: &Disk,
    ring: &Ring,
    drained: &mut Drained<'_>,
    options: CommitOptions,
) -> Result<(), Error> {
    let graph = Arc::clone(drained.graph());
    let mut layers = graph.layers.clone();
    if let Err(error) = open_each(disk, ring, &graph, options, &mut layers).await {
        drained.begin();
        for (layer, old) in layers.iter_mut().zip(&graph.layers) {
            if !Arc::ptr_eq(layer, old) {
                let _ = close_layer(ring, layer).await;
                *layer = Arc::new(for_reading(ring, layer, disk.options()).await?);
            }
        }
        drained.replace(graph.with_merged(layers, options.top));
        return Err(error);
    }
    let mut next = graph.with_merged(layers, options.top);
    if options.top == 0 {
        next.tracker = Some(Arc::new(Tracker::new(graph.size())));
    }
    drained.replace(next);
    Ok(())
}

async fn open_each(
    disk: &Disk,
    ring: &Ring,
    graph: &Graph,
    options: CommitOptions,
    layers: &mut [Arc<Layer>],
) -> Result<(), Error> {
    let CommitOptions { top, base, keep_top } = options;
    let context = |error: Error, layer: &Layer| {
        error.context(format!("cannot write to '{}'", printable_path(layer.name())))
    };
    let merged = if keep_top { base..base } else { top.max(1)..base };
    for layer in &mut layers[merged] {
        let kept = kept_for_writing(ring, layer, disk.options()).await;
        *layer = Arc::new(kept.map_err(|error| context(error, layer))?);
    }
    let old = &graph.layers[base];
    let opened = in_mode(ring, old, disk.options(), true).await;
    layers[base] = Arc::new(opened.map_err(|error| context(error, old))?);
    let wanted = graph.layers[top].size();
    if layers[base].size() < wanted {
        let grown = grow(disk, ring, &layers[base], wanted, graph.below(base)).await;
        layers[base] = Arc::new(grown.map_err(|error| context(error, old))?);
    }
    Ok(())
}

/// Grows the base while no request writes to it. After an error a qcow2 base is closed.
pub(super) async fn grow(
    disk: &Disk,
    ring: &Ring,
    base: &Layer,
    size: Bytes,
    below: Chain<'_>,
) -> Result<Layer, Error> {
    match &base.node {
        Node::Raw(raw) => {
            let failed = |errno| Error::os("it is smaller and cannot grow", errno);
            if !raw.can_resize() {
                return Err(failed(Errno::OPNOTSUPP));
            }
            let end = raw.offset.checked_add(size).ok_or(Errno::FBIG).map_err(failed)?;
            raw.storage.set_len(ring, end.0).await.map_err(failed)?;
            let fresh = in_mode(ring, base, disk.options(), true).await?;
            fresh.size.store(size.0, Ordering::Release);
            Ok(fresh)
        }
        Node::Qcow2(_) => {
            close_layer(ring, base).await?;
            let size = size.next_multiple_of(SECTOR_BYTES);
            let grown = offline_on(ring, disk, base, async |ring, image| {
                image.resize(ring, size, &ringdisk_qcow2::ResizeOptions::default(), &below).await
            });
            let (layer, result) = grown.await?;
            result.map(|()| layer)
        }
        Node::Null(_) | Node::Frozen(_) => Err(Error::os("it cannot grow", Errno::OPNOTSUPP)),
    }
}

/// Copies everything.
async fn copy_all(merging: &Merging<'_>, ring: &Ring, progress: &Progress) -> Result<(), Errno> {
    let (disk, is_top) = (merging.disk, merging.options().top == 0);
    let (size, base_size) = {
        let pass = disk.enter_beside_clients().await;
        let copier = copier(&pass, merging.options())?;
        (copier.from.size(), copier.target.size())
    };
    progress.set_total(size);
    let mut ranges = pieces(GuestOffset(0), GuestOffset::after(size));
    all_of(|| {
        let (offset, len) = ranges.next()?;
        // A change of the size puts another one in place. A range that is taken from an old one is
        // copied twice at worst.
        let tracker = tracker_of(merging);
        Some(async move {
            // Before the copy reads it: later writes are recorded again.
            if let Some(tracker) = tracker {
                tracker.clear(offset, len);
            }
            copy_again(merging, ring, (offset, len), progress, (false, Tries::default())).await?;
            progress.add_done(len);
            Ok(())
        })
    })
    .await?;
    if !is_top && base_size > size {
        // The layer hid the bytes of the base past its own end, and no longer will.
        let pass = disk.enter_beside_clients().await;
        let options = merging.options();
        let _graces = pass.graces_of_copy(options.top, options.base);
        copier(&pass, options)?.zero(ring, GuestOffset::after(size), base_size - size).await?;
    }
    Ok(())
}

/// Where the changes of clients are recorded that a commit of the top has to copy again. That of a
/// mirror or a stream, beside a commit below the top, is none of its business.
fn tracker_of(merging: &Merging<'_>) -> Option<Arc<Tracker>> {
    let is_top = merging.options().top == 0;
    merging.disk.graph().tracker.clone().filter(|_| is_top)
}

/// Copies the ranges that were written meanwhile, until little is left, and makes what was copied
/// durable while clients still work, so that the flush of the last step is short.
async fn catch_up(merging: &Merging<'_>, ring: &Ring, progress: &Progress) -> Result<(), Errno> {
    let (mut before, mut at_once) = (Bytes::MAX, false);
    for _ in 0..PASSES_MAX {
        let Some(tracker) = tracker_of(merging) else { break };
        let left = tracker.bytes();
        if left <= LAST_PASS_BYTES || at_once && left > before / 2 {
            break;
        }
        // Clients would wait for the rest: where they change as much as is copied beside them,
        // copying no longer yields.
        at_once |= left > before / 2;
        before = left;
        progress.add_total(left);
        let mut at = GuestOffset(0);
        all_of(|| {
            let (offset, len) = tracker.take(at)?;
            at = offset + len;
            Some(async move {
                let result = async {
                    for (offset, len) in pieces(offset, offset + len) {
                        let how = (at_once, Tries::default());
                        copy_again(merging, ring, (offset, len), progress, how).await?;
                    }
                    Ok(())
                };
                result.await?;
                progress.add_done(len);
                Ok(())
            })
        })
        .await?;
    }
    progress.check()?;
    let pass = merging.disk.enter_beside_clients().await;
    copier(&pass, merging.options())?.flush(ring).await
}

/// Copies one range, in turns beside the clients or `at_once`; after an error again, where the
/// commit rests after errors. The speed limit counts what was copied: how much of a range is data
/// is known afterwards.
async fn copy_again(
    merging: &Merging<'_>,
    ring: &Ring,
    (offset, len): (GuestOffset, Bytes),
    progress: &Progress,
    (at_once, mut tries): (bool, Tries),
) -> Result<(), Errno> {
    let disk = merging.disk;
    let base = merging.options().base;
    let unit = disk.graph().layers.get(base).map_or(Bytes(1), |base| unit_of(base));
    let mut parts = Parts::new(offset, len, unit);
    while !parts.is_over() {
        progress.pace_try(ring, &tries).await?;
        let turn = if at_once { Turn::at_once() } else { disk.turn(ring).await };
        let (at, len) = parts.next(&turn);
        let copied = copy_live(merging, ring, at, len).await;
        drop(turn);
        match copied {
            Ok(copied) => {
                progress.written(&mut tries);
                parts.done(len, copied);
                progress.charge(copied);
            }
            Err(errno) => progress.failed(ring, &mut tries, errno).await?,
        }
    }
    Ok(())
}

/// Copies one range, as one request among those of the clients. Gives the bytes of data.
async fn copy_live(
    merging: &Merging<'_>,
    ring: &Ring,
    offset: GuestOffset,
    len: Bytes,
) -> Result<Bytes, Errno> {
    let disk = merging.disk;
    let pass = disk.enter_beside_clients().await;
    let options = merging.options();
    if let Some(tracker) = pass.tracker.as_ref().filter(|_| options.top == 0) {
        tracker.check()?;
    }
    let copier = copier(&pass, options)?;
    let _graces = pass.graces_of_copy(options.top, options.base);
    let copied = copy_range(ring, copier, offset, len).await?;
    if let Node::Qcow2(image) = &copier.target.node {
        disk.look_after(ring, image);
    }
    Ok(copied)
}

/// Copies the rest while no request is in flight, and makes the base durable.
async fn last_pass(
    ring: &Ring,
    drained: &Drained<'_>,
    options: CommitOptions,
    progress: &Progress,
) -> Result<(), LastPassFailure> {
    let graph = drained.graph();
    let copier = copier(graph, options)?;
    let _graces = graph.graces_of_copy(options.top, options.base);
    if let Some(tracker) = graph.tracker.as_ref().filter(|_| options.top == 0) {
        tracker.check()?;
        let mut at = GuestOffset(0);
        while let Some((offset, len)) = tracker.take(at) {
            progress.check()?;
            progress.add_total(len);
            for (at, count) in pieces(offset, offset + len) {
                let copied = copy_range(ring, copier, at, count).await;
                copied.map_err(|errno| LastPassFailure::Range((offset, len), errno))?;
            }
            progress.add_done(len);
            at = offset + len;
        }
    }
    progress.check()?;
    Ok(copier.flush(ring).await?)
}
