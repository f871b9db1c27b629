//! Decides from an L2 entry what a write to a part of its cluster needs.
//!
//! Promises: pure; no I/O, no lock.
//!
//! Source: qcow2 specification, "Cluster mapping" and "Extended L2 entries".

use std::ops::Range;

use rustix::io::Errno;

use crate::entry::{COMPRESSED, COPIED, OFFSET_MASK, Rules};
use crate::units::{Bytes, HostCluster, HostOffset};

/// The two words of an L2 entry; the second one is 0 where entries have one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Words {
    pub(crate) entry: u64,
    pub(crate) bitmap: u64,
}

/// How a part of a cluster gets written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The place is ours and the entry stays as it is.
    InPlace {
        /// Where the cluster begins.
        host: HostOffset,
    },
    /// The place is ours, but the entry does not call it data yet.
    Reuse {
        /// Where the cluster begins.
        host: HostOffset,
        copy: Copy,
    },
    /// A new cluster is needed.
    Fresh { copy: Copy },
}

/// What else has to be stored beside the data, and what the entry says then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copy {
    /// Bytes of the cluster before the data that get their old content.
    pub(crate) head: Range<Bytes>,
    /// The same behind the data.
    pub(crate) tail: Range<Bytes>,
    /// Second word of the new entry.
    pub(crate) bitmap: u64,
}

/// Host clusters that an entry refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// First host cluster.
    pub(crate) start: HostCluster,
    /// Number of clusters.
    pub(crate) count: u64,
}

/// All 32 subclusters of an extended entry.
const ALL: u32 = u32::MAX;

impl Words {
    /// Subclusters that have data.
    fn allocated(self) -> u32 {
        // The lower half.
        #[allow(clippy::cast_possible_truncation)]
        let allocated = self.bitmap as u32;
        allocated
    }

    /// Whether any subcluster has data.
    pub(super) fn has_data(self) -> bool {
        self.allocated() != 0
    }

    /// Subclusters that read as zeroes.
    fn zeroes(self) -> u32 {
        (self.bitmap >> 32) as u32
    }
}

/// The second word from its halves.
pub(crate) fn bitmap(allocated: u32, zeroes: u32) -> u64 {
    u64::from(allocated) | u64::from(zeroes) << 32
}

impl Rules {
    /// Checks an entry of which clusters are going to be used or freed.
    ///
    /// Errors: `EIO` for an entry that cannot be right.
    pub(crate) fn check_words(&self, words: Words) -> Result<(), Errno> {
        if words.entry & COMPRESSED != 0 {
            if self.external || words.entry & COPIED != 0 || self.extended && words.bitmap != 0 {
                return Err(Errno::IO);
            }
            return Ok(());
        }
        let host = HostOffset(words.entry & OFFSET_MASK);
        let bad = words.entry & self.bad_bits != 0
            || host != HostOffset(0)
                && !self.external
                && self.overlaps_metadata(host, Bytes(1 << self.cluster_bits))
            || self.external && host != HostOffset(0) && words.entry & COPIED == 0;
        let torn = self.extended
            && (words.allocated() & words.zeroes() != 0
                || words.allocated() != 0 && self.host(words).is_none());
        if bad || torn { Err(Errno::IO) } else { Ok(()) }
    }

    /// Host offset of the cluster of an entry that is not compressed.
    pub(crate) fn host(&self, words: Words) -> Option<HostOffset> {
        let host = HostOffset(words.entry & OFFSET_MASK);
        let present = host != HostOffset(0) || self.external && words.entry & COPIED != 0;
        (words.entry & COMPRESSED == 0 && present).then_some(host)
    }

    /// Whether the cluster of an entry is this image's alone.
    pub(crate) fn is_own(words: Words) -> bool {
        words.entry & (COMPRESSED | COPIED) == COPIED
    }

    /// Whether an entry of one word says "zeroes".
    pub(crate) fn is_zero(&self, words: Words) -> bool {
        words.entry & COMPRESSED == 0 && words.entry & self.zero_flag != 0
    }

    /// The host clusters whose reference counts an entry holds; `None`: none.
    pub(crate) fn reference(&self, words: Words) -> Option<Reference> {
        if self.external {
            return None;
        }
        if words.entry & COMPRESSED != 0 {
            let (host, len) = self.compressed_place(words.entry);
            let start = host >> self.cluster_bits;
            let end = (host + len - Bytes(1)) >> self.cluster_bits;
            return Some(Reference { start, count: end - start + 1 });
        }
        let host = self.host(words)?;
        Some(Reference { start: host >> self.cluster_bits, count: 1 })
    }

    /// What it takes to write the bytes `from..to` of the cluster of `words`.
    ///
    /// * `words`: checked by [`check_words`](Rules::check_words).
    pub(crate) fn action(&self, words: Words, from: Bytes, to: Bytes) -> Action {
        let cluster_size = Bytes(1 << self.cluster_bits);
        let whole = Copy { head: Bytes::ZERO..from, tail: to..cluster_size, bitmap: 0 };
        if !self.extended {
            return match self.host(words) {
                Some(host) if Rules::is_own(words) && !self.is_zero(words) => {
                    Action::InPlace { host }
                }
                Some(host) if Rules::is_own(words) => Action::Reuse { host, copy: whole },
                _ => Action::Fresh { copy: whole },
            };
        }
        if words.entry & COMPRESSED != 0 {
            return Action::Fresh { copy: Copy { bitmap: bitmap(ALL, 0), ..whole } };
        }
        let shift = self.cluster_bits - 5;
        let (first, last) = (from >> shift, (to - Bytes(1)) >> shift);
        let touched = (ALL >> (31 - (last - first))) << first;
        let bitmap = bitmap(words.allocated() | touched, words.zeroes() & !touched);
        // Where the subclusters at both ends begin and end.
        let (start, end) = (Bytes::of_clusters(first, shift), Bytes::of_clusters(last + 1, shift));
        let has = |index: u64| words.allocated() >> index & 1 != 0;
        match self.host(words) {
            Some(host) if Rules::is_own(words) => {
                if touched & !words.allocated() == 0 {
                    return Action::InPlace { host };
                }
                // What is there already is not written again.
                let head = if has(first) { from..from } else { start..from };
                let tail = if has(last) { to..to } else { to..end };
                Action::Reuse { host, copy: Copy { head, tail, bitmap } }
            }
            Some(_) => {
                // Shared with a snapshot: the data that it has is copied along.
                let at = |subcluster: u32| Bytes::of_clusters(subcluster.into(), shift);
                let lowest = at(words.allocated().trailing_zeros());
                let highest = at(32 - words.allocated().leading_zeros());
                let head = start.min(lowest)..from;
                Action::Fresh { copy: Copy { head, tail: to..end.max(highest), bitmap } }
            }
            None => Action::Fresh { copy: Copy { head: start..from, tail: to..end, bitmap } },
        }
    }
}
