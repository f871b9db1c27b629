//! Another backing file for a disk that is in use.
//!
//! Promises: the new chain is compared with the old one wherever the top, or an internal snapshot
//! of it, has nothing itself, so no client sees another byte, now or after a snapshot is applied;
//! only then the header names it. What clients change meanwhile is noted and compared again, the
//! last of it while nobody works: a discard may uncover what was hidden when it was compared. They
//! may change the size of the disk, too (`resize_in_commit.rs`).

use std::iter;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ringdisk_qcow2::GuestOffset;
use ringdisk_ring::{Errno, Ring};
use ringdisk_storage::{Kind, Storage};
use rustix::fs::{AtFlags, CWD, StatxFlags, major, makedev, minor, statx};

use super::copy::{all_of, buffer, equal, pieces};
use super::{Busy, Tracker, check_lasting, offline_layer};
use crate::chain::Chain;
use crate::graph::Graph;
use crate::layer::Layer;
use crate::name::{printable, printable_path};
use crate::names_note::{self, Names};
use crate::open::open_below;
use crate::{Disk, Error, ErrorKind, Format, Progress, lost};

/// What is left is compared while nobody works when it is no more than this, bytes: some ten
/// milliseconds.
const LAST_PASS_BYTES: u64 = 4 << 20;
/// Or after so many passes.
const PASSES_MAX: u32 = 16;

/// The backing file that an image shall name.
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
        let turn = self.turns().enter().await;
        self.check_free()?;
        let graph = self.graph();
        super::reopen::check(graph.top())?;
        // The old backing files may have lost their names: that is a reason to name another one.
        lost::check("change the backing file", [&**graph.top()])?;
        let named = backing.map(|it| (it.file, Some(it.format.name().to_owned())));
        let (full, below) = match &named {
            None => (None, Vec::new()),
            Some(named) => {
                let file = printable(&named.0);
                let (full, below) = open_below(ring, self.options(), graph.top(), named.clone())
                    .await
                    .map_err(|error| error.context(format!("backing file '{file}'")))?;
                (Some(full), below)
            }
        };
        self.check_others(&below)?;
        let below: Vec<Arc<Layer>> = below.into_iter().map(Arc::new).collect();
        let tracker = Arc::new(Tracker::new(graph.size()));
        let mut drained = self.gateway().drain(ring, turn).await;
        // Clients may change the size meanwhile; every other change is refused.
        let busy = Busy::begin(self)?;
        drained.replace(noting(&graph, Some(&tracker)));
        drop(drained);

        let comparison = Comparison { ring, below: &below };
        let compared = comparison.run(self, progress).await;
        let of_snapshots = match (compared, graph.top_image()) {
            (Ok(()), Some(image)) => {
                // Tables of snapshots do not change meanwhile, also where the image was opened
                // again.
                snapshots_show_the_same(ring, image, graph.below(0), Chain(&below), progress).await
            }
            _ => Ok(()),
        };
        let turn = self.turns().enter().await;
        let mut drained = self.gateway().drain(ring, turn).await;
        let compared = match compared {
            Ok(()) => comparison.what_is_noted(drained.graph(), progress).await,
            Err(errno) => Err(errno),
        };
        let graph = Arc::new(noting(drained.graph(), None));
        drained.replace(Graph::clone(&graph));
        compared.map_err(refusal)?;
        of_snapshots?;
        // Comparing takes long, and the header names the first of these now.
        lost::check(
            "change the backing file",
            iter::once(&**graph.top()).chain(below.iter().map(|it| &**it)),
        )?;

        let (file, format) = match &named {
            Some((file, format)) => (Some(file.as_slice()), format.as_deref()),
            None => (None, None),
        };
        self.note_backing(graph.top(), file, format, false);
        let (mut top, result) =
            offline_layer(ring, self, &mut drained, graph.top(), async |ring, image| {
                let (file, format) = match &named {
                    Some((file, format)) => (Some(file.as_slice()), format.as_deref()),
                    None => (None, None),
                };
                image.set_backing(ring, file, format).await
            })
            .await?;
        if let Err(error) = result {
            let mut layers = graph.layers.clone();
            layers[0] = Arc::new(top);
            self.put(&mut drained, graph.with_layers(layers), false);
            return Err(error);
        }
        self.note_backing(&top, file, format, true);
        top.full_backing_name = full;
        let mut layers = vec![Arc::new(top)];
        layers.extend(below);
        self.put(&mut drained, graph.with_layers(layers), false);
        drop(busy);
        Ok(())
    }
}

impl Disk {
    /// Errors: `Invalid` where one of the layers is the disk itself.
    fn check_others(&self, layers: &[Layer]) -> Result<(), Error> {
        let own = self.shown_on.load(Ordering::Acquire);
        let lies_on = |storage: &Storage| match storage.kind() {
            Kind::BlockDevice => behind_loop_device(storage) == Some(own),
            _ => storage.identity().is_some_and(|(on, _)| on == own),
        };
        let is_own = |layer: &&Layer| own != 0 && layer.storages().any(|it| lies_on(it));
        let Some(layer) = layers.iter().find(is_own) else { return Ok(()) };
        let name = printable_path(layer.name());
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "'{name}' is this very disk as it is mounted, which cannot lie below itself; name an image"
            ),
        ))
    }
}

/// The device number of the file system that the file of a loop device lies on. `None`: it is no
/// loop device, or its file has no name here.
fn behind_loop_device(device: &Storage) -> Option<u64> {
    let (number, _) = device.identity()?;
    let place = format!("/sys/dev/block/{}:{}", major(number), minor(number));
    // Of a partition: beside it.
    let file = ["loop/backing_file", "../loop/backing_file"]
        .into_iter()
        .find_map(|name| std::fs::read_to_string(format!("{place}/{name}")).ok())?;
    // Its server, which may be us, is not asked.
    let (quietly, nothing) = (AtFlags::STATX_DONT_SYNC, StatxFlags::empty());
    let found = statx(CWD, file.trim_end_matches('\n'), quietly, nothing).ok()?;
    Some(makedev(found.stx_dev_major, found.stx_dev_minor))
}

/// The same graph, with or without a note of what is changed.
fn noting(graph: &Graph, tracker: Option<&Arc<Tracker>>) -> Graph {
    let mut next = graph.clone();
    next.tracker = tracker.cloned();
    next
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
    /// Compares everything while clients work, and what they change meanwhile until little is left.
    async fn run(self, disk: &Disk, progress: &Progress) -> Result<(), Errno> {
        // It is another one when the size of the disk has changed.
        let tracker = || disk.graph().tracker.clone();
        let size = disk.graph().size();
        progress.set_total(size);
        let mut ranges = pieces(0, size);
        all_of(|| {
            let (offset, len) = ranges.next()?;
            let tracker = tracker();
            Some(async move {
                // Before it is looked at: what changes from now on is noted again.
                if let Some(tracker) = tracker {
                    tracker.clear(offset, len);
                }
                self.beside_clients(disk, offset, len, progress).await?;
                progress.add_done(len);
                Ok(())
            })
        })
        .await?;
        let mut before = u64::MAX;
        for _ in 0..PASSES_MAX {
            let Some(tracker) = tracker() else { break };
            let left = tracker.bytes();
            if left <= LAST_PASS_BYTES || left > before / 2 {
                break;
            }
            before = left;
            let mut at = 0;
            all_of(|| {
                let (offset, len) = tracker.take(at)?;
                at = offset + len;
                Some(async move {
                    for (offset, len) in pieces(offset, offset + len) {
                        self.beside_clients(disk, offset, len, progress).await?;
                    }
                    Ok(())
                })
            })
            .await?;
        }
        Ok(())
    }

    /// Compares one piece, as one request among those of the clients.
    async fn beside_clients(
        self,
        disk: &Disk,
        offset: u64,
        len: u64,
        progress: &Progress,
    ) -> Result<(), Errno> {
        progress.check()?;
        let pass = disk.enter().await;
        self.piece(&pass, offset, len).await
    }

    /// Compares what is noted while nobody works.
    async fn what_is_noted(self, graph: &Graph, progress: &Progress) -> Result<(), Errno> {
        let Some(tracker) = &graph.tracker else { return Err(Errno::IO) };
        let mut at = 0;
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
    /// * `len`: at most a piece. What lies past the end of the disk is left out.
    async fn piece(self, graph: &Graph, offset: u64, len: u64) -> Result<(), Errno> {
        graph.check()?;
        let len = len.min(graph.size().saturating_sub(offset));
        let _graces = graph.graces();
        let top = Chain(&graph.layers[..1]);
        same(self.ring, top, graph.below(0), Chain(self.below), offset, len).await
    }
}

impl Disk {
    /// Writes another backing file into the header of the top image; nothing is opened or compared,
    /// and the disk goes on with the layers that it has. For jobs.
    pub(crate) async fn set_backing_name(
        &self,
        ring: &Ring,
        backing: Option<&Backing>,
    ) -> Result<(), Error> {
        let mut drained = self.change(ring).await?;
        let file = backing.map(|backing| backing.file.as_slice());
        let format = backing.map(|backing| backing.format.name());
        self.note_backing(drained.graph().top(), file, format, false);
        self.offline(ring, &mut drained, false, async |ring, image| {
            image.set_backing(ring, file, format).await
        })
        .await?;
        self.note_backing(drained.graph().top(), file, format, true);
        Ok(())
    }

    /// The header of an image names another backing file, or is about to: so does the note at it.
    pub(super) fn note_backing(
        &self,
        layer: &Layer,
        file: Option<&[u8]>,
        format: Option<&str>,
        is_done: bool,
    ) {
        let Some(image) = layer.qcow2() else { return };
        let info = image.info();
        let data = info.data_file.as_deref().filter(|_| info.external_data_file);
        let options = crate::open::storage_options(self.options(), true);
        names_note::follow(image.file(), &Names::new(file, format, data), is_done, &options);
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
        let (mut at, end) = (GuestOffset(0), GuestOffset(end));
        while let Some(range) = map.next_unallocated(ring, at, end).await.map_err(of_qcow2)? {
            for (offset, len) in pieces(range.start.0, range.end.0) {
                let compared = match progress.check() {
                    Ok(()) => equal_where_present(ring, old, new, offset, len).await,
                    Err(errno) => Err(errno),
                };
                compared.map_err(|errno| match errno {
                    Errno::ILSEQ => Error::new(
                        ErrorKind::Invalid,
                        format!(
                            "the internal snapshot '{}' shows bytes of the old backing file that the new one \
                             does not have; delete the snapshot first, or copy the disk with `ringdisk convert`",
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

/// Compares a piece of two chains; what is known to be zero in both is not read.
///
/// Errors: EILSEQ where they differ; those of the storage.
async fn equal_where_present(
    ring: &Ring,
    old: Chain<'_>,
    new: Chain<'_>,
    offset: u64,
    len: u64,
) -> Result<(), Errno> {
    use ringdisk_qcow2::Below;
    if !old.has_data(GuestOffset(offset), len) && !new.has_data(GuestOffset(offset), len) {
        return Ok(());
    }
    let (a, b) = (buffer(len), buffer(len));
    old.read(ring, GuestOffset(offset), &a).await?;
    new.read(ring, GuestOffset(offset), &b).await?;
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
    offset: u64,
    len: u64,
) -> Result<(), Errno> {
    let end = offset + len;
    let mut at = offset;
    while at < end {
        let (status, _) = top.status(ring, at, end - at).await?;
        if status.len == 0 {
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
