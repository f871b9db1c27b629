//! `convert`: copies one disk to another of any format.
//!
//! Promises: ranges that are known to be zero or unallocated are never read; zeroes take no space
//! in the target unless the options ask for it; several pieces are under way at once, and
//! compression runs on helper threads; with the order kept, writes of the target begin in the order
//! of the disk. An error or a cancellation waits for the I/O that was begun, so no write arrives
//! afterwards.
//!
//! Runs on the thread that owns the ring. Source of the behaviour: qemu-img(1), "convert".

mod compress;
mod offload;
mod order;
mod salvage;
mod scan;
mod sources;
#[cfg(test)]
mod tests;
mod walk;
mod work;

use ringdisk_qcow2::{Bytes, GuestOffset};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::limits::SECTOR_BYTES;
use crate::name::printable_path;
use crate::{Disk, Error, ErrorKind, Progress};

use compress::Packing;
use order::Order;
use salvage::Unreadable;
use sources::Sources;
use walk::Walk;

/// Bytes of one copy: enough for a storage to be efficient, and with [`TASKS_MAX`] of them still
/// less than the cache of a CPU.
const CHUNK_BYTES: Bytes = Bytes(1 << 20);
/// Most pieces under way (QEMU's limit).
pub const TASKS_MAX: usize = 16;
/// Default of the pieces under way (QEMU's).
pub const TASKS_DEFAULT: usize = 8;
/// Default of the zeroes in a row that take no space, bytes (QEMU's).
pub const SPARSE_BYTES_DEFAULT: Bytes = Bytes(4096);
/// Alignment of buffers: a page suits every storage.
const BUFFER_ALIGN: usize = 4096;

/// Options of a conversion.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Pieces under way at once, 1 to [`TASKS_MAX`] (`-m`).
    pub tasks: usize,
    /// Writes need not begin in the order of the disk (`-W`).
    pub out_of_order: bool,
    /// Zeroes in a row that take no space, bytes (`-S`). 0: all zeroes are written, so the target
    /// is fully allocated.
    pub sparse_bytes: Bytes,
    /// Write compressed clusters (`-c`), of the target's compression type.
    pub compressed: bool,
    /// Level of the compression; `None`: the usual one.
    pub level: Option<i32>,
    /// The target reads as zeroes: it is new, or the user states it (`--target-is-zero`).
    pub target_is_zero: bool,
    /// The target has a backing file with the content of the source's backing file (`-B`): only the
    /// data of the source's top image is copied.
    pub target_has_backing: bool,
    /// Ranges that cannot be read become zeroes (`--salvage`).
    pub salvage: bool,
    /// Only these ranges are copied, in bytes of the disk, as a checkpoint has them: in order,
    /// without overlaps. `None`: all.
    pub only: Option<Arc<[Range<u64>]>>,
    /// The file system copies where it can (`-C`), by reference where it has that; zeroes inside of
    /// data are not looked for then.
    pub copy_range: bool,
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        ConvertOptions {
            tasks: TASKS_DEFAULT,
            out_of_order: false,
            sparse_bytes: SPARSE_BYTES_DEFAULT,
            compressed: false,
            level: None,
            target_is_zero: false,
            target_has_backing: false,
            salvage: false,
            only: None,
            copy_range: false,
        }
    }
}

/// Report of a conversion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConvertReport {
    /// Bytes that were read from the source.
    pub read_bytes: Bytes,
    /// Bytes of the disk that were written as data (compressed or not).
    pub written_bytes: Bytes,
    /// Ranges of the disk that could not be read and became zeroes, in order; at most
    /// [`UNREADABLE_MAX`] of them.
    pub unreadable: Vec<Range<GuestOffset>>,
    /// All bytes that could not be read.
    pub unreadable_bytes: Bytes,
}

pub use salvage::UNREADABLE_MAX;

/// State that all tasks of a conversion share.
struct Conversion<'a> {
    ring: &'a Ring,
    source: &'a Sources<'a>,
    target: &'a Disk,
    options: &'a ConvertOptions,
    progress: &'a Progress,
    walk: Walk<'a>,
    order: Order,
    packing: Option<Packing>,
    /// Buffers of clusters, for the next ones; as many as are compressed at once.
    spare: RefCell<Vec<Vec<u8>>>,
    failure: RefCell<Option<Failure>>,
    report: RefCell<ConvertReport>,
    unreadable: RefCell<Unreadable>,
    /// The file system has refused to copy.
    is_range_refused: Cell<bool>,
}

/// Why a conversion ends early.
#[derive(Clone, Copy, Debug)]
struct Failure {
    doing: Doing,
    offset: GuestOffset,
    errno: Errno,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Looking,
    Reading,
    Writing,
}

impl Failure {
    fn new(doing: Doing, offset: GuestOffset, errno: Errno) -> Failure {
        Failure { doing, offset, errno }
    }
}

/// Copies `sources`, one behind the other, to `target` and flushes it. The target has at least
/// their size; bytes past that stay as they are.
///
/// * `progress`: total is the size of the sources.
///
/// Errors: `Invalid` for options that make no sense or a target that is too small, `Unsupported`
/// for a compressed target that is not qcow2, `Cancelled`; those of source and target, with the
/// offset.
pub async fn convert(
    ring: &Ring,
    sources: &[Arc<Disk>],
    target: &Disk,
    options: &ConvertOptions,
    progress: &Progress,
) -> Result<ConvertReport, Error> {
    let source = &Sources::new(sources);
    check(source, target, options)?;
    let packing = if options.compressed { Some(Packing::of(target, options)?) } else { None };
    progress.set_total(source.size());
    let unit = packing.as_ref().map(Packing::cluster_bytes);
    let conversion = Conversion {
        ring,
        source,
        target,
        options,
        progress,
        walk: Walk::new(source, options, unit, CHUNK_BYTES.max(unit.unwrap_or_default())),
        order: Order::new(!options.out_of_order),
        packing,
        spare: RefCell::default(),
        failure: RefCell::default(),
        report: RefCell::default(),
        unreadable: RefCell::default(),
        is_range_refused: Cell::new(false),
    };
    join_all((0..options.tasks).map(|_| conversion.task())).await;
    if let Some(failure) = conversion.failure.take() {
        return Err(conversion.error(failure));
    }
    let mut report = conversion.report.take();
    (report.unreadable, report.unreadable_bytes) = conversion.unreadable.take().finish();
    target
        .flush(ring)
        .await
        .map_err(|errno| Error::os(format!("cannot flush '{}'", name(target)), errno))?;
    progress.finish();
    Ok(report)
}

fn check(source: &Sources<'_>, target: &Disk, options: &ConvertOptions) -> Result<(), Error> {
    let invalid = |message: String| Err(Error::new(ErrorKind::Invalid, message));
    if options.tasks == 0 || options.tasks > TASKS_MAX {
        return invalid(format!("the number of coroutines must be from 1 to {TASKS_MAX}"));
    }
    if !options.sparse_bytes.is_multiple_of(SECTOR_BYTES) {
        return invalid(format!("the sparse size must be a multiple of {SECTOR_BYTES} bytes"));
    }
    if options.target_is_zero && options.target_has_backing {
        return invalid("a target with a backing file does not read as zeroes".to_owned());
    }
    if target.size() < source.size() {
        let (source_size, target_size) = (source.size(), target.size());
        return invalid(format!(
            "'{}' has {target_size} bytes, fewer than the {source_size} of '{}'; resize it first",
            name(target),
            source.names()
        ));
    }
    Ok(())
}

fn name(disk: &Disk) -> String {
    disk.layers().first().map(|layer| printable_path(layer.name())).unwrap_or_default()
}

impl Conversion<'_> {
    /// Takes piece after piece until there are no more, or something failed.
    async fn task(&self) {
        let chunk = usize::try_from(self.walk.chunk_bytes()).unwrap_or(usize::MAX);
        let buf = IoBuf::new(chunk, BUFFER_ALIGN);
        while self.failure.borrow().is_none() {
            let piece = match self.walk.next(self.ring, self.progress).await {
                Ok(Some(piece)) => piece,
                Ok(None) => return,
                Err(failure) => return self.fail(failure),
            };
            let result = self.copy(&piece, &buf).await;
            if let Err(failure) = result {
                return self.fail(failure);
            }
            // A piece that the file system copied may be done before its turn has come.
            self.order.turn(piece.number).await;
            self.order.pass(piece.number);
            self.progress.add_done(piece.len);
        }
    }

    /// Ends all tasks after what they are doing. The failure nearest to the start of the disk
    /// counts.
    fn fail(&self, failure: Failure) {
        let mut first = self.failure.borrow_mut();
        if first.is_none_or(|first| failure.offset < first.offset) {
            *first = Some(failure);
        }
        drop(first);
        self.order.abandon();
    }

    fn error(&self, failure: Failure) -> Error {
        let Failure { doing, offset, errno } = failure;
        if errno == Errno::CANCELED {
            return Error::os("the conversion was ended early", errno);
        }
        let (from, at) = self.source.place(offset);
        let doing = match doing {
            Doing::Looking => return super::cannot_look_up(&from, at, errno),
            Doing::Reading => format!("cannot read '{from}' at byte {at}"),
            Doing::Writing => format!("cannot write '{}' at byte {offset}", name(self.target)),
        };
        Error::os(doing, errno)
    }
}
