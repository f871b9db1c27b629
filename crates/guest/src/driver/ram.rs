//! Memory of a simulated guest.
//!
//! Promises: it is mapped, and zero at first.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::memory::{Mapping, Region, RingMemory};
use crate::{Error, Memory};

/// Address of the guest where memory begins: not 0, so that 0 is no address.
pub const GUEST_BASE: u64 = 0x4000_0000;
/// Address in the front end where it begins: another one, so that mixing them up is seen.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// A memfd or another file, and this process's mapping of it.
#[derive(Debug)]
pub struct GuestRam {
    fd: OwnedFd,
    memory: RingMemory,
    /// Allocated bytes.
    taken: u64,
    /// The table of a device that shares our mapping.
    shared: Option<Arc<Memory>>,
}

impl GuestRam {
    /// Memory of `bytes` bytes, all zero.
    ///
    /// Errors: there is no memory.
    pub fn new(bytes: u64) -> Result<GuestRam, Error> {
        let failed = |errno| Error::System { doing: "make memory of a guest", errno };
        let fd = memfd_create(c"guest-ram", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&fd, bytes).map_err(failed)?;
        GuestRam::of(fd, bytes)
    }

    /// Memory that is the first `bytes` bytes of a file, all zero.
    ///
    /// Errors: the file is none, or shorter.
    pub fn of(fd: OwnedFd, bytes: u64) -> Result<GuestRam, Error> {
        let memory = RingMemory::new(&Mapping::new(fd.as_fd(), 0, bytes)?, GUEST_BASE);
        Ok(GuestRam { fd, memory, taken: 0, shared: None })
    }

    /// Its file, for ADD_MEM_REG: from [`GUEST_BASE`] and [`USER_BASE`], at offset 0.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.memory.len() as u64
    }

    /// All of it.
    pub fn memory(&self) -> &RingMemory {
        &self.memory
    }

    /// Another mapping of it, as a device makes it.
    pub fn region(&self) -> Arc<Region> {
        let fd = self.fd.try_clone().expect("a descriptor is left");
        Region::map(fd, GUEST_BASE, USER_BASE, self.size(), 0).expect("a memfd of this size")
    }

    /// A table of one region.
    pub fn table(&self) -> Arc<Memory> {
        Arc::new(Memory::new(vec![self.region()]).expect("one region"))
    }

    /// As [`GuestRam::table`], of the mapping that the guest uses from now on too. A sanitizer
    /// knows memory by its address: it sees what two threads do to one another only where both have
    /// the same one.
    #[cfg(test)]
    pub(crate) fn shared_table(&mut self) -> Arc<Memory> {
        let region = self.region();
        self.memory = RingMemory::new(region.mapping(), GUEST_BASE);
        let table = Arc::new(Memory::new(vec![region]).expect("one region"));
        self.shared = Some(Arc::clone(&table));
        table
    }

    /// The table that a driver of this memory uses.
    pub(super) fn own_table(&self) -> Arc<Memory> {
        self.shared.clone().unwrap_or_else(|| self.table())
    }

    /// Address in the front end.
    pub fn user_addr(guest_addr: u64) -> u64 {
        guest_addr - GUEST_BASE + USER_BASE
    }

    /// Bytes that were taken, from the beginning.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Takes memory. Gives its address of the guest.
    ///
    /// Errors: there is not so much left.
    pub fn take(&mut self, bytes: u64, align: u64) -> Result<u64, Error> {
        let start = self.taken.next_multiple_of(align);
        let full = Error::BadRange { guest_addr: GUEST_BASE + start, size: bytes };
        let end = start.checked_add(bytes).filter(|end| *end <= self.size()).ok_or(full)?;
        self.taken = end;
        Ok(GUEST_BASE + start)
    }

    /// Writes bytes of the guest. Panics outside memory.
    pub fn write(&self, guest_addr: u64, bytes: &[u8]) {
        self.memory.write_bytes(offset(guest_addr), bytes);
    }

    /// Reads bytes of the guest. Panics outside memory.
    pub fn read(&self, guest_addr: u64, bytes: &mut [u8]) {
        self.memory.read_bytes(offset(guest_addr), bytes);
    }
}

fn offset(guest_addr: u64) -> usize {
    usize::try_from(guest_addr - GUEST_BASE).expect("64 bits")
}
