//! The last step of a commit: the merged layers are emptied, and the base takes their place.
//!
//! Promises: when it begins, the base alone has the content of the chain, on stable storage. It
//! runs while no request is in flight, and the chain has the same content after each of its
//! operations, also after a crash:
//! 1. The merged layers are emptied from the bottom up. (From the top down, an emptied layer would
//!    uncover data of the layer below it, which is older than the data of the base.) Any part of a
//!    merged layer may be lost: the base has the same content. A layer that is shorter than those
//!    above it is lengthened: it would hide data that only the base has by then.
//! 2. A base that is longer than the disk is cut; clients never see the bytes past the end.
//! 3. The base becomes the top, or the layer above the merged ones names it.
//!
//! So the former images have the same content as the base for as long as the disk has this size,
//! whatever is written to the base: a program that opens them again by their old names sees the
//! present disk. If a step fails, clients keep the chain as it was, and nothing is written to the
//! base.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};

use super::copy::copier;
use super::{again, close_layer, for_reading, in_mode, offline_on};
use crate::graph::{Drained, Graph};
use crate::layer::{Layer, Node};
use crate::limits::SECTOR_BYTES;
use crate::name::{FileName, printable, printable_path};
use crate::{CommitOptions, Disk, Error, ErrorKind};

/// Name and format of a backing file, as a header states them.
pub(super) type Named = (Vec<u8>, Option<String>);

/// Why the last step ended early.
enum Failure {
    /// The layers can be used as they are.
    Refused(Error),
    /// A layer could not be opened again.
    Broken(Error),
}

/// The layers of a commit in its last step.
pub(super) struct Last<'a, 'b> {
    disk: &'a Disk,
    ring: &'a Ring,
    drained: &'a mut Drained<'b>,
    options: CommitOptions,
    /// As they are at this moment.
    layers: Vec<Arc<Layer>>,
}

impl<'a, 'b> Last<'a, 'b> {
    /// * `drained`: the commit has the graph for itself.
    pub(super) fn new(
        disk: &'a Disk,
        ring: &'a Ring,
        drained: &'a mut Drained<'b>,
        options: CommitOptions,
    ) -> Last<'a, 'b> {
        let layers = drained.graph().layers.clone();
        Last { disk, ring, drained, options, layers }
    }

    /// Does all of it.
    ///
    /// * `named`: the base, for the layer above the merged ones; `None` when the top layer is
    ///   merged.
    ///
    /// Errors: those of the storage, `Locked`. The chain shows what it showed.
    pub(super) async fn run(mut self, named: Option<Named>) -> Result<(), Error> {
        let done = match named {
            None => self.pivot().await,
            Some(named) => self.unlink(named).await,
        };
        match done {
            Ok(()) => Ok(()),
            Err(Failure::Refused(error)) => {
                self.go_back().await?;
                Err(error)
            }
            // The graph stays marked as broken: serving anything could mix old and new.
            Err(Failure::Broken(error)) => Err(error),
        }
    }

    /// Undoes the preparation: the chain keeps its layers, and all but the top are open for reading
    /// only again.
    ///
    /// Errors: a layer could not be opened again.
    pub(super) async fn go_back(mut self) -> Result<(), Error> {
        self.drained.begin();
        let CommitOptions { top, base, .. } = self.options;
        // The layer above the merged ones may have been opened for writing, too.
        for index in top.saturating_sub(1).max(1)..=base {
            let is_ours = index >= top || !self.disk.long.is_base(index);
            // The other layers were not opened again.
            if is_ours && self.layers[index].file().is_some_and(|file| !file.is_read_only()) {
                self.open_for_reading(index..index + 1).await?;
            }
        }
        let old = Arc::clone(self.drained.graph());
        self.drained.replace(old.with_merged(self.layers, self.options.top));
        Ok(())
    }

    /// The base becomes the top.
    async fn pivot(&mut self) -> Result<(), Failure> {
        self.empty_merged().await?;
        self.cut_base().await?;
        if self.options.keep_top {
            self.close_top().await?;
        }
        self.give_up_bitmaps().await?;
        let rest = self.layers.split_off(self.options.base);
        let graph = self.drained.graph().with_layers(rest);
        self.disk.put(self.drained, graph, false);
        Ok(())
    }

    /// The layer above the merged ones names the base from now on.
    async fn unlink(&mut self, named: Named) -> Result<(), Failure> {
        let CommitOptions { top, base, .. } = self.options;
        let (ring, disk) = (self.ring, self.disk);
        self.empty_merged().await?;
        // The base has changed below the layers between, and changes again with the next commit.
        self.give_up_bitmaps().await?;
        // Steps that may be refused come first, while the layer above is still usable.
        let upper = Arc::clone(&self.layers[top - 1]);
        // The top, or the base of another commit.
        let was_writable = upper.is_writable;
        if !was_writable {
            let opened = in_mode(ring, &upper, disk.options(), true).await;
            self.layers[top - 1] = Arc::new(opened.map_err(Failure::Refused)?);
        }
        let upper = Arc::clone(&self.layers[top - 1]);
        let (name, format) = named;
        disk.note_backing(&upper, Some(&name), format.as_deref(), false)
            .map_err(Failure::Refused)?;
        close_layer(ring, &upper).await.map_err(Failure::Refused)?;
        self.drained.begin();
        let full = self.layers[base - 1].full_backing_name.clone();
        let rename = async |ring: &Ring, image: &mut ringdisk_qcow2::Qcow2| {
            image.set_backing(ring, Some(&name), format.as_deref()).await
        };
        let (mut fresh, result) = match close_layer(ring, &self.layers[base]).await {
            Ok(()) => offline_on(ring, disk, &upper, rename).await.map_err(Failure::Broken)?,
            Err(error) => {
                let fresh = again(ring, &upper, disk.options(), true).await;
                (fresh.map_err(Failure::Broken)?, Err(error))
            }
        };
        if result.is_ok() {
            disk.note_backing(&fresh, Some(&name), format.as_deref(), true)
                .map_err(Failure::Refused)?;
            fresh.full_backing_name = full;
        }
        self.layers[top - 1] = Arc::new(fresh);
        let kept_for_reading = if was_writable { top..top } else { top - 1..top };
        self.open_for_reading(kept_for_reading).await.map_err(Failure::Broken)?;
        result.map_err(Failure::Refused)?;
        self.open_for_reading(base..base + 1).await.map_err(Failure::Broken)?;
        self.layers.drain(top..base);
        disk.long.dropped(top, base);
        let layers = std::mem::take(&mut self.layers);
        let graph = self.drained.graph().with_merged(layers, top);
        self.disk.put(self.drained, graph, false);
        Ok(())
    }

    /// Empties the merged layers from the bottom up.
    async fn empty_merged(&mut self) -> Result<(), Failure> {
        let CommitOptions { top, base, keep_top } = self.options;
        if keep_top {
            return Ok(());
        }
        // When clients write to the base, no layer above it may hide bytes past its own end.
        // Otherwise no merged layer may hide bytes that the uppermost merged layer shows.
        let shown = merged_size(self.drained.graph(), self.options);
        for index in (top..base).rev() {
            if index == 0 {
                self.close_top().await?;
            }
            self.drained.begin();
            let layer = Arc::clone(&self.layers[index]);
            let uncovered = if layer.size() < shown { shown } else { Bytes::ZERO };
            let emptied = empty_layer(self.ring, self.disk, &layer, uncovered).await;
            let (fresh, result) = emptied.map_err(Failure::Broken)?;
            self.layers[index] = Arc::new(fresh);
            result.map_err(|error| {
                let name = printable_path(layer.name());
                Failure::Refused(error.context(format!("cannot empty '{name}'")))
            })?;
        }
        Ok(())
    }

    /// Invalidates the bitmaps of the emptied layers: they do not record writes to the base, which
    /// change the content of these layers. When the top is merged, those are the writes of clients
    /// from now on, so it is the last step there. For layers between, the copy was such a write.
    async fn give_up_bitmaps(&mut self) -> Result<(), Failure> {
        let CommitOptions { top, base, keep_top } = self.options;
        // From the bottom up: the bitmap of the top matters most if one of them cannot be
        // invalidated.
        for index in (top..base).rev().filter(|_| !keep_top) {
            let layer = Arc::clone(&self.layers[index]);
            let bitmaps = layer.qcow2().map(|image| image.bitmaps()).unwrap_or_default();
            if !bitmaps.iter().any(|bitmap| bitmap.auto && !bitmap.in_use) {
                continue;
            }
            self.drained.begin();
            let given_up = offline_on(self.ring, self.disk, &layer, async |ring, image| {
                image.bitmaps_give_up(ring).await
            });
            let (fresh, result) = given_up.await.map_err(Failure::Broken)?;
            self.layers[index] = Arc::new(fresh);
            result.map_err(Failure::Refused)?;
            tracing::warn!(
                "bitmaps of '{}' do not record what is written to the base: the next backup has to \
                 be a full one",
                printable_path(layer.name())
            );
        }
        Ok(())
    }

    /// Closes the top layer. Where there is no space to store its bitmaps (a full file system is a
    /// usual reason to commit) they are lost here: the last step would invalidate them anyway.
    async fn close_top(&mut self) -> Result<(), Failure> {
        let top = &self.layers[0];
        let Err(error) = close_layer(self.ring, top).await else { return Ok(()) };
        let is_full = matches!(error.errno(), Some(Errno::NOSPC | Errno::DQUOT));
        match top.qcow2().filter(|_| is_full && !self.options.keep_top) {
            Some(image) if image.close(self.ring).await.is_ok() => Ok(()),
            _ => Err(Failure::Refused(error)),
        }
    }

    /// Cuts the base to the size of the disk. Only when the top layer is merged: otherwise a layer
    /// above hides the rest.
    async fn cut_base(&mut self) -> Result<(), Failure> {
        let CommitOptions { top, base, .. } = self.options;
        let graph = Arc::clone(self.drained.graph());
        let size = graph.size();
        let layer = Arc::clone(&self.layers[base]);
        if top > 0 || layer.size() <= size {
            return Ok(());
        }
        let named = |error: Error| {
            let name = printable_path(layer.name());
            Failure::Refused(error.context(format!("cannot make '{name}' as small as the disk")))
        };
        check_cut(&layer, size).map_err(Failure::Refused)?;
        match &layer.node {
            Node::Raw(raw) => {
                let cut =
                    raw.storage.set_len(self.ring, raw.host(GuestOffset::after(size)).0).await;
                cut.map_err(|errno| named(Error::os("cannot shorten the file", errno)))?;
                layer.size.store(size.0, Ordering::Release);
                close_layer(self.ring, &layer).await.map_err(Failure::Refused)
            }
            Node::Qcow2(_) => {
                let end = size.next_multiple_of(SECTOR_BYTES).min(layer.size());
                if end > size {
                    let zeroed = async {
                        copier(&graph, self.options)?
                            .zero(self.ring, GuestOffset::after(size), end - size)
                            .await
                    };
                    let zeroed = zeroed.await;
                    zeroed.map_err(|errno| named(Error::os("cannot zero its end", errno)))?;
                }
                close_layer(self.ring, &layer).await.map_err(Failure::Refused)?;
                self.drained.begin();
                let shrink = async |ring: &Ring, image: &mut ringdisk_qcow2::Qcow2| {
                    image.resize(ring, end, &SHRINK, &graph.below(base)).await
                };
                let cut = offline_on(self.ring, self.disk, &layer, shrink).await;
                let (fresh, result) = cut.map_err(Failure::Broken)?;
                self.layers[base] = Arc::new(fresh);
                result.map_err(named)
            }
            Node::Null(_) | Node::Frozen(_) => Ok(()),
        }
    }

    /// Opens layers for reading again.
    async fn open_for_reading(&mut self, range: std::ops::Range<usize>) -> Result<(), Error> {
        for index in range {
            let layer = Arc::clone(&self.layers[index]);
            // Everything in a base that is given up is in the layers above too, so a failed close
            // loses nothing.
            if let Err(error) = close_layer(self.ring, &layer).await {
                tracing::warn!("{error}");
            }
            let fresh = for_reading(self.ring, &layer, self.disk.options()).await?;
            self.layers[index] = Arc::new(fresh);
        }
        Ok(())
    }
}

/// Size up to which merged layers must not hide bytes of the layers below them.
pub(super) fn merged_size(graph: &Graph, options: CommitOptions) -> Bytes {
    if options.top == 0 { graph.size() } else { graph.layers[options.top].size() }
}

/// Options that allow a smaller size.
const SHRINK: ringdisk_qcow2::ResizeOptions = ringdisk_qcow2::ResizeOptions {
    shrink: true,
    preallocation: ringdisk_qcow2::Preallocation::Off,
};

/// Empties a merged layer, which was closed: all its content is its backing file's then. Gives the
/// layer, open for writing, and the result. The base has the same content, so any part of the layer
/// may be lost after an error.
///
/// * `uncovered`: the least size afterwards, bytes; 0: the size stays.
///
/// Errors: it cannot be opened again.
async fn empty_layer(
    ring: &Ring,
    disk: &Disk,
    layer: &Layer,
    uncovered: Bytes,
) -> Result<(Layer, Result<(), Error>), Error> {
    offline_on(ring, disk, layer, async |ring, image| {
        image.make_empty(ring).await?;
        match uncovered {
            Bytes::ZERO => Ok(()),
            size => image.uncover(ring, size).await,
        }
    })
    .await
}

/// Whether a base that is longer than the disk can become as short.
///
/// Errors: `Unsupported` with what the user can do.
pub(super) fn check_cut(base: &Layer, size: Bytes) -> Result<(), Error> {
    let reason = match &base.node {
        Node::Raw(raw) if !raw.can_resize() => {
            "a block device, or a window of fixed size, cannot become smaller".to_owned()
        }
        Node::Qcow2(image) => {
            let end = size.next_multiple_of(SECTOR_BYTES).min(base.size());
            match image.check_resize(end, &SHRINK) {
                Ok(()) => return Ok(()),
                Err(error) => error.reason().to_owned(),
            }
        }
        Node::Raw(_) | Node::Null(_) | Node::Frozen(_) => return Ok(()),
    };
    let (name, len) = (printable_path(base.name()), base.size());
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "the base '{name}' has {len} bytes and the disk has {size}, so the base would have to \
             be cut, but {reason}; make the disk as large as the base first (resize it to {len}) \
             and commit it then"
        ),
    ))
}

/// Name and format of the base, as the layer above the merged ones will state them.
pub(super) fn name_of_base(graph: &Graph, options: CommitOptions) -> Result<Named, Error> {
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
    if parsed.nbd.is_some() || parsed.path.is_absolute() || upper.directory == lower.directory {
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
