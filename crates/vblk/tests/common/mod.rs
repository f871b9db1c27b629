//! A guest that is none, on a device that is one: memory with odd regions, the model driver of the
//! test kit, and disks to serve.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ringdisk_guest::driver::{Driver, DriverConfig, GUEST_BASE, GuestRam, USER_BASE};
use ringdisk_guest::{Areas, Layout, Memory, Region, Segment};
use ringdisk_testkit::limits::{needs, part_needs};
use ringdisk_testkit::model::{Cut, Queue, Request, TIMEOUT, bits};
use ringdisk_testkit::process::patient;
use ringdisk_vblk::{DiskSetup, Engine, Error, RingSetup, Vblk};
use rustix::event::{EventfdFlags, eventfd};

pub(crate) const DEVICE: &str = "/dev/vhost-blk";
/// Bytes of each disk.
pub(crate) const CAPACITY: u64 = 64 << 20;
/// Descriptors of each ring.
pub(crate) const SIZE: u16 = 128;
/// Requests at once in each queue, and bytes of the largest.
const SLOTS: usize = 32;
const SLOT_BYTES: usize = 96 << 10;
const RAM_BYTES: u64 = 64 << 20;
/// What the driver negotiates.
pub(crate) const FEATURES: u64 = bits::VERSION_1
    | bits::INDIRECT
    | bits::EVENT_IDX
    | bits::FLUSH
    | bits::CONFIG_WCE
    | bits::MQ
    | bits::DISCARD
    | bits::WRITE_ZEROES;

/// No other test has the disks meanwhile.
pub(crate) struct Turn {
    _guard: MutexGuard<'static, ()>,
}

/// Waits for the disks. `None`, with a word about it, without the module.
pub(crate) fn turn() -> Option<Turn> {
    static ALONE: Mutex<()> = Mutex::new(());
    let there = needs("module vhost_blk (/dev/vhost-blk)", Path::new(DEVICE).exists());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    there.then_some(Turn { _guard: guard })
}

/// A disk, and how it is served.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) name: &'static str,
    pub(crate) file: File,
    pub(crate) engine: Engine,
}

impl Disk {
    /// As it is told to the kernel.
    pub(crate) fn setup(&self) -> DiskSetup<'_> {
        DiskSetup {
            fd: self.file.as_fd(),
            read_only: false,
            write_through: false,
            engine: self.engine,
            block_bytes: 512,
            memory_align: 512,
            ranges_max: 4,
            range_sectors_max: 4096,
            capacity: CAPACITY,
            id: *b"ringdisk-vblk-test\0\0",
        }
    }
}

/// A file of zeroes on tmpfs.
pub(crate) fn tmpfs() -> Disk {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(CAPACITY).unwrap();
    Disk { name: "tmpfs", file, engine: Engine::Default }
}

/// The file, and a memory disk with both engines where there is one. What is on that is not known.
pub(crate) fn disks() -> Vec<Disk> {
    let open = || -> io::Result<File> {
        let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
        OpenOptions::new().read(true).write(true).custom_flags(direct).open("/dev/ram0")
    };
    let mut all = vec![tmpfs()];
    if part_needs("memory disk (modprobe brd)", open().is_ok()) {
        for engine in [Engine::Kiocb, Engine::Bio] {
            all.push(Disk { name: "brd", file: open().unwrap(), engine });
        }
    }
    all
}

pub(crate) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Memory, and queues with their drivers.
pub(crate) struct Guest {
    pub(crate) ram: GuestRam,
    pub(crate) queues: Vec<Queue>,
    /// Eventfds that say that a ring is broken.
    pub(crate) errors: Vec<OwnedFd>,
}

impl Guest {
    pub(crate) fn new(queues: u16) -> Guest {
        let mut ram = GuestRam::new(RAM_BYTES).unwrap();
        let config = DriverConfig {
            layout: Layout::Split,
            size: SIZE,
            event_idx: FEATURES & bits::EVENT_IDX != 0,
            indirect: 16,
        };
        let drivers: Vec<Driver> =
            (0..queues).map(|_| Driver::new(&mut ram, config).unwrap()).collect();
        let queues = (0..).zip(drivers).map(|(seed, driver)| {
            let slots = (0..SLOTS).map(|_| ram.take(SLOT_BYTES as u64, 64).unwrap()).collect();
            Queue::new(driver, slots, SLOT_BYTES, seed)
        });
        let queues: Vec<Queue> = queues.collect();
        let errors = queues.iter().map(|_| event()).collect();
        Guest { ram, queues, errors }
    }

    /// The memory as a front end announces it: the rings in the first region, and borders at odd
    /// bytes among requests.
    pub(crate) fn memory(&self) -> Arc<Memory> {
        let slots = (self.queues.len() * SLOTS * SLOT_BYTES) as u64;
        let rings = self.ram.taken() - slots;
        let borders = [0, rings + slots / 3 + 13, rings + slots / 2 + 0x3b10, self.ram.size()];
        let regions = borders.windows(2).map(|pair| {
            let (at, size) = (pair[0], pair[1] - pair[0]);
            let fd = self.ram.fd().try_clone_to_owned().unwrap();
            Region::map(fd, GUEST_BASE + at, USER_BASE + at, size, at).unwrap()
        });
        Arc::new(Memory::new(regions.collect()).unwrap())
    }

    /// Where a ring lies.
    pub(crate) fn areas(&self, memory: &Memory, queue: u16) -> Areas {
        let driver = &self.queues[usize::from(queue)].driver;
        let event_idx = driver.config().event_idx;
        Areas::find(memory, Layout::Split, SIZE, event_idx, driver.user_addresses()).unwrap()
    }

    /// Hands a ring to the kernel.
    pub(crate) fn start(
        &self,
        vblk: &mut Vblk,
        memory: &Memory,
        queue: u16,
        base: u16,
    ) -> Result<(), Error> {
        let at = usize::from(queue);
        vblk.start(
            queue,
            RingSetup {
                size: SIZE,
                base,
                areas: self.areas(memory, queue),
                kick: self.queues[at].kick.as_fd(),
                call: Some(self.queues[at].call.as_fd()),
                err: Some(self.errors[at].as_fd()),
            },
        )
    }

    /// Where the device writes its used index.
    pub(crate) fn used(&self, queue: u16) -> u16 {
        let driver = &self.queues[usize::from(queue)].driver;
        driver.areas().device.load_u16(2, std::sync::atomic::Ordering::Acquire)
    }

    /// The status of a request that is done in a queue where nothing is in flight.
    pub(crate) fn status(&mut self, queue: usize, request: Request) -> u8 {
        self.queues[queue].run(&self.ram, request).status
    }

    /// Reads a page into an aligned one, which the model driver never does. Nothing is in flight in
    /// the queue.
    pub(crate) fn read_page(&mut self, queue: usize, sector: u64) -> Vec<u8> {
        let at = self.ram.take(3 * 4096, 4096).unwrap();
        let (page, status) = (at + 4096, at + 2 * 4096);
        // VIRTIO_BLK_T_IN (virtio 1.3, 5.2.6).
        self.ram.write(at, &[&[0; 8][..], &sector.to_le_bytes()].concat());
        let segments = [(at, 16), (page, 4096), (status, 1)];
        let segments = segments.map(|(addr, len)| Segment { addr, len });
        let Queue { driver, kick, .. } = &mut self.queues[queue];
        driver.add(&segments, 1).unwrap();
        driver.publish();
        rustix::io::write(kick, &1_u64.to_ne_bytes()).unwrap();
        let end = Instant::now() + patient(TIMEOUT);
        while driver.pop_used().is_none() {
            assert!(Instant::now() < end, "no answer");
            std::thread::yield_now();
        }
        let mut bytes = vec![1; 4097];
        self.ram.read(page, &mut bytes);
        assert_eq!(bytes.pop(), Some(0), "the status");
        bytes
    }

    /// Bytes that are read there.
    pub(crate) fn read(&mut self, queue: usize, sector: u64, len: usize) -> Vec<u8> {
        let done = self.queues[queue].run(&self.ram, Request::read(sector, len));
        assert_eq!(done.status, 0, "a read of {len} bytes at sector {sector}");
        done.data
    }
}

/// A device with memory and a disk, and its rings started.
pub(crate) fn running(guest: &Guest, disk: &Disk) -> (Vblk, Arc<Memory>) {
    let queues = u16::try_from(guest.queues.len()).unwrap();
    let mut vblk = Vblk::open(queues).unwrap_or_else(|error| panic!("{error}"));
    let memory = guest.memory();
    vblk.set_features(FEATURES).unwrap();
    vblk.set_memory(Arc::clone(&memory)).unwrap();
    vblk.set_disk(Some(&disk.setup())).unwrap();
    for queue in 0..queues {
        guest.start(&mut vblk, &memory, queue, 0).unwrap_or_else(|error| panic!("{error}"));
    }
    (vblk, memory)
}

/// Bytes that tell where they belong and when they were written.
pub(crate) fn pattern(sector: u64, seed: u64, len: usize) -> Vec<u8> {
    let word = |at: u64| (sector << 24 ^ seed << 12 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len as u64 / 8).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// As drivers and firmware cut their requests.
pub(crate) const CUTS: [Cut; 4] = [Cut::Plain, Cut::Pieces(5), Cut::Anywhere(6), Cut::Anywhere(2)];
