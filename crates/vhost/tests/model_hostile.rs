//! Guests that do their worst: their own device needs a reset, says why, and works after it; others
//! go on; nothing grows.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::raw::{Descriptor, INDIRECT, NEXT, WRITE, avail, entry, send};
use common::{MIB, Served, serve, simulated};
use ringdisk_guest::Layout;
use ringdisk_guest::driver::GUEST_BASE;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{Refused, Request, Vm, VmOptions, ask, bits};
use ringdisk_testkit::process::until;
use ringdisk_testkit::sim::{Fault, OpKind, Prng, SimStorage, When};
use rustix::fs::{MemfdFlags, memfd_create};

/// In GET_STATUS.
const NEEDS_RESET: u64 = 0x40;
/// Where a test of descriptors has its bytes: far behind what queues and requests take.
const PLACE: u64 = GUEST_BASE + (200 << 20);

fn options(packed: bool) -> VmOptions {
    let packed = if packed { bits::PACKED } else { 0 };
    VmOptions {
        features: VmOptions::default().features | packed,
        indirect: 8,
        slot_bytes: 8 << 10,
        slots: 8,
        ..VmOptions::default()
    }
}

fn works(vm: &mut Vm) {
    assert_eq!(vm.status(0, Request::write(1, vec![4; 512])), 0);
    assert_eq!(vm.run(0, Request::read(1, 512)).data, [4; 512]);
}

/// Waits until a device needs a reset. Gives the reason.
fn reason(served: &Served) -> String {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(reason) = served.export.broken_reason() {
            return reason;
        }
        assert!(Instant::now() < end, "the device has not noticed");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A header of a request at [`PLACE`].
fn header(vm: &Vm, kind: u32) {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    vm.ram.write(PLACE, &bytes);
}

/// Descriptors that must not be, and what is said of them.
fn chains(layout: Layout) -> Vec<(&'static str, Vec<Descriptor>)> {
    let end = GUEST_BASE + (1 << 28);
    let head = (PLACE, 16, NEXT, 1);
    let status = (PLACE + 64, 1, WRITE, 0);
    let after = |first: Descriptor| vec![head, first, status];
    let table = |len: u32, flags: u16| vec![(PLACE + 4096, len, INDIRECT | flags, 1)];
    let mut list = vec![
        ("not in memory", vec![(0, 16, NEXT, 1), status]),
        ("not in memory", vec![(GUEST_BASE - 1, 16, NEXT, 1), status]),
        ("not in memory", vec![(u64::MAX, 16, NEXT, 1), status]),
        ("not in memory", vec![(u64::MAX - 15, 16, NEXT, 1), status]),
        ("not in memory", after((end - 511, 512, NEXT | WRITE, 2))),
        ("not in memory", after((end, 1, NEXT | WRITE, 2))),
        ("not in memory", after((PLACE, u32::MAX - 64, NEXT | WRITE, 2))),
        ("4 GiB or more", after((PLACE, u32::MAX, NEXT | WRITE, 2))),
        ("follows one to write", vec![(PLACE, 16, NEXT | WRITE, 1), (PLACE, 16, 0, 0)]),
        ("no header or no status", vec![(PLACE, 16, 0, 0)]),
        ("no header or no status", vec![(PLACE, 16, WRITE, 0)]),
        ("no header or no status", vec![(PLACE, 15, NEXT, 1), status]),
        ("an indirect table of 0 bytes", table(0, 0)),
        ("an indirect table of 17 bytes", table(17, 0)),
        ("not in memory", vec![(end - 16, 32, INDIRECT, 0)]),
        ("that goes on", table(16, 0)),
    ];
    if layout == Layout::Split {
        list.extend([
            ("runs in a circle", vec![(PLACE, 16, NEXT, 0)]),
            ("runs in a circle", vec![head, (PLACE, 16, NEXT, 0)]),
            ("descriptor 128 was named", vec![(PLACE, 16, NEXT, 128)]),
            ("descriptor 65535 was named", vec![(PLACE, 16, NEXT, u16::MAX)]),
            ("that goes on", table(16, NEXT)),
        ]);
    } else {
        list.push(("runs in a circle", vec![(PLACE, 16, NEXT, 0); 128]));
    }
    list
}

#[test]
fn every_bad_chain_ends_its_own_device_which_works_again_after_a_reset() {
    for packed in [false, true] {
        let (_sim, disk) = simulated(MIB);
        let (served, other) = (serve(disk.clone(), |_| {}), serve(disk, |_| {}));
        let mut neighbour = other.vm(options(packed));
        let mut vm = served.vm(options(packed));
        let layout = if packed { Layout::Packed } else { Layout::Split };
        for (text, chain) in chains(layout) {
            header(&vm, 0);
            // A table inside a table.
            vm.ram.write(PLACE + 4096, &entry(layout, (PLACE, 16, INDIRECT, 0)));
            send(&mut vm, 0, &chain);
            let reason = reason(&served);
            assert!(reason.contains(text), "{chain:x?}: {reason}");
            assert!(reason.contains("virtqueue 0"), "{reason}");
            let status = vm.front.get(ask::GET_STATUS).expect("a status");
            assert_eq!(status & NEEDS_RESET, NEEDS_RESET);
            works(&mut neighbour);
            vm.reset().expect("a reset");
            let status = vm.front.get(ask::GET_STATUS).expect("a status");
            assert_eq!((status & NEEDS_RESET, served.export.broken_reason()), (0, None));
            works(&mut vm);
            // Descriptors are laid from the first place on.
            vm.reset().expect("a reset");
        }
        assert_eq!(other.export.broken_reason(), None);
    }
}

/// Waits until the storage holds a request.
fn wait_for_held(sim: &SimStorage) {
    let held = until(Duration::from_secs(20), || (!sim.held().is_empty()).then_some(()));
    assert_eq!(held, Some(()), "nothing reaches the storage");
}

#[test]
fn a_broken_device_takes_no_requests_in_any_virtqueue_before_a_reset() {
    for (packed, protocol) in [(false, u64::MAX), (true, u64::MAX), (false, !bits::P_STATUS)] {
        let (sim, disk) = simulated(MIB);
        let served = serve(disk, |_| {});
        // Two threads: one of the virtqueues is on the same as the broken one.
        let mut vm = served.vm(VmOptions { queues: 3, protocol, ..options(packed) });
        for index in 0..3 {
            assert_eq!(vm.status(index, Request::read(0, 512)), 0);
        }
        vm.reset().or_else(|_| restart(&mut vm)).expect("it begins anew");
        // What was taken before is answered.
        sim.on(When::kind(OpKind::Read).once(), Fault::Hold);
        vm.submit(1, Request::read(3, 512)).expect("room");
        wait_for_held(&sim);
        header(&vm, 0);
        send(&mut vm, 0, &[(PLACE, 16, 0, 0)]);
        assert!(reason(&served).contains("virtqueue 0"));
        let before = sim.count(OpKind::Read);
        for index in 1..3 {
            vm.submit(index, Request::read(1, 512)).expect("room");
            vm.queues[index].kick_anyway();
        }
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(sim.count(OpKind::Read), before, "nothing goes on");
        assert_eq!(sim.release_all(), 1);
        assert_eq!(vm.queues[1].wait(&vm.ram).status, 0);
        let none = vm.queues[1].wait_for(&vm.ram, Duration::from_millis(50));
        assert!(none.is_none() && vm.queues[2].reap(&vm.ram).is_none(), "nothing goes on");
        // An idle thread, too.
        let cpu = || served.export.stats_reader()().queues.iter().map(|q| q.cpu_ns).sum::<u64>();
        let used = cpu();
        std::thread::sleep(Duration::from_millis(200));
        assert!(cpu() - used < 100_000_000, "it looks for requests that it may not take");
        if protocol & bits::P_STATUS == 0 {
            restart(&mut vm).expect("all virtqueues end and begin anew");
        } else {
            vm.reset().expect("a reset");
        }
        assert_eq!(served.export.broken_reason(), None);
        for index in 0..3 {
            assert_eq!(vm.status(index, Request::read(1, 512)), 0);
        }
    }
}

/// A reset as front ends do it that know no device status.
fn restart(vm: &mut Vm) -> Result<(), Refused> {
    for index in 0..u32::from(vm.options.queues) {
        vm.front.vring_base(index)?;
    }
    vm.make_queues();
    (0..vm.queues.len()).try_for_each(|index| vm.start_queue(index, None))
}

#[test]
fn a_table_that_was_not_agreed_on_is_refused() {
    for packed in [false, true] {
        let (_sim, disk) = simulated(MIB);
        let served = serve(disk, |_| {});
        let features = options(packed).features & !bits::INDIRECT;
        let mut vm = served.vm(VmOptions { features, ..options(packed) });
        send(&mut vm, 0, &[(PLACE, 32, INDIRECT, 0)]);
        assert!(reason(&served).contains("not negotiated"));
    }
}

#[test]
fn jumps_of_the_index_and_heads_that_are_not_there_or_in_flight_are_found() {
    let (sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options(false));
    for (text, heads, index) in [
        ("jumped from 0 to 129", &[0_u16][..], 129),
        ("jumped from 0 to 65535", &[0], u16::MAX),
        ("descriptor 128 was named", &[128], 1),
        ("descriptor 65535 was named", &[u16::MAX], 1),
    ] {
        avail(&mut vm, 0, heads, index);
        let reason = reason(&served);
        assert!(reason.contains(text), "{reason}");
        vm.reset().expect("a reset");
        works(&mut vm);
        vm.reset().expect("a reset");
    }
    // Twice the same, which is in flight.
    sim.on(When::kind(OpKind::Read).once(), Fault::Hold);
    header(&vm, 0);
    let chain =
        [(PLACE, 16, NEXT, 1), (PLACE + 512, 512, NEXT | WRITE, 2), (PLACE + 64, 1, WRITE, 0)];
    send(&mut vm, 0, &chain);
    avail(&mut vm, 0, &[0, 0], 2);
    assert!(reason(&served).contains("descriptor 0 was made available while it is in flight"));
    wait_for_held(&sim);
    assert_eq!(sim.release_all(), 1);
    vm.reset().expect("a reset");
    works(&mut vm);
}

#[test]
fn requests_whose_buffers_overlap_hurt_only_themselves() {
    for packed in [false, true] {
        let (_sim, disk) = simulated(MIB);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(options(packed));
        header(&vm, 0);
        // The header, the data and the status are the same bytes.
        send(
            &mut vm,
            0,
            &[(PLACE, 16, NEXT, 1), (PLACE, 512, NEXT | WRITE, 2), (PLACE, 1, WRITE, 0)],
        );
        while !vm.queues[0].driver.has_used() {
            assert_eq!(served.export.broken_reason(), None);
        }
        vm.reset().expect("a reset");
        works(&mut vm);
    }
}

#[test]
fn queues_that_cannot_be_are_refused_when_they_are_set_up() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(options(false));
    vm.front.vring_base(0).expect("it stops");
    for size in [0, 1025, 32768, 65536, u32::MAX] {
        let refused = vm.front.vring(ask::SET_VRING_NUM, 0, size);
        assert_eq!(refused, Err(Refused::Number(1)), "size {size}");
    }
    for index in [8, 255, u32::MAX] {
        let refused = vm.front.vring(ask::SET_VRING_NUM, index, 128);
        assert_eq!(refused, Err(Refused::Number(1)), "virtqueue {index}");
    }
    let good = vm.queues[0].driver.user_addresses();
    for (place, bad) in [(0, 0), (0, 8), (1, 1), (2, 2), (0, 1 << 60), (2, !3)] {
        let mut words = good;
        words[place] = if bad < 16 && bad > 0 { good[place] + bad } else { bad };
        let set = vm.front.vring_addr(0, words, None).and_then(|()| {
            vm.front.vring(ask::SET_VRING_NUM, 0, 128)?;
            vm.front.vring(ask::SET_VRING_BASE, 0, 0)?;
            let kick = vm.queues[0].kick.try_clone().expect("a descriptor");
            let kick = std::os::fd::AsFd::as_fd(&kick);
            vm.front.vring_fd(ask::SET_VRING_KICK, 0, Some(kick))?;
            vm.front.vring(ask::SET_VRING_ENABLE, 0, 1)
        });
        assert_eq!(set, Err(Refused::Number(1)), "area {place} at {:#x}", words[place]);
    }
    vm.reset().expect("a reset");
    works(&mut vm);
}

#[test]
fn a_storm_of_kicks_keeps_nobody_from_work() {
    let (_sim, disk) = simulated(MIB);
    let (served, other) = (serve(disk.clone(), |_| {}), serve(disk, |_| {}));
    let (mut vm, mut neighbour) = (served.vm(options(false)), other.vm(options(true)));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let kick = vm.queues[0].kick.try_clone().expect("a descriptor");
        let stop = &stop;
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let _ = rustix::io::write(&kick, &1_u64.to_ne_bytes());
            }
        });
        (0..200).for_each(|_| {
            works(&mut vm);
            works(&mut neighbour);
        });
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(served.export.broken_reason(), None);
}

#[test]
fn memory_that_is_truncated_under_us_ends_that_device_alone() {
    for packed in [false, true] {
        let (_sim, disk) = simulated(MIB);
        let (served, other) = (serve(disk.clone(), |_| {}), serve(disk, |_| {}));
        let mut neighbour = other.vm(options(packed));
        let mut vm = served.vm(options(packed));
        works(&mut vm);
        rustix::fs::ftruncate(vm.ram.fd(), 0).expect("truncate");
        vm.queues[0].kick_anyway();
        assert!(reason(&served).contains("gone"));
        works(&mut neighbour);
        drop(vm);
        works(&mut served.vm(options(packed)));
        // Under load: buffers go while the storage reads into them.
        let mut vm = served.vm(options(packed));
        let memory = vm.ram.fd().try_clone_to_owned().expect("a descriptor");
        for sector in 0..8 {
            vm.submit(0, Request::read(sector, 4096)).expect("room");
        }
        rustix::fs::ftruncate(&memory, 0).expect("truncate");
        vm.queues[0].kick_anyway();
        reason(&served);
        works(&mut neighbour);
        drop(vm);
        works(&mut served.vm(options(packed)));
    }
}

/// A second region of memory, whose file goes.
const GOING: u64 = 1 << 40;

/// Adds [`GOING`]. Gives its file.
fn add_going(vm: &mut Vm) -> OwnedFd {
    let file = memfd_create(c"going", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, MIB).expect("a memfd");
    vm.front.add_region([GOING, MIB, 1 << 46, 0], file.as_fd()).expect("there is room");
    file
}

/// Truncates the file of [`GOING`] and lets the device find that, by a chain whose header is there.
fn lose(served: &Served, vm: &mut Vm, queue: usize, file: &OwnedFd) {
    rustix::fs::ftruncate(file, 0).expect("truncate");
    let status = (PLACE + 64, 1, WRITE, 0);
    send(vm, queue, &[(GOING, 16, NEXT, 1), (PLACE, 512, NEXT | WRITE, 2), status]);
    vm.queues[queue].kick_anyway();
    let reason = reason(served);
    assert!(reason.contains("gone"), "{reason}");
}

/// There are zeroes of ours in its place: a guest that goes on would write them to its disk.
#[test]
fn memory_that_is_gone_is_not_used_after_a_reset_before_it_is_announced_anew() {
    for packed in [false, true] {
        let (_sim, disk) = simulated(MIB);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(options(packed));
        let file = add_going(&mut vm);
        lose(&served, &mut vm, 0, &file);
        assert!(vm.reset().is_err(), "it begins anew on what is gone");
        vm.front.remove_region([GOING, MIB, 1 << 46, 0]).expect("it was added");
        vm.reset().expect("what is left is all there");
        works(&mut vm);
        assert_eq!(served.export.broken_reason(), None);
    }
}

/// What the storage gets of memory that goes meanwhile is not what the guest has written.
#[test]
fn a_request_whose_memory_goes_while_it_is_carried_out_is_no_success() {
    for packed in [false, true] {
        let (sim, disk) = simulated(MIB);
        let served = serve(disk, |_| {});
        let mut vm = served.vm(VmOptions { queues: 2, ..options(packed) });
        let file = add_going(&mut vm);
        vm.ram.write(PLACE + 4096, &[1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        vm.ram.write(PLACE + 8192, &[0xee]);
        sim.on(When::kind(OpKind::Write).once(), Fault::Hold);
        let data = (GOING + 4096, 512, NEXT, 2);
        send(&mut vm, 1, &[(PLACE + 4096, 16, NEXT, 1), data, (PLACE + 8192, 1, WRITE, 0)]);
        wait_for_held(&sim);
        lose(&served, &mut vm, 0, &file);
        assert_eq!(sim.release_all(), 1);
        let end = Instant::now() + Duration::from_secs(20);
        let mut status = [0xee];
        while status == [0xee] {
            assert!(Instant::now() < end, "it is not answered");
            std::thread::sleep(Duration::from_millis(1));
            vm.ram.read(PLACE + 8192, &mut status);
        }
        assert_eq!(status, [1], "an I/O error");
    }
}

/// Whether a thread of this process waits in the kernel for the end of a write of eight bytes: of
/// an eventfd that is full.
fn somebody_waits_for_an_eventfd() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").expect("threads").flatten();
    let mut calls =
        threads.filter_map(|each| std::fs::read_to_string(each.path().join("syscall")).ok());
    let write = libc::SYS_write.to_string();
    calls.any(|call| {
        let words: Vec<_> = call.split_whitespace().collect();
        words.first() == Some(&write.as_str()) && words.get(3) == Some(&"0x8")
    })
}

/// Makes a queue thread wait in its call: the eventfd did not wait when it was announced, does so
/// now, and is full.
fn stick(vm: &mut Vm) {
    works(vm);
    // Goes through the queue thread: no call for what was answered before comes later.
    vm.change_call(0).expect("another eventfd");
    let call = vm.queues[0].call.try_clone().expect("a descriptor");
    let flags = rustix::fs::fcntl_getfl(&call).expect("flags");
    let _ = rustix::io::read(&call, &mut [0; 8]);
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).expect("room for all of it");
    rustix::fs::fcntl_setfl(&call, flags - rustix::fs::OFlags::NONBLOCK).expect("a flag");
    vm.queues[0].driver.enable_calls();
    vm.submit(0, Request::read(1, 512)).expect("room");
    let end = Instant::now() + Duration::from_secs(20);
    while !vm.queues[0].driver.has_used() {
        assert!(Instant::now() < end, "the request was not answered");
        std::thread::sleep(Duration::from_millis(1));
    }
    // From the index that the driver sees to the call.
    while !somebody_waits_for_an_eventfd() {
        assert!(Instant::now() < end, "no thread waits in its call");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_front_end_that_makes_a_call_wait_for_ever_stops_only_itself() {
    let (_sim, disk) = simulated(MIB);
    let (served, other) = (serve(disk.clone(), |_| {}), serve(disk, |_| {}));
    let mut neighbour = other.vm(options(false));
    let soon = ringdisk_testkit::process::patient(Duration::from_secs(5));

    // It goes; its memory stays.
    let mut first = served.vm(options(false));
    stick(&mut first);
    works(&mut neighbour);
    let Vm { front, ram: _ram, queues: _queues, .. } = first;
    drop(front);
    let begun = Instant::now();
    let mut second = served.vm(options(false));
    works(&mut second);
    assert!(begun.elapsed() < soon, "the next front end waited for {:?}", begun.elapsed());

    // It stays, and goes on with another eventfd.
    stick(&mut second);
    second.change_call(0).expect("another eventfd");
    assert_eq!(second.queues[0].wait(&second.ram).status, 0);
    works(&mut second);

    // The export ends.
    stick(&mut second);
    works(&mut neighbour);
    let begun = Instant::now();
    drop(served);
    assert!(begun.elapsed() < soon, "the end took {:?}", begun.elapsed());
    works(&mut neighbour);
}

/// Rewrites rings, tables and headers as fast as it can until it is told to stop.
fn rewrite(memory: &ringdisk_guest::RingMemory, rings: u64, seed: u64, stop: &AtomicBool) {
    let mut prng = Prng::new(seed);
    let rings = usize::try_from(rings).expect("small");
    let place = usize::try_from(PLACE - GUEST_BASE).expect("small");
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..64 {
            let random = |prng: &mut Prng, bound: u64| usize::try_from(prng.below(bound));
            let word = match prng.below(4) {
                0 => prng.next_u64(),
                1 => PLACE + prng.below(4096),
                // Lengths, flags and next descriptors that nearly make sense.
                2 => prng.below(600) | prng.below(8) << 32 | prng.below(130) << 48,
                _ => prng.below(14),
            };
            let at = match prng.coin() {
                true => random(&mut prng, rings as u64 / 8).expect("small") * 8,
                false => place + random(&mut prng, 512).expect("small") * 8,
            };
            memory.store_u64(at, word, Ordering::Relaxed);
        }
        std::thread::yield_now();
    }
}

#[test]
fn memory_that_changes_while_it_is_read_never_does_more_than_break_its_device() {
    let time = Duration::from_millis(if full() { 20_000 } else { 1500 });
    for packed in [false, true] {
        let (_sim, disk) = simulated(MIB);
        let (served, other) = (serve(disk, |_| {}), serve(simulated(MIB).1, |_| {}));
        let mut neighbour = other.vm(options(packed));
        let mut vm = served.vm(VmOptions { slots: 1, ..options(packed) });
        let (end, mut resets) = (Instant::now() + time, 0);
        while Instant::now() < end {
            let stop = AtomicBool::new(false);
            let (memory, taken) = (vm.ram.memory().clone(), vm.ram.taken());
            std::thread::scope(|scope| {
                scope.spawn(|| rewrite(&memory, taken.min(8192), resets, &stop));
                let round = Instant::now();
                let mut index = 0_u16;
                while round.elapsed() < Duration::from_millis(20) {
                    index = index.wrapping_add(1);
                    if packed {
                        let flags = if index & 1 == 0 { 1 << 7 } else { 1 << 15 };
                        let ring = &vm.queues[0].driver.areas().descriptors;
                        let at = usize::from(index % 128) * 16;
                        ring.store_u16(at + 14, flags | index & 7, Ordering::Release);
                        vm.queues[0].kick_anyway();
                    } else {
                        avail(&mut vm, 0, &[index % 128], index);
                    }
                }
                stop.store(true, Ordering::Relaxed);
            });
            vm.ram.write(GUEST_BASE, &vec![0; 8192]);
            drop(vm);
            vm = served.vm(VmOptions { slots: 1, ..options(packed) });
            works(&mut vm);
            resets += 1;
            works(&mut neighbour);
        }
        println!("packed {packed}: {resets} rounds");
    }
}
