//! The module itself: needs a kernel with it (`tests/vm/run vhost-blk`), and says so where there is
//! none.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use common::{
    CAPACITY, CUTS, DEVICE, Disk, FEATURES, Guest, disks, event, pattern, running, tmpfs, turn,
};
use ringdisk_guest::driver::{GUEST_BASE, USER_BASE};
use ringdisk_guest::{Memory, Region};
use ringdisk_ring::{CpuList, Topology, cpus_of_thread};
use ringdisk_testkit::limits::descriptors;
use ringdisk_testkit::model::{Kind, Request, TIMEOUT, bits, range};
use ringdisk_testkit::process::patient;
use ringdisk_testkit::sim::Prng;
use ringdisk_vblk::{DiskSetup, Engine, Error, Placement, State, Vblk};

/// Waits until something is so.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + patient(TIMEOUT);
    while !is_so() {
        assert!(std::time::Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_a_reason() {
    let Some(_turn) = turn() else { return };
    assert_eq!(Vblk::open(0).unwrap_err(), Error::Queues { queues: 0, limit: 64 });
    assert_eq!(Vblk::open(65).unwrap_err(), Error::Queues { queues: 65, limit: 64 });
    let mut vblk = Vblk::open(1).unwrap();
    let (guest, disk) = (Guest::new(1), tmpfs());
    let memory = guest.memory();

    let info = *vblk.info();
    assert_eq!((info.version, info.ring_max, info.features & FEATURES), (1, 1024, FEATURES));
    assert!(info.has(Engine::Default) && info.has(Engine::Kiocb) && info.has(Engine::Bio));
    assert_eq!(vblk.regions_max(), 64);
    let memoryless = guest.start(&mut vblk, &memory, 0, 0).unwrap_err().to_string();
    assert!(memoryless.contains("memory or features are not set"), "{memoryless}");
    vblk.set_memory(Arc::clone(&memory)).unwrap();
    assert_eq!(guest.start(&mut vblk, &memory, 0, 0).unwrap_err(), Error::NoDisk);
    let bad = |result: Result<(), Error>| result.unwrap_err();
    assert_eq!(bad(vblk.set_features(FEATURES | 1 << 34)), Error::Features { features: 1 << 34 });
    assert_eq!(bad(vblk.set_features(bits::FLUSH)), Error::Features { features: 0 });
    let short = DiskSetup { capacity: CAPACITY + 512, ..disk.setup() };
    assert!(bad(vblk.set_disk(Some(&short))).to_string().contains("it is shorter than"));
    let bio = DiskSetup { engine: Engine::Bio, ..disk.setup() };
    assert!(bad(vblk.set_disk(Some(&bio))).to_string().contains("it is no block device"));
    let pipe = rustix::pipe::pipe().unwrap();
    let none = DiskSetup { fd: pipe.0.as_fd(), ..disk.setup() };
    assert!(bad(vblk.set_disk(Some(&none))).to_string().contains("neither a file nor"));
    let proc = std::fs::File::open("/proc/self/status").unwrap();
    let none = DiskSetup { fd: proc.as_fd(), read_only: true, ..disk.setup() };
    assert!(matches!(bad(vblk.set_disk(Some(&none))), Error::Disk { .. }));
    vblk.set_disk(Some(&disk.setup())).unwrap();
    let unset = bad(guest.start(&mut vblk, &memory, 0, 0)).to_string();
    assert!(unset.contains("features are not set"), "{unset}");
    assert_eq!(bad(vblk.attach(1, 0)), Error::NoQueue { queue: 1, queues: 1 });
    assert!(bad(vblk.attach(0, 77)).to_string().contains("give queue 0 to worker 77"));
    assert!(bad(vblk.free_worker(0)).to_string().contains("could not end worker 0"));
    assert_eq!(vblk.stop(0).unwrap_err(), Error::NotStarted { queue: 0 });
    assert_eq!(vblk.stop_all(), Ok(vec![]));
    assert!(bad(vblk.set_call(0, Some(disk.file.as_fd()))).to_string().contains("no eventfd"));
}

#[test]
fn more_regions_than_vhost_takes_are_refused() {
    let Some(_turn) = turn() else { return };
    let mut vblk = Vblk::open(1).unwrap();
    let guest = Guest::new(1);
    let table = |count: u64| {
        let regions = (0..count).map(|number| {
            let (fd, at) = (guest.ram.fd().try_clone_to_owned().unwrap(), number * 4099);
            Region::map(fd, GUEST_BASE + at, USER_BASE + at, 4099, at).unwrap()
        });
        Arc::new(Memory::new(regions.collect()).unwrap())
    };

    vblk.set_memory(table(64)).unwrap();
    let refused = vblk.set_memory(table(65)).unwrap_err();

    assert_eq!(refused, Error::TooManyRegions { regions: 65, limit: 64 });
}

#[test]
fn requests_of_all_kinds_are_served_on_each_disk() {
    let Some(_turn) = turn() else { return };
    for disk in disks() {
        println!("{} {:?}", disk.name, disk.engine);
        let mut guest = Guest::new(2);
        let (vblk, _memory) = running(&guest, &disk);

        let id = guest.queues[0].run(&guest.ram, Request::get_id(20));
        assert_eq!((id.status, &id.data[..]), (0, &b"ringdisk-vblk-test\0\0"[..]));
        for (number, cut) in (0u64..).zip(CUTS) {
            for (len, indirect) in [(512, false), (4096, true), (65536, true), (20480, false)] {
                let sector = 8 + number * 1024 + len as u64 / 64;
                let bytes = pattern(sector, number, len);
                let mut write = Request::write(sector, bytes.clone()).cut(cut);
                let mut read = Request::read(sector, len).cut(cut);
                (write.indirect, read.indirect) = (indirect, indirect);
                assert_eq!(guest.status(0, write), 0);
                let got = guest.queues[1].run(&guest.ram, read);
                assert!(got.status == 0 && got.data == bytes, "{cut:?}, {len} bytes");
            }
        }
        let sector = 8 + 3 * 1024 + 4096 / 64;
        assert_eq!(guest.read_page(0, sector), pattern(sector, 3, 4096));
        assert_eq!(guest.status(1, Request::flush()), 0);
        let zeroes = Request::ranges(Kind::WriteZeroes, &[range(8, 8, 0), range(1032, 8, 1)]);
        assert_eq!(guest.status(0, zeroes), 0);
        assert!(guest.read(0, 8, 4096).iter().all(|byte| *byte == 0));
        assert_eq!(guest.status(0, Request::ranges(Kind::Discard, &[range(16, 8, 0)])), 0);
        assert_eq!(guest.status(0, Request::ranges(Kind::Unknown, &[])), 2);
        assert_eq!(guest.status(0, Request::read(CAPACITY / 512, 512)), 1);
        let stats = [vblk.stats(0).unwrap(), vblk.stats(1).unwrap()];
        assert_eq!((stats[0].writes, stats[1].reads, stats[0].get_ids), (16, 16, 1));
        assert_eq!((stats[1].flushes, stats[0].unsupported, stats[0].errors), (1, 1, 1));
        assert!(stats[0].bounced > 0 && stats[1].bounced > 0, "{stats:?}");
        assert_eq!(stats.map(|queue| (queue.state, queue.in_flight)), [(State::Running, 0); 2]);
        // Of all these only the read of a page is aligned.
        let direct = if disk.engine == Engine::Bio { (1, 0) } else { (0, 1) };
        assert_eq!((stats[0].bios, stats[0].kiocbs), direct);
    }
}

/// What a load has written: sectors of 4 KiB with their seeds.
struct Written {
    prng: Prng,
    count: u64,
}

impl Written {
    /// Adds some requests to a queue.
    fn submit(&mut self, guest: &mut Guest, queue: usize) {
        for _ in 0..1 + self.prng.below(8) {
            let sector = 8 * (1 + self.count);
            let bytes = pattern(sector, 3, 4096);
            if guest.queues[queue].add(&guest.ram, Request::write(sector, bytes)).is_err() {
                break;
            }
            self.count += 1;
        }
        guest.queues[queue].kick();
    }
}

/// Takes answers that are there, or all.
fn reap(guest: &mut Guest, queue: usize, all: bool) {
    let Guest { ram, queues, .. } = guest;
    let queue = &mut queues[queue];
    while queue.in_flight() > 0 {
        let done = if all { Some(queue.wait(ram)) } else { queue.reap(ram) };
        let Some(done) = done else { break };
        assert_eq!(done.status, 0, "{:?} at {}", done.request.kind, done.request.sector);
    }
}

#[test]
fn a_hundred_stops_and_starts_under_load_lose_nothing_and_double_nothing() {
    let Some(_turn) = turn() else { return };
    for disk in disks() {
        let mut guest = Guest::new(2);
        let (mut vblk, memory) = running(&guest, &disk);
        let mut load = Written { prng: Prng::new(5), count: 0 };

        for round in 0..100 {
            for queue in 0..2 {
                reap(&mut guest, queue, false);
                load.submit(&mut guest, queue);
            }
            let bases = if round % 2 == 0 {
                vblk.stop_all().unwrap()
            } else {
                vec![(1, vblk.stop(1).unwrap()), (0, vblk.stop(0).unwrap())]
            };
            assert_eq!(bases.len(), 2);
            for (queue, base) in bases {
                // All that was taken is answered, and nothing more is taken, though it is asked
                // for.
                assert_eq!(guest.used(queue), base);
                load.submit(&mut guest, usize::from(queue));
                assert_eq!(vblk.stats(queue).unwrap().state, State::Idle);
                assert_eq!(guest.used(queue), base);
                guest.start(&mut vblk, &memory, queue, base).unwrap();
            }
        }
        reap(&mut guest, 0, true);
        reap(&mut guest, 1, true);

        let served: u64 = (0..2).map(|queue| vblk.stats(queue).unwrap().writes).sum();
        assert_eq!(served, load.count);
        for number in 0..load.count {
            let sector = 8 * (1 + number);
            assert_eq!(guest.read(0, sector, 4096), pattern(sector, 3, 4096), "sector {sector}");
        }
    }
}

#[test]
fn memory_lives_while_the_kernel_may_write_it_and_no_longer() {
    let Some(_turn) = turn() else { return };
    let (mut guest, disk) = (Guest::new(1), tmpfs());
    let (mut vblk, memory) = running(&guest, &disk);
    let region = Arc::downgrade(&memory.regions()[0]);
    let table = Arc::downgrade(&memory);
    drop(memory);

    assert_eq!(guest.status(0, Request::write(0, pattern(0, 1, 4096))), 0);
    let other = guest.memory();
    let refused = vblk.set_memory(Arc::clone(&other)).unwrap_err();
    assert!(matches!(refused, Error::Started { .. }), "{refused}");
    assert!(matches!(vblk.set_disk(None), Err(Error::Started { .. })));
    assert!(matches!(vblk.set_features(FEATURES), Err(Error::Started { .. })));
    assert!(table.upgrade().is_some());
    let base = vblk.stop(0).unwrap();
    assert!(table.upgrade().is_some());
    vblk.set_memory(Arc::clone(&other)).unwrap();
    assert!(table.upgrade().is_none() && region.upgrade().is_none());
    guest.start(&mut vblk, &other, 0, base).unwrap();
    assert_eq!(guest.read(0, 0, 4096), pattern(0, 1, 4096));

    let table: Weak<Memory> = Arc::downgrade(&other);
    drop(other);
    drop(vblk);
    assert!(table.upgrade().is_none());
}

/// Threads of this process that are workers.
fn worker_threads() -> BTreeSet<u32> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let tids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
    tids.filter(|tid| Placement::of(*tid).is_ok_and(|p| p.name.starts_with("vhost-"))).collect()
}

#[test]
fn workers_are_as_many_as_queues_and_run_where_they_are_told() {
    let Some(_turn) = turn() else { return };
    let topology = Topology::read();
    let cpus: Vec<usize> = topology.spread(&topology.allowed);
    let before = cpus_of_thread();
    let (mut guest, disk) = (Guest::new(4), tmpfs());
    let mut vblk = Vblk::open(4).unwrap();
    vblk.set_features(FEATURES).unwrap();
    let memory = guest.memory();
    vblk.set_memory(Arc::clone(&memory)).unwrap();
    vblk.set_disk(Some(&disk.setup())).unwrap();
    assert_eq!(vblk.workers().len(), 1);

    for queue in 0..4 {
        let cpu: CpuList = [cpus[usize::from(queue) % cpus.len()]].into_iter().collect();
        let worker = vblk.new_worker(Some(&cpu)).unwrap();
        assert_eq!(worker.unbound, None);
        let placement = Placement::of(worker.tid.unwrap()).unwrap();
        assert_eq!((&placement.cpus, cpus_of_thread()), (&cpu, before.clone()));
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap();
        assert_eq!(placement.cgroup, own.trim_end());
        vblk.attach(queue, worker.id).unwrap();
        assert_eq!(vblk.worker_of(queue), Ok(worker.id));
    }
    vblk.free_worker(0).unwrap();
    until("worker 0 ends", || worker_threads().len() == 4);
    let tids: BTreeSet<u32> = vblk.workers().iter().filter_map(|worker| worker.tid).collect();
    assert_eq!(worker_threads(), tids);
    for queue in 0..4 {
        guest.start(&mut vblk, &memory, queue, 0).unwrap();
    }
    for queue in 0..4 {
        assert_eq!(guest.status(queue, Request::read(0, 4096)), 0);
    }
    // Other CPUs while it runs; none at all mean that it stays.
    let (first, all) = (vblk.workers()[0].clone(), topology.allowed.clone());
    for cpus in [&all, &first.cpus, &CpuList::default()] {
        vblk.place_worker(first.id, cpus).unwrap();
        let expected = if cpus.is_empty() { &first.cpus } else { cpus };
        assert_eq!(&Placement::of(first.tid.unwrap()).unwrap().cpus, expected);
        assert_eq!(guest.status(0, Request::read(0, 4096)), 0);
    }
    let far = vblk.place_worker(first.id, &[1023].into_iter().collect()).unwrap_err();
    assert!(far.to_string().contains("to CPUs 1023"), "{far}");
    assert!(vblk.place_worker(77, &all).is_err());
    // Another worker.
    vblk.attach(0, vblk.workers()[3].id).unwrap();
    assert_eq!(guest.status(0, Request::read(0, 4096)), 0);

    drop(vblk);
    until("workers end", || worker_threads().is_empty());
}

#[test]
fn the_write_cache_is_turned_off_and_on_under_load() {
    let Some(_turn) = turn() else { return };
    for disk in disks() {
        let mut guest = Guest::new(1);
        let (mut vblk, memory) = running(&guest, &disk);
        let mut load = Written { prng: Prng::new(9), count: 0 };

        for round in 0..20 {
            load.submit(&mut guest, 0);
            vblk.set_cache(round % 2 == 1).unwrap();
            reap(&mut guest, 0, false);
        }
        reap(&mut guest, 0, true);
        let base = vblk.stop(0).unwrap();
        let through = DiskSetup { write_through: true, ..disk.setup() };
        vblk.set_disk(Some(&through)).unwrap();
        guest.start(&mut vblk, &memory, 0, base).unwrap();
        load.submit(&mut guest, 0);
        reap(&mut guest, 0, true);

        assert_eq!(vblk.stats(0).unwrap().writes, load.count);
    }
}

#[test]
fn a_disk_that_is_read_only_is_not_written() {
    let Some(_turn) = turn() else { return };
    let (mut guest, disk) = (Guest::new(1), tmpfs());
    let mut vblk = Vblk::open(1).unwrap();
    vblk.set_features(FEATURES | bits::READ_ONLY).unwrap();
    let memory = guest.memory();
    vblk.set_memory(Arc::clone(&memory)).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&disk.file));
    let file = std::fs::File::open(path).unwrap();
    let disk = Disk { file, ..disk };
    let refused = vblk.set_disk(Some(&disk.setup())).unwrap_err();
    assert!(refused.to_string().contains("not open for"), "{refused}");
    vblk.set_disk(Some(&DiskSetup { read_only: true, ..disk.setup() })).unwrap();
    guest.start(&mut vblk, &memory, 0, 0).unwrap();

    assert_eq!(guest.status(0, Request::write(0, vec![1; 512])), 1);
    assert_eq!(guest.read(0, 0, 512), vec![0; 512]);
}

#[test]
fn eventfds_are_changed_while_a_queue_runs_and_let_go_when_it_stops() {
    let Some(_turn) = turn() else { return };
    let (mut guest, disk) = (Guest::new(1), tmpfs());
    let (mut vblk, _memory) = running(&guest, &disk);

    let call = event();
    vblk.set_call(0, Some(call.as_fd())).unwrap();
    guest.queues[0].call = call;
    assert_eq!(guest.status(0, Request::read(0, 512)), 0);
    vblk.set_call(0, None).unwrap();
    vblk.set_err(0, None).unwrap();
    vblk.stop(0).unwrap();

    // A kick of a stopped queue has no effect.
    let rounds = vblk.stats(0).unwrap().rounds;
    guest.queues[0].kick_anyway();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(vblk.stats(0).unwrap().rounds, rounds);
}

#[test]
fn a_ring_that_makes_no_sense_is_broken_until_it_is_started_again() {
    let Some(_turn) = turn() else { return };
    let (mut guest, disk) = (Guest::new(2), tmpfs());
    let (mut vblk, memory) = running(&guest, &disk);
    assert_eq!(guest.status(0, Request::read(0, 512)), 0);

    let driver = guest.areas(&memory, 0).driver;
    let avail = driver.load_u16(2, std::sync::atomic::Ordering::Relaxed);
    driver.store_u16(2, avail.wrapping_add(1000), std::sync::atomic::Ordering::Release);
    guest.queues[0].kick_anyway();
    until("the ring breaks", || vblk.stats(0).unwrap().state == State::Broken);
    assert_eq!(rustix::io::read(&guest.errors[0], &mut [0; 8]), Ok(8));
    assert_eq!(guest.status(1, Request::read(0, 512)), 0);
    driver.store_u16(2, avail, std::sync::atomic::Ordering::Release);
    let base = vblk.stop(0).unwrap();
    assert_eq!(base, avail);
    guest.start(&mut vblk, &memory, 0, base).unwrap();

    assert_eq!(guest.status(0, Request::read(0, 512)), 0);
}

#[test]
fn a_device_that_is_dropped_while_it_runs_finishes_what_it_took() {
    let Some(_turn) = turn() else { return };
    let held = || descriptors(std::process::id());
    for disk in disks() {
        for _ in 0..10 {
            let mut guest = Guest::new(2);
            let before = held();
            let (vblk, memory) = running(&guest, &disk);
            let table = Arc::downgrade(&memory);
            drop(memory);
            let mut load = Written { prng: Prng::new(1), count: 0 };
            load.submit(&mut guest, 0);
            load.submit(&mut guest, 1);

            drop(vblk);

            let used = [guest.used(0), guest.used(1)];
            assert!(table.upgrade().is_none());
            assert_eq!(held(), before);
            std::thread::sleep(Duration::from_millis(1));
            assert_eq!([guest.used(0), guest.used(1)], used);
            reap(&mut guest, 0, false);
            reap(&mut guest, 1, false);
        }
    }
    until("workers end", || worker_threads().is_empty());
}

#[test]
fn a_child_of_the_owner_changes_nothing() {
    let Some(_turn) = turn() else { return };
    let (mut guest, disk) = (Guest::new(1), tmpfs());
    let (mut vblk, _memory) = running(&guest, &disk);

    // SAFETY: the child makes system calls, allocates a little (glibc's allocator survives fork),
    // and ends without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = [
            matches!(vblk.stop(0), Err(Error::NotOwner { .. })),
            matches!(vblk.set_cache(false), Err(Error::NotOwner { .. })),
            matches!(vblk.new_worker(None), Err(Error::NotOwner { .. })),
            vblk.stats(0).is_ok(),
        ];
        drop(vblk);
        let all = refused.iter().all(|each| *each);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: fills a number.
    unsafe { libc::waitpid(child, &raw mut status, 0) };

    assert_eq!(status, 0, "what the child did was not refused");
    assert_eq!(guest.status(0, Request::read(0, 512)), 0);
    assert!(std::path::Path::new(DEVICE).exists() && vblk.stop(0).is_ok());
}
