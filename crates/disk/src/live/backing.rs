//! Changes the backing file of a disk that is in use.
//!
//! Promises: no client sees another byte, now or after an internal snapshot is applied: the header
//! names the new chain only after it was compared with the old one wherever the top image, or one
//! of its snapshots, has no data of its own. Ranges that clients change meanwhile are recorded and
//! compared again (a discard may uncover the backing file), the last of them while no request is in
//! flight. Clients may also change the size of the disk meanwhile (`resize_in_commit.rs`).

use std::iter;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::{Kind, Storage};
use rustix::fs::{AtFlags, CWD, StatxFlags, major, makedev, minor, statx};

use super::copy::{all_of, buffer, equal, pieces};
use super::pivot::Named;
use super::{Busy, LongChange, check_lasting, offline_layer, reopen};
use crate::background::{Parts, Turn};
use crate::chain::Chain;
use crate::graph::{Drained, Graph, Tracker};
use crate::layer::Layer;
use crate::name::{printable, printable_path};
use crate::names_note::{self, Names};
use crate::open::open_below;
use crate::{Disk, Error, ErrorKind, Format, Progress, lost_names};

/// The last comparison, without requests, begins when no more than this is left, bytes: it takes
/// some ten milliseconds.
const LAST_PASS_BYTES: Bytes = Bytes(4 << 20);
/// Or after so many passes.
const PASSES_MAX: u32 = 16;

/// A backing file, as the header of an image names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// As it goes into the header: absolute, or relative to the directory of the image.
    pub file: Vec<u8>,
    /// Its format.
    pub format: Format,
}

impl Disk {
    /// Makes the top image name another backing file of the same content; `None`: no backing file,
    /// where all of it is zeroes or hidden.
    ///
    /// Errors: `Invalid` when the content differs (the message says where), `Busy`, `Cancelled`,
    /// those of opening the chain, those of the storage. The disk is as it was.
    pub async fn change_backing(
        &self,
        ring: &Ring,
        backing: Option<Backing>,
        progress: &Arc<Progress>,
    ) -> Result<(), Error> {
        check_lasting(self)?;
        let progress = Arc::clone(progress);
        let change = move |disk: Arc<Disk>, ring: Ring| async move {
            disk.change_backing_now(&ring, backing, &progress).await
        };
        self.detached(ring, change).await
    }

    async fn change_backing_now(
        &self,
        ring: &Ring,
        backing: Option<Backing>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let turn = self.changes().lock().await;
        self.check_free()?;
        let graph = self.graph();
        reopen::check(graph.top())?;
        // The old backing files may have lost their names: that is a reason to name another one.
        lost_names::check("change the backing file", [&**graph.top()])?;
        let next = NextBacking::open(ring, self, graph.top(), backing).await?;
        self.check_others(&next.below)?;
        let comparison = Comparison { ring, below: &next.below };

        let drained = self.gateway().drain(ring, turn).await;
        // Clients may change the size meanwhile; every other change is refused.
        let busy = Busy::begin(self, LongChange::Whole)?;
        start_recording(drained);
        let compared = comparison.run(self, progress).await;
        let snapshots = match (compared, graph.top_image()) {
            (Ok(()), Some(image)) => {
                // No change writes tables of snapshots meanwhile, also where the image was opened
                // again.
                let (old, new) = (graph.below(0), Chain(&next.below));
                snapshots_show_the_same(ring, image, old, new, progress).await
            }
            _ => Ok(()),
        };

        let turn = self.changes().lock().await;
        let mut drained = self.gateway().drain(ring, turn).await;
        let compared = match compared {
            Ok(()) => comparison.what_is_recorded(drained.graph(), progress).await,
            Err(errno) => Err(errno),
        };
        stop_recording(&mut drained);
        let done = match compared.map_err(refusal).and(snapshots) {
            Ok(()) => self.put_backing(ring, &mut drained, next).await,
            Err(error) => Err(error),
        };
        // Before the gate opens: the next change must not find this one still under way.
        drop(busy);
        done
    }

    /// The last phase: the header of the top image names the new backing file, and its layers are
    /// put below the top. No request is in flight.
    ///
    /// Errors: as [`Disk::change_backing`]; the disk is as it was.
    pub(super) async fn put_backing(
        &self,
        ring: &Ring,
        drained: &mut Drained<'_>,
        next: NextBacking,
    ) -> Result<(), Error> {
        let graph = Arc::clone(drained.graph());
        // Comparing takes long, and the header names the first of these now.
        let named = iter::once(&**graph.top()).chain(next.below.iter().map(|it| &**it));
        lost_names::check("change the backing file", named)?;
        let (file, format) = next.file_and_format();
        self.note_backing(graph.top(), file, format, false)?;
        let set = async |ring: &Ring, image: &mut ringdisk_qcow2::Qcow2| {
            image.set_backing(ring, file, format).await
        };
        let (mut top, result) = offline_layer(ring, self, drained, graph.top(), set).await?;
        if let Err(error) = result {
            let mut layers = graph.layers.clone();
            layers[0] = Arc::new(top);
            self.put(drained, graph.with_layers(layers), false);
            return Err(error);
        }
        self.note_backing(&top, file, format, true)?;
        top.full_backing_name = next.full;
        let mut layers = vec![Arc::new(top)];
        layers.extend(next.below);
        self.put(drained, graph.with_layers(layers), false);
        Ok(())
    }
}

/// The backing file that the top image will name, with its chain open for reading.
pub(super) struct NextBacking {
    /// Name and format, as the header will state them; `None`: no backing file.
    pub(super) named: Option<Named>,
    pub(super) full: Option<String>,
    pub(super) below: Vec<Arc<Layer>>,
}

impl NextBacking {
    /// Opens the chain.
    ///
    /// * `top`: the image that will name the file.
    ///
    /// Errors: those of opening an image.
    async fn open(
        ring: &Ring,
        disk: &Disk,
        top: &Layer,
        backing: Option<Backing>,
    ) -> Result<NextBacking, Error> {
        let Some(Backing { file, format }) = backing else {
            return Ok(NextBacking { named: None, full: None, below: Vec::new() });
        };
        let named = (file.clone(), Some(format.name().to_owned()));
        let (full, below) = open_below(ring, disk.options(), top, named)
            .await
            .map_err(|error| error.context(format!("backing file '{}'", printable(&file))))?;
        Ok(NextBacking {
            named: Some((file, Some(format.name().to_owned()))),
            full: Some(full),
            below: below.into_iter().map(Arc::new).collect(),
        })
    }

    fn file_and_format(&self) -> (Option<&[u8]>, Option<&str>) {
        match &self.named {
            Some((file, format)) => (Some(file), format.as_deref()),
            None => (None, None),
        }
    }
}

/// From now on a [`Tracker`] records which ranges clients change.
pub(super) fn start_recording(mut drained: Drained<'_>) {
    let mut graph = Graph::clone(drained.graph());
    graph.tracker = Some(Arc::new(Tracker::new(graph.size())));
    drained.replace(graph);
}

pub(super) fn stop_recording(drained: &mut Drained<'_>) {
    let mut graph = Graph::clone(drained.graph());
    graph.tracker = None;
    drained.replace(graph);
}

impl Disk {
    /// Errors: `Invalid` where one of the layers is the disk itself.
    pub(super) fn check_others(&self, layers: &[Arc<Layer>]) -> Result<(), Error> {
        let own = self.mounted_on.load(Ordering::Acquire);
        let lies_on = |storage: &Storage| match storage.kind() {
            _ if storage.nbd_address().is_some() => false,
            Kind::BlockDevice => behind_loop_device(storage) == Some(own),
            _ => storage.identity().is_some_and(|(on, _)| on == own),
        };
        let is_own = |layer: &&Arc<Layer>| own != 0 && layer.storages().any(|it| lies_on(it));
        let Some(layer) = layers.iter().find(is_own) else { return Ok(()) };
        let name = printable_path(layer.name());
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "'{name}' is this very disk as it is mounted, which cannot lie below itself, nor \
                 be its own copy; name an image"
            ),
        ))
    }
}

/// The device number of the file system that the file of a loop device lies on. `None`: it is no
/// loop device, or its file has no name here.
fn behind_loop_device(device: &Storage) -> Option<u64> {
    let (number, _) = device.identity()?;
    let place = format!("/sys/dev/block/{}:{}", major(number), minor(number));
    // The device of a partition is its parent directory.
    let file = ["loop/backing_file", "../loop/backing_file"]
        .into_iter()
        .find_map(|name| std::fs::read_to_string(format!("{place}/{name}")).ok())?;
    // Without asking the file's server, which may be this process.
    let (quietly, nothing) = (AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
    let found = statx(CWD, file.trim_end_matches('\n'), quietly, nothing).ok()?;
    Some(makedev(found.stx_dev_major, found.stx_dev_minor))
}

/// Why the change is refused.
fn refusal(errno: Errno) -> Error {
    match errno {
        Errno::ILSEQ => Error::new(
            ErrorKind::Invalid,
            "the new backing file has other content than the old one, so clients would see the \
             disk change; use `ringdisk rebase` while nobody uses the disk",
        ),
        Errno::CANCELED => {
            Error::new(ErrorKind::Cancelled, "the change of the backing file was cancelled")
                .with_errno(Some(errno))
        }
        errno => Error::os("cannot compare the backing files", errno),
    }
}

/// The chain below the disk as it is, and another one.
#[derive(Clone, Copy)]
struct Comparison<'a> {
    ring: &'a Ring,
    below: &'a [Arc<Layer>],
}

impl Comparison<'_> {
    /// Compares everything while clients work, then the ranges that they changed meanwhile, until
    /// little is left.
    async fn run(self, disk: &Disk, progress: &Progress) -> Result<(), Errno> {
        // A change of the size puts another tracker in place.
        let tracker = || disk.graph().tracker.clone();
        let size = disk.graph().size();
        progress.set_total(size);
        let mut ranges = pieces(GuestOffset(0), GuestOffset::after(size));
        all_of(|| {
            let (offset, len) = ranges.next()?;
            let tracker = tracker();
            Some(async move {
                // Before the comparison reads it: later changes are recorded again.
                if let Some(tracker) = tracker {
                    tracker.clear(offset, len);
                }
                self.beside_clients(disk, offset, len, progress, false).await?;
                progress.add_done(len);
                Ok(())
            })
        })
        .await?;
        let (mut before, mut at_once) = (Bytes::MAX, false);
        for _ in 0..PASSES_MAX {
            let Some(tracker) = tracker() else { break };
            let left = tracker.bytes();
            if left <= LAST_PASS_BYTES || at_once && left > before / 2 {
                break;
            }
            // As a commit does.
            at_once |= left > before / 2;
            before = left;
            let mut at = GuestOffset(0);
            all_of(|| {
                let (offset, len) = tracker.take(at)?;
                at = offset + len;
                Some(async move {
                    for (offset, len) in pieces(offset, offset + len) {
                        self.beside_clients(disk, offset, len, progress, at_once).await?;
                    }
                    Ok(())
                })
            })
            .await?;
        }
        Ok(())
    }

    /// Compares one piece, in turns beside the clients.
    async fn beside_clients(
        self,
        disk: &Disk,
        offset: GuestOffset,
        len: Bytes,
        progress: &Progress,
        at_once: bool,
    ) -> Result<(), Errno> {
        let mut parts = Parts::new(offset, len, Bytes(1));
        while !parts.is_over() {
            progress.check()?;
            let turn = if at_once { Turn::at_once() } else { disk.turn(self.ring).await };
            let (at, len) = parts.next(&turn);
            let pass = disk.enter_beside_clients().await;
            self.piece(&pass, at, len).await?;
            parts.done(len, len);
        }
        Ok(())
    }

    /// Compares the recorded ranges while no request is in flight.
    async fn what_is_recorded(self, graph: &Graph, progress: &Progress) -> Result<(), Errno> {
        let Some(tracker) = &graph.tracker else { return Err(Errno::IO) };
        let mut at = GuestOffset(0);
        while let Some((offset, len)) = tracker.take(at) {
            progress.check()?;
            for (offset, len) in pieces(offset, offset + len) {
                self.piece(graph, offset, len).await?;
            }
            at = offset + len;
        }
        Ok(())
    }

    /// * `graph`: with the old chain.
    /// * `len`: at most a piece. Bytes past the end of the disk are left out.
    async fn piece(self, graph: &Graph, offset: GuestOffset, len: Bytes) -> Result<(), Errno> {
        graph.check()?;
        let len = len.min(GuestOffset::after(graph.size()).saturating_sub(offset));
        let _graces = graph.graces();
        let top = Chain(&graph.layers[..1]);
        same(self.ring, top, graph.below(0), Chain(self.below), offset, len).await
    }
}

impl Disk {
    /// Writes another backing file into the header of the top image without opening or comparing
    /// it; the disk keeps its layers. For jobs.
    pub(crate) async fn set_backing_name(
        &self,
        ring: &Ring,
        backing: Option<&Backing>,
    ) -> Result<(), Error> {
        let mut drained = self.change(ring).await?;
        let file = backing.map(|backing| backing.file.as_slice());
        let format = backing.map(|backing| backing.format.name());
        self.note_backing(drained.graph().top(), file, format, false)?;
        self.offline(ring, &mut drained, false, async |ring, image| {
            image.set_backing(ring, file, format).await
        })
        .await?;
        self.note_backing(drained.graph().top(), file, format, true)
    }

    /// Updates the note of an image before and after its header names another backing file.
    ///
    /// Errors: only before: the note cannot be changed, so the header must not be either.
    pub(super) fn note_backing(
        &self,
        layer: &Layer,
        file: Option<&[u8]>,
        format: Option<&str>,
        is_done: bool,
    ) -> Result<(), Error> {
        let Some(image) = layer.qcow2() else { return Ok(()) };
        let info = image.info();
        let data = info.data_file.as_deref().filter(|_| info.external_data_file);
        let options = crate::open::storage_options(self.options(), true);
        names_note::follow(image.file(), &Names::new(file, format, data), is_done, &options)
    }
}

/// Compares two chains wherever an internal snapshot of the image above them has nothing itself.
///
/// Errors: `Invalid` with the name of a snapshot that would show other bytes; `Cancelled`; those of
/// the storage.
pub(crate) async fn snapshots_show_the_same(
    ring: &Ring,
    image: &ringdisk_qcow2::Qcow2,
    old: Chain<'_>,
    new: Chain<'_>,
    progress: &Progress,
) -> Result<(), Error> {
    let end = old.size().max(new.size());
    for (index, snapshot) in image.info().snapshots.iter().enumerate() {
        let of_qcow2 = |error: ringdisk_qcow2::Error| crate::open::of_qcow2(&error);
        let mut map = image.snapshot_map(ring, index).await.map_err(of_qcow2)?;
        let (mut at, end) = (GuestOffset(0), GuestOffset::after(end));
        while let Some(range) = map.next_unallocated(ring, at, end).await.map_err(of_qcow2)? {
            for (offset, len) in pieces(range.start, range.end) {
                let compared = match progress.check() {
                    Ok(()) => equal_where_present(ring, old, new, offset, len).await,
                    Err(errno) => Err(errno),
                };
                compared.map_err(|errno| match errno {
                    Errno::ILSEQ => Error::new(
                        ErrorKind::Invalid,
                        format!(
                            "the internal snapshot '{}' shows bytes of the old backing file that \
                             the new one does not have; delete the snapshot first, or copy the \
                             disk with `ringdisk convert`",
                            snapshot.name.escape_debug()
                        ),
                    ),
                    errno => refusal(errno),
                })?;
            }
            at = range.end;
        }
    }
    Ok(())
}

/// Compares a piece of two chains; a range that is known to be zero in both is not read.
///
/// Errors: EILSEQ where they differ; those of the storage.
async fn equal_where_present(
    ring: &Ring,
    old: Chain<'_>,
    new: Chain<'_>,
    offset: GuestOffset,
    len: Bytes,
) -> Result<(), Errno> {
    use ringdisk_qcow2::Below;
    if !old.has_data(offset, len) && !new.has_data(offset, len) {
        return Ok(());
    }
    let (a, b) = (buffer(len), buffer(len));
    old.read(ring, offset, &a).await?;
    new.read(ring, offset, &b).await?;
    if equal(&a, &b) { Ok(()) } else { Err(Errno::ILSEQ) }
}

/// Compares two chains where `top` has nothing. Past its end a chain reads as zeroes.
///
/// Errors: EILSEQ where they differ; those of the storage.
async fn same(
    ring: &Ring,
    top: Chain<'_>,
    old: Chain<'_>,
    new: Chain<'_>,
    offset: GuestOffset,
    len: Bytes,
) -> Result<(), Errno> {
    let end = offset + len;
    let mut at = offset;
    while at < end {
        let (status, _) = top.status(ring, at, end - at).await?;
        if status.len.is_zero() {
            break;
        }
        let run = status.len;
        if !status.present {
            equal_where_present(ring, old, new, at, run).await?;
        }
        at += run;
    }
    Ok(())
}
