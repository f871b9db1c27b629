//! Structures in payloads.
//!
//! Promises: plain values, of the layout and with the field names of the specification; nothing in
//! them is checked yet.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A number about one virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Which virtqueue.
    pub index: u32,
    /// Its size, its base, or whether it is enabled.
    pub num: u32,
}

/// Where a virtqueue is; addresses are the front end's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddress {
    /// Which virtqueue.
    pub index: u32,
    /// Bit 0: writes to the used ring are logged.
    pub flags: u32,
    /// Descriptor table (packed: the ring).
    pub descriptor: u64,
    /// Used ring (packed: device event suppression).
    pub used: u64,
    /// Avail ring (packed: driver event suppression).
    pub available: u64,
    /// Guest-physical address of the used ring, for the log.
    pub log: u64,
}

impl VringAddress {
    /// Writes to the used ring are logged.
    pub const LOG: u32 = 1;
}

/// Before the regions of SET_MEM_TABLE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MemoryHead {
    /// How many regions follow; one descriptor each.
    pub num_regions: u32,
    /// Nothing.
    pub padding: u32,
}

/// A piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Region {
    /// Guest-physical address of its first byte.
    pub guest_addr: u64,
    /// Bytes; not necessarily whole pages.
    pub size: u64,
    /// Its address in the front end, in which ring addresses are given.
    pub user_addr: u64,
    /// Where in the descriptor it begins, bytes.
    pub mmap_offset: u64,
}

/// Payload of ADD_MEM_REG and REM_MEM_REG.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SingleRegion {
    /// Nothing.
    pub padding: u64,
    /// The region.
    pub region: Region,
}

/// The dirty log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Log {
    /// Bytes.
    pub mmap_size: u64,
    /// Where in the descriptor it begins, bytes.
    pub mmap_offset: u64,
}

/// Before the bytes of configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigHead {
    /// First byte; see [`ConfigHead::start`].
    pub offset: u32,
    /// How many.
    pub size: u32,
    /// 0: a write of the driver; 1: a migration restores what the driver cannot write. Front ends
    /// set anything in reads.
    pub flags: u32,
}

/// Offset that some front ends add: where configuration space lies in virtio-mmio.
const CONFIG_BASE: u32 = 0x100;

impl ConfigHead {
    /// First byte within configuration space. Cloud Hypervisor counts from 0x100, others from 0; a
    /// block device has less than 0x100 bytes, so both can be told apart.
    #[must_use]
    pub fn start(&self) -> u32 {
        self.offset.checked_sub(CONFIG_BASE).unwrap_or(self.offset)
    }
}

/// The area of requests in flight. 20 bytes, which C compilers round to 24: both are in use.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Inflight {
    /// Bytes.
    pub mmap_size: u64,
    /// Where in the descriptor it begins, bytes.
    pub mmap_offset: u64,
    /// Virtqueues.
    pub num_queues: u16,
    /// Entries of each.
    pub queue_size: u16,
    /// Sent by those whose compiler added it.
    pub padding: u32,
}

impl Inflight {
    /// Without the padding.
    pub const SHORT_BYTES: usize = 20;
}

/// Which way internal state goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceState {
    /// 0: we save, 1: we load.
    pub direction: u32,
    /// 0: while all virtqueues are stopped; there is no other.
    pub phase: u32,
}

const _: () = {
    assert!(size_of::<VringState>() == 8);
    assert!(size_of::<VringAddress>() == 40);
    assert!(size_of::<MemoryHead>() == 8);
    assert!(size_of::<Region>() == 32);
    assert!(size_of::<SingleRegion>() == 40);
    assert!(size_of::<Log>() == 16);
    assert!(size_of::<ConfigHead>() == 12);
    assert!(size_of::<Inflight>() == 24);
    assert!(size_of::<DeviceState>() == 8);
};
