//! How often each host cluster is referenced, in one byte for most clusters.
//!
//! Promises: memory follows what is referenced, not the length of the file: regions of
//! [`REGION_CLUSTERS`] clusters come into being when a reference is counted there, and the sum is
//! bounded by the limit that the caller gave. Pure memory, never blocks.
//!
//! Besides the number of references there is, for each cluster, how many entries of the active tree
//! claim to be its only user (COPIED flag) and how many say that they are not. So one pass over the
//! L2 tables is enough, whatever the refcounts turn out to be.

use crate::units::{Bytes, HostCluster};

/// Clusters of one region: small, so that a few scattered references cost a page each.
pub(super) const REGION_CLUSTERS: u64 = 1 << REGION_BITS;
const REGION_BITS: u32 = 12;
const REGION: usize = 1 << REGION_BITS;
/// Marks a slot that holds a wide region.
const WIDE: u32 = 1 << 31;
/// Largest numbers of the narrow form.
const NARROW_TOTAL_MAX: u32 = 15;
const NARROW_FLAG_MAX: u32 = 3;
/// Largest numbers of the wide form; they stick there.
pub(super) const TOTAL_MAX: u32 = (1 << 24) - 1;
const WIDE_FLAG_MAX: u32 = 15;

/// References to one cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Uses {
    /// All references; [`TOTAL_MAX`] means that or more.
    pub(super) total: u32,
    /// Those from the active tree with the COPIED flag (at least this many when it is 15).
    pub(super) copied: u32,
    /// Those from the active tree without it (at least this many when it is 15).
    pub(super) plain: u32,
}

impl Uses {
    /// References that carry no flag.
    pub(super) const fn unflagged(total: u32) -> Uses {
        Uses { total, copied: 0, plain: 0 }
    }

    /// The narrow form, where it fits.
    pub(super) fn narrow(self) -> Option<u8> {
        let fits = self.total <= NARROW_TOTAL_MAX
            && self.copied <= NARROW_FLAG_MAX
            && self.plain <= NARROW_FLAG_MAX;
        let packed = self.total | self.copied << 4 | self.plain << 6;
        if fits { u8::try_from(packed).ok() } else { None }
    }

    pub(super) fn from_narrow(byte: u8) -> Uses {
        let byte = u32::from(byte);
        Uses { total: byte & 15, copied: byte >> 4 & 3, plain: byte >> 6 }
    }

    fn wide(self) -> u32 {
        self.total.min(TOTAL_MAX)
            | self.copied.min(WIDE_FLAG_MAX) << 24
            | self.plain.min(WIDE_FLAG_MAX) << 28
    }

    pub(super) fn from_wide(word: u32) -> Uses {
        Uses { total: word & TOTAL_MAX, copied: word >> 24 & 15, plain: word >> 28 }
    }

    fn plus(self, other: Uses) -> Uses {
        Uses {
            total: self.total.saturating_add(other.total),
            copied: self.copied.saturating_add(other.copied),
            plain: self.plain.saturating_add(other.plain),
        }
    }
}

/// The limit is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutOfMemory;

/// The counts of neighbouring clusters.
#[derive(Clone, Copy, Debug)]
pub(super) enum Region<'a> {
    /// None of them is referenced.
    Empty,
    /// See [`Uses::from_narrow`].
    Narrow(&'a [u8]),
    /// See [`Uses::from_wide`].
    Wide(&'a [u32]),
}

/// The counts of all clusters of one file.
#[derive(Debug)]
pub(super) struct Counts {
    /// For each region: 0 (nothing counted), a slot of `narrow`, or a slot of `wide` with [`WIDE`].
    directory: Vec<u32>,
    /// Slot 0 is never used.
    narrow: Vec<u8>,
    wide: Vec<u32>,
    /// Narrow slots whose region became wide.
    spare: Vec<u32>,
    clusters: HostCluster,
    bytes_max: Bytes,
}

impl Counts {
    /// * `clusters`: clusters of the file; those behind cannot be counted.
    /// * `bytes_max`: memory that this may take.
    pub(super) fn new(clusters: HostCluster, bytes_max: Bytes) -> Result<Counts, OutOfMemory> {
        let regions = clusters.0.div_ceil(REGION_CLUSTERS);
        if Bytes(regions.saturating_mul(4)) > bytes_max / 4 {
            return Err(OutOfMemory);
        }
        Ok(Counts {
            // Zeroes from the allocator: pages of it that are never touched take no memory.
            directory: vec![0; usize::try_from(regions).map_err(|_| OutOfMemory)?],
            narrow: Vec::new(),
            wide: Vec::new(),
            spare: Vec::new(),
            clusters,
            bytes_max,
        })
    }

    /// Clusters that can be counted.
    pub(super) fn clusters(&self) -> HostCluster {
        self.clusters
    }

    /// Bytes that are taken now.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes::of(self.directory.len() * 4 + self.narrow.capacity() + self.wide.capacity() * 4)
    }

    /// Counts `uses` (and `narrow`, the same in its narrow form) of `cluster`, which must be below
    /// [`clusters`](Counts::clusters); beyond nothing happens.
    #[inline]
    pub(super) fn add_narrow(
        &mut self,
        cluster: HostCluster,
        narrow: u8,
        uses: Uses,
    ) -> Result<(), OutOfMemory> {
        let region = usize::try_from(cluster.0 >> REGION_BITS).unwrap_or(usize::MAX);
        if let Some(&slot) = self.directory.get(region)
            && slot & WIDE == 0
        {
            let at = (slot as usize) << REGION_BITS | place(cluster);
            // The slot 0 is not there, so its regions go the long way.
            if slot != 0
                && let Some(byte) = self.narrow.get_mut(at)
                && *byte == 0
            {
                *byte = narrow;
                return Ok(());
            }
        }
        self.add(cluster, uses)
    }

    /// Counts `uses` of `cluster`; see [`add_narrow`](Counts::add_narrow).
    pub(super) fn add(&mut self, cluster: HostCluster, uses: Uses) -> Result<(), OutOfMemory> {
        if cluster >= self.clusters {
            return Ok(());
        }
        let region = usize::try_from(cluster.0 >> REGION_BITS).map_err(|_| OutOfMemory)?;
        let mut slot = self.directory[region];
        if slot == 0 {
            slot = self.new_narrow()?;
            self.directory[region] = slot;
        }
        if slot & WIDE == 0 {
            let at = (slot as usize) << REGION_BITS | place(cluster);
            let sum = Uses::from_narrow(self.narrow[at]).plus(uses);
            if let Some(byte) = sum.narrow() {
                self.narrow[at] = byte;
                return Ok(());
            }
            slot = self.widen(slot)?;
            self.directory[region] = slot;
        }
        let at = ((slot & !WIDE) as usize) << REGION_BITS | place(cluster);
        self.wide[at] = Uses::from_wide(self.wide[at]).plus(uses).wide();
        Ok(())
    }

    /// Takes references back; the flags stay.
    pub(super) fn take_back(&mut self, cluster: HostCluster, count: u32) {
        let Some(&slot) = usize::try_from(cluster.0 >> REGION_BITS)
            .ok()
            .and_then(|region| self.directory.get(region))
        else {
            return;
        };
        if slot == 0 || cluster >= self.clusters {
            return;
        }
        if slot & WIDE == 0 {
            let at = (slot as usize) << REGION_BITS | place(cluster);
            let total = self.narrow[at] & 15;
            // At most 15.
            self.narrow[at] -= u8::try_from(count.min(u32::from(total))).unwrap_or(total);
        } else {
            let at = ((slot & !WIDE) as usize) << REGION_BITS | place(cluster);
            let total = self.wide[at] & TOTAL_MAX;
            if total != TOTAL_MAX {
                self.wide[at] -= count.min(total);
            }
        }
    }

    /// The references to `cluster`; none to those beyond the file.
    pub(super) fn get(&self, cluster: HostCluster) -> Uses {
        if cluster >= self.clusters {
            return Uses::default();
        }
        let place = place(cluster);
        match self.region(cluster.0 >> REGION_BITS) {
            Region::Empty => Uses::default(),
            Region::Narrow(bytes) => Uses::from_narrow(bytes[place]),
            Region::Wide(words) => Uses::from_wide(words[place]),
        }
    }

    /// The region with this number, i.e. the clusters from `number * REGION_CLUSTERS` on. It always
    /// has its full length.
    pub(super) fn region(&self, number: u64) -> Region<'_> {
        let slot = usize::try_from(number).ok().and_then(|number| self.directory.get(number));
        match slot.copied().unwrap_or(0) {
            0 => Region::Empty,
            slot if slot & WIDE == 0 => {
                let start = (slot as usize) << REGION_BITS;
                Region::Narrow(&self.narrow[start..start + REGION])
            }
            slot => {
                let start = ((slot & !WIDE) as usize) << REGION_BITS;
                Region::Wide(&self.wide[start..start + REGION])
            }
        }
    }

    fn new_narrow(&mut self) -> Result<u32, OutOfMemory> {
        if let Some(slot) = self.spare.pop() {
            let start = (slot as usize) << REGION_BITS;
            self.narrow[start..start + REGION].fill(0);
            return Ok(slot);
        }
        // Slot 0 means "none".
        let slot = (self.narrow.len() >> REGION_BITS).max(1);
        grow(&mut self.narrow, (slot + 1) << REGION_BITS)?;
        self.check_limit()?;
        u32::try_from(slot).ok().filter(|slot| slot & WIDE == 0).ok_or(OutOfMemory)
    }

    /// Turns a narrow region into a wide one.
    fn widen(&mut self, slot: u32) -> Result<u32, OutOfMemory> {
        let new = self.wide.len() >> REGION_BITS;
        grow(&mut self.wide, (new + 1) << REGION_BITS)?;
        self.check_limit()?;
        let from = (slot as usize) << REGION_BITS;
        let target = &mut self.wide[new << REGION_BITS..];
        for (word, byte) in target.iter_mut().zip(&self.narrow[from..from + REGION]) {
            *word = Uses::from_narrow(*byte).wide();
        }
        self.spare.push(slot);
        let new = u32::try_from(new).ok().filter(|new| new & WIDE == 0).ok_or(OutOfMemory)?;
        Ok(new | WIDE)
    }

    fn check_limit(&self) -> Result<(), OutOfMemory> {
        if self.bytes() > self.bytes_max { Err(OutOfMemory) } else { Ok(()) }
    }
}

/// Position of a cluster inside its region.
#[inline]
fn place(cluster: HostCluster) -> usize {
    // Below REGION.
    #[allow(clippy::cast_possible_truncation)]
    let place = (cluster.0 & (REGION_CLUSTERS - 1)) as usize;
    place
}

/// Zeroes up to `len`; never aborts for want of memory.
fn grow<T: Copy + Default>(target: &mut Vec<T>, len: usize) -> Result<(), OutOfMemory> {
    target.try_reserve(len - target.len()).map_err(|_| OutOfMemory)?;
    target.resize(len, T::default());
    Ok(())
}

/// Whether an entry gets the wrong flag when its cluster's refcount sinks to `refcount`.
pub(super) fn needs_flags(uses: Uses, refcount: u64) -> bool {
    refcount == 1 && uses.plain > 0
}
