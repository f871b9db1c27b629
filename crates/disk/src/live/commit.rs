//! Commit of a disk that is in use: layers are merged into one below them.
//!
//! Promises: the chain reads the same at every moment, also after a crash: what is copied down is what the
//! layers above show already, and it is on stable storage before anything refers to it. Clients wait for
//! the beginning and the last step only. When the top layer is merged, what clients write meanwhile is
//! noted and copied again, in passes that get shorter; the last one runs while nobody writes.
//!
//! After a commit of the top layer the layer that it was merged into is the new top. The former one is
//! left empty if that was the layer below it, so it reads like its backing file if somebody opens it
//! again; else it is left as it is, and must not be used any more.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_ring::{Errno, Ring};

use super::copy::{Copier, all_of, copy_range, pieces};
use super::{Tracker, again, busy, check_lasting, close_layer, for_reading, in_mode, offline_on};
use crate::chain::Chain;
use crate::graph::{Drained, Graph};
use crate::layer::{Layer, Node};
use crate::name::{FileName, printable, printable_path};
use crate::{Disk, Error, ErrorKind, Progress};

/// The last pass begins when so much is left to copy, bytes: some ten milliseconds.
const LAST_PASS_BYTES: u64 = 4 << 20;
/// Or after so many passes: clients that write faster than it is copied wait a little longer then.
const PASSES_MAX: u32 = 16;

/// Which layers are merged; indexes into [`Disk::layers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitOptions {
    /// The uppermost layer that is merged; 0 is the top one.
    pub top: usize,
    /// The layer that it is merged into, with all between.
    pub base: usize,
    /// The former top is left as it is, not emptied. It shows a mixture once the base has changed.
    pub keep_top: bool,
}

impl CommitOptions {
    /// Merges the top layer into the one below.
    pub const TOP: CommitOptions = CommitOptions { top: 0, base: 1, keep_top: false };
}

impl Disk {
    /// Merges layers into one below, while clients work.
    ///
    /// * `progress`: can be cancelled until the last step; the chain is as it was then.
    ///
    /// Errors: `Busy` during another change of this kind; `Cancelled`; `Locked` when somebody else uses
    /// the base; those of the storage. The chain is as it was.
    pub async fn commit(
        &self,
        ring: &Ring,
        options: CommitOptions,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        let progress = Arc::clone(progress);
        let change = move |disk: Arc<Disk>, ring: Ring| async move {
            crate::lost::check_commit(&disk.layers(), options)?;
            run(&disk, &ring, options, &progress).await
        };
        self.detached(ring, change).await
    }
}

/// Lets other changes in when the commit is over, however it ended.
struct Busy<'a>(&'a Disk);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.is_busy.store(false, Ordering::Release);
    }
}

async fn run(
    disk: &Disk,
    ring: &Ring,
    options: CommitOptions,
    progress: &Progress,
) -> Result<(), Error> {
    let CommitOptions { top, base, .. } = options;
    let mut drained = disk.change(ring).await?;
    check(drained.graph(), options)?;
    let new_name = match top {
        0 => None,
        _ => Some(name_of_base(drained.graph(), options)?),
    };
    if disk.is_busy.swap(true, Ordering::AcqRel) {
        return Err(busy());
    }
    let busy = Busy(disk);
    open_base(disk, ring, &mut drained, options).await?;
    drop(drained);

    let copied = async {
        copy_all(disk, ring, options, progress).await?;
        progress.check()?;
        // Most of it reaches stable storage while clients still work.
        let pass = disk.enter().await;
        copier(&pass, options)?.flush(ring).await
    };
    let copied = copied.await;

    // Not `change`: it would refuse on account of this very commit.
    let turn = disk.turns().enter().await;
    let mut drained = disk.gateway().drain(ring, turn).await;
    let finished = match copied {
        Ok(()) => last_pass(ring, &drained, options, progress).await,
        Err(errno) => Err(errno),
    };
    if let Err(errno) = finished {
        let error = match errno {
            Errno::CANCELED => {
                Error::new(ErrorKind::Cancelled, "the commit was cancelled").with_errno(Some(errno))
            }
            errno => Error::os("cannot commit", errno),
        };
        give_up(disk, ring, &mut drained, base).await?;
        return Err(error);
    }
    match new_name {
        None => pivot(disk, ring, &mut drained, options).await?,
        Some(name) => unlink(disk, ring, &mut drained, options, name).await?,
    }
    progress.finish();
    drop(busy);
    Ok(())
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
    Ok(())
}

/// What is copied where.
fn copier(graph: &Graph, options: CommitOptions) -> Result<Copier<'_>, Errno> {
    graph.check()?;
    let from = graph.layers.get(options.top..options.base).ok_or(Errno::IO)?;
    Ok(Copier {
        from: Chain(from),
        target: graph.layers.get(options.base).ok_or(Errno::IO)?,
        below: graph.below(options.base),
    })
}

/// Makes the base writable and large enough, and begins to note what is written to the top.
async fn open_base(
    disk: &Disk,
    ring: &Ring,
    drained: &mut Drained<'_>,
    options: CommitOptions,
) -> Result<(), Error> {
    let graph = Arc::clone(drained.graph());
    let old = &graph.layers[options.base];
    let context =
        |error: Error| error.context(format!("cannot write to '{}'", printable_path(old.name())));
    let wanted = graph.layers[options.top].size();
    let mut base = in_mode(ring, old, disk.options(), true).await.map_err(context)?;
    if base.size() < wanted {
        match grow(disk, ring, &base, wanted, graph.below(options.base)).await {
            Ok(grown) => base = grown,
            Err(error) => {
                let _ = close_layer(ring, &base).await;
                drained.begin();
                let back = for_reading(ring, &base, disk.options()).await?;
                drained.replace(replaced(&graph, options.base, back));
                return Err(context(error));
            }
        }
    }
    let mut next = replaced(&graph, options.base, base);
    next.tracker = (options.top == 0).then(|| Arc::new(Tracker::new(graph.size())));
    drained.replace(next);
    Ok(())
}

/// Grows the base, which nobody writes to yet.
async fn grow(
    disk: &Disk,
    ring: &Ring,
    base: &Layer,
    size: u64,
    below: Chain<'_>,
) -> Result<Layer, Error> {
    match &base.node {
        Node::Raw(raw) => {
            let failed = |errno| Error::os("it is smaller and cannot grow", errno);
            if !crate::write::resizable(raw) {
                return Err(failed(Errno::OPNOTSUPP));
            }
            let end = raw.offset.checked_add(size).ok_or(Errno::FBIG).map_err(failed)?;
            raw.storage.set_len(ring, end).await.map_err(failed)?;
            let fresh = in_mode(ring, base, disk.options(), true).await?;
            fresh.size.store(size, Ordering::Release);
            Ok(fresh)
        }
        Node::Qcow2(_) => {
            close_layer(ring, base).await?;
            let size = size.next_multiple_of(512);
            let grown = offline_on(ring, disk, base, async |ring, image| {
                image.resize(ring, size, &ringdisk_qcow2::ResizeOptions::default(), &below).await
            });
            let (layer, result) = grown.await?;
            result.map(|()| layer)
        }
        Node::Null(_) => Err(Error::os("it cannot grow", Errno::OPNOTSUPP)),
    }
}

/// A graph with one layer replaced.
fn replaced(graph: &Graph, index: usize, layer: Layer) -> Graph {
    let mut layers = graph.layers.clone();
    layers[index] = Arc::new(layer);
    let mut next = graph.with_layers(layers);
    next.guard.clone_from(&graph.guard);
    next
}

/// Copies everything, and then what was written meanwhile until little is left.
async fn copy_all(
    disk: &Disk,
    ring: &Ring,
    options: CommitOptions,
    progress: &Progress,
) -> Result<(), Errno> {
    let (size, base_size, tracker) = {
        let pass = disk.enter().await;
        let copier = copier(&pass, options)?;
        (copier.from.size(), copier.target.size(), pass.tracker.clone())
    };
    progress.set_total(size);
    let mut ranges = pieces(0, size);
    all_of(|| {
        let (offset, len) = ranges.next()?;
        let tracker = tracker.as_ref();
        Some(async move {
            progress.check()?;
            // Before it is read: what is written from now on is noted again.
            if let Some(tracker) = tracker {
                tracker.clear(offset, len);
            }
            copy_live(disk, ring, options, offset, len).await?;
            progress.add_done(len);
            Ok(())
        })
    })
    .await?;
    if options.top > 0 && base_size > size {
        // The layer hid what the base has behind its end, and will do so no more.
        let pass = disk.enter().await;
        copier(&pass, options)?.zero(ring, size, base_size - size).await?;
    }
    let Some(tracker) = tracker else { return Ok(()) };
    let mut before = u64::MAX;
    for _ in 0..PASSES_MAX {
        let left = tracker.bytes();
        if left <= LAST_PASS_BYTES || left > before / 2 {
            break;
        }
        before = left;
        progress.add_total(left);
        let mut at = 0;
        all_of(|| {
            let (offset, len) = tracker.take(at)?;
            at = offset + len;
            Some(async move {
                let result = async {
                    progress.check()?;
                    for (offset, len) in pieces(offset, offset + len) {
                        copy_live(disk, ring, options, offset, len).await?;
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
    Ok(())
}

/// Copies one range, as one request among those of the clients.
async fn copy_live(
    disk: &Disk,
    ring: &Ring,
    options: CommitOptions,
    offset: u64,
    len: u64,
) -> Result<(), Errno> {
    let pass = disk.enter().await;
    let copier = copier(&pass, options)?;
    let _graces = pass.graces_above(options.base);
    copy_range(ring, copier, offset, len).await?;
    if let Node::Qcow2(image) = &copier.target.node {
        disk.look_after(ring, image);
    }
    Ok(())
}

/// Copies what is left while nobody writes, and makes the base durable.
async fn last_pass(
    ring: &Ring,
    drained: &Drained<'_>,
    options: CommitOptions,
    progress: &Progress,
) -> Result<(), Errno> {
    let graph = drained.graph();
    let copier = copier(graph, options)?;
    let _graces = graph.graces_above(options.base);
    if let Some(tracker) = &graph.tracker {
        progress.add_total(tracker.bytes());
        let mut at = 0;
        while let Some((offset, len)) = tracker.take(at) {
            progress.check()?;
            for (offset, len) in pieces(offset, offset + len) {
                copy_range(ring, copier, offset, len).await?;
            }
            progress.add_done(len);
            at = offset + len;
        }
    }
    progress.check()?;
    copier.flush(ring).await
}

/// Back to how it was: the base is for reading again.
async fn give_up(
    disk: &Disk,
    ring: &Ring,
    drained: &mut Drained<'_>,
    base: usize,
) -> Result<(), Error> {
    let graph = Arc::clone(drained.graph());
    let layer = &graph.layers[base];
    // What was copied is what the layers above show, so it does not matter whether it gets there.
    if let Err(error) = close_layer(ring, layer).await {
        tracing::warn!("{error}");
    }
    drained.begin();
    let layer = for_reading(ring, layer, disk.options()).await?;
    drained.replace(replaced(&graph, base, layer));
    Ok(())
}

/// The base becomes the top.
async fn pivot(
    disk: &Disk,
    ring: &Ring,
    drained: &mut Drained<'_>,
    options: CommitOptions,
) -> Result<(), Error> {
    let base = options.base;
    let graph = Arc::clone(drained.graph());
    let old = graph.top();
    let closed = close_layer(ring, old).await;
    drained.begin();
    if closed.is_ok() && base == 1 && !options.keep_top {
        // Before the first write to the base: from then on the former top would show a mixture.
        let emptied = async {
            let (layer, result) =
                offline_on(ring, disk, old, async |ring, image| image.make_empty(ring).await)
                    .await?;
            result.and(close_layer(ring, &layer).await)
        };
        if let Err(error) = emptied.await {
            tracing::warn!(
                "'{}' was committed but could not be emptied ({error}); do not use it any more",
                printable_path(old.name())
            );
        }
    }
    let layers = graph.layers.get(base..).unwrap_or_default().to_vec();
    disk.put(drained, graph.with_layers(layers), false);
    // All that it had is in the base, on stable storage.
    if let Err(error) = closed {
        tracing::warn!("{error}");
    }
    Ok(())
}

/// Name and format of the base, as the layer above the merged ones shall state them.
fn name_of_base(graph: &Graph, options: CommitOptions) -> Result<(Vec<u8>, Option<String>), Error> {
    use std::os::unix::ffi::OsStrExt;
    let upper = &graph.layers[options.top - 1];
    let lower = &graph.layers[options.base - 1];
    let named = lower.qcow2().and_then(|image| {
        let info = image.info();
        Some((info.backing_file.clone()?, info.backing_format.clone()))
    });
    let Some((name, format)) = named else {
        return Err(Error::new(
            ErrorKind::Invalid,
            "the layer above the base names no backing file",
        ));
    };
    let parsed = FileName::parse(&name)?;
    if parsed.path.is_absolute() || upper.directory == lower.directory {
        return Ok((name, format));
    }
    match &lower.directory {
        Some(directory) if !name.starts_with(b"json:") => {
            Ok((directory.join(&parsed.path).as_os_str().as_bytes().to_vec(), format))
        }
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the base is named '{}', which means something else in the directory of '{}'; give \
                 it an absolute name first",
                printable(&name),
                printable_path(upper.name())
            ),
        )),
    }
}

/// The layer above the merged ones names the base from now on.
async fn unlink(
    disk: &Disk,
    ring: &Ring,
    drained: &mut Drained<'_>,
    options: CommitOptions,
    named: (Vec<u8>, Option<String>),
) -> Result<(), Error> {
    let CommitOptions { top, base, .. } = options;
    let graph = Arc::clone(drained.graph());
    let (upper, target) = (&graph.layers[top - 1], &graph.layers[base]);
    let full = graph.layers[base - 1].full_backing_name.clone();
    // What may be refused comes first, while nothing has happened yet.
    let opened = async {
        let opened = match top {
            1 => None,
            _ => Some(in_mode(ring, upper, disk.options(), true).await?),
        };
        close_layer(ring, opened.as_ref().unwrap_or(upper)).await?;
        Ok(opened)
    };
    let opened = match opened.await {
        Ok(opened) => opened,
        Err(error) => {
            give_up(disk, ring, drained, base).await?;
            return Err(error);
        }
    };
    drained.begin();
    let closed = close_layer(ring, target).await;
    let target = for_reading(ring, target, disk.options()).await?;
    let (name, format) = named;
    let rename = async |ring: &Ring, image: &mut ringdisk_qcow2::Qcow2| {
        image.set_backing(ring, Some(&name), format.as_deref()).await
    };
    let writable = opened.as_ref().unwrap_or(upper);
    let (mut fresh, result) = match closed {
        Ok(()) => offline_on(ring, disk, writable, rename).await?,
        Err(error) => (again(ring, writable, disk.options(), true).await?, Err(error)),
    };
    if top > 1 {
        if let Err(error) = close_layer(ring, &fresh).await {
            tracing::warn!("{error}");
        }
        fresh = for_reading(ring, &fresh, disk.options()).await?;
    }
    let mut layers = graph.layers.clone();
    layers[base] = Arc::new(target);
    let is_done = result.is_ok();
    if is_done {
        fresh.full_backing_name = full;
    }
    layers[top - 1] = Arc::new(fresh);
    if is_done {
        layers.drain(top..base);
    }
    disk.put(drained, graph.with_layers(layers), false);
    result
}
