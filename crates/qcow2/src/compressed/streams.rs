//! Finds the sequential readers of one image and says how far to load ahead.
//!
//! Promises: pure arithmetic on a few numbers, no allocation; random reads never load ahead.
//! Called for compressed clusters only.

use std::ops::Range;

use crate::units::GuestCluster;

/// Sequential readers that are distinguished; more than this many push each other out.
const STREAMS: usize = 8;
/// Clusters behind and before the expected one that still belong to a stream: requests of several
/// threads arrive out of order, and clusters that are not compressed are not seen here.
const SLACK: u64 = 16;
/// Reads in a row before anything is loaded ahead.
const RUN_MIN: u32 = 2;

/// The sequential readers of one image.
#[derive(Debug)]
pub(super) struct Streams {
    streams: [Stream; STREAMS],
    /// Counts accesses.
    now: u64,
    /// Most clusters to load ahead.
    ahead_max: u64,
    /// Most clusters to load for one request.
    request_max: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// First cluster that still belongs to it.
    from: GuestCluster,
    /// End of what its reader asked for so far, cluster.
    wanted: GuestCluster,
    /// End of what was to be loaded so far, cluster.
    loaded: GuestCluster,
    /// Reads in a row.
    run: u32,
    used: u64,
}

/// What to do about an access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Advice {
    /// The access continues nothing.
    pub(super) alone: bool,
    /// Clusters to load beside the first; may be empty.
    pub(super) load: Range<GuestCluster>,
}

impl Streams {
    /// * `ahead_max`, `request_max`: clusters, at least 1.
    pub(super) fn new(ahead_max: u64, request_max: u64) -> Streams {
        Streams { streams: [Stream::default(); STREAMS], now: 0, ahead_max, request_max }
    }

    /// A request reads cluster `first`, as the start of a request (or of what is left of it) that
    /// ends in cluster `last`.
    pub(super) fn access(&mut self, first: GuestCluster, last: GuestCluster) -> Advice {
        self.now += 1;
        let end = last.saturating_add(1).min(first.saturating_add(self.request_max));
        let known = self.streams.iter_mut().find(|stream| {
            stream.used > 0 && stream.from <= first && first <= stream.wanted.saturating_add(SLACK)
        });
        let Some(stream) = known else {
            let stream =
                Stream { from: before(first), wanted: end, loaded: end, run: 0, used: self.now };
            if let Some(oldest) = self.streams.iter_mut().min_by_key(|stream| stream.used) {
                *oldest = stream;
            }
            return Advice { alone: end == first + 1, load: first + 1..end };
        };
        stream.used = self.now;
        if end > stream.wanted {
            stream.run = stream.run.saturating_add(1);
            stream.wanted = end;
            stream.from = before(first);
        }
        let ahead = if stream.run < RUN_MIN {
            0
        } else {
            1u64.checked_shl(stream.run).unwrap_or(u64::MAX).min(self.ahead_max)
        };
        let until = stream.wanted.saturating_add(ahead);
        // In bundles, not one by one: half of the way ahead is left before the next is fetched.
        let enough = stream.loaded >= stream.wanted.saturating_add(ahead / 2);
        if enough || until <= stream.loaded {
            return Advice { alone: stream.run == 0, load: first + 1..first + 1 };
        }
        let start = stream.loaded.max(first + 1).min(until);
        stream.loaded = until;
        Advice { alone: false, load: start..until }
    }
}

/// The first cluster that belongs to a stream which reads `first` now.
fn before(first: GuestCluster) -> GuestCluster {
    GuestCluster(first.0.saturating_sub(SLACK))
}
