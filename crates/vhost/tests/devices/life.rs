//! A driver under load while everything around it changes: virtqueues stop and start, memory comes
//! and goes, a migration is logged.

use std::os::fd::{AsFd, OwnedFd};

use ringdisk_disk::Format;
use ringdisk_testkit::images;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{BaseRule, Load, Refused, Request, Vm, VmOptions, ask, bits, words};
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process;
use ringdisk_testkit::sim::{Fault, OpKind, Prng, When};
use ringdisk_vhost::Threads;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::{MIB, load, open, serve, simulated};

const QUEUES: usize = 3;

fn options(packed: bool, seed: u64) -> VmOptions {
    let packed = if packed { bits::PACKED } else { 0 };
    let queues = 3;
    VmOptions {
        features: VmOptions::default().features | packed,
        queues,
        indirect: 16,
        regions: 3,
        seed,
        ..VmOptions::default()
    }
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create(c"more", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, bytes).expect("a memfd");
    fd
}

/// Stops a virtqueue and starts it again. What was taken is answered when it has stopped.
fn stop_and_start(vm: &mut Vm, index: usize) {
    let number = u32::try_from(index).expect("few");
    let base = vm.front.vring_base(number).expect("a base");
    vm.start_queue(index, Some(base)).expect("it starts again");
}

/// Takes the memory of rings that run away, and gives it back.
fn memory_away_and_back(vm: &mut Vm, load: &mut Load) {
    let regions = vm.regions.clone();
    for region in &regions {
        vm.front.remove_region(*region).expect("it was added");
    }
    // Nothing was lost, and nothing is answered: rings wait for their memory.
    load.reap(vm);
    let before = load.in_flight();
    for index in 0..QUEUES {
        load.fill(vm, index);
        vm.queues[index].kick_anyway();
    }
    std::thread::sleep(std::time::Duration::from_millis(2));
    assert_eq!(load.reap(vm), 0, "{before} in flight without memory");
    // The rings' last: they go on at once.
    for region in regions.iter().rev() {
        vm.front.add_region(*region, vm.ram.fd()).expect("it fits again");
    }
}

/// All memory anew, in other pieces.
fn other_table(vm: &mut Vm) {
    let [guest, size, user, _] = vm.regions[0];
    let all: u64 = vm.regions.iter().map(|region| region[1]).sum();
    let regions = if vm.regions.len() == 1 {
        let first = vm.ram.taken() - 77_777;
        vec![[guest, first, user, 0], [guest + first, all - first, user + first, first]]
    } else {
        assert!(size < all);
        vec![[guest, all, user, 0]]
    };
    let fds = vec![vm.ram.fd(); regions.len()];
    vm.front.memory_table(&regions, &fds).expect("a table");
    vm.regions = regions;
}

/// Does something to a device that runs.
fn disturb(vm: &mut Vm, load: &mut Load, prng: &mut Prng) {
    let index = usize::try_from(prng.below(QUEUES as u64)).expect("few");
    let number = u32::try_from(index).expect("few");
    match prng.below(7) {
        0 => stop_and_start(vm, index),
        1 => {
            vm.front.vring(ask::SET_VRING_ENABLE, number, 0).expect("it is drained");
            load.fill(vm, index);
            vm.front.vring(ask::SET_VRING_ENABLE, number, 1).expect("it goes on");
        }
        2 => {
            // Of odd size and at an odd place, far from the guest's.
            let size = 0x3b10 + prng.below(9);
            let at = [1 << 50, size, 1 << 46, prng.below(100)];
            let fd = memory(1 << 20);
            vm.front.add_region(at, fd.as_fd()).expect("there is room");
            vm.front.remove_region(at).expect("it was added");
        }
        3 => memory_away_and_back(vm, load),
        4 => other_table(vm),
        5 => vm.change_call(index).expect("another eventfd"),
        _ => vm.queues[index].kick_anyway(),
    }
}

#[test]
fn a_load_goes_on_while_rings_and_memory_change() {
    let rounds = if full() { 400 } else { 60 };
    let directory = scratch();
    for (packed, format) in [(false, Format::Raw), (true, Format::Qcow2)] {
        let seed = 5 + u64::from(packed);
        let path = directory.path().join("disk");
        match format {
            Format::Raw => images::sparse(&path, 4 * MIB),
            _ => images::qcow2(&path, "4M", "cluster_size=4k"),
        }
        let served = serve(open(&path, format), |_| {});
        let mut vm = served.vm(options(packed, seed));
        let mut load = Load::new(load(4 * MIB, seed));
        let mut prng = Prng::new(seed);
        for _ in 0..rounds {
            load.run(&mut vm, prng.below(60));
            (0..QUEUES).for_each(|index| {
                load.fill(&mut vm, index);
            });
            disturb(&mut vm, &mut load, &mut prng);
        }
        load.drain(&mut vm);
        load.read_all(&mut vm);
        assert_eq!(served.export.broken_reason(), None);
    }
}

#[test]
fn a_stopped_virtqueue_has_answered_what_it_took_and_takes_nothing_more() {
    for packed in [false, true] {
        let (sim, disk) = simulated(MIB);
        sim.on(When::kind(OpKind::Read), Fault::Delay(std::time::Duration::from_millis(20)));
        let served = serve(disk, |_| {});
        let mut vm = served.vm(options(packed, 1));
        for sector in 0..8 {
            vm.submit(1, Request::read(sector, 512)).expect("room");
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
        vm.front.vring(ask::SET_VRING_ENABLE, 1, 0).expect("it is drained");
        let Vm { queues, ram, .. } = &mut vm;
        let answered = std::iter::from_fn(|| queues[1].reap(ram)).count();
        assert_eq!(sim.count(OpKind::Read), answered, "what was begun was answered");
        vm.submit(1, Request::read(9, 512)).expect("room");
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(vm.queues[1].reap(&vm.ram).is_none(), "it is stopped");
        vm.front.vring(ask::SET_VRING_ENABLE, 1, 1).expect("it goes on");
        (answered..9).for_each(|_| assert_eq!(vm.queues[1].wait(&vm.ram).status, 0));
    }
}

#[test]
fn the_area_says_where_virtqueues_are_to_a_front_end_that_does_not_know() {
    for packed in [false, true] {
        for rule in [BaseRule::Used, BaseRule::Avail, BaseRule::Beginning] {
            let (_sim, disk) = simulated(2 * MIB);
            let served = serve(disk, |_| {});
            let mut vm = served.vm(options(packed, 8));
            let mut load = Load::new(load(2 * MIB, 8));
            for _ in 0..10 {
                load.run(&mut vm, 45);
                // Drained, and then asked more; the base is told to nobody.
                vm.front.vring(ask::SET_VRING_ENABLE, 1, 0).expect("it is drained");
                (0..QUEUES).for_each(|index| {
                    load.fill(&mut vm, index);
                });
                vm.resume(served.front(), rule).expect("it goes on");
            }
            load.drain(&mut vm);
            load.read_all(&mut vm);
        }
    }
}

/// A front end that stops a virtqueue of the next process is told a base behind what the process
/// before had taken: all of that has to be carried out, once, though there are more requests than
/// are taken at a time.
#[test]
fn what_a_process_before_had_taken_is_carried_out_once_by_one_that_is_stopped_at_once() {
    const EACH: usize = 100;
    for (packed, memory_goes) in [(false, false), (true, false), (false, true), (true, true)] {
        let (before, disk) = simulated(MIB);
        before.on(When::kind(OpKind::Read), Fault::Hold);
        let killed = serve(disk, |options| options.common.threads.threads = Threads::Count(4));
        let options = VmOptions {
            queues: 4,
            size: 512,
            indirect: 0,
            slots: EACH,
            slot_bytes: 4096,
            ..options(packed, 6)
        };
        let mut vm = killed.vm(options);
        for index in 0..4 {
            for sector in 0..EACH as u64 {
                let request = Request::read(sector, 512);
                vm.queues[index].add(&vm.ram, request).expect("room");
            }
            vm.queues[index].kick();
        }
        let all_taken = || (before.held().len() == 4 * EACH).then_some(());
        assert!(process::until(std::time::Duration::from_secs(20), all_taken).is_some());

        let (sim, disk) = simulated(MIB);
        sim.on(When::kind(OpKind::Read), Fault::Delay(std::time::Duration::from_millis(10)));
        let served = serve(disk, |options| options.common.threads.threads = Threads::Count(1));
        // The first one is stopped by this, too, and waits for requests that are never answered.
        vm.resume(served.front(), BaseRule::Used).expect("it goes on");
        if memory_goes {
            // They leave their thread already then.
            let regions = vm.regions.clone();
            regions.iter().for_each(|it| vm.front.remove_region(*it).expect("it was added"));
            let base = |index| vm.front.vring_base(index).expect("a base");
            let bases: Vec<u32> = (0..4).map(base).collect();
            vm.announce().expect("memory again");
            for (index, base) in bases.into_iter().enumerate() {
                vm.start_queue(index, Some(base)).expect("it starts again");
            }
        } else {
            (0..4).rev().for_each(|index| stop_and_start(&mut vm, index));
        }
        for index in 0..4 {
            while vm.queues[index].in_flight() > 0 {
                assert_eq!(vm.queues[index].wait(&vm.ram).status, 0);
            }
        }
        assert_eq!(sim.count(OpKind::Read), 4 * EACH, "packed {packed}, memory {memory_goes}");
        assert_eq!(served.export.broken_reason(), None);
        before.release_all();
    }
}

#[test]
fn a_call_eventfd_that_is_new_is_signalled_once() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options(false, 1));
    for _ in 0..3 {
        assert_eq!(vm.status(0, Request::read(0, 512)), 0);
        vm.change_call(0).expect("another eventfd");
        let mut count = [0; 8];
        rustix::io::read(&vm.queues[0].call, &mut count).expect("what it said before may be lost");
        assert_eq!(u64::from_ne_bytes(count), 1);
    }
}

#[test]
fn a_reset_under_load_ends_all_and_the_device_begins_again() {
    for packed in [false, true] {
        let (_sim, disk) = simulated(2 * MIB);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(options(packed, 3));
        let mut load = Load::new(load(2 * MIB, 3));
        for _ in 0..20 {
            load.run(&mut vm, 30);
            (0..QUEUES).for_each(|index| {
                load.fill(&mut vm, index);
            });
            vm.reset().expect("a reset");
            load.forget();
        }
        load.run(&mut vm, 100);
        load.drain(&mut vm);
        load.read_all(&mut vm);
    }
}

/// A log of all memory, as the front end of a migration has it.
struct DirtyLog {
    fd: OwnedFd,
    bytes: usize,
}

impl DirtyLog {
    /// Announced to the device, which does not write to it yet.
    fn new(vm: &mut Vm) -> DirtyLog {
        let end = ringdisk_guest::driver::GUEST_BASE + vm.ram.size();
        let bytes = end / 4096 / 8;
        let log = DirtyLog { fd: memory(bytes), bytes: usize::try_from(bytes).expect("small") };
        let fds = [log.fd.as_fd()];
        vm.front.ask(ask::SET_LOG_BASE, &words(&[bytes, 0]), &fds).expect("a log");
        log
    }

    /// Pages that are marked, from the first of the guest's memory on; clears the log.
    fn take(&self) -> Vec<bool> {
        let mut bits = vec![0; self.bytes];
        rustix::io::pread(&self.fd, &mut bits, 0).expect("the log");
        rustix::io::pwrite(&self.fd, &vec![0; self.bytes], 0).expect("the log");
        let first = usize::try_from(ringdisk_guest::driver::GUEST_BASE / 4096).expect("small");
        (first..self.bytes * 8).map(|page| bits[page / 8] >> (page % 8) & 1 == 1).collect()
    }
}

fn snapshot(vm: &Vm) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(vm.ram.taken()).expect("small")];
    vm.ram.read(ringdisk_guest::driver::GUEST_BASE, &mut bytes);
    bytes
}

fn changed(before: &[u8], after: &[u8]) -> Vec<bool> {
    before.chunks(4096).zip(after.chunks(4096)).map(|(left, right)| left != right).collect()
}

/// Does requests in all virtqueues; gives which pages the device has written.
fn device_writes(vm: &mut Vm, sectors: std::ops::Range<u64>) -> Vec<bool> {
    for sector in sectors.clone() {
        let queue = usize::try_from(sector).expect("small") % QUEUES;
        let cut = ringdisk_testkit::model::Cut::Anywhere(6);
        let request = Request::read(sector, 9 << 10).cut(cut);
        vm.queues[queue].add(&vm.ram, request).expect("room");
    }
    // Before anything is published: a device that polls begins at once.
    let before = snapshot(vm);
    for queue in &mut vm.queues {
        queue.driver.publish();
        queue.kick_anyway();
    }
    // Nothing of ours is written while the device works.
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let per_queue = (sectors.end - sectors.start) / QUEUES as u64;
    std::thread::sleep(std::time::Duration::from_millis(20));
    while vm.queues.iter().any(|queue| !queue.driver.has_used()) {
        assert!(std::time::Instant::now() < end, "no answer to {per_queue} requests");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let mut after = snapshot(vm);
    for queue in &vm.queues {
        // What was published here, which the device only reads. (The ring of a packed queue is
        // written by both.)
        let area = &queue.driver.areas().driver;
        let start =
            usize::try_from(area.guest_addr() - ringdisk_guest::driver::GUEST_BASE).expect("small");
        let ours = start..start + area.len();
        after[ours.clone()].copy_from_slice(&before[ours]);
    }
    for index in 0..QUEUES {
        while vm.queues[index].in_flight() > 0 {
            assert_eq!(vm.queues[index].wait(&vm.ram).status, 0);
        }
    }
    changed(&before, &after)
}

#[test]
fn every_page_that_the_device_writes_is_logged_while_the_log_is_on() {
    for packed in [false, true] {
        let (sim, disk) = simulated(MIB);
        sim.put(0, &vec![3; 1 << 20]);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(options(packed, 9));
        let features = vm.features;
        let log = DirtyLog::new(&mut vm);
        assert!(device_writes(&mut vm, 0..30).contains(&true));
        assert!(!log.take().contains(&true), "the log is not on");
        for round in 1..4 {
            vm.front.set(ask::SET_FEATURES, features | bits::LOG_ALL).expect("under way");
            for index in 0..QUEUES {
                let words = vm.queues[index].driver.user_addresses();
                let used = vm.queues[index].driver.areas().device.guest_addr();
                let number = u32::try_from(index).expect("few");
                vm.front.vring_addr(number, words, Some(used)).expect("the log of a ring");
            }
            log.take();
            let written = device_writes(&mut vm, round * 40..round * 40 + 30);
            let marked = log.take();
            let missing: Vec<usize> =
                (0..written.len()).filter(|page| written[*page] && !marked[*page]).collect();
            assert_eq!(missing, [] as [usize; 0], "pages written and not marked");
            assert!(written.contains(&true), "the device writes while we look");
            // It is of use only if what was not written is not marked: most of memory.
            let many = marked.iter().filter(|page| **page).count();
            assert!(many < written.len() / 2, "{many} pages of {}", written.len());
            vm.front.set(ask::SET_FEATURES, features).expect("back");
            log.take();
            device_writes(&mut vm, round * 40..round * 40 + 30);
            assert!(!log.take().contains(&true), "the log is off again");
        }
    }
}

/// How often an eventfd was signalled since the last time.
fn signals(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

#[test]
fn the_front_end_is_told_of_what_was_logged() {
    for flags in [EventfdFlags::NONBLOCK, EventfdFlags::empty()] {
        let (_sim, disk) = simulated(MIB);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(options(false, 1));
        let _log = DirtyLog::new(&mut vm);
        let event = eventfd(0, flags | EventfdFlags::CLOEXEC).expect("an eventfd");
        vm.front.tell(ask::SET_LOG_FD, &[], &[event.as_fd()]).expect("taken");
        // Reading waits for a signal where the eventfd says so: one of ours.
        let told = || {
            rustix::io::write(&event, &1_u64.to_ne_bytes()).expect("room");
            signals(&event) - 1
        };
        assert_eq!(vm.status(0, Request::read(0, 512)), 0);
        assert_eq!(told(), 0, "the log is not on");
        vm.front.set(ask::SET_FEATURES, vm.features | bits::LOG_ALL).expect("agreed");
        for index in 0..QUEUES {
            assert_eq!(vm.status(index, Request::read(0, 512)), 0);
        }
        // Each thread has done what it does after an answer when it does something else for us.
        (0..QUEUES).for_each(|index| vm.change_call(index).expect("another eventfd"));
        assert!(told() >= QUEUES as u64);
        // Nobody has to read it.
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).expect("room");
        assert_eq!(vm.status(0, Request::read(0, 512)), 0);
        vm.change_call(0).expect("another eventfd");
        assert_eq!(signals(&event), u64::MAX - 1);
        vm.front.set(ask::SET_FEATURES, vm.features).expect("agreed");
        assert_eq!(vm.status(0, Request::read(0, 512)), 0);
        assert_eq!(told(), 0, "the log is off");
    }
}

#[test]
fn the_address_of_a_used_ring_in_the_log_may_change_while_it_runs() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options(false, 9));
    let features = vm.features;
    let log = DirtyLog::new(&mut vm);
    vm.front.set(ask::SET_FEATURES, features | bits::LOG_ALL).expect("under way");
    let words = vm.queues[0].driver.user_addresses();
    // Nothing lies there.
    let page = 40_000;
    let elsewhere = ringdisk_guest::driver::GUEST_BASE + page * 4096;
    for there in [true, false] {
        vm.front.vring_addr(0, words, there.then_some(elsewhere)).expect("the log of a ring");
        log.take();
        assert_eq!(vm.status(0, Request::read(0, 512)), 0);
        // The ring is at rest: what it wrote is marked.
        vm.front.vring(ask::SET_VRING_ENABLE, 0, 0).expect("it stops");
        let marked = log.take();
        assert_eq!(marked[usize::try_from(page).expect("small")], there);
        vm.front.vring(ask::SET_VRING_ENABLE, 0, 1).expect("it goes on");
    }
}

#[test]
fn the_state_of_a_device_is_saved_and_loaded_by_another_one() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk.clone(), |_| {});
    let mut vm = served.vm(options(false, 1));
    vm.front.set_config(32, &[0]).expect("the write cache can be turned off");
    for index in 0..3 {
        vm.front.vring_base(index).expect("it stops");
    }
    let transfer = |vm: &mut Vm, direction: u32, fd: &OwnedFd| {
        let payload = [direction.to_ne_bytes(), 0_u32.to_ne_bytes()].concat();
        let reply = vm.front.ask(ask::SET_DEVICE_STATE_FD, &payload, &[fd.as_fd()]);
        let (payload, _) = reply.expect("a reply");
        assert_eq!(payload, words(&[1 << 8]), "begun, without another descriptor");
    };
    let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
    transfer(&mut vm, 0, &writer);
    drop(writer);
    assert_eq!(vm.front.get(ask::CHECK_DEVICE_STATE), Ok(0));
    assert_eq!(vm.front.get(ask::CHECK_DEVICE_STATE), Ok(1), "it was looked at");
    drop(vm);
    let other = serve(disk, |_| {});
    let mut vm = other.vm(options(false, 1));
    assert_eq!(vm.front.config(32, 1), Ok(vec![1]));
    for index in 0..3 {
        vm.front.vring_base(index).expect("it stops");
    }
    transfer(&mut vm, 1, &reader);
    assert_eq!(vm.front.get(ask::CHECK_DEVICE_STATE), Ok(0));
    assert_eq!(vm.front.config(32, 1), Ok(vec![0]));
}

#[test]
fn a_table_without_the_rings_that_run_is_refused() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options(false, 1));
    let [guest, size, user, offset] = vm.regions[1];
    let fds = [vm.ram.fd()];
    let refused = vm.front.memory_table(&[[guest, size, user, offset]], &fds);
    assert_eq!(refused, Err(Refused::Number(1)));
    assert_eq!(vm.status(0, Request::read(0, 512)), 0, "all is as it was");
}

#[test]
fn more_memory_than_we_map_is_refused_and_what_there_was_stays() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options(false, 1));
    let half = ringdisk_guest::MEMORY_BYTES_MAX / 2;
    let fd = memory(half);
    let at = |number: u64| [(number + 1) << 43, half, (number + 1) << 43, 0];
    // The guest's own is the third.
    vm.front.add_region(at(0), fd.as_fd()).expect("there is room");
    assert_eq!(vm.front.add_region(at(1), fd.as_fd()), Err(Refused::Number(1)));
    vm.front.remove_region(at(0)).expect("it was added");
    let mut table = vm.regions.clone();
    table.extend([at(0), at(1)]);
    let mut fds = vec![vm.ram.fd(); vm.regions.len()];
    fds.extend([fd.as_fd(), fd.as_fd()]);
    assert_eq!(vm.front.memory_table(&table, &fds), Err(Refused::Number(1)));
    assert_eq!(vm.status(0, Request::read(0, 512)), 0, "all is as it was");
}

/// Copies a guest's memory to another file, or back.
fn copy(vm: &Vm, from: impl AsFd, to: impl AsFd) {
    let mut bytes = vec![0; usize::try_from(vm.ram.taken()).expect("small")];
    rustix::io::pread(from, &mut bytes, 0).expect("memory");
    rustix::io::pwrite(to, &bytes, 0).expect("memory");
}

#[test]
fn rings_follow_their_memory_into_another_file() {
    for packed in [false, true] {
        let (_sim, disk) = simulated(MIB);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(VmOptions { regions: 1, ..options(packed, 1) });
        assert_eq!(vm.status(0, Request::write(1, vec![4; 512])), 0);
        let other = memory(vm.ram.size());
        copy(&vm, vm.ram.fd(), &other);
        vm.front.memory_table(&vm.regions, &[other.as_fd()]).expect("a table");

        // Nobody looks at the old file any more.
        let _ = rustix::io::read(&vm.queues[0].call, &mut [0; 8]);
        vm.queues[0].driver.enable_calls();
        vm.submit(0, Request::read(1, 512)).expect("room");
        vm.queues[0].kick_anyway();
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!vm.queues[0].driver.has_used(), "packed {packed}: answered in the old file");

        // In the new one it is answered, and with all of it.
        copy(&vm, vm.ram.fd(), &other);
        vm.queues[0].kick_anyway();
        let called = || rustix::io::read(&vm.queues[0].call, &mut [0; 8]).ok();
        let called = process::until(std::time::Duration::from_secs(20), called);
        assert!(called.is_some(), "packed {packed}: no answer in the new file");
        assert!(!vm.queues[0].driver.has_used());
        copy(&vm, &other, vm.ram.fd());
        vm.front.memory_table(&vm.regions, &[vm.ram.fd()]).expect("back");
        assert_eq!(vm.queues[0].wait(&vm.ram).data, [4; 512]);
        assert_eq!(vm.status(0, Request::read(0, 512)), 0);
        assert_eq!(served.export.broken_reason(), None);
    }
}
