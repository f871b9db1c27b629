//! A guest changes all memory of its requests while they are served: descriptors, tables, headers,
//! ranges, data, rings and inflight area. Its device may need a reset, as often as that takes;
//! nothing else happens, no request reaches what is not on the disk, and when it stops, everything
//! works.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ringdisk_guest::RingMemory;
use ringdisk_guest::driver::{GUEST_BASE, GuestRam};
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{Refused, Request, Vm, VmOptions, ask, bits};
use ringdisk_testkit::process::patient;
use ringdisk_vhost::Threads;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::ledger::Ledger;
use crate::common::racer::{BURST, Hand, RING, Switch, pieces, race, room};
use crate::common::{Served, serve};

/// Bytes of the disk.
const DISK: u64 = 64 << 10;
/// Bytes of the guest's memory; the file is longer.
const RAM: u64 = 32 << 20;
/// What lies behind it.
const BEHIND: u64 = 1 << 20;
/// Times that each byte is changed, at least.
const ROUNDS: u64 = 5;
/// Where requests are, behind the rings.
const PLACE: u64 = GUEST_BASE + (16 << 20);

/// Memory of a guest at the beginning of a file, and what follows, which is not the guest's.
fn memory() -> (GuestRam, OwnedFd) {
    let fd = memfd_create(c"raced", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&fd, RAM + BEHIND).expect("a memfd");
    let pattern = vec![0x5c; usize::try_from(BEHIND).expect("small")];
    rustix::io::pwrite(&fd, &pattern, RAM).expect("the file");
    let other = fd.try_clone().expect("a descriptor");
    (GuestRam::of(fd, RAM).expect("memory"), other)
}

fn options(packed: bool) -> VmOptions {
    let packed = if packed { bits::PACKED } else { 0 };
    VmOptions {
        features: VmOptions::default().features | packed,
        size: RING,
        slots: 4,
        slot_bytes: 8 << 10,
        indirect: 4,
        ..VmOptions::default()
    }
}

/// Requests that the device has answered.
fn served(export: &Served) -> u64 {
    export.export.stats_reader()().queues.iter().map(|queue| queue.requests).sum()
}

/// A machine under race.
struct Scene<'a> {
    served: &'a Served,
    vm: Vm,
    hand: Hand,
    /// The inflight area.
    area: RingMemory,
    switch: &'a Switch,
    resets: u64,
    reconnects: u64,
}

impl Scene<'_> {
    /// Waits until the last burst was served. `false`: the device needs a reset.
    fn wait(&mut self, until: u64) -> bool {
        let mut begun = Instant::now();
        let mut rests = false;
        loop {
            // The counters cost more than what they count; others want the CPU, too.
            std::thread::sleep(Duration::from_micros(60));
            if self.served.export.broken_reason().is_some() {
                return false;
            }
            if served(self.served) >= until {
                return true;
            }
            if begun.elapsed() > Duration::from_millis(20) {
                assert!(!rests, "the device stands still, and says nothing");
                // The race may have put an index back that was older. It rests, so this one stays.
                let (hand, vm) = (&self.hand, &mut self.vm);
                let done = self.switch.without(|| {
                    hand.show_again();
                    vm.queues[0].kick_anyway();
                    // A packed ring that was put back half is reset below: no reason to wait for
                    // long.
                    let limit = if vm.has(bits::PACKED) { 100 } else { 20_000 };
                    let end = Instant::now() + patient(Duration::from_millis(limit));
                    let is_done = || {
                        served(self.served) >= until || self.served.export.broken_reason().is_some()
                    };
                    while !is_done() && Instant::now() < end {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    is_done()
                });
                // A packed ring shows nothing again: descriptors that were put back half are a
                // driver's loss, and a reset helps.
                if !done && self.vm.has(bits::PACKED) {
                    return false;
                }
                rests = !done;
                begun = Instant::now();
            }
        }
    }

    /// A reset by the driver, which begins with new rings.
    fn reset(&mut self) {
        self.resets += 1;
        self.vm.front.set(ask::SET_STATUS, 0).expect("a reset");
        self.vm.front.set(ask::SET_FEATURES, self.vm.features).expect("as before");
        self.hand.begin();
        if self.vm.start_queue(0, None).is_err() {
            // Its inflight area made no sense.
            self.anew();
        }
    }

    /// Another connection, with an area that is empty, which nobody changes before the device has
    /// taken it.
    fn anew(&mut self) {
        let Scene { served, vm, hand, switch, area, .. } = self;
        switch.without(|| {
            area.write_bytes(0, &vec![0; area.len()]);
            hand.begin();
            vm.front = served.front();
            vm.negotiate().expect("features");
            vm.announce().expect("memory");
            vm.take_inflight().expect("an area");
            vm.start_queue(0, None).expect("an empty area");
        });
    }

    /// Another connection with the area that there is, which the race changes while it is read.
    fn reconnect(&mut self) {
        self.reconnects += 1;
        self.vm.front = self.served.front();
        let base = self.hand.base();
        let resumed = (|| -> Result<(), Refused> {
            self.vm.negotiate()?;
            self.vm.take_inflight()?;
            self.vm.announce()?;
            self.vm.start_queue(0, Some(base))
        })();
        if resumed.is_err() {
            self.anew();
        }
    }
}

fn races(packed: bool, requests: u64, seed: u64) {
    let ledger = Ledger::of_bytes(DISK, 32);
    let export = serve(ledger.disk(), |options| options.common.threads.threads = Threads::Count(1));
    let (ram, file) = memory();
    let vm = Vm::start_in(ram, export.front(), options(packed)).expect("a device");
    assert!(vm.ram.taken() < PLACE - GUEST_BASE && room(PLACE).end - GUEST_BASE < RAM);
    let mut hand = Hand::new(&vm, PLACE, DISK / 512, seed);
    hand.begin();
    let mut targets = hand.targets();
    let area = vm.inflight.as_ref().expect("an area");
    let area_bytes = u64::from_ne_bytes(area.payload[..8].try_into().expect("a size"));
    let area = area.fd.as_fd().try_clone_to_owned().expect("a descriptor");
    let area = GuestRam::of(area, area_bytes).expect("the area").memory().clone();
    targets.extend(pieces(&area));
    let switch = Switch::default();
    let mut scene =
        Scene { served: &export, vm, hand, area, switch: &switch, resets: 0, reconnects: 0 };
    std::thread::scope(|scope| {
        // Whatever fails below, the race ends.
        struct Stop<'a>(&'a Switch);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        let _stop = Stop(&switch);
        let (targets, switch) = (&targets, &switch);
        scope.spawn(move || race(targets, switch, seed));
        scene.reset();
        let mut bursts = 0_u64;
        while served(&export) < requests || switch.rounds() < ROUNDS {
            let until = served(&export) + BURST as u64;
            scene.hand.lay();
            scene.vm.queues[0].kick_anyway();
            bursts += 1;
            if !scene.wait(until) {
                scene.reset();
            } else if bursts.is_multiple_of(256) {
                scene.reconnect();
            }
        }
    });
    println!(
        "packed {packed}: {} requests, {} resets, {} reconnects, {} bytes changed, each {} times",
        served(&export),
        scene.resets,
        scene.reconnects,
        switch.flips(),
        switch.rounds(),
    );
    assert_eq!(ledger.outside(), [] as [String; 0]);
    // The race is over: the device of a driver that means well works.
    let mut vm = scene.vm;
    vm.inflight = None;
    vm.front = export.front();
    vm.negotiate().expect("features");
    vm.announce().expect("memory");
    vm.take_inflight().expect("an area");
    vm.make_queues();
    vm.start_queue(0, None).expect("a new virtqueue");
    for sector in 0..8 {
        let data = vec![u8::try_from(sector).expect("small") + 1; 512];
        assert_eq!(vm.status(0, Request::write(sector, data.clone())), 0);
        assert_eq!(vm.run(0, Request::read(sector, 512)).data, data);
    }
    assert_eq!(export.export.broken_reason(), None);
    let mut behind = vec![0; usize::try_from(BEHIND).expect("small")];
    rustix::io::pread(&file, &mut behind, RAM).expect("the file");
    assert!(behind.iter().all(|byte| *byte == 0x5c), "memory behind the guest's was written");
}

/// 10^6 of both rings together, 10^7 with `RINGDISK_FULL`.
fn requests() -> u64 {
    if full() { 5_000_000 } else { 500_000 }
}

#[test]
fn nothing_but_a_reset_comes_of_memory_that_changes_under_a_split_ring() {
    races(false, requests(), 1);
}

#[test]
fn nothing_but_a_reset_comes_of_memory_that_changes_under_a_packed_ring() {
    races(true, requests(), 2);
}
