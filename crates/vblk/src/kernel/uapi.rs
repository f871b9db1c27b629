//! Ioctls of the module and of vhost, and what they carry: `kernel/vhost-blk/ringdisk_vhost_blk.h`
//! and `include/uapi/linux/vhost.h`.
//!
//! Promises: a number and the type that the kernel reads or writes through it belong together
//! ([`In`], [`Out`], [`InOut`]); tests compare all of them with the headers.

use std::marker::PhantomData;

use ringdisk_guest::REGIONS_MAX;
use rustix::ioctl::{Direction, Opcode, opcode};

/// `RINGDISK_VBLK_VERSION`.
pub(crate) const VERSION: u32 = 1;
/// `RINGDISK_VBLK_MAGIC`.
const MAGIC: u8 = 0xE8;
/// `VHOST_VIRTIO`.
const VHOST: u8 = 0xAF;

/// The kernel reads a `T`.
#[derive(Debug)]
pub(super) struct In<T>(pub(super) Opcode, PhantomData<fn(T)>);

/// The kernel writes a `T`.
#[derive(Debug)]
pub(super) struct Out<T>(pub(super) Opcode, PhantomData<fn() -> T>);

/// The kernel reads a `T` and writes it.
#[derive(Debug)]
pub(super) struct InOut<T>(pub(super) Opcode, PhantomData<fn(T) -> T>);

impl<T> In<T> {
    const fn new(magic: u8, number: u8) -> In<T> {
        In(opcode::write::<T>(magic, number), PhantomData)
    }
}

impl<T> Out<T> {
    const fn new(magic: u8, number: u8) -> Out<T> {
        Out(opcode::read::<T>(magic, number), PhantomData)
    }
}

impl<T> InOut<T> {
    const fn new(magic: u8, number: u8) -> InOut<T> {
        InOut(opcode::read_write::<T>(magic, number), PhantomData)
    }
}

/// `struct ringdisk_vblk_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InfoWords {
    pub(crate) version: u32,
    pub(crate) engines: u32,
    pub(crate) queues_max: u32,
    pub(crate) ring_max: u32,
    pub(crate) request_bytes_max: u32,
    pub(crate) ranges_max: u32,
    pub(crate) features: u64,
    pub(crate) reserved: [u64; 4],
}

/// `struct ringdisk_vblk_setup`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SetupWords {
    pub(super) version: u32,
    pub(super) queues: u32,
    pub(super) reserved: [u64; 2],
}

/// `RINGDISK_VBLK_ENGINE_*`.
pub(crate) const ENGINE_DEFAULT: u32 = 0;
pub(crate) const ENGINE_KIOCB: u32 = 1;
pub(crate) const ENGINE_BIO: u32 = 2;

/// `RINGDISK_VBLK_DISK_*`.
pub(crate) const DISK_RO: u32 = 1 << 0;
pub(crate) const DISK_WRITE_THROUGH: u32 = 1 << 1;

/// `struct ringdisk_vblk_disk`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DiskWords {
    pub(crate) fd: i32,
    pub(crate) flags: u32,
    pub(crate) engine: u32,
    pub(crate) block_bytes: u32,
    pub(crate) memory_align: u32,
    pub(crate) ranges_max: u32,
    pub(crate) range_sectors_max: u32,
    pub(crate) reserved0: u32,
    pub(crate) capacity: u64,
    pub(crate) id: [u8; 20],
    pub(crate) reserved1: [u8; 12],
}

/// `RINGDISK_VBLK_ALL`.
pub(super) const ALL: u32 = u32::MAX;

/// States of a queue.
pub(crate) const IDLE: u32 = 0;
pub(crate) const RUNNING: u32 = 1;
pub(crate) const BROKEN: u32 = 2;
pub(crate) const DRAINING: u32 = 3;

/// `struct ringdisk_vblk_stats`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StatsWords {
    pub(crate) queue: u32,
    pub(crate) state: u32,
    pub(crate) in_flight: u32,
    pub(crate) reserved0: u32,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) flushes: u64,
    pub(crate) discards: u64,
    pub(crate) write_zeroes: u64,
    pub(crate) get_ids: u64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    pub(crate) errors: u64,
    pub(crate) unsupported: u64,
    pub(crate) rounds: u64,
    pub(crate) batches: u64,
    pub(crate) bounced: u64,
    pub(crate) bounce_waits: u64,
    pub(crate) bios: u64,
    pub(crate) kiocbs: u64,
    pub(crate) starved: u64,
    pub(crate) orphans: u64,
    pub(crate) broken: u64,
    pub(crate) reserved1: [u64; 4],
}

/// `struct vhost_memory_region`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemoryRegion {
    pub(super) guest_phys_addr: u64,
    pub(super) memory_size: u64,
    pub(super) userspace_addr: u64,
    pub(super) flags_padding: u64,
}

/// `struct vhost_memory`, with room for as many regions as a [`ringdisk_guest::Memory`] can have.
#[repr(C)]
#[derive(Debug)]
pub(super) struct MemoryTable {
    pub(super) nregions: u32,
    pub(super) padding: u32,
    pub(super) regions: [MemoryRegion; REGIONS_MAX],
}

/// `struct vhost_vring_state`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VringState {
    pub(super) index: u32,
    pub(super) num: u32,
}

/// `struct vhost_vring_file`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VringFile {
    pub(super) index: u32,
    pub(super) fd: i32,
}

/// `struct vhost_vring_addr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VringAddr {
    pub(super) index: u32,
    pub(super) flags: u32,
    pub(super) desc_user_addr: u64,
    pub(super) used_user_addr: u64,
    pub(super) avail_user_addr: u64,
    pub(super) log_guest_addr: u64,
}

/// `struct vhost_worker_state`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WorkerState {
    pub(super) worker_id: u32,
}

/// `struct vhost_vring_worker`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VringWorker {
    pub(super) index: u32,
    pub(super) worker_id: u32,
}

pub(super) const INFO: Out<InfoWords> = Out::new(MAGIC, 0x00);
pub(super) const SETUP: In<SetupWords> = In::new(MAGIC, 0x01);
pub(super) const SET_DISK: In<DiskWords> = In::new(MAGIC, 0x02);
pub(super) const START: In<u32> = In::new(MAGIC, 0x03);
pub(super) const STOP: In<u32> = In::new(MAGIC, 0x04);
pub(super) const SET_CACHE: In<u32> = In::new(MAGIC, 0x05);
pub(super) const STATS: InOut<StatsWords> = InOut::new(MAGIC, 0x06);

pub(super) const SET_FEATURES: In<u64> = In::new(VHOST, 0x00);
/// Carries nothing.
pub(super) const SET_OWNER: Opcode = opcode::none(VHOST, 0x01);
/// Its number counts the bytes before the regions only.
pub(super) const SET_MEM_TABLE: In<MemoryTable> =
    In(opcode::from_components(Direction::Write, VHOST, 0x03, 8), PhantomData);
pub(super) const NEW_WORKER: Out<WorkerState> = Out::new(VHOST, 0x08);
pub(super) const FREE_WORKER: In<WorkerState> = In::new(VHOST, 0x09);
pub(super) const SET_VRING_NUM: In<VringState> = In::new(VHOST, 0x10);
pub(super) const SET_VRING_ADDR: In<VringAddr> = In::new(VHOST, 0x11);
pub(super) const SET_VRING_BASE: In<VringState> = In::new(VHOST, 0x12);
pub(super) const GET_VRING_BASE: InOut<VringState> = InOut::new(VHOST, 0x12);
pub(super) const ATTACH_VRING_WORKER: In<VringWorker> = In::new(VHOST, 0x15);
pub(super) const GET_VRING_WORKER: InOut<VringWorker> = InOut::new(VHOST, 0x16);
pub(super) const SET_VRING_KICK: In<VringFile> = In::new(VHOST, 0x20);
pub(super) const SET_VRING_CALL: In<VringFile> = In::new(VHOST, 0x21);
pub(super) const SET_VRING_ERR: In<VringFile> = In::new(VHOST, 0x22);
pub(super) const SET_FORK_FROM_OWNER: In<u8> = In::new(VHOST, 0x84);
