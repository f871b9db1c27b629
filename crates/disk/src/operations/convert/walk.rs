//! Cuts the source into pieces of work.
//!
//! Promises: pieces come in the order of the disk, cover every range that must be copied or zeroed,
//! and end where the block status of the source changes; the status of a long run is asked once. If
//! the target is written in clusters, pieces begin and end at cluster boundaries.

use std::cell::RefCell;

use ringdisk_qcow2::{Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};

use super::sources::Sources;
use super::{ConvertOptions, Doing, Failure};
use crate::task_mutex::TaskMutex;
use crate::{BlockStatus, Progress};

/// What to do with a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Read it and write what is there.
    Copy,
    /// Zero it in the target.
    Zero,
    /// Leave it out.
    Skip,
}

/// A piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// From 0, in order.
    pub(super) number: u64,
    pub(super) offset: GuestOffset,
    pub(super) len: Bytes,
    /// Copy or zero.
    pub(super) action: Action,
}

/// Iteration over the source.
pub(super) struct Walk<'a> {
    source: &'a Sources<'a>,
    options: &'a ConvertOptions,
    /// The end of the source.
    end: GuestOffset,
    /// Length of a cluster that has to be written as a whole.
    unit: Option<Bytes>,
    chunk: Bytes,
    /// Held by the task that asks the source, since an answer may take time.
    mutex: TaskMutex,
    state: RefCell<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    at: GuestOffset,
    number: u64,
    /// End of the present run, and what to do with it.
    run: Option<(GuestOffset, Action)>,
}

impl<'a> Walk<'a> {
    /// * `unit`: length of a cluster that has to be written as a whole; `chunk` is a multiple of
    ///   it.
    pub(super) fn new(
        source: &'a Sources<'a>,
        options: &'a ConvertOptions,
        unit: Option<Bytes>,
        chunk: Bytes,
    ) -> Walk<'a> {
        let end = GuestOffset::after(source.size());
        let (mutex, state) = (TaskMutex::default(), RefCell::default());
        Walk { source, options, end, unit, chunk, mutex, state }
    }

    /// Longest piece.
    pub(super) fn chunk_bytes(&self) -> Bytes {
        self.chunk
    }

    /// The next piece; `None` at the end.
    pub(super) async fn next(
        &self,
        ring: &Ring,
        progress: &Progress,
    ) -> Result<Option<Piece>, Failure> {
        let _pass = self.mutex.lock().await;
        loop {
            let State { at, number, .. } = *self.state.borrow();
            progress.check().map_err(|errno| Failure::new(Doing::Looking, at, errno))?;
            if at >= self.end {
                return Ok(None);
            }
            let (end, action) = self.run(ring, at).await?;
            let mut state = self.state.borrow_mut();
            if action == Action::Skip {
                state.at = end;
                progress.add_done(end - at);
                continue;
            }
            // To the next multiple: pieces then suit clusters and pages.
            let border = at.align_down(self.chunk) + self.chunk;
            // Zeroes are written without a buffer.
            let is_cheap = action == Action::Zero && !self.options.sparse_bytes.is_zero();
            let end = if is_cheap { end } else { end.min(border) };
            state.at = end;
            state.number += 1;
            return Ok(Some(Piece { number, offset: at, len: end - at, action }));
        }
    }

    /// The run at `at`: where it ends and what to do with it.
    async fn run(&self, ring: &Ring, at: GuestOffset) -> Result<(GuestOffset, Action), Failure> {
        let known = self.state.borrow().run;
        if let Some((end, action)) = known.filter(|(end, _)| at < *end) {
            return Ok((end, action));
        }
        let (mut end, mut action) = self.ask(ring, at).await?;
        if let Some(unit) = self.unit {
            // A cluster that is partly to be copied is copied as a whole; answers may be shorter
            // than a cluster.
            let first_end = at.saturating_add(unit).min(self.end);
            while end < first_end && action != Action::Copy {
                let (next_end, next) = self.ask(ring, end).await?;
                (end, action) = (next_end, if next == action { action } else { Action::Copy });
            }
            let whole = (end - at).align_down(unit);
            end = match action {
                Action::Copy => at + (end - at).next_multiple_of(unit),
                _ if end < self.end => at + whole,
                _ => end,
            };
            end = end.min(self.end);
        }
        self.state.borrow_mut().run = Some((end, action));
        Ok((end, action))
    }

    /// Asks the source for the run at `at`: its end, and what to do with it.
    async fn ask(&self, ring: &Ring, at: GuestOffset) -> Result<(GuestOffset, Action), Failure> {
        let (is_in, end) = self.span(at);
        if !is_in {
            return Ok((end, Action::Skip));
        }
        let left = end - at;
        let (len, action) = match self.source.block_status(ring, at, left).await {
            Ok(status) if status.len > Bytes::ZERO => (status.len.min(left), self.action(&status)),
            // The read will find the bad part.
            Err(_) if self.options.salvage => (left.min(self.chunk), Action::Copy),
            Ok(_) => return Err(Failure::new(Doing::Looking, at, Errno::IO)),
            Err(errno) => return Err(Failure::new(Doing::Looking, at, errno)),
        };
        Ok((at + len, action))
    }

    /// Whether `at` is in a range that is copied, and where that, or the gap, ends.
    fn span(&self, at: GuestOffset) -> (bool, GuestOffset) {
        let Some(only) = &self.options.only else { return (true, self.end) };
        let next = only.partition_point(|range| GuestOffset(range.end) <= at);
        match only.get(next) {
            Some(range) if GuestOffset(range.start) <= at => {
                (true, GuestOffset(range.end).min(self.end))
            }
            Some(range) => (false, GuestOffset(range.start).min(self.end)),
            None => (false, self.end),
        }
    }

    fn action(&self, status: &BlockStatus) -> Action {
        let options = self.options;
        if options.target_has_backing && !(status.present && status.depth == 0) {
            return Action::Skip;
        }
        if !status.zero {
            return Action::Copy;
        }
        if options.target_is_zero && !options.sparse_bytes.is_zero() {
            Action::Skip
        } else {
            Action::Zero
        }
    }
}
