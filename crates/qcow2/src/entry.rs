//! L1 and L2 entries: what they mean, and whether they may be believed.
//!
//! Promises: no offset leaves here that is unaligned, points into the header, the L1 table, the
//! refcount table or the snapshot table, or starts past the end of its file. Entries with
//! reserved bits set are refused: they mean something that we do not know. Pure, never allocates.
//!
//! Source: qcow2 specification, "Cluster mapping" and "Extended L2 entries".

use rustix::io::Errno;

use crate::compressed::Compressed;
use crate::geometry::Geometry;
use crate::limits::SECTOR;
use crate::run::ExtentKind;

use crate::concurrent::region::{MovingRegion, Region};
use crate::units::{Bytes, GuestOffset, HostOffset};

/// Bits 9 to 55: host offset of a table or cluster.
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the reference count is exactly one.
pub(crate) const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry: compressed cluster.
pub(crate) const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard L2 entry of version 3: reads as zeroes.
pub(crate) const ZERO: u64 = 1;
/// Bits 0 to 8 and 56 to 62.
const L1_RESERVED: u64 = !(OFFSET_MASK | COPIED);
/// Bits 0 to 8 and 56 to 61 (bit 0 is taken out where it has a meaning).
const L2_RESERVED: u64 = !(OFFSET_MASK | COPIED | COMPRESSED);

/// Lengths of the files right now, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lengths {
    /// The image file.
    pub(crate) file: Bytes,
    /// The file with the data: the same, or the external data file.
    pub(crate) data: Bytes,
}

/// The rules by which entries of one image are read.
#[derive(Debug)]
pub(crate) struct Rules {
    pub(crate) cluster_bits: u32,
    pub(crate) extended: bool,
    pub(crate) external: bool,
    /// Bits of a standard entry that must be zero, alignment included.
    pub(crate) bad_bits: u64,
    /// Bits of a standard entry that say "zeroes": none where bit 0 is reserved.
    pub(crate) zero_flag: u64,
    /// Bits of the host offset of a compressed cluster.
    compressed_offset_bits: u32,
    /// L1 table, refcount table, snapshot table.
    pub(crate) metadata: [MovingRegion; 3],
}

/// Index of the refcount table in [`Rules::metadata`].
pub(crate) const REFCOUNT_TABLE: usize = 1;

impl Rules {
    /// * `version`: 2 or 3.
    /// * `external`: data lies in another file.
    /// * `metadata`: where the tables are that the header names.
    pub(crate) fn new(
        geometry: &Geometry,
        version: u32,
        external: bool,
        metadata: [Region; 3],
    ) -> Rules {
        let zero_flag = if version >= 3 && !geometry.extended { ZERO } else { 0 };
        let alignment = (geometry.cluster_size().0 - 1) & OFFSET_MASK;
        Rules {
            cluster_bits: geometry.cluster_bits,
            extended: geometry.extended,
            external,
            bad_bits: (L2_RESERVED | alignment) & !zero_flag,
            zero_flag,
            compressed_offset_bits: 62 - (geometry.cluster_bits - 8),
            metadata: metadata.map(MovingRegion::new),
        }
    }

    /// Whether a range of the image file lies where other things are.
    pub(crate) fn overlaps_metadata(&self, start: HostOffset, len: Bytes) -> bool {
        let Some(end) = start.checked_add(len) else { return true };
        start < HostOffset(1 << self.cluster_bits)
            || self.metadata.iter().any(|region| region.overlaps(start, end))
    }

    /// Host offset of the L2 table that an L1 entry names; `None`: there is no table.
    ///
    /// Errors: `EIO` for an entry that cannot be right.
    pub(crate) fn l2_table(
        &self,
        entry: u64,
        file_len: Bytes,
    ) -> Result<Option<HostOffset>, Errno> {
        let cluster_size = Bytes(1 << self.cluster_bits);
        let offset = HostOffset(entry & OFFSET_MASK);
        if entry & L1_RESERVED != 0 || !offset.is_multiple_of(cluster_size) {
            return Err(Errno::IO);
        }
        if offset == HostOffset(0) {
            return Ok(None);
        }
        if offset.from_start() >= file_len || self.overlaps_metadata(offset, cluster_size) {
            return Err(Errno::IO);
        }
        Ok(Some(offset))
    }

    /// Errors: `EIO` for an entry of an image with an external data file that names another place
    /// there than that of its guest cluster. An image without one passes.
    ///
    /// * `guest`: any offset of the disk inside the cluster.
    #[inline]
    pub(crate) fn check_place(&self, entry: u64, guest: GuestOffset) -> Result<(), Errno> {
        if !self.external {
            return Ok(());
        }
        let host = entry & OFFSET_MASK;
        // Bit 63 distinguishes place 0 from none.
        let present = host != 0 || entry & COPIED != 0;
        let misplaced = present
            && entry & COMPRESSED == 0
            && host != (guest >> self.cluster_bits << self.cluster_bits).0;
        if misplaced { Err(Errno::IO) } else { Ok(()) }
    }

    /// What the bytes from `in_cluster` on are, and how many are of the same kind (up to the end
    /// of the cluster, or of the file).
    ///
    /// * `entry`, `bitmap`: the two words of an extended entry; `bitmap` is ignored otherwise.
    ///
    /// Errors: `EIO` for an entry that cannot be right.
    pub(crate) fn piece(
        &self,
        entry: u64,
        bitmap: u64,
        in_cluster: Bytes,
        lengths: Lengths,
    ) -> Result<(ExtentKind, Bytes), Errno> {
        let cluster_size = Bytes(1 << self.cluster_bits);
        let rest = cluster_size - in_cluster;
        if entry & COMPRESSED != 0 {
            let cluster = self.compressed(entry, bitmap, lengths)?;
            return Ok((ExtentKind::Compressed(cluster), rest));
        }
        if entry & self.bad_bits != 0 {
            return Err(Errno::IO);
        }
        let host = HostOffset(entry & OFFSET_MASK);
        // Host offset 0 is the header, or "none". In an external data file it is a place like any
        // other, and bit 63 says whether the entry names it.
        let present = host != HostOffset(0) || (self.external && entry & COPIED != 0);
        if present && !self.external && self.overlaps_metadata(host, cluster_size) {
            return Err(Errno::IO);
        }
        let host = present.then_some(host);
        let (zero, data, rest) = if self.extended {
            self.subclusters(bitmap, present, in_cluster)?
        } else {
            let zero = entry & self.zero_flag != 0;
            (zero, present && !zero, rest)
        };
        match host {
            Some(host) if data => data_piece(host, in_cluster, rest, lengths.data),
            _ if zero => {
                let offset = host.map(|host| host + in_cluster);
                Ok((ExtentKind::Zero { offset }, rest))
            }
            _ => Ok((ExtentKind::Unallocated, rest)),
        }
    }

    /// Whether the subcluster at `in_cluster` is zero or data, and for how many bytes that holds.
    fn subclusters(
        &self,
        bitmap: u64,
        present: bool,
        in_cluster: Bytes,
    ) -> Result<(bool, bool, Bytes), Errno> {
        // The two halves of the word.
        #[allow(clippy::cast_possible_truncation)]
        let (allocated, zeroes) = (bitmap as u32, (bitmap >> 32) as u32);
        if allocated & zeroes != 0 || (allocated != 0 && !present) {
            return Err(Errno::IO);
        }
        let subcluster_bits = self.cluster_bits - 5;
        let index = in_cluster >> subcluster_bits;
        let bit = 1u32 << index;
        let zero = zeroes & bit != 0;
        let data = allocated & bit != 0;
        let alike = match (zero, data) {
            (true, _) => zeroes,
            (_, true) => allocated,
            _ => !(allocated | zeroes),
        };
        let count = u64::from((alike >> index).trailing_ones());
        let end = Bytes::of_clusters(index + count, subcluster_bits);
        Ok((zero, data, end - in_cluster))
    }

    /// Host offset and length in bytes of a compressed cluster, up to the end of its last sector.
    pub(crate) fn compressed_place(&self, entry: u64) -> (HostOffset, Bytes) {
        let host = HostOffset(entry & ((1 << self.compressed_offset_bits) - 1));
        let sectors = (entry & (COMPRESSED - 1)) >> self.compressed_offset_bits;
        (host, (sectors + 1) * SECTOR - host % SECTOR)
    }

    /// The entry of a compressed cluster of `len` bytes at `host`.
    pub(crate) fn compressed_entry(&self, host: HostOffset, len: Bytes) -> u64 {
        let sectors = (host.from_start() + len - Bytes(1)) / SECTOR - host.from_start() / SECTOR;
        COMPRESSED | sectors << self.compressed_offset_bits | host.0
    }

    /// The descriptor of a compressed cluster.
    fn compressed(&self, entry: u64, bitmap: u64, lengths: Lengths) -> Result<Compressed, Errno> {
        if self.external || (self.extended && bitmap != 0) {
            return Err(Errno::IO);
        }
        let (host, len) = self.compressed_place(entry);
        // The last sector may be cut by the end of the file: what is needed of it is there.
        let len = len.min(lengths.file.saturating_sub(host.from_start()));
        if len == Bytes::ZERO || self.overlaps_metadata(host, len) {
            return Err(Errno::IO);
        }
        // At most 2^13 sectors of 512 bytes.
        Ok(Compressed::new(host, u32::try_from(len).map_err(|_| Errno::IO)?))
    }
}

/// Data of a cluster at `host`. The file may end inside its last cluster: the part that is not
/// there reads as zeroes.
fn data_piece(
    host: HostOffset,
    in_cluster: Bytes,
    rest: Bytes,
    data_len: Bytes,
) -> Result<(ExtentKind, Bytes), Errno> {
    if host.from_start() >= data_len {
        return Err(Errno::IO);
    }
    let offset = host + in_cluster;
    if offset.from_start() >= data_len {
        return Ok((ExtentKind::Zero { offset: Some(offset) }, rest));
    }
    Ok((ExtentKind::Data { offset }, rest.min(data_len - offset.from_start())))
}
