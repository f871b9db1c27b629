//! What the target of a mirror that was suspended does not have.
//!
//! Promises: it is noted while no request is in flight, and holds every range that differs; more is
//! harmless, it is copied once more. It stays short: ranges that are near each other become one.

use ringdisk_qcow2::GuestOffset;
use ringdisk_ring::Ring;

use super::super::backing::{start_recording, stop_recording};
use super::{MirrorSync, Run};
use crate::Disk;
use crate::graph::Tracker;

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
    /// * `size`: of the disk, bytes.
    pub(super) fn new(size: u64, sync: MirrorSync) -> Begun {
        let (changed, first) = (Tracker::new(size), Tracker::new(size));
        if sync != MirrorSync::None {
            first.set(GuestOffset(0), size);
        }
        Begun { changed, first }
    }

    /// Of one that begins again.
    ///
    /// * `since`: what clients changed since the earlier one was suspended.
    pub(super) fn again(size: u64, left: &MirrorLeft, since: &Tracker) -> Begun {
        let (changed, first) = (Tracker::new(size), Tracker::new(size));
        let since = ranges(since);
        for (tracker, ranges) in
            [(&changed, &left.changed), (&changed, &since), (&first, &left.first)]
        {
            ranges.iter().for_each(|(offset, len)| tracker.set(GuestOffset(*offset), *len));
        }
        Begun { changed, first }
    }
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
        if self.check_free().is_ok() {
            stop_recording(&mut self.gateway().drain(ring, turn).await);
        }
    }
}

/// All recorded ranges, and what lies between those that are near where there are too many.
fn ranges(tracker: &Tracker) -> Vec<(u64, u64)> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    let mut near = 0;
    let mut at = GuestOffset(0);
    while let Some((offset, len)) = tracker.next(at, u64::MAX >> 1) {
        at = offset + len;
        join(&mut found, (offset.0, len), near);
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
        // Copies for which a client no longer waits record what they could not send.
        self.mirror.idle().await;
        // What the target has answered has to outlive it.
        if let Err(errno) = self.target.flush(self.ring).await {
            tracing::warn!(
                "the target of a mirror cannot be flushed: {errno}; all is copied again"
            );
            return;
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
        let tracker = Tracker::new(1 << 40);
        for index in 0..20_000 {
            tracker.set(GuestOffset(index * 4 * granule), 1);
        }
        tracker.set(GuestOffset((1 << 40) - 1), 1);
        let found = ranges(&tracker);
        assert!(found.len() <= RANGES_MAX, "{}", found.len());
        let left = MirrorLeft { first: Vec::new(), changed: found, is_new: false };
        let since = Tracker::new(1 << 40);
        since.set(GuestOffset(3 << 38), 1);
        let Begun { changed, first } = Begun::again(1 << 40, &left, &since);
        assert!(changed.covers(GuestOffset(3 << 38), 1), "what was changed since");
        assert_eq!(first.bytes(), 0);
        assert!((0..20_000).all(|index| changed.covers(GuestOffset(index * 4 * granule), 1)));
        assert!(changed.covers(GuestOffset((1 << 40) - 1), 1));
        assert!(!changed.covers(GuestOffset(1 << 39), 1));
    }

    #[test]
    fn a_mirror_that_begins_copies_what_its_sync_says() {
        let size = 100 << 20;
        for (sync, bytes) in
            [(MirrorSync::Full, size), (MirrorSync::Top, size), (MirrorSync::None, 0)]
        {
            let Begun { changed, first } = Begun::new(size, sync);
            assert_eq!((changed.bytes(), first.bytes()), (0, bytes), "{sync:?}");
        }
    }
}
