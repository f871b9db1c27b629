//! The device as the kernel sees it. The only place of this crate with `unsafe`.
//!
//! Promises: the kernel is given no address that could go away while it is used. What that rests
//! on: the kernel reads and writes memory of ours at addresses that SET_MEM_TABLE and
//! SET_VRING_ADDR name, but only between START of a queue and the return of its STOP
//! (`ringdisk_vhost_blk.h`). So a [`Handle`] owns a reference to that memory: a table of regions is
//! replaced only while no queue is started, the areas of a ring are checked to be as long as the
//! ring needs, and are kept until STOP succeeded. If STOP fails, the memory is never unmapped.

#![allow(unsafe_code)]

#[cfg(test)]
mod tests;
pub(crate) mod uapi;

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringdisk_guest::{Areas, Memory, RingMemory};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::{Errno, Result};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, ioctl};

use uapi::{
    DiskWords, In, InOut, InfoWords, MemoryRegion, MemoryTable, Out, SetupWords, StatsWords,
    VringAddr, VringFile, VringState, VringWorker, WorkerState,
};

/// `VIRTIO_RING_F_EVENT_IDX` (virtio 1.3, 6).
const EVENT_IDX: u64 = 1 << 29;

/// Which eventfd of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The guest has new requests.
    Kick,
    /// The guest has new answers.
    Call,
    /// The ring is broken.
    Error,
}

/// An open device, with the memory that the kernel may write.
#[derive(Debug)]
pub(crate) struct Handle {
    fd: OwnedFd,
    features: u64,
    /// What SET_MEM_TABLE named.
    memory: Option<Arc<Memory>>,
    /// One for each queue that SETUP has made; there while it is started.
    started: Vec<Option<Areas>>,
}

impl Handle {
    /// Opens the device. It is not set up.
    ///
    /// Errors: those of open(2).
    pub(crate) fn open(path: &str) -> Result<Handle> {
        let fd = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Handle { fd, features: 0, memory: None, started: Vec::new() })
    }

    /// INFO.
    pub(crate) fn info(&self) -> Result<InfoWords> {
        self.take(&uapi::INFO)
    }

    /// SETUP.
    pub(crate) fn set_up(&mut self, queues: u16) -> Result<()> {
        let words =
            SetupWords { version: uapi::VERSION, queues: queues.into(), ..SetupWords::default() };
        self.give(&uapi::SETUP, &words)?;
        self.started = (0..queues).map(|_| None).collect();
        Ok(())
    }

    /// SET_OWNER. Workers become threads of this process.
    pub(crate) fn set_owner(&self) -> Result<()> {
        // A parameter of vhost can make them threads of the kernel, in another cgroup and without
        // NEW_WORKER. Kernels that do not know this call, or are built without it, do not have the
        // parameter.
        let _ = self.give(&uapi::SET_FORK_FROM_OWNER, &1);
        self.call(uapi::SET_OWNER, std::ptr::null_mut())
    }

    /// SET_FEATURES. Refused while a queue is started (the module does, too): the length of what it
    /// writes depends on them.
    pub(crate) fn set_features(&mut self, features: u64) -> Result<()> {
        self.all_stopped()?;
        self.give(&uapi::SET_FEATURES, &features)?;
        self.features = features;
        Ok(())
    }

    /// SET_MEM_TABLE. Refused while a queue is started.
    pub(crate) fn set_memory(&mut self, memory: Arc<Memory>) -> Result<()> {
        self.all_stopped()?;
        let mut table = Box::new(MemoryTable {
            nregions: u32::try_from(memory.regions().len()).map_err(|_| Errno::TOOBIG)?,
            padding: 0,
            regions: [MemoryRegion::default(); ringdisk_guest::REGIONS_MAX],
        });
        for (entry, region) in table.regions.iter_mut().zip(memory.regions()) {
            *entry = MemoryRegion {
                guest_phys_addr: region.guest_addr(),
                memory_size: region.size(),
                userspace_addr: region.address() as u64,
                flags_padding: 0,
            };
        }
        self.give(&uapi::SET_MEM_TABLE, &table)?;
        self.memory = Some(memory);
        Ok(())
    }

    /// Lets go of the memory: nothing is started before there is another one. Refused while a queue
    /// is started.
    pub(crate) fn forget_memory(&mut self) -> Result<()> {
        self.all_stopped()?;
        self.memory = None;
        Ok(())
    }

    /// SET_DISK. The kernel takes a reference of its own to the file.
    pub(crate) fn set_disk(&self, fd: Option<BorrowedFd<'_>>, words: DiskWords) -> Result<()> {
        self.give(&uapi::SET_DISK, &DiskWords { fd: raw(fd), ..words })
    }

    /// NEW_WORKER.
    pub(crate) fn new_worker(&self) -> Result<u32> {
        Ok(self.take(&uapi::NEW_WORKER)?.worker_id)
    }

    /// FREE_WORKER.
    pub(crate) fn free_worker(&self, worker_id: u32) -> Result<()> {
        self.give(&uapi::FREE_WORKER, &WorkerState { worker_id })
    }

    /// ATTACH_VRING_WORKER.
    pub(crate) fn attach_worker(&self, queue: u16, worker_id: u32) -> Result<()> {
        self.give(&uapi::ATTACH_VRING_WORKER, &VringWorker { index: queue.into(), worker_id })
    }

    /// GET_VRING_WORKER.
    pub(crate) fn worker_of(&self, queue: u16) -> Result<u32> {
        let mut words = VringWorker { index: queue.into(), worker_id: 0 };
        self.exchange(&uapi::GET_VRING_WORKER, &mut words)?;
        Ok(words.worker_id)
    }

    /// SET_VRING_KICK, _CALL or _ERR. The kernel takes a reference of its own to the eventfd.
    pub(crate) fn set_event(
        &self,
        queue: u16,
        event: Event,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<()> {
        let number = match event {
            Event::Kick => &uapi::SET_VRING_KICK,
            Event::Call => &uapi::SET_VRING_CALL,
            Event::Error => &uapi::SET_VRING_ERR,
        };
        self.give(number, &VringFile { index: queue.into(), fd: raw(fd) })
    }

    /// SET_VRING_NUM, _BASE and _ADDR, and START.
    ///
    /// Errors: `EINVAL` where the areas are shorter than such a ring, which is refused here;
    /// `EBUSY` for a queue that is started; those of the kernel. Then the queue is stopped, and
    /// nothing of it is kept.
    pub(crate) fn start(&mut self, queue: u16, size: u16, base: u16, areas: Areas) -> Result<()> {
        let index = usize::from(queue);
        if self.started.get(index).ok_or(Errno::NOBUFS)?.is_some() {
            return Err(Errno::BUSY);
        }
        if self.memory.is_none() || !self.is_large_enough(&areas, size) {
            return Err(Errno::INVAL);
        }
        let address = |area: &RingMemory| area.address() as u64;
        let words = VringAddr {
            index: queue.into(),
            flags: 0,
            desc_user_addr: address(&areas.descriptors),
            used_user_addr: address(&areas.device),
            avail_user_addr: address(&areas.driver),
            log_guest_addr: 0,
        };
        let state = |num: u16| VringState { index: queue.into(), num: num.into() };
        self.give(&uapi::SET_VRING_NUM, &state(size))?;
        self.give(&uapi::SET_VRING_BASE, &state(base))?;
        self.give(&uapi::SET_VRING_ADDR, &words)?;
        // The memory of `areas` and of `self.memory` is there and stays: nothing of this object
        // unmaps it before STOP.
        self.started[index] = Some(areas);
        let started = self.give(&uapi::START, &queue.into());
        if started.is_err() {
            self.started[index] = None;
        }
        started
    }

    /// STOP of a queue. Afterwards the kernel does not touch its memory any more.
    pub(crate) fn stop(&mut self, queue: u16) -> Result<()> {
        self.give(&uapi::STOP, &queue.into())?;
        self.started[usize::from(queue)] = None;
        Ok(())
    }

    /// STOP of all queues, which drain at the same time.
    pub(crate) fn stop_all(&mut self) -> Result<()> {
        self.give(&uapi::STOP, &uapi::ALL)?;
        self.started.fill(None);
        Ok(())
    }

    /// GET_VRING_BASE: where the next request is taken from the avail ring.
    pub(crate) fn base(&self, queue: u16) -> Result<u16> {
        let mut words = VringState { index: queue.into(), num: 0 };
        self.exchange(&uapi::GET_VRING_BASE, &mut words)?;
        u16::try_from(words.num).map_err(|_| Errno::PROTO)
    }

    /// SET_CACHE.
    pub(crate) fn set_cache(&self, on: bool) -> Result<()> {
        self.give(&uapi::SET_CACHE, &on.into())
    }

    /// STATS.
    pub(crate) fn stats(&self, queue: u16) -> Result<StatsWords> {
        let mut words = StatsWords { queue: queue.into(), ..StatsWords::default() };
        self.exchange(&uapi::STATS, &mut words)?;
        Ok(words)
    }

    /// Queues that SETUP has made.
    pub(crate) fn queues(&self) -> u16 {
        u16::try_from(self.started.len()).unwrap_or(u16::MAX)
    }

    /// Whether a queue is started.
    pub(crate) fn is_started(&self, queue: u16) -> bool {
        self.started.get(usize::from(queue)).is_some_and(Option::is_some)
    }

    /// Features of SET_FEATURES.
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    fn all_stopped(&self) -> Result<()> {
        if self.started.iter().any(Option::is_some) { Err(Errno::BUSY) } else { Ok(()) }
    }

    /// Whether areas are as long as the kernel believes (virtio 1.3, 2.7), and aligned.
    fn is_large_enough(&self, areas: &Areas, size: u16) -> bool {
        let event_bytes = if self.features & EVENT_IDX == 0 { 0 } else { 2 };
        let size_bytes = |each: usize| usize::from(size) * each;
        let fits = |area: &RingMemory, bytes, align| area.len() >= bytes && area.is_aligned(align);
        size.is_power_of_two()
            && fits(&areas.descriptors, size_bytes(16), 16)
            && fits(&areas.driver, 4 + size_bytes(2) + event_bytes, 2)
            && fits(&areas.device, 4 + size_bytes(8) + event_bytes, 4)
    }

    fn give<T>(&self, number: &In<T>, argument: &T) -> Result<()> {
        self.call(number.0, std::ptr::from_ref(argument).cast_mut().cast())
    }

    fn take<T: Default>(&self, number: &Out<T>) -> Result<T> {
        let mut argument = T::default();
        self.call(number.0, (&raw mut argument).cast())?;
        Ok(argument)
    }

    fn exchange<T>(&self, number: &InOut<T>, argument: &mut T) -> Result<()> {
        self.call(number.0, std::ptr::from_mut(argument).cast())
    }

    fn call(&self, number: Opcode, argument: *mut c_void) -> Result<()> {
        // SAFETY: `argument` points to what the number stands for (`uapi`, compared with the
        // headers by tests), which lives for the call, and which the kernel writes only where it
        // was made from an exclusive reference. What it writes later lies in memory that `self`
        // keeps, as the head of this file says.
        unsafe { ioctl(&self.fd, Call { number, argument }) }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.all_stopped().is_ok() || self.stop_all().is_ok() {
            return;
        }
        // In a child of the owner, or when the process is being killed: others may have the device
        // open, and it runs.
        std::mem::forget(self.memory.take());
        std::mem::forget(std::mem::take(&mut self.started));
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A descriptor as the kernel is told; -1: none.
fn raw(fd: Option<BorrowedFd<'_>>) -> i32 {
    fd.map_or(-1, |fd| fd.as_raw_fd())
}

struct Call {
    number: Opcode,
    argument: *mut c_void,
}

// SAFETY: gives the kernel the number and the address as they are; `Handle::call` answers for both.
// It may write.
unsafe impl Ioctl for Call {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.number
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> Result<()> {
        Ok(())
    }
}
