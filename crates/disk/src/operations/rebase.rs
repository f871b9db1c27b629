//! Changes the backing file of an image that is not served.
//!
//! Promises: in safe mode the disk reads the same before, during and after the rebase: wherever the
//! image has no data and the two chains differ, the bytes of the old chain are copied into the
//! image, and are on stable storage before the header names the new backing file. The rebase is
//! refused where an internal snapshot would read other bytes, since nothing can be copied into a
//! snapshot. In unsafe mode only the header changes. A rebase that is cancelled, or crashes, leaves
//! an image that reads the same (it may be larger).

use std::path::PathBuf;
use std::sync::Arc;

use ringdisk_qcow2::{Below, Bytes, CompressionType, GuestOffset, compress};
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::chain::Chain;
use crate::layer::{Layer, Node};
use crate::live::{all_of, buffer, equal, pieces, snapshots_show_the_same};
use crate::name::{FileName, printable};
use crate::open::{identity_of, open_below};
use crate::{AllowedHost, Backing, Cause, Disk, Error, ErrorKind, ImageOptions, Progress, Source};

/// Differences are found in units of this, bytes, or of a cluster where that is larger.
const UNIT_MIN: Bytes = Bytes(64 << 10);

/// Options of `qemu-img rebase`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rebase {
    /// The new backing file; `None`: no backing file, so the image holds all data itself.
    pub backing: Option<Backing>,
    /// Only the header changes (`-u`): the old backing file may be gone, and the caller knows that
    /// the new one has the same content.
    pub header_only: bool,
    /// What is copied into the image is compressed (`-c`).
    pub compressed: bool,
}

/// Gives an image another backing file.
///
/// * `image`: the image; opened here, since with `header_only` its old chain need not be there.
/// * `options`: how to open it; the directory of the new backing file is allowed besides.
///
/// Errors: those of opening the image and both chains; `Unsupported` for other formats than qcow2;
/// `Invalid` where an internal snapshot would show other bytes; `Cancelled`; those of the storage.
pub async fn rebase(
    ring: &Ring,
    image: PathBuf,
    options: &ImageOptions,
    rebase: &Rebase,
    progress: &Arc<Progress>,
) -> Result<(), Error> {
    let mut options = ImageOptions { without_backing: rebase.header_only, ..options.clone() };
    if let Some(backing) = &rebase.backing {
        allow(&mut options, &image, backing)?;
    }
    let disk = Disk::open(ring, Source::Path(image), &options).await?;
    let result = run(ring, &disk, rebase, progress).await;
    let closed = disk.close(ring).await;
    result?;
    closed.map_err(|errno| Error::os("cannot write the image to stable storage", errno))?;
    progress.finish();
    Ok(())
}

/// Allows the directory of the new backing file, since the user named it.
fn allow(
    options: &mut ImageOptions,
    image: &std::path::Path,
    backing: &Backing,
) -> Result<(), Error> {
    let name = FileName::parse(&backing.file)?;
    if let Some(address) = name.nbd {
        options.allow_hosts.push(AllowedHost::Server(address.server));
        return Ok(());
    }
    let path = crate::name::beside(image, &name);
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let directory = directory.map_or_else(|| PathBuf::from("."), std::path::Path::to_path_buf);
    if directory.is_dir() {
        options.known_paths.push(directory);
    }
    Ok(())
}

async fn run(
    ring: &Ring,
    disk: &Disk,
    rebase: &Rebase,
    progress: &Arc<Progress>,
) -> Result<(), Error> {
    if disk.is_read_only() {
        let reason = disk.read_only_reason().unwrap_or("the image is open for reading only");
        return Err(Error::new(ErrorKind::PermissionDenied, reason));
    }
    if rebase.compressed && Packing::of(disk).is_err() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the image cannot hold compressed clusters; only qcow2 images without an external \
             data file can",
        )
        .because(Cause::NotCompressible));
    }
    if !rebase.header_only {
        let below = match &rebase.backing {
            None => Vec::new(),
            Some(backing) => {
                let named = (backing.file.clone(), Some(backing.format.name().to_owned()));
                let file = printable(&backing.file);
                let graph = disk.graph();
                let (_, layers) = open_below(ring, disk.options(), graph.top(), named)
                    .await
                    .map_err(|error| error.of_backing_file(&file, ""))?;
                layers.into_iter().map(Arc::new).collect()
            }
        };
        let graph = disk.graph();
        if let Some(image) = graph.top_image() {
            let (old, new) = (graph.below(0), Chain(&below));
            snapshots_show_the_same(ring, image, old, new, progress).await?;
        }
        copy_what_differs(ring, disk, rebase, &below, progress).await.map_err(|errno| {
            Error::os("cannot copy what the new backing file does not have", errno)
        })?;
        disk.flush(ring).await.map_err(|errno| Error::os("cannot flush the image", errno))?;
    }
    disk.set_backing_name(ring, rebase.backing.as_ref()).await
}

/// Copies ranges in which the chains differ from the old chain into the top image.
async fn copy_what_differs(
    ring: &Ring,
    disk: &Disk,
    rebase: &Rebase,
    new: &[Arc<Layer>],
    progress: &Progress,
) -> Result<(), Errno> {
    let graph = disk.graph();
    let top = Chain(graph.layers.get(..1).unwrap_or_default());
    let old = graph.below(0);
    // If the new backing file is in the old chain, only the layers above it can differ.
    let above = shared(old, new).map(|index| Chain(old.0.get(..index).unwrap_or_default()));
    let unit = top
        .0
        .first()
        .and_then(|layer| layer.qcow2())
        .map_or(UNIT_MIN, |image| image.info().cluster_size().max(UNIT_MIN));
    let packing = if rebase.compressed { Some(Packing::of(disk)?) } else { None };
    let work = Work { ring, disk, top, old, new: Chain(new), above, unit, packing };
    progress.set_total(graph.size());
    let mut ranges = pieces(GuestOffset(0), GuestOffset::after(graph.size()));
    all_of(|| {
        let (offset, len) = ranges.next()?;
        Some(async move {
            progress.check()?;
            work.range(offset, len).await?;
            progress.add_done(len);
            Ok(())
        })
    })
    .await
}

/// Index in the old chain at which the complete new chain begins. (All layers are compared, since a
/// name can exclude the layers below its file.)
fn shared(old: Chain<'_>, new: &[Arc<Layer>]) -> Option<usize> {
    let index = old.0.len().checked_sub(new.len()).filter(|_| !new.is_empty())?;
    let is_shared = old.0.iter().skip(index).zip(new).all(|(old, new)| is_same(old, new));
    is_shared.then_some(index)
}

/// Whether two layers are the same part of one file in the same format.
fn is_same(a: &Layer, b: &Layer) -> bool {
    let identity = |layer: &Layer| layer.file().and_then(|file| identity_of(file));
    let is_one_file = identity(a).is_some() && identity(a) == identity(b);
    is_one_file
        && match (&a.node, &b.node) {
            (Node::Raw(ours), Node::Raw(theirs)) => {
                ours.offset == theirs.offset && a.size() == b.size()
            }
            (Node::Qcow2(_), Node::Qcow2(_)) => true,
            _ => false,
        }
}

/// The old chain, which will be gone: zeroes that it shows must be in the image too.
struct Opaque<'a>(Chain<'a>);

impl Below for Opaque<'_> {
    async fn read(&self, ring: &Ring, offset: GuestOffset, buf: &IoBuf) -> Result<(), Errno> {
        self.0.read(ring, offset, buf).await
    }

    fn has_data(&self, _offset: GuestOffset, _len: Bytes) -> bool {
        true
    }
}

/// What is done with a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Same,
    Zeroes,
    Data,
}

/// The chains to compare, and the target of the copies.
#[derive(Clone, Copy)]
struct Work<'a> {
    ring: &'a Ring,
    disk: &'a Disk,
    top: Chain<'a>,
    old: Chain<'a>,
    new: Chain<'a>,
    above: Option<Chain<'a>>,
    unit: Bytes,
    packing: Option<Packing>,
}

/// Compression of what is copied.
#[derive(Clone, Copy)]
struct Packing {
    kind: CompressionType,
    /// Bytes of a cluster.
    cluster: Bytes,
}

impl Packing {
    /// Errors: EOPNOTSUPP for an image that cannot hold compressed clusters.
    fn of(disk: &Disk) -> Result<Packing, Errno> {
        let graph = disk.graph();
        let info = graph.top_image().map(|image| image.info());
        let info = info.filter(|info| !info.external_data_file).ok_or(Errno::OPNOTSUPP)?;
        Ok(Packing { kind: info.compression, cluster: info.cluster_size() })
    }
}

impl Work<'_> {
    async fn range(self, offset: GuestOffset, len: Bytes) -> Result<(), Errno> {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let (status, _) = self.top.status(self.ring, at, end - at).await?;
            if status.len.is_zero() {
                break;
            }
            if !status.present {
                self.hole(at, at + status.len).await?;
            }
            at += status.len;
        }
        Ok(())
    }

    /// Handles a range that is not allocated in the image.
    async fn hole(self, start: GuestOffset, end: GuestOffset) -> Result<(), Errno> {
        let mut at = start;
        while at < end {
            let (old_zero, old_len) = self.known(self.old, at, end).await?;
            let (new_zero, new_len) = self.known(self.new, at, end).await?;
            let mut run = old_len.min(new_len);
            let mut same = old_zero && new_zero;
            if let Some(above) = self.above
                && at < above.end()
                && !same
            {
                let len = run.min(above.end() - at);
                let (status, is_cut) = above.status(self.ring, at, len).await?;
                if !status.present && !is_cut && !status.len.is_zero() {
                    (same, run) = (true, run.min(status.len));
                }
            }
            if same {
                at += run;
                continue;
            }
            let (from, to) = match self.packing {
                None => (at, at + run),
                // Whole clusters, since only these can be compressed.
                Some(Packing { cluster, .. }) => {
                    let after = at + run + (cluster - Bytes(1));
                    (at.align_down(cluster).max(start), after.align_down(cluster).min(end))
                }
            };
            self.compare(from, to - from).await?;
            at = to;
        }
        Ok(())
    }

    /// Whether a chain is known to have zeroes at `at`, and for how many bytes.
    async fn known(
        self,
        chain: Chain<'_>,
        at: GuestOffset,
        end: GuestOffset,
    ) -> Result<(bool, Bytes), Errno> {
        let left = chain.end().saturating_sub(at);
        if left.is_zero() {
            return Ok((true, end - at));
        }
        let (status, _) = chain.status(self.ring, at, left.min(end - at)).await?;
        Ok((status.zero, status.len.max(Bytes(1))))
    }

    /// Copies the units that differ, neighbours in one write: they get neighbouring clusters.
    ///
    /// * `len`: at most the length of a piece.
    async fn compare(self, at: GuestOffset, len: Bytes) -> Result<(), Errno> {
        let (old, new) = (buffer(len), buffer(len));
        self.old.read(self.ring, at, &old).await?;
        self.new.read(self.ring, at, &new).await?;
        let kind = |start: usize, end: usize| {
            let (old, new) = (old.slice(start..end), new.slice(start..end));
            match equal(&old, &new) {
                true => Unit::Same,
                false if old.is_zero() => Unit::Zeroes,
                false => Unit::Data,
            }
        };
        // Inside the buffers.
        let unit_end = |start: usize| {
            let end = (at + Bytes::of(start)).align_down(self.unit) + self.unit - at;
            usize::try_from(end).unwrap_or(usize::MAX).min(old.len())
        };
        let mut start = 0;
        while start < old.len() {
            let mut end = unit_end(start);
            let what = kind(start, end);
            while end < old.len() && kind(end, unit_end(end)) == what {
                end = unit_end(end);
            }
            let offset = at + Bytes::of(start);
            match what {
                Unit::Same => {}
                Unit::Zeroes => {
                    let graph = self.disk.graph();
                    let image = graph.top_image().ok_or(Errno::OPNOTSUPP)?;
                    let len = Bytes::of(end - start);
                    image.write_zeroes(self.ring, offset, len, true, &Opaque(self.old)).await?;
                }
                Unit::Data => self.put(offset, &old.slice(start..end)).await?,
            }
            start = end;
        }
        Ok(())
    }

    /// Writes a range, its whole clusters compressed if that was asked for.
    async fn put(self, at: GuestOffset, old: &IoBuf) -> Result<(), Errno> {
        let Some(Packing { kind, cluster }) = self.packing else {
            return self.write(at, old).await;
        };
        let disk_end = GuestOffset::after(self.disk.size());
        let mut done = 0;
        while done < old.len() {
            let offset = at + Bytes::of(done);
            let border = offset.align_down(cluster) + cluster - at;
            let end = usize::try_from(border).unwrap_or(usize::MAX).min(old.len());
            let part = old.slice(done..end);
            let part_len = Bytes::of(part.len());
            // The last cluster of a disk may be shorter.
            let is_whole = offset.is_multiple_of(cluster)
                && (part_len == cluster || offset + part_len == disk_end);
            let packed = match is_whole {
                false => None,
                true => {
                    let mut bytes = vec![0; usize::try_from(cluster).unwrap_or(usize::MAX)];
                    part.copy_to_slice(0, &mut bytes[..part.len()]);
                    self.ring.offload(move || compress(kind, None, &bytes)).await
                }
            };
            let written = match packed {
                None => Err(Errno::EXIST),
                Some(bytes) => self.disk.write_compressed(self.ring, offset.0, &bytes).await,
            };
            match written {
                // It does not become smaller, or a part of it is in the image already.
                Err(Errno::EXIST) => self.write(offset, &part).await?,
                result => result?,
            }
            done = end;
        }
        Ok(())
    }

    async fn write(self, at: GuestOffset, old: &IoBuf) -> Result<(), Errno> {
        self.disk.write_all(self.ring, at.0, old).await
    }
}
