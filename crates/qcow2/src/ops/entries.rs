//! The host clusters that entries of L1 and L2 tables refer to.
//!
//! Promises: pure; no I/O.
//!
//! Source: qcow2 specification, "Cluster mapping".

use crate::entry::{COMPRESSED, COPIED, OFFSET_MASK, ZERO};
use crate::geometry::Geometry;
use crate::limits::SECTOR;
use crate::units::{Bytes, HostCluster, HostOffset};

/// How the entries of one image are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader {
    geometry: Geometry,
    /// Length of the image file in bytes.
    file_len: Bytes,
    version: u32,
    /// Guest data lies in another file.
    external: bool,
}

/// What one L2 entry refers to in the image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reference {
    /// Nothing that is counted.
    None,
    /// The clusters that compressed data lies in.
    Compressed { start: HostCluster, count: u64 },
    /// One host cluster.
    Cluster(HostCluster),
}

impl Reader {
    pub(super) fn new(geometry: Geometry, file_len: Bytes, version: u32, external: bool) -> Reader {
        Reader { geometry, file_len, version, external }
    }

    /// Words of one L2 entry.
    pub(super) fn words(&self) -> usize {
        self.geometry.entry_words()
    }

    /// Host offset of the L2 table of an L1 entry; `None`: there is none.
    ///
    /// Errors: the text says what is wrong with the entry.
    pub(super) fn table(&self, entry: u64) -> Result<Option<HostOffset>, String> {
        let offset = HostOffset(entry & OFFSET_MASK);
        let bad = entry & !(OFFSET_MASK | COPIED) != 0 || !self.is_aligned(offset);
        if bad || offset.from_start() >= self.file_len {
            return Err(format!(
                "the L1 entry {entry:#x} is unaligned, past the end of the file or has reserved \
                 bits set"
            ));
        }
        Ok((offset != HostOffset(0)).then_some(offset))
    }

    fn is_aligned(&self, offset: HostOffset) -> bool {
        offset.is_multiple_of(self.geometry.cluster_size())
    }

    /// What the L2 entry with the first word `entry` refers to.
    ///
    /// Errors: the text says what is wrong with it.
    pub(super) fn reference(&self, entry: u64) -> Result<Reference, String> {
        if entry & COMPRESSED != 0 {
            let (host, len) = self.compressed_place(entry);
            if self.external || host == HostOffset(0) || host.from_start() >= self.file_len {
                return Err(format!("the L2 entry {entry:#x} of compressed data cannot be right"));
            }
            let bits = self.geometry.cluster_bits;
            let start = host >> bits;
            let count = ((host + len - Bytes(1)) >> bits) - start + 1;
            return Ok(Reference::Compressed { start, count });
        }
        let zero_flag = if self.version >= 3 && !self.geometry.extended { ZERO } else { 0 };
        let offset = HostOffset(entry & OFFSET_MASK);
        if entry & !(OFFSET_MASK | COPIED | zero_flag) != 0 || !self.is_aligned(offset) {
            return Err(format!("the L2 entry {entry:#x} is unaligned or has reserved bits set"));
        }
        if offset == HostOffset(0) || self.external {
            return Ok(Reference::None);
        }
        if offset.from_start() >= self.file_len {
            return Err(format!("the L2 entry {entry:#x} lies past the end of the file"));
        }
        Ok(Reference::Cluster(offset >> self.geometry.cluster_bits))
    }

    /// The clusters that entries of an L2 table name, also where these cannot be right.
    pub(super) fn named(&self, words: &[u64]) -> Vec<(HostCluster, u64)> {
        let mut runs: Vec<(HostCluster, u64)> = Vec::new();
        let bits = self.geometry.cluster_bits;
        for entry in words.iter().step_by(self.words()) {
            let (host, len) = match entry & COMPRESSED != 0 {
                true => self.compressed_place(*entry),
                false => (HostOffset(entry & OFFSET_MASK), Bytes(1)),
            };
            if host == HostOffset(0) || self.external {
                continue;
            }
            let (start, end) = (host >> bits, ((host + len - Bytes(1)) >> bits) + 1);
            match runs.last_mut() {
                Some((first, count)) if *first + *count == start => *count += end - start,
                _ => runs.push((start, end - start)),
            }
        }
        runs
    }

    /// Host offset and length in bytes of compressed data, up to the end of its last sector.
    fn compressed_place(&self, entry: u64) -> (HostOffset, Bytes) {
        let offset_bits = 62 - (self.geometry.cluster_bits - 8);
        let host = HostOffset(entry & ((1 << offset_bits) - 1));
        let sectors = (entry & (COMPRESSED - 1)) >> offset_bits;
        (host, (sectors + 1) * SECTOR - host % SECTOR)
    }

    /// All references of entries of an L2 table. Adjacent ones are joined, so each run stands for
    /// one reference to each of its clusters.
    pub(super) fn references(&self, words: &[u64]) -> Result<Vec<(HostCluster, u64)>, String> {
        let mut runs: Vec<(HostCluster, u64)> = Vec::new();
        for entry in words.iter().step_by(self.words()) {
            let (start, count) = match self.reference(*entry)? {
                Reference::None => continue,
                Reference::Compressed { start, count } => (start, count),
                Reference::Cluster(cluster) => (cluster, 1),
            };
            match runs.last_mut() {
                Some((first, len)) if *first + *len == start => *len += count,
                _ => runs.push((start, count)),
            }
        }
        Ok(runs)
    }
}
