//! What the target of a mirror does not have: at its beginning, and where it was suspended.
//!
//! Promises: it is noted while no request is in flight, and holds every range that differs; more is
//! harmless, it is copied once more. The target has a fixed time to answer. What another process
//! gets stays short: ranges that are near each other become one.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_qcow2::{BitmapContents, Bytes, GuestOffset};
use ringdisk_ring::{Errno, Ring};

use super::super::backing::{start_recording, stop_recording};
use super::super::{LongChange, Marks};
use super::copy::GIVEN_UP_WAIT;
use super::{MirrorOptions, MirrorSync, Run};
use crate::graph::{Graph, Tracker};
use crate::task_join::spawn;
use crate::{Disk, Error, ErrorKind};

/// Ranges of each kind, at most: a description that goes to another process holds them.
const RANGES_MAX: usize = 4096;

/// Ranges of the disk: offset and length, bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MirrorLeft {
    /// What the first copy has not copied.
    pub first: Vec<(u64, u64)>,
    /// What clients changed and was not sent.
    pub changed: Vec<(u64, u64)>,
    /// The target reads as zeroes where nothing was sent to it.
    pub is_new: bool,
}

/// The records of a mirror that begins.
pub(super) struct Begun {
    /// What clients change.
    pub(super) changed: Tracker,
    /// What the first copy has to copy.
    pub(super) first: Tracker,
}

impl Begun {
    /// Of a new one, or of one that begins again.
    ///
    /// * `options`: everything is copied where it is not known what clients wrote since.
    /// * `is_new`: whether the target holds nothing yet; of one that begins again as it was.
    /// * `marks`: the bitmap of a new one that goes by one.
    ///
    /// Errors: `Io` where there is no memory for a copy of that.
    pub(super) fn of(
        graph: &Graph,
        (options, is_new): (&mut MirrorOptions, &mut bool),
        marks: Option<&Marks>,
    ) -> Result<Begun, Error> {
        let marked = match marks {
            Some(marks) => Some(marks.at_instant(graph).ok_or_else(|| no_copy(marks))?),
            None => None,
        };
        Ok(match (&options.left, &graph.tracker) {
            (Some(left), Some(since)) => {
                *is_new = left.is_new;
                Begun::again(graph.size(), left, since)
            }
            // What clients wrote since is not known.
            (Some(_), None) => {
                options.sync = MirrorSync::Full;
                Begun::new(graph.size(), &options.sync, None)
            }
            (None, _) => Begun::new(graph.size(), &options.sync, marked.as_deref()),
        })
    }

    /// * `size`: of the disk, bytes.
    /// * `marked`: by the bitmap that `sync` names.
    fn new(size: Bytes, sync: &MirrorSync, marked: Option<&BitmapContents>) -> Begun {
        let (changed, first) = (Tracker::new(size), Tracker::new(size));
        match (sync, marked) {
            (MirrorSync::None, _) => {}
            (MirrorSync::Bitmap(_), Some(marked)) => {
                // A bitmap may be of a longer disk.
                let end = GuestOffset::after(size);
                let inside = marked.ranges().filter(|range| range.start < end);
                inside.for_each(|range| first.set(range.start, range.end.min(end) - range.start));
            }
            (MirrorSync::Full | MirrorSync::Top | MirrorSync::Bitmap(_), _) => {
                first.set(GuestOffset(0), size);
            }
        }
        Begun { changed, first }
    }

    /// Of one that begins again.
    ///
    /// * `since`: what clients changed since the earlier one was suspended.
    pub(super) fn again(size: Bytes, left: &MirrorLeft, since: &Tracker) -> Begun {
        let (changed, first) = (Tracker::new(size), Tracker::new(size));
        let since = ranges(since);
        for (tracker, ranges) in
            [(&changed, &left.changed), (&changed, &since), (&first, &left.first)]
        {
            ranges.iter().for_each(|(offset, len)| tracker.set(GuestOffset(*offset), Bytes(*len)));
        }
        Begun { changed, first }
    }
}

/// The bitmap whose marks say what a new mirror copies. The caller holds the lock of changes.
///
/// Errors: as [`Marks::find`].
pub(super) async fn marks_of(
    disk: &Disk,
    ring: &Ring,
    options: &MirrorOptions,
) -> Result<Option<Marks>, Error> {
    match (&options.sync, &options.left) {
        (MirrorSync::Bitmap(name), None) => Marks::find(disk, ring, name.clone()).await.map(Some),
        // One that goes on knows what is left.
        _ => Ok(None),
    }
}

fn no_copy(marks: &Marks) -> Error {
    let name = marks.name().escape_debug();
    let text = format!("there is no memory for a copy of the bitmap '{name}', or it is gone");
    Error::new(ErrorKind::Io, text).with_errno(Some(Errno::NOMEM))
}

impl Disk {
    /// Records what clients change from now on, for a mirror that goes on
    /// ([`MirrorOptions::left`]). For a disk that was handed over, before it serves.
    pub async fn record_changes(&self, ring: &Ring) {
        let turn = self.changes().lock().await;
        start_recording(self.gateway().drain(ring, turn).await);
    }

    /// No mirror goes on: nothing is recorded any more.
    pub async fn forget_changes(&self, ring: &Ring) {
        let turn = self.changes().lock().await;
        if self.check_free_for(LongChange::Mirror).is_ok() {
            stop_recording(&mut self.gateway().drain(ring, turn).await);
        }
    }
}

/// All recorded ranges, and what lies between those that are near where there are too many.
fn ranges(tracker: &Tracker) -> Vec<(u64, u64)> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    let mut near = 0;
    let mut at = GuestOffset(0);
    while let Some((offset, len)) = tracker.next(at, Bytes(u64::MAX >> 1)) {
        at = offset + len;
        join(&mut found, (offset.0, len.0), near);
        while found.len() > RANGES_MAX {
            near = (near * 2).max(1 << 16);
            for range in std::mem::take(&mut found) {
                join(&mut found, range, near);
            }
        }
    }
    found
}

/// Adds a range, with what lies between it and the last one where that is not more than `near`.
fn join(found: &mut Vec<(u64, u64)>, (offset, len): (u64, u64), near: u64) {
    match found.last_mut() {
        Some(last) if offset - (last.0 + last.1) <= near => last.1 = offset + len - last.0,
        _ => found.push((offset, len)),
    }
}

impl Run<'_> {
    /// Notes what is left. No request is in flight.
    pub(super) async fn note_left(&self) {
        let (target, ring) = (Arc::clone(self.target), self.ring.clone());
        let settled = async {
            // Copies for which a client no longer waits record what they could not send.
            self.mirror.idle().await;
            // What the target has answered has to outlive it. A task of its own, since what has
            // begun cannot be taken back.
            let flushed = spawn(self.ring, async move { target.flush(&ring).await });
            flushed.await.unwrap_or(Err(Errno::IO))
        };
        let wait = if self.hangs.get() { Duration::ZERO } else { GIVEN_UP_WAIT };
        match self.ring.within(wait, settled).await {
            Ok(Ok(())) => {}
            Ok(Err(errno)) => {
                tracing::warn!(
                    "the target of a mirror cannot be flushed: {errno}; all is copied again"
                );
                return;
            }
            Err(_) => {
                self.hangs.set(true);
                tracing::warn!("the target of a mirror does not answer; all is copied again");
                return;
            }
        }
        let (first, changed) = (ranges(&self.first), ranges(&self.tracker));
        self.control.set_left(MirrorLeft { first, changed, is_new: self.is_new });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_all_there_and_short() {
        let granule = 64 << 10;
        let tracker = Tracker::new(Bytes(1 << 40));
        for index in 0..20_000 {
            tracker.set(GuestOffset(index * 4 * granule), Bytes(1));
        }
        tracker.set(GuestOffset((1 << 40) - 1), Bytes(1));
        let found = ranges(&tracker);
        assert!(found.len() <= RANGES_MAX, "{}", found.len());
        let left = MirrorLeft { first: Vec::new(), changed: found, is_new: false };
        let since = Tracker::new(Bytes(1 << 40));
        since.set(GuestOffset(3 << 38), Bytes(1));
        let Begun { changed, first } = Begun::again(Bytes(1 << 40), &left, &since);
        assert!(changed.covers(GuestOffset(3 << 38), Bytes(1)), "what was changed since");
        assert_eq!(first.bytes(), Bytes::ZERO);
        assert!(
            (0..20_000).all(|index| changed.covers(GuestOffset(index * 4 * granule), Bytes(1)))
        );
        assert!(changed.covers(GuestOffset((1 << 40) - 1), Bytes(1)));
        assert!(!changed.covers(GuestOffset(1 << 39), Bytes(1)));
    }

    #[test]
    fn a_mirror_that_begins_copies_what_its_sync_says() {
        let size = 100 << 20;
        for (sync, bytes) in
            [(MirrorSync::Full, size), (MirrorSync::Top, size), (MirrorSync::None, 0)]
        {
            let Begun { changed, first } = Begun::new(Bytes(size), &sync, None);
            assert_eq!((changed.bytes(), first.bytes()), (Bytes::ZERO, Bytes(bytes)), "{sync:?}");
        }
    }
}
