//! Which ranges have a flag of the context that was chosen, as the server says: those that read as
//! zeroes, or those that a bitmap marks.
//!
//! Promises: a range that is told to be a hole reads as zeroes. One reply of an export that is
//! opened for reading serves the questions that follow it, for a second; of one that is written
//! each question is asked anew. Control path: convert and map.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringdisk_nbd_protocol::numbers::{command, command_flags, extent_flags};
use ringdisk_nbd_protocol::request::Request;
use ringdisk_nbd_protocol::status::Extent;
use ringdisk_ring::{Errno, Ring};

use super::{Nbd, driver};
use crate::kinds::Allocation;

/// How long a reply is believed.
const BELIEVED: Duration = Duration::from_secs(1);
/// Longest range that is asked about, bytes: what every server can say in 32 bits.
const SPAN_MAX: u64 = 2 << 30;

/// A run of bytes that have the flag, or of bytes that have it not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    end: u64,
    has_flag: bool,
}

/// The last reply.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<Option<Known>>);

impl Cache {
    fn find(&self, offset: u64) -> Option<(bool, u64)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.find(offset)
    }

    fn set(&self, known: Known) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(known);
    }
}

#[derive(Debug)]
struct Known {
    start: u64,
    runs: Vec<Run>,
    since: Instant,
}

impl Known {
    /// Whether the byte at `offset` has the flag, and bytes from there to the end of its run.
    fn find(&self, offset: u64) -> Option<(bool, u64)> {
        if offset < self.start || self.since.elapsed() > BELIEVED {
            return None;
        }
        let at = self.runs.partition_point(|run| run.end <= offset);
        self.runs.get(at).map(|run| (run.has_flag, run.end - offset))
    }
}

/// The runs of a reply, which begins at `start` and counts up to `end`.
fn runs(start: u64, end: u64, flag: u64, extents: &[Extent]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::with_capacity(extents.len());
    let mut at = start;
    for extent in extents {
        at = at.saturating_add(extent.len).min(end);
        let has_flag = extent.flags & flag != 0;
        match runs.last_mut() {
            Some(last) if last.has_flag == has_flag => last.end = at,
            _ => runs.push(Run { end: at, has_flag }),
        }
    }
    runs
}

impl Nbd {
    /// As [`crate::Storage::allocation`].
    pub(crate) async fn allocation(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
    ) -> Result<(Allocation, u64), Errno> {
        let len = self.clipped(offset, len);
        if len == 0 {
            return Ok((Allocation::Hole, 0));
        }
        if self.shared.agreed.allocation.is_none() {
            return Ok((Allocation::Data, len));
        }
        let (is_zero, run) = self.known(ring, offset, len, extent_flags::ZERO).await?;
        Ok((if is_zero { Allocation::Hole } else { Allocation::Data }, run))
    }

    /// Whether it shows a bitmap.
    pub(crate) fn shows_bitmap(&self) -> bool {
        self.shared.agreed.bitmap.is_some()
    }

    /// As [`crate::Storage::dirty`].
    pub(crate) async fn dirty(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
    ) -> Result<(bool, u64), Errno> {
        let len = self.clipped(offset, len);
        if len == 0 || !self.shows_bitmap() {
            return Ok((false, len));
        }
        self.known(ring, offset, len, extent_flags::DIRTY).await
    }

    /// Whether the byte at `offset` has a flag of the one context that was chosen, and for how many
    /// bytes that is so.
    ///
    /// * `len`: not 0, and inside the export.
    async fn known(
        &self,
        ring: &Ring,
        offset: u64,
        len: u64,
        flag: u64,
    ) -> Result<(bool, u64), Errno> {
        if let Some((has_flag, run)) = self.status.find(offset) {
            return Ok((has_flag, run.min(len)));
        }
        let block = u64::from(self.shared.agreed.block);
        let start = offset / block * block;
        let (flags, end) = if self.read_only {
            (0, self.len().min(start + SPAN_MAX))
        } else {
            let end = (offset + len).next_multiple_of(block).min(self.len());
            (command_flags::REQ_ONE, end.min(start + SPAN_MAX))
        };
        let request = Request {
            command: command::BLOCK_STATUS,
            flags,
            offset: start,
            len: end - start,
            ..Request::default()
        };
        // A server may say more than it was asked about, at the end: that is not believed.
        let driver = driver::of(&self.shared, ring);
        let runs = driver.status(request, |extents| runs(start, end, flag, extents)).await?;
        let known = Known { start, runs, since: Instant::now() };
        let (has_flag, run) = known.find(offset).unwrap_or((false, len));
        if self.read_only {
            self.status.set(known);
        }
        Ok((has_flag, run.min(len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_become_runs_that_end_where_the_question_did() {
        let extent = |len, flags| Extent { len, flags };
        let extents =
            [extent(10, 0), extent(10, 1), extent(10, 3), extent(10, 2), extent(u64::MAX, 0)];
        let known = Known { start: 100, runs: runs(100, 150, 2, &extents), since: Instant::now() };
        for (offset, found) in [
            (99, None),
            (100, Some((false, 20))),
            (119, Some((false, 1))),
            (120, Some((true, 20))),
            (140, Some((false, 10))),
            (150, None),
        ] {
            assert_eq!(known.find(offset), found, "{offset}");
        }
    }
}
