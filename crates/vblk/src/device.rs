//! The device `/dev/vhost-blk`: a disk whose rings the kernel serves.
//!
//! Promises: memory of a started ring is kept until the ring is stopped. Order of calls:
//! [`Vblk::open`], features, memory, disk, workers; then each ring is started and stopped, any
//! number of times. While none is started, features, memory and disk can be changed. One control
//! thread at a time; calls block.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use ringdisk_guest::{Areas, Memory};
use ringdisk_ring::{CpuList, Errno};

use crate::Error;
use crate::error::DEVICE;
use crate::kernel::uapi::{self, DiskWords, InfoWords};
use crate::kernel::{Event, Handle};
use crate::layout;
use crate::stats::Stats;
use crate::worker::{Bound, Worker, making};

/// Regions that vhost takes where its parameter cannot be read: its default.
const REGIONS_DEFAULT: usize = 64;
/// `VIRTIO_F_VERSION_1`.
const VERSION_1: u64 = 1 << 32;

/// The mechanism of reads and writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// The module's choice.
    #[default]
    Default,
    /// The file's own asynchronous direct I/O: block devices and files.
    Kiocb,
    /// Bios: block devices only.
    Bio,
}

impl Engine {
    fn number(self) -> u32 {
        match self {
            Engine::Default => uapi::ENGINE_DEFAULT,
            Engine::Kiocb => uapi::ENGINE_KIOCB,
            Engine::Bio => uapi::ENGINE_BIO,
        }
    }
}

/// Version and abilities of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// Of its control interface.
    pub version: u32,
    /// Queues of a device.
    pub queues_max: u32,
    /// Descriptors of a ring.
    pub ring_max: u32,
    /// Bytes of one read or write; longer ones are answered with an I/O error.
    pub request_bytes_max: u32,
    /// Ranges of one discard or of one request to write zeroes.
    pub ranges_max: u32,
    /// Virtio features that it serves.
    pub features: u64,
    engines: u32,
}

impl Info {
    fn of(words: InfoWords) -> Info {
        Info {
            version: words.version,
            queues_max: words.queues_max,
            ring_max: words.ring_max,
            request_bytes_max: words.request_bytes_max,
            ranges_max: words.ranges_max,
            features: words.features,
            engines: words.engines,
        }
    }

    /// Whether it has an engine.
    pub fn has(&self, engine: Engine) -> bool {
        engine == Engine::Default || self.engines & (1 << engine.number()) != 0
    }
}

/// The disk behind all queues.
#[derive(Clone, Copy, Debug)]
pub struct DiskSetup<'a> {
    /// A block device or a regular file on a file system with direct I/O. The kernel takes a
    /// reference of its own.
    pub fd: BorrowedFd<'a>,
    /// The guest may not write; else it must be open for writing.
    pub read_only: bool,
    /// The write cache is off from the beginning, as [`Vblk::set_cache`].
    pub write_through: bool,
    /// Mechanism of reads and writes.
    pub engine: Engine,
    /// Logical block as the guest knows it: bytes, a power of two, 512 to 4096, no smaller than the
    /// device's.
    pub block_bytes: u32,
    /// Alignment that direct I/O wants of memory, bytes, a power of two up to 4096; buffers that
    /// are not are copied.
    pub memory_align: u32,
    /// Ranges of one discard or of one request to write zeroes, as the guest knows it; at most
    /// [`Info::ranges_max`].
    pub ranges_max: u32,
    /// Sectors of 512 bytes of a range, as the guest knows it; at most 1 GiB.
    pub range_sectors_max: u32,
    /// Bytes, a multiple of `block_bytes`, no more than the file or device has.
    pub capacity: u64,
    /// The serial number that the guest sees; padded with zeroes.
    pub id: [u8; 20],
}

/// Options of a ring that is started.
#[derive(Debug)]
pub struct RingSetup<'a> {
    /// Descriptors, a power of two, at most [`Info::ring_max`].
    pub size: u16,
    /// Where the next request is taken from the avail ring: the index as the guest counts.
    pub base: u16,
    /// Memory of the ring, split layout.
    pub areas: Areas,
    /// Eventfd that the guest kicks. The kernel checks the ring once at the start, so no kick is
    /// missed.
    pub kick: BorrowedFd<'a>,
    /// Eventfd that calls the guest; `None`: the guest polls.
    pub call: Option<BorrowedFd<'a>>,
    /// Eventfd that says that the ring is broken.
    pub err: Option<BorrowedFd<'a>>,
}

/// A disk whose rings the kernel serves. Dropping it stops all queues, waits for the requests in
/// flight, and releases everything.
///
/// It keeps the memory of [`Vblk::set_memory`] and of rings that are started. Only the process that
/// opened it may use it: a child gets [`Error::NotOwner`], and its copy, dropped, leaks that memory
/// (of the child) in place of unmapping it.
#[derive(Debug)]
pub struct Vblk {
    handle: Handle,
    info: Info,
    regions_max: usize,
    workers: Vec<Worker>,
    /// The worker of each queue, known also while the kernel is busy with the device.
    serving: Vec<u32>,
}

impl Vblk {
    /// Opens a device with so many queues, and becomes its owner. The kernel makes one worker,
    /// which serves all queues ([`Vblk::attach`] changes that) and runs where the calling thread
    /// may.
    ///
    /// Errors: there is no module, or one that is not ours, of another version, or built for
    /// another vhost; no permission; too many queues; no memory or threads.
    pub fn open(queues: u16) -> Result<Vblk, Error> {
        let mut handle = Handle::open(DEVICE).map_err(cannot_open)?;
        let info = handle.info().map_err(|errno| Error::Foreign { errno })?;
        if info.version != uapi::VERSION {
            return Err(Error::Version { module: info.version, ours: uapi::VERSION });
        }
        if queues == 0 || u32::from(queues) > info.queues_max {
            return Err(Error::Queues { queues, limit: info.queues_max });
        }
        // The module stays as it is from here on: the open device holds it.
        layout::check().map_err(Error::Layout)?;
        handle.set_up(queues).map_err(|errno| Error::of("make the queues", errno))?;
        let (owned, tid, unbound) = making(None, || handle.set_owner());
        owned.map_err(|errno| Error::Worker { errno })?;
        let workers = vec![Worker { id: 0, tid, unbound, cpus: CpuList::default() }];
        let serving = vec![0; usize::from(queues)];
        Ok(Vblk { handle, info: Info::of(info), regions_max: regions_max(), workers, serving })
    }

    /// Version and abilities of the module.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Queues that it has.
    pub fn queues(&self) -> u16 {
        self.handle.queues()
    }

    /// Regions of memory that [`Vblk::set_memory`] takes.
    pub fn regions_max(&self) -> usize {
        self.regions_max
    }

    /// Sets the features that guest and device have negotiated. Bits above those of the device and
    /// of rings are not looked at by the module and must not be given (such as vhost-user's 30).
    ///
    /// Errors: [`Error::Features`]; a queue is started.
    pub fn set_features(&mut self, features: u64) -> Result<(), Error> {
        let unknown = features & !self.info.features;
        if unknown != 0 || features & VERSION_1 == 0 {
            return Err(Error::Features { features: unknown });
        }
        self.handle.set_features(features).map_err(|errno| Error::of("set features", errno))
    }

    /// Features of the last [`Vblk::set_features`]; 0 before.
    pub fn features(&self) -> u64 {
        self.handle.features()
    }

    /// Sets the memory of the guest that requests may name. It is kept until it is
    /// replaced.
    ///
    /// Errors: more regions than [`Vblk::regions_max`]; a queue is started.
    pub fn set_memory(&mut self, memory: Arc<Memory>) -> Result<(), Error> {
        let regions = memory.regions().len();
        if regions > self.regions_max {
            return Err(Error::TooManyRegions { regions, limit: self.regions_max });
        }
        self.handle.set_memory(memory).map_err(|errno| match errno {
            Errno::TOOBIG => Error::TooManyRegions { regions, limit: self.regions_max },
            _ => Error::of("set the memory", errno),
        })
    }

    /// Releases the memory of [`Vblk::set_memory`], which the kernel does not touch while no
    /// queue is started.
    ///
    /// Errors: a queue is started.
    pub fn forget_memory(&mut self) -> Result<(), Error> {
        self.handle.forget_memory().map_err(|errno| Error::of("forget the memory", errno))
    }

    /// Sets the disk, or removes it.
    ///
    /// Errors: [`Error::Disk`]; a queue is started.
    pub fn set_disk(&mut self, disk: Option<&DiskSetup<'_>>) -> Result<(), Error> {
        let words = disk.map_or_else(DiskWords::default, |disk| DiskWords {
            flags: if disk.read_only { uapi::DISK_RO } else { 0 }
                | if disk.write_through { uapi::DISK_WRITE_THROUGH } else { 0 },
            engine: disk.engine.number(),
            block_bytes: disk.block_bytes,
            memory_align: disk.memory_align,
            ranges_max: disk.ranges_max,
            range_sectors_max: disk.range_sectors_max,
            capacity: disk.capacity,
            id: disk.id,
            ..DiskWords::default()
        });
        let bio = words.engine == uapi::ENGINE_BIO;
        let fd = disk.map(|disk| disk.fd);
        self.handle.set_disk(fd, words).map_err(|errno| match errno {
            Errno::PERM | Errno::BUSY => Error::of("set the disk", errno),
            _ => Error::Disk { errno, bio },
        })
    }

    /// Makes a worker. It is a thread of this process, in the cgroup of the calling thread, and
    /// runs where that may; with `cpus`, where they say: the calling thread is bound to them
    /// meanwhile, and runs where it ran afterwards. A refusal of that is in [`Worker::unbound`].
    ///
    /// Errors: no thread may be made.
    pub fn new_worker(&mut self, cpus: Option<&CpuList>) -> Result<Worker, Error> {
        let handle = &self.handle;
        let (made, tid, unbound) = making(cpus, || handle.new_worker());
        let id = made.map_err(|errno| match errno {
            Errno::PERM => Error::of("make a worker", errno),
            _ => Error::Worker { errno },
        })?;
        let cpus = cpus.filter(|_| unbound.is_none()).cloned().unwrap_or_default();
        let worker = Worker { id, tid, unbound, cpus };
        self.workers.push(worker.clone());
        Ok(worker)
    }

    /// Ends a worker that serves no queue; number 0, too.
    ///
    /// Errors: `EBUSY` as [`Error::System`] while it serves one; there is none of this number.
    pub fn free_worker(&mut self, id: u32) -> Result<(), Error> {
        self.handle.free_worker(id).map_err(|errno| match errno {
            Errno::PERM => Error::of("end a worker", errno),
            _ => Error::System { doing: format!("end worker {id}"), errno },
        })?;
        self.workers.retain(|worker| worker.id != id);
        Ok(())
    }

    /// Binds a worker to CPUs, at any time; one that is bound to them already stays as it is, and
    /// so does every worker for no CPUs at all.
    ///
    /// Errors: there is none of this number; its thread is not known ([`Worker::tid`]) or may not
    /// run there.
    pub fn place_worker(&mut self, id: u32, cpus: &CpuList) -> Result<(), Error> {
        let worker = self.workers.iter_mut().find(|worker| worker.id == id);
        let placed = worker.ok_or(Errno::NODEV).and_then(|worker| worker.place(cpus));
        placed.map_err(|errno| Error::System {
            doing: format!("bind worker {id} to CPUs {cpus}"),
            errno,
        })
    }

    /// Workers that there are.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// Lets a worker serve a queue from now on; the one that did so does not end. Cheap while the
    /// queue is not started.
    ///
    /// Errors: no such queue or worker.
    pub fn attach(&mut self, queue: u16, worker: u32) -> Result<(), Error> {
        self.has_queue(queue)?;
        let doing = || format!("give queue {queue} to worker {worker}");
        self.handle.attach_worker(queue, worker).map_err(|errno| match errno {
            Errno::PERM => Error::of(doing(), errno),
            _ => Error::System { doing: doing(), errno },
        })?;
        self.serving[usize::from(queue)] = worker;
        Ok(())
    }

    /// The thread of the worker that serves a queue; `None` where it could not be told from others,
    /// or there is no such queue. Makes no system call, so it may be called at any time.
    pub fn thread_of(&self, queue: u16) -> Option<u32> {
        let id = self.serving.get(usize::from(queue))?;
        self.workers.iter().find(|worker| worker.id == *id)?.tid
    }

    /// The worker that serves a queue. Errors: as [`Vblk::attach`].
    pub fn worker_of(&self, queue: u16) -> Result<u32, Error> {
        self.has_queue(queue)?;
        let doing = || format!("ask for the worker of queue {queue}");
        self.handle.worker_of(queue).map_err(|errno| Error::of(doing(), errno))
    }

    /// Gives a ring to the kernel. From its return on requests are taken from it, also those that
    /// were there before.
    ///
    /// Errors: the queue is started; there is no disk; features, size, base or memory do not fit; a
    /// descriptor is no eventfd. Then the kernel has none of it.
    pub fn start(&mut self, queue: u16, ring: RingSetup<'_>) -> Result<(), Error> {
        self.has_queue(queue)?;
        if self.handle.is_started(queue) {
            return Err(Error::Started { doing: format!("start queue {queue}") });
        }
        let bad = |why| Err(Error::Ring { queue, why });
        if !ring.size.is_power_of_two() || u32::from(ring.size) > self.info.ring_max {
            return bad("the kernel does not serve a ring of this size");
        }
        let RingSetup { size, base, areas, kick, call, err } = ring;
        let events = [(Event::Call, call), (Event::Error, err), (Event::Kick, Some(kick))];
        let set = events.into_iter().try_for_each(|(event, fd)| {
            self.handle.set_event(queue, event, fd).map_err(|errno| event_error(queue, fd, errno))
        });
        // The kernel allocates where the caller runs: next to the one that will use it.
        let near = self.handle.worker_of(queue).ok().and_then(|id| {
            let worker = self.workers.iter().find(|worker| worker.id == id)?;
            Some(worker.cpus.clone()).filter(|cpus| !cpus.is_empty())
        });
        let near = near.and_then(|cpus| Bound::to(&cpus).ok());
        let started = set.and_then(|()| {
            self.handle.start(queue, size, base, areas).map_err(|errno| match errno {
                Errno::NODEV => Error::NoDisk,
                Errno::INVAL => Error::Ring {
                    queue,
                    why: "its memory does not fit its size, or memory or features are not set",
                },
                Errno::FAULT => Error::Ring { queue, why: "its memory is not there" },
                Errno::TOOBIG => {
                    Error::Ring { queue, why: "the kernel does not serve a ring of this size" }
                }
                _ => Error::of(format!("start queue {queue}"), errno),
            })
        });
        drop(near);
        if started.is_err() {
            self.forget_events(queue);
        }
        started
    }

    /// Takes a ring back: no request is taken any more, those in flight are waited for. Afterwards
    /// the kernel touches neither its memory nor its eventfds, and all that was answered is in the
    /// used ring, with a call where the guest wanted one.
    ///
    /// Gives where the next request is to be taken from the avail ring; all before are answered.
    ///
    /// Errors: the queue is not started; [`Error::NotOwner`]. Then its memory is still kept, and
    /// this may be called again. (`EINTR`: the process is being killed.)
    pub fn stop(&mut self, queue: u16) -> Result<u16, Error> {
        self.has_queue(queue)?;
        if !self.handle.is_started(queue) {
            return Err(Error::NotStarted { queue });
        }
        let doing = || format!("stop queue {queue}");
        self.handle.stop(queue).map_err(|errno| Error::of(doing(), errno))?;
        self.forget_events(queue);
        self.handle.base(queue).map_err(|errno| Error::of(doing(), errno))
    }

    /// As [`Vblk::stop`], of all queues that are started, which drain at the same time. Gives
    /// queues with where they go on; one of which the kernel does not tell that is stopped as well,
    /// and not among them.
    ///
    /// Errors: as [`Vblk::stop`]; [`Vblk::is_started`] says which are.
    pub fn stop_all(&mut self) -> Result<Vec<(u16, u16)>, Error> {
        let started: Vec<u16> =
            (0..self.queues()).filter(|queue| self.handle.is_started(*queue)).collect();
        if started.is_empty() {
            return Ok(Vec::new());
        }
        self.handle.stop_all().map_err(|errno| Error::of("stop all queues", errno))?;
        for queue in &started {
            self.forget_events(*queue);
        }
        let told = |queue| Some((queue, self.handle.base(queue).ok()?));
        Ok(started.into_iter().filter_map(told).collect())
    }

    /// Whether the kernel has a ring.
    pub fn is_started(&self, queue: u16) -> bool {
        self.handle.is_started(queue)
    }

    /// Turns the write cache on or off, in the middle of requests. Off: from the return on each
    /// write is durable before it is answered, and so are all that were answered before.
    ///
    /// Errors: there is no disk; it could not be flushed, then the cache is as it was.
    pub fn set_cache(&mut self, on: bool) -> Result<(), Error> {
        let doing = if on { "turn the write cache on" } else { "turn the write cache off" };
        self.handle.set_cache(on).map_err(|errno| match errno {
            Errno::NODEV => Error::NoDisk,
            _ => Error::of(doing, errno),
        })
    }

    /// Another eventfd that calls the guest, while the queue runs or before.
    ///
    /// Errors: it is none; no such queue.
    pub fn set_call(&mut self, queue: u16, call: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        self.set_event(queue, Event::Call, call)
    }

    /// Another eventfd that says that the ring is broken, while the queue runs or before. Errors:
    /// as [`Vblk::set_call`].
    pub fn set_err(&mut self, queue: u16, err: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        self.set_event(queue, Event::Error, err)
    }

    /// Counters of a queue. Errors: no such queue.
    pub fn stats(&self, queue: u16) -> Result<Stats, Error> {
        self.has_queue(queue)?;
        let doing = || format!("read counters of queue {queue}");
        let words = self.handle.stats(queue).map_err(|errno| Error::of(doing(), errno))?;
        Ok(Stats::of(&words))
    }

    fn set_event(
        &mut self,
        queue: u16,
        event: Event,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        self.has_queue(queue)?;
        self.handle.set_event(queue, event, fd).map_err(|errno| event_error(queue, fd, errno))
    }

    /// The kernel releases the eventfds of a queue. Those of a stopped queue are not used, so
    /// failures mean nothing.
    fn forget_events(&self, queue: u16) {
        for event in [Event::Kick, Event::Call, Event::Error] {
            let _ = self.handle.set_event(queue, event, None);
        }
    }

    fn has_queue(&self, queue: u16) -> Result<(), Error> {
        let queues = self.queues();
        if queue < queues { Ok(()) } else { Err(Error::NoQueue { queue, queues }) }
    }
}

/// Why the device could not be opened.
fn cannot_open(errno: Errno) -> Error {
    match errno {
        // A node without a driver, too.
        Errno::NOENT | Errno::NXIO | Errno::NODEV => {
            Error::Missing { is_installed: is_installed() }
        }
        Errno::ACCESS | Errno::PERM => Error::NotAllowed { errno },
        _ => Error::Open { errno },
    }
}

/// Whether the running kernel has the module in its directory. Source: modules.dep(5).
fn is_installed() -> Option<bool> {
    let release = rustix::system::uname();
    let release = release.release().to_str().ok()?;
    let list = fs::read_to_string(format!("/lib/modules/{release}/modules.dep")).ok()?;
    Some(list.lines().any(|line| {
        let path = line.split(':').next().unwrap_or_default();
        path.rsplit('/').next().is_some_and(|name| name.starts_with("vhost_blk.ko"))
    }))
}

/// Regions that vhost takes.
fn regions_max() -> usize {
    let text = fs::read_to_string("/sys/module/vhost/parameters/max_mem_regions");
    text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(REGIONS_DEFAULT)
}

fn event_error(queue: u16, fd: Option<BorrowedFd<'_>>, errno: Errno) -> Error {
    match (fd, errno) {
        (Some(_), Errno::INVAL | Errno::BADF) => {
            Error::Ring { queue, why: "a descriptor is no eventfd" }
        }
        (fd, _) => {
            let fd = fd.map_or(-1, |fd| fd.as_raw_fd());
            Error::of(format!("give descriptor {fd} to queue {queue}"), errno)
        }
    }
}

#[cfg(test)]
mod tests;
