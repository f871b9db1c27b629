//! `compare`: whether two disks hold the same bytes.
//!
//! Promises: ranges that are zero in both disks are not read; a range with data in one disk only is
//! read from that one only; several pieces are read at once, and the answer is still about the
//! first difference. Nothing is written.
//!
//! Runs on the thread that owns the ring. Source of the behaviour: qemu-img(1), "compare".

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};

use futures_util::future::join_all;
use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use crate::limits::SECTOR_BYTES;
use crate::name::printable_path;
use crate::task_mutex::TaskMutex;
use crate::{BlockStatus, Disk, Error, Progress};

/// Bytes that are compared at once.
const CHUNK_BYTES: Bytes = Bytes(1 << 20);
/// Pieces under way: each reads two disks.
const TASKS: usize = 4;
/// Bytes that are compared together: they stay in the first-level cache.
const BLOCK: usize = 4096;
/// Alignment of buffers: a page suits every storage.
const BUFFER_ALIGN: usize = 4096;

/// Options of a comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompareOptions {
    /// Sizes, and the block status of each range, must be the same too (`-s`).
    pub strict: bool,
}

/// The result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// The same bytes; past the end of the shorter disk the longer one has zeroes.
    Identical {
        /// The sizes differ.
        sizes_differ: bool,
    },
    /// They differ.
    Different(Difference),
}

/// How two disks differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// In size; with `strict` only.
    Size,
    /// In the block status of a range; with `strict` only.
    Status {
        /// First byte of the range.
        offset: GuestOffset,
    },
    /// In content.
    Content {
        /// First byte of the first sector (512 bytes) that differs.
        offset: GuestOffset,
    },
}

/// How the comparison of a piece ended.
type Outcome = Result<(), Finding>;

/// The end of a comparison, with its place.
#[derive(Clone, Copy, Debug)]
struct Finding {
    offset: GuestOffset,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Content,
    Status,
    /// The second disk, or the first; reading, or looking up.
    Failed {
        is_right: bool,
        is_reading: bool,
        errno: Errno,
    },
    Cancelled,
}

/// Which disks have to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sides {
    Both,
    Left,
    Right,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    offset: GuestOffset,
    len: Bytes,
    sides: Sides,
}

struct Comparing<'a> {
    ring: &'a Ring,
    disks: [&'a Disk; 2],
    is_strict: bool,
    progress: &'a Progress,
    mutex: TaskMutex,
    at: Cell<GuestOffset>,
    /// The present run: its end, and the disks to read (`None`: no disk).
    run: Cell<Option<(GuestOffset, Option<Sides>)>>,
    first: RefCell<Option<Finding>>,
}

/// Compares two disks.
///
/// * `progress`: total is the size of the larger one.
///
/// Errors: those of the disks, with name and offset, unless a difference lies before them;
/// `Cancelled`.
pub async fn compare(
    ring: &Ring,
    left: &Disk,
    right: &Disk,
    options: CompareOptions,
    progress: &Progress,
) -> Result<Comparison, Error> {
    let sizes_differ = left.size() != right.size();
    if options.strict && sizes_differ {
        return Ok(Comparison::Different(Difference::Size));
    }
    progress.set_total(left.size().max(right.size()));
    let comparing = Comparing {
        ring,
        disks: [left, right],
        is_strict: options.strict,
        progress,
        mutex: TaskMutex::default(),
        at: Cell::new(GuestOffset::ZERO),
        run: Cell::new(None),
        first: RefCell::default(),
    };
    join_all((0..TASKS).map(|_| comparing.task())).await;
    let Some(Finding { offset, what }) = comparing.first.take() else {
        progress.finish();
        return Ok(Comparison::Identical { sizes_differ });
    };
    match what {
        What::Content => Ok(Comparison::Different(Difference::Content { offset })),
        What::Status => Ok(Comparison::Different(Difference::Status { offset })),
        What::Cancelled => Err(Error::os("the comparison was ended early", Errno::CANCELED)),
        What::Failed { is_right, is_reading, errno } => {
            let layers = comparing.disks[usize::from(is_right)].layers();
            let name = layers.first().map(|layer| printable_path(layer.name())).unwrap_or_default();
            if !is_reading {
                return Err(super::cannot_look_up(&name, offset, errno));
            }
            Err(Error::os(format!("cannot read '{name}' at byte {offset}"), errno))
        }
    }
}

impl Comparing<'_> {
    /// Takes piece after piece, until the end or a finding.
    async fn task(&self) {
        let buffers = [CHUNK_BYTES; 2]
            .map(|bytes| IoBuf::new(usize::try_from(bytes).unwrap_or(usize::MAX), BUFFER_ALIGN));
        // Pieces come in order, so all pieces before a finding are under way.
        while self.first.borrow().is_none() {
            let piece = match self.next().await {
                Ok(Some(piece)) => piece,
                Ok(None) => return,
                Err(finding) => return self.found(finding),
            };
            match self.piece(&piece, &buffers).await {
                Ok(()) => self.progress.add_done(piece.len),
                Err(finding) => return self.found(finding),
            }
        }
    }

    fn found(&self, finding: Finding) {
        let mut first = self.first.borrow_mut();
        if first.is_none_or(|first| finding.offset < first.offset) {
            *first = Some(finding);
        }
    }

    /// The next piece that has to be read; `None` at the end.
    async fn next(&self) -> Result<Option<Piece>, Finding> {
        let _pass = self.mutex.lock().await;
        let total = GuestOffset::after(self.progress.total());
        loop {
            let at = self.at.get();
            if self.progress.is_cancelled() {
                return Err(Finding { offset: at, what: What::Cancelled });
            }
            if at >= total {
                return Ok(None);
            }
            let (end, sides) = match self.run.get() {
                Some((end, sides)) if at < end => (end, sides),
                _ => self.look(at).await?,
            };
            self.run.set(Some((end, sides)));
            let Some(sides) = sides else {
                self.at.set(end);
                self.progress.add_done(end - at);
                continue;
            };
            let end = end.min(at.align_down(CHUNK_BYTES) + CHUNK_BYTES);
            self.at.set(end);
            return Ok(Some(Piece { offset: at, len: end - at, sides }));
        }
    }

    /// The run at `at`: its end, and the disks to read.
    async fn look(&self, at: GuestOffset) -> Result<(GuestOffset, Option<Sides>), Finding> {
        let left = self.status(at, 0).await?;
        let right = self.status(at, 1).await?;
        let (left, right) = match (left, right) {
            (Some(left), Some(right)) => (left, right),
            // Past the end of one disk the other must be zero.
            (Some(left), None) => {
                return Ok((at + left.len, Some(Sides::Left).filter(|_| !left.zero)));
            }
            (None, Some(right)) => {
                return Ok((at + right.len, Some(Sides::Right).filter(|_| !right.zero)));
            }
            (None, None) => return Err(self.failed(at, 0, false, Errno::IO)),
        };
        if self.is_strict && marks(&left) != marks(&right) {
            return Err(Finding { offset: at, what: What::Status });
        }
        let sides = match (left.zero, right.zero) {
            (true, true) => None,
            (false, true) => Some(Sides::Left),
            (true, false) => Some(Sides::Right),
            (false, false) => Some(Sides::Both),
        };
        Ok((at + left.len.min(right.len), sides))
    }

    /// The block status of a disk; `None` past its end.
    async fn status(&self, at: GuestOffset, side: usize) -> Result<Option<BlockStatus>, Finding> {
        let disk = self.disks[side];
        let left = GuestOffset::after(disk.size()).saturating_sub(at);
        if left == Bytes::ZERO {
            return Ok(None);
        }
        match disk.block_status(self.ring, at.0, left).await {
            Ok(status) if status.len > Bytes::ZERO => Ok(Some(status)),
            Ok(_) => Err(self.failed(at, side, false, Errno::IO)),
            Err(errno) => Err(self.failed(at, side, false, errno)),
        }
    }

    fn failed(&self, offset: GuestOffset, side: usize, is_reading: bool, errno: Errno) -> Finding {
        Finding { offset, what: What::Failed { is_right: side == 1, is_reading, errno } }
    }

    async fn piece(&self, piece: &Piece, buffers: &[IoBuf; 2]) -> Outcome {
        let len = usize::try_from(piece.len).unwrap_or(usize::MAX).min(buffers[0].len());
        let [left, right] = [buffers[0].slice(0..len), buffers[1].slice(0..len)];
        let place = match piece.sides {
            Sides::Both => {
                let (first, second) = futures_util::future::join(
                    self.read(piece.offset, 0, &left),
                    self.read(piece.offset, 1, &right),
                )
                .await;
                first?;
                second?;
                first_difference(&left, Some(&right))
            }
            Sides::Left => {
                self.read(piece.offset, 0, &left).await?;
                first_difference(&left, None)
            }
            Sides::Right => {
                self.read(piece.offset, 1, &right).await?;
                first_difference(&right, None)
            }
        };
        match place {
            None => Ok(()),
            Some(place) => {
                Err(Finding { offset: piece.offset + Bytes::of(place), what: What::Content })
            }
        }
    }

    async fn read(&self, offset: GuestOffset, side: usize, buf: &IoBuf) -> Outcome {
        match self.disks[side].read(self.ring, offset.0, buf).await {
            Ok(done) => {
                buf.slice(done.min(buf.len())..buf.len()).fill(0);
                Ok(())
            }
            Err(errno) => Err(self.failed(offset, side, true, errno)),
        }
    }
}

/// The properties that must be the same with `strict`.
fn marks(status: &BlockStatus) -> (bool, bool, bool, bool, bool) {
    (status.data, status.zero, status.present, status.offset.is_some(), status.compressed)
}

/// First byte of the first sector in which two buffers (or one and zeroes) differ. Sectors are
/// counted from the start of the buffers.
fn first_difference(left: &IoBuf, right: Option<&IoBuf>) -> Option<usize> {
    let sector = usize::try_from(SECTOR_BYTES).unwrap_or(1);
    let (mut ours, mut theirs) = ([0; BLOCK], [0; BLOCK]);
    for start in (0..left.len()).step_by(BLOCK) {
        let len = BLOCK.min(left.len() - start);
        left.copy_to_slice(start, &mut ours[..len]);
        if let Some(right) = right {
            right.copy_to_slice(start, &mut theirs[..len]);
        }
        if ours[..len] != theirs[..len] {
            let mut sectors = ours[..len].chunks(sector).zip(theirs[..len].chunks(sector));
            let place = sectors.position(|(ours, theirs)| ours != theirs);
            return place.map(|place| start + place * sector);
        }
    }
    None
}
