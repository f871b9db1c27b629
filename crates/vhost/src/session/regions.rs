//! Which regions of memory the front end has given: for counting, for finding them again, and so
//! that none overlap.
//!
//! Promises: plain values; control thread. A region that is empty, wraps around or overlaps another
//! one is refused. Nothing is mapped here.

use crate::protocol::Region;

/// A region, without what it maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    guest_addr: u64,
    size: u64,
    user_addr: u64,
}

impl Known {
    fn of(region: &Region) -> Known {
        Known { guest_addr: region.guest_addr, size: region.size, user_addr: region.user_addr }
    }

    /// Both ends are known not to wrap around.
    fn overlaps(&self, other: &Known) -> bool {
        self.guest_addr < other.guest_addr + other.size
            && other.guest_addr < self.guest_addr + self.size
    }
}

/// The regions of a session.
#[derive(Debug, Default)]
pub(super) struct Regions(Vec<Known>);

impl Regions {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Guest address, size and front end's address of each.
    pub(super) fn saved(&self) -> Vec<(u64, u64, u64)> {
        self.0.iter().map(|known| (known.guest_addr, known.size, known.user_addr)).collect()
    }

    /// A table of these regions alone.
    ///
    /// Errors: one of them cannot be, or two overlap.
    pub(super) fn of(regions: &[&Region]) -> Result<Regions, String> {
        let mut table = Regions::default();
        for region in regions {
            table.check(region)?;
            table.add(region);
        }
        Ok(table)
    }

    /// Whether a region could be added.
    pub(super) fn check(&self, region: &Region) -> Result<(), String> {
        let Region { guest_addr, size, user_addr, mmap_offset } = *region;
        if size == 0 {
            return Err(format!("region at {guest_addr:#x} is empty"));
        }
        for (what, start) in
            [("guest", guest_addr), ("front end", user_addr), ("descriptor", mmap_offset)]
        {
            if start.checked_add(size).is_none() {
                return Err(format!(
                    "region of {size:#x} bytes at {start:#x} ({what}) wraps around"
                ));
            }
        }
        let known = Known::of(region);
        if let Some(other) = self.0.iter().find(|other| other.overlaps(&known)) {
            return Err(format!(
                "region at {guest_addr:#x} ({size:#x} bytes) overlaps the one at {:#x} ({:#x} \
                 bytes)",
                other.guest_addr, other.size
            ));
        }
        Ok(())
    }

    /// Adds one that was checked.
    pub(super) fn add(&mut self, region: &Region) {
        self.0.push(Known::of(region));
    }

    /// Where a region is, if it was added exactly so; its offset in the descriptor does not count.
    pub(super) fn find(&self, region: &Region) -> Option<usize> {
        self.0.iter().position(|known| *known == Known::of(region))
    }

    pub(super) fn remove(&mut self, at: usize) {
        self.0.swap_remove(at);
    }
}
