//! Copies old data to the fleecing file, for the client that is about to overwrite it.
//!
//! Promises: those of the module above. A request of a client waits here for at most
//! [`Fleece::limit`] and the time that closing the file takes.

use std::ops::Range;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::{COPY_MAX, Fleece, Granule, Graph};
use crate::chain::Chain;
use crate::layer::Kind;

/// Alignment of the buffer of a copy: what direct I/O wants.
const COPY_ALIGN: usize = 4096;
/// Longest run of zeroes that is looked at in one step, bytes.
const ZEROES_MAX: Bytes = Bytes(1 << 30);

/// Why a copy was not made.
pub(super) enum Failure {
    /// The disk could not be read.
    Read(Errno),
    /// The file could not be written.
    Write(Errno),
    /// The file would hold more than it may.
    Full,
}

/// Granules that this writer copies; given back when it is dropped before they are settled.
struct Claimed<'a> {
    fleece: &'a Fleece,
    granules: Range<u64>,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        for granule in self.granules.clone() {
            self.fleece.states.settle(granule, Granule::Untouched);
        }
        self.fleece.wake();
    }
}

impl Claimed<'_> {
    /// Settles the first granules.
    fn settle(&mut self, count: u64, to: Granule) {
        for _ in 0..count {
            self.fleece.states.settle(self.granules.start, to);
            self.granules.start += 1;
        }
    }
}

impl Fleece {
    /// As [`Graph::keep`].
    pub(super) async fn keep(
        self: &Arc<Fleece>,
        ring: &Ring,
        graph: &Graph,
        offset: GuestOffset,
        len: Bytes,
    ) {
        let copies = self.keep_all(ring, graph, self.granules(offset, len));
        match ring.within(self.limit, copies).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => self.fail(ring, self.reason(&failure)).await,
            Err(_) => self.fail(ring, self.too_slow()).await,
        }
    }

    /// Why a copy that took too long ends the checkpoint.
    pub(super) fn too_slow(&self) -> String {
        format!(
            "copying old data away took longer than {} s; use faster storage for the fleecing file",
            self.limit.as_secs_f32()
        )
    }

    /// Why a failure ends the checkpoint.
    pub(super) fn reason(&self, failure: &Failure) -> String {
        let why = |errno: &Errno| std::io::Error::from(*errno).to_string();
        match failure {
            Failure::Full => format!(
                "the fleecing file is full: it may hold {} bytes of old data; allow more, or make \
                 the backup while less is written",
                self.max
            ),
            Failure::Write(Errno::NOSPC) => String::from(
                "the file system of the fleecing file is full; use a directory with more space",
            ),
            Failure::Write(errno) => {
                format!("the fleecing file could not be written: {}", why(errno))
            }
            Failure::Read(errno) => {
                format!("old data of the disk could not be read: {}", why(errno))
            }
        }
    }

    /// Keeps granules, from the first to the last one.
    async fn keep_all(
        self: &Arc<Fleece>,
        ring: &Ring,
        graph: &Graph,
        mut granules: Range<u64>,
    ) -> Result<(), Failure> {
        // A long change, such as the discard of a whole disk, may find long runs of zeroes, which
        // need no copy; in a file it takes a system call to see a hole.
        let asks_for_holes = self.bytes(&granules).1 > COPY_MAX;
        while granules.start < granules.end && self.is_running() {
            match self.states.get(granules.start) {
                Granule::Zero | Granule::Copied => granules.start += 1,
                Granule::Copying => {
                    let granule = granules.start;
                    let is_copied = || self.states.get(granule) != Granule::Copying;
                    self.wait(|_| is_copied() || !self.is_running()).await;
                }
                Granule::Untouched => {
                    let zeroes = self.zeroes(ring, graph, &granules, asks_for_holes).await;
                    let zeroes = zeroes.map_err(Failure::Read)?;
                    if zeroes > 0 {
                        // What was untouched when it was looked at and is so now has not changed
                        // between.
                        let run = granules.start..granules.start + zeroes;
                        granules.start = self.claim(run, Granule::Zero).end;
                        continue;
                    }
                    let most = (COPY_MAX >> self.granule_bits).max(1);
                    let run = granules.start..granules.end.min(granules.start + most);
                    let claimed =
                        Claimed { fleece: self, granules: self.claim(run, Granule::Copying) };
                    granules.start = claimed.granules.end;
                    if !claimed.granules.is_empty() {
                        self.copy(ring, graph, claimed).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes untouched granules to another state, from the first on until one is not untouched.
    /// Returns them.
    fn claim(&self, granules: Range<u64>, to: Granule) -> Range<u64> {
        let mut end = granules.start;
        while end < granules.end && self.states.claim(end, to) {
            end += 1;
        }
        granules.start..end
    }

    /// How many granules from the first on are known to be zeroes, without a read of data.
    async fn zeroes(
        &self,
        ring: &Ring,
        graph: &Graph,
        granules: &Range<u64>,
        asks_for_holes: bool,
    ) -> Result<u64, Errno> {
        let (offset, len) = self.bytes(granules);
        let _graces = graph.graces();
        let (is_zero, found) =
            zero_run(ring, graph.chain(), offset, len.min(ZEROES_MAX), asks_for_holes).await?;
        if !is_zero {
            return Ok(0);
        }
        // The last granule may be shorter.
        let is_all = found == len;
        Ok(if is_all { granules.end - granules.start } else { found >> self.granule_bits })
    }

    /// Copies granules, or finds that they are zeroes.
    async fn copy(
        self: &Arc<Fleece>,
        ring: &Ring,
        graph: &Graph,
        mut claimed: Claimed<'_>,
    ) -> Result<(), Failure> {
        let (offset, len) = self.bytes(&claimed.granules);
        // At most a granule or `COPY_MAX`.
        let buf = IoBuf::new(usize::try_from(len).unwrap_or(usize::MAX), COPY_ALIGN);
        {
            let _graces = graph.graces();
            graph.chain().fill(ring, offset, &buf).await.map_err(Failure::Read)?;
        }
        let granule = 1usize << self.granule_bits;
        let pieces: Vec<IoBuf> = (0..buf.len())
            .step_by(granule)
            .map(|at| buf.slice(at..buf.len().min(at + granule)))
            .collect();
        let mut at = 0;
        while at < pieces.len() {
            let is_zero = pieces[at].is_zero();
            let alike = pieces[at..].iter().take_while(|piece| piece.is_zero() == is_zero).count();
            if is_zero {
                claimed.settle(alike as u64, Granule::Zero);
            } else {
                let (start, end) = (at * granule, buf.len().min((at + alike) * granule));
                let file = self.file().map_err(Failure::Write)?;
                self.take_room(Bytes::of(end - start))?;
                self.write_behind(ring, file, offset + Bytes::of(start), buf.slice(start..end));
                claimed.settle(alike as u64, Granule::Copied);
            }
            at += alike;
        }
        drop(claimed);
        self.wait_for_room().await;
        Ok(())
    }

    /// Counts bytes that are about to be written to the file.
    fn take_room(&self, bytes: Bytes) -> Result<(), Failure> {
        use std::sync::atomic::Ordering;
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes.0).filter(|used| *used <= self.max.0)
        });
        taken.map(drop).map_err(|_| Failure::Full)
    }
}

/// Whether a range begins with bytes that are known to be zeroes, and how many of one kind there
/// are.
async fn zero_run(
    ring: &Ring,
    chain: Chain<'_>,
    offset: GuestOffset,
    len: Bytes,
    asks_for_holes: bool,
) -> Result<(bool, Bytes), Errno> {
    let mut found = Bytes::ZERO;
    while found < len {
        let (at, left) = (offset + found, len - found);
        let (is_zero, run) = if asks_for_holes {
            let (status, _) = chain.status(ring, at, left).await?;
            (status.zero, status.len)
        } else {
            let run = chain.locate(ring, at, left).await?;
            (matches!(run.kind, Kind::Zero { .. } | Kind::Unallocated), run.len)
        };
        if !is_zero || run.is_zero() {
            break;
        }
        found += run;
    }
    Ok((!found.is_zero(), found))
}
