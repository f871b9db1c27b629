//! Check and repair of an image that no other program uses.
//!
//! Promises:
//! - A check writes nothing. It finds what `qemu-img check` finds and counts it in the same way,
//!   reads every table once, and takes about one byte of memory for each cluster in use, up to
//!   [`limits::CHECK_BYTES_MAX`](crate::limits::CHECK_BYTES_MAX).
//! - Whatever the image holds, a check or repair ends with a report or an error: no panic, no
//!   endless loop.
//! - A repair that is cut off at any point leaves an image that is no worse than before (module
//!   `repair`).
//!
//! Where QEMU stops at a refcount block that is not aligned the verdict is the same, but the rest
//! is checked too. What QEMU does not look for is counted in [`CheckReport::own_findings`] as well.
//! A bitmap that it does not open an image with is damage here, which a repair removes. Tables
//! past the end of the file read as zeroes, as it reads them.
//!
//! It works on storage, not on an open image, so that it can check what cannot be opened.
//! Control threads; the ring that it is given serves its reads.

mod bitmaps;
mod compare;
mod counts;
mod image;
mod layout;
mod lost_bitmaps;
mod overlaps;
mod plan;
mod rebuild;
mod refcount;
mod repair;
mod report;
mod scan;
mod source;
mod stop;
mod tables;
#[cfg(test)]
mod tests;
mod walk;

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringdisk_ring::Ring;
use ringdisk_storage::Storage;

use crate::error::Error;
use crate::header::{self, Header, Subject};
use crate::limits::{SECTOR, SECTOR_LEN};
use crate::units::{Bytes, HostOffset};

use compare::Compared;
use scan::Scan;
use source::{Memory, Reader, Source};
use stop::Stop;

pub use report::{CheckHooks, CheckReport, CheckVerdict};
pub use source::ImageBytes;

/// What a check may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Repair {
    /// Nothing.
    #[default]
    Nothing,
    /// Only clusters that are counted as used and are not.
    Leaks,
    /// Everything that can be repaired.
    All,
}

/// How to check.
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckOptions {
    /// What may be changed.
    pub repair: Repair,
}

/// Bytes that are read first: enough for the whole first cluster in most images.
const FIRST_READ_BYTES: Bytes = Bytes(64 << 10);

/// Checks the image in `file`, which no other program may use meanwhile.
///
/// * `data_file`: the external data file, where the image has one. Only its length is used;
///   `None`: every place of it is taken to be there.
///
/// Errors: `Corrupt` when the header or a directory cannot be understood, `Cancelled`, `TooLarge`,
/// `Io`, and what the header asks for that we do not have.
pub async fn check(
    ring: &Ring,
    file: &Arc<Storage>,
    data_file: Option<&Arc<Storage>>,
    options: &CheckOptions,
    hooks: CheckHooks<'_>,
) -> Result<CheckReport, Error> {
    let data_len = data_file.map(|data| Bytes(data.len()));
    let result = async {
        if options.repair != Repair::Nothing {
            return repair::repair(ring, (file, data_len), options.repair, hooks).await;
        }
        let reader = Reader { ring, storage: file, data_len };
        let header = read_header(&reader, file.name()).await?;
        examine(&reader, &header, hooks).await.map(|(report, _, _)| report)
    };
    // Boxed: the many steps of a repair make a large future.
    Box::pin(result).await.map_err(|stop| stop.into_check_error(file.name()))
}

/// Makes the refcounts of an image right that was not closed cleanly, in new structures beside the
/// old ones, and takes the dirty bit off in the same sector that leads to them. For an open for
/// writing; no other program may use the image.
///
/// * `header`: as read from `file`; it has to be read again afterwards.
///
/// Errors: as [`check`]; `Corrupt` when the refcounts cannot be made right. The image is then as it
/// was.
pub(crate) async fn rebuild_refcounts(
    ring: &Ring,
    file: &Arc<Storage>,
    header: &Header,
) -> Result<(), Error> {
    let image = image::Image { ring, storage: file, header, data_len: None };
    let rebuilt = repair::rebuild_dirty(image, CheckHooks::none());
    Box::pin(rebuilt).await.map_err(|stop| stop.into_error(file.name()))
}

/// Checks an image in memory, without a ring and without changing it. For tests that judge many
/// images.
///
/// Errors: as [`check`].
pub fn check_bytes<B: ImageBytes + ?Sized>(image: &B) -> Result<CheckReport, Error> {
    let source = Memory(image);
    let name = "image in memory";
    let future = pin!(async {
        let header = read_header(&source, name).await?;
        examine(&source, &header, CheckHooks::none()).await
    });
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => {
            result.map(|(report, _, _)| report).map_err(|stop| stop.into_check_error(name))
        }
        // Reads from memory are ready at once.
        Poll::Pending => Err(Error::corrupt(name, "the check waits for memory")),
    }
}

async fn read_header(source: &impl Source, name: &str) -> Result<Header, Stop> {
    let read = async |len: Bytes| {
        // At most 2 MiB, the largest cluster.
        let len = usize::try_from(len.min(source.len())).unwrap_or(0);
        source.read("reading the qcow2 header", HostOffset(0), len).await
    };
    let mut head = read(FIRST_READ_BYTES).await?;
    let wanted = header::wanted_bytes(&head).filter(|_| header::is_qcow2(&head));
    if let Some(wanted) = wanted
        && wanted > FIRST_READ_BYTES
    {
        head = read(wanted).await?;
    }
    // Tables that the file does not have are a finding, not a reason to stop: they read as zeroes.
    let len = if head.len() < SECTOR_LEN { source.len() } else { Bytes(i64::MAX.unsigned_abs()) };
    Ok(header::parse_for_check(&head, Subject { name, len })?)
}

/// One complete pass over the image.
async fn examine(
    source: &impl Source,
    header: &Header,
    hooks: CheckHooks<'_>,
) -> Result<(CheckReport, Scan, Compared), Stop> {
    let mut report = CheckReport {
        total_clusters: header
            .geometry
            .virtual_size
            .next_multiple_of(SECTOR)
            .div_ceil(header.geometry.cluster_size()),
        dirty: header.incompatible & header::DIRTY != 0,
        marked_corrupt: header.incompatible & header::CORRUPT != 0,
        ..CheckReport::default()
    };
    let mut scan = scan::scan(source, header, &mut report, hooks).await?;
    overlaps::find(source, &mut scan, &mut report).await?;
    let compared = compare::compare(source, &mut scan, &mut report, hooks).await?;
    Ok((report, scan, compared))
}
