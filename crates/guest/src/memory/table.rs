//! The memory of a guest: a table of regions.
//!
//! Promises: a table never changes; a change makes another table, and users of the old one keep it.

use std::sync::Arc;

use crate::Error;

use super::access::RingMemory;
use super::region::{MEMORY_BYTES_MAX, Region};

/// Most regions: the number that QEMU's own back end reports, 512 slots of KVM less three.
pub const REGIONS_MAX: usize = 509;

/// All regions, sorted by address of the guest.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    regions: Vec<Arc<Region>>,
}

impl Memory {
    /// A table of these regions.
    ///
    /// Errors: two overlap, there are more than [`REGIONS_MAX`], or more than [`MEMORY_BYTES_MAX`]
    /// bytes.
    pub fn new(mut regions: Vec<Arc<Region>>) -> Result<Memory, Error> {
        if regions.len() > REGIONS_MAX {
            return Err(Error::TooManyRegions { limit: REGIONS_MAX });
        }
        Memory::check_size(regions.iter().map(|region| region.size()))?;
        regions.sort_by_key(|region| region.guest_addr());
        for (at, region) in regions.iter().enumerate() {
            if regions[at + 1..].iter().any(|other| region.overlaps(other)) {
                let (guest_addr, size) = (region.guest_addr(), region.size());
                return Err(Error::Overlap { guest_addr, size });
            }
        }
        Ok(Memory { regions })
    }

    /// Whether regions of these sizes may be one memory: checked before they are mapped, since they
    /// use up addresses.
    ///
    /// Errors: more than [`MEMORY_BYTES_MAX`] bytes.
    pub fn check_size(sizes: impl Iterator<Item = u64>) -> Result<(), Error> {
        let total = sizes.fold(0, u64::saturating_add);
        match total <= MEMORY_BYTES_MAX {
            true => Ok(()),
            false => Err(Error::TooMuchMemory { size: total, limit: MEMORY_BYTES_MAX }),
        }
    }

    /// As [`Memory::check_size`], of this table and one more region.
    pub fn check_room(&self, size: u64) -> Result<(), Error> {
        let sizes = self.regions.iter().map(|region| region.size());
        Memory::check_size(sizes.chain([size]))
    }

    /// This table and one more region. Errors as [`Memory::new`].
    pub fn with(&self, region: Arc<Region>) -> Result<Memory, Error> {
        if self.regions.len() == REGIONS_MAX {
            return Err(Error::TooManyRegions { limit: REGIONS_MAX });
        }
        if self.regions.iter().any(|other| region.overlaps(other)) {
            let (guest_addr, size) = (region.guest_addr(), region.size());
            return Err(Error::Overlap { guest_addr, size });
        }
        self.check_room(region.size())?;
        let place = self.regions.partition_point(|r| r.guest_addr() < region.guest_addr());
        let mut regions = self.regions.clone();
        regions.insert(place, region);
        Ok(Memory { regions })
    }

    /// This table without the region of exactly these addresses and this size; gives the region
    /// too.
    ///
    /// Errors: there is none.
    pub fn without(
        &self,
        guest_addr: u64,
        size: u64,
        user_addr: u64,
    ) -> Result<(Memory, Arc<Region>), Error> {
        let is_it = |r: &Arc<Region>| {
            r.guest_addr() == guest_addr && r.size() == size && r.user_addr() == user_addr
        };
        let place = self.regions.iter().position(is_it);
        let place = place.ok_or(Error::NoSuchRegion { guest_addr, size })?;
        let mut regions = self.regions.clone();
        let region = regions.remove(place);
        Ok((Memory { regions }, region))
    }

    /// The regions, sorted by address of the guest.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Whether a part of any region was found gone.
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.is_lost())
    }

    /// The region with all of these bytes of the front end, and where in it they begin.
    pub fn translate_user(&self, user_addr: u64, len: u64) -> Option<(&Arc<Region>, u64)> {
        self.regions.iter().find_map(|region| {
            let at = user_addr.checked_sub(region.user_addr())?;
            (at <= region.size() && len <= region.size() - at).then_some((region, at))
        })
    }

    /// An area of a queue.
    ///
    /// * `user_addr`: address in the front end, as SET_VRING_ADDR gives it; `len`: bytes.
    ///
    /// Errors: it does not lie inside one region.
    pub fn ring(&self, user_addr: u64, len: u64) -> Result<RingMemory, Error> {
        let outside = Error::NotInMemory { user_addr, len };
        let (region, at) = self.translate_user(user_addr, len).ok_or(outside)?;
        let (from, len) = (usize::try_from(at), usize::try_from(len));
        let (from, len) = (from.map_err(|_| outside)?, len.map_err(|_| outside)?);
        Ok(RingMemory::new(region.mapping(), region.guest_addr()).part(from, len))
    }

    /// Number of the region that holds an address of the guest.
    pub(super) fn find(&self, guest_addr: u64) -> Option<usize> {
        let after = self.regions.partition_point(|region| region.guest_addr() <= guest_addr);
        let place = after.checked_sub(1)?;
        (guest_addr < self.regions[place].guest_end()).then_some(place)
    }
}
