//! Devices that are killed before each of their writes, and their successors.

mod steps;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::driver::{Driver, DriverConfig, GuestRam};
use crate::layout::Layout;
use crate::memory::kill;
use crate::{Chain, Error, PACKED_BASE, Queue, Segment, Token, View};

use super::InflightArea;

const REQUESTS: u32 = 40;

/// A guest, its disk's inflight area, and a device that may die.
struct World {
    ram: GuestRam,
    driver: Driver,
    area: InflightArea,
    data: u64,
    /// Requests by the driver's number.
    sent: HashMap<u16, u32>,
    next: u32,
    done: Vec<u32>,
    random: u64,
    deaths: u32,
}

/// What a kill takes away.
struct Device {
    queue: Queue,
    view: View,
    popped: Vec<(Token, u32)>,
}

impl World {
    fn new(layout: Layout, size: u16, seed: u64) -> World {
        let mut ram = GuestRam::new(1 << 20).unwrap();
        let config = DriverConfig { layout, size, event_idx: true, indirect: 4 };
        let driver = Driver::new(&mut ram, config).unwrap();
        let data = ram.take(4096 * u64::from(REQUESTS), 4096).unwrap();
        let area = InflightArea::create(2, size, layout).unwrap();
        let (sent, done) = (HashMap::new(), Vec::new());
        World { ram, driver, area, data, sent, next: 0, done, random: seed | 1, deaths: 0 }
    }

    fn choose(&mut self, of: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % of
    }

    /// A new process. Cloud Hypervisor's base is the guest's avail index, QEMU's is what it knew at
    /// the start.
    fn boot(&self) -> Device {
        let layout = self.driver.config().layout;
        let base = match layout {
            Layout::Split => u32::from(
                self.driver.areas().driver.load_u16(2, std::sync::atomic::Ordering::Relaxed),
            ),
            Layout::Packed => PACKED_BASE,
        };
        let inflight = self.area.queue(1);
        let (queue, view) =
            crate::queue::tests::device(&self.ram, &self.driver, base, inflight, None);
        Device { queue, view, popped: Vec::new() }
    }

    /// The guest adds requests and looks at those that are done.
    fn guest(&mut self) {
        while let Some(used) = self.driver.pop_used() {
            let request = self.sent.remove(&used.id).unwrap();
            assert_eq!(used.len, request * 3 + 1, "another request's bytes");
            self.done.push(request);
        }
        for _ in 0..self.choose(4) {
            let at = self.data + 4096 * u64::from(self.next);
            let count = usize::try_from(self.choose(3)).unwrap() + 1;
            let segments = [Segment { addr: at, len: 16 }; 3];
            let segments = &segments[..count];
            let added = match self.choose(3) {
                _ if self.next == REQUESTS => None,
                0 => self.driver.add_indirect(segments, 1),
                _ => self.driver.add(segments, 1),
            };
            let Some(id) = added else { break };
            self.sent.insert(id, self.next);
            self.next += 1;
        }
        self.driver.publish();
    }

    /// A turn of the device's loop.
    fn turn(&mut self, device: &mut Device) {
        let mut chain = Chain::new();
        for _ in 0..self.choose(5) {
            let Some(token) = device.queue.pop(&device.view, &mut chain).unwrap() else { break };
            let at = chain.readable()[0].addr - self.data;
            let request = u32::try_from(at / 4096).unwrap();
            let is_in_flight = self.sent.values().any(|sent| *sent == request);
            assert!(is_in_flight, "request {request} is done and was taken again");
            let twice = device.popped.iter().any(|(_, other)| *other == request);
            assert!(!twice, "request {request} was taken twice");
            device.popped.push((token, request));
        }
        for _ in 0..self.choose(5) {
            if device.popped.is_empty() {
                break;
            }
            let which = usize::try_from(self.choose(device.popped.len() as u64)).unwrap();
            let (token, request) = device.popped.swap_remove(which);
            device.queue.complete(token, request * 3 + 1);
        }
        device.queue.publish();
        device.queue.enable_kicks();
    }

    /// Runs all requests to their end, with kills after these numbers of writes. Gives how often it
    /// was killed.
    fn run(&mut self, kills: &[u64]) -> u32 {
        let mut kills = kills.iter().copied();
        kills.next().map_or_else(kill::never, kill::after);
        let mut device = None;
        let mut turns = 0;
        while self.done.len() < REQUESTS as usize {
            self.guest_undisturbed();
            let lived = catch_unwind(AssertUnwindSafe(|| {
                let mut present = device.take().unwrap_or_else(|| self.boot());
                self.turn(&mut present);
                present
            }));
            match lived {
                Ok(present) => device = Some(present),
                Err(payload) if payload.is::<kill::Killed>() => {
                    self.deaths += 1;
                    kills.next().map_or_else(kill::never, kill::after);
                }
                Err(payload) => std::panic::resume_unwind(payload),
            }
            turns += 1;
            assert!(turns < 10_000, "requests are lost: {:?} of them done", self.done.len());
        }
        kill::never();
        let mut done = self.done.clone();
        done.sort_unstable();
        assert!(done.iter().copied().eq(0..REQUESTS));
        // The last one may have died after the guest saw all, before it said so in the area.
        drop(self.boot());
        assert!(!self.area.is_busy());
        self.deaths
    }

    /// The guest does not die with the device: its writes are not counted.
    fn guest_undisturbed(&mut self) {
        let left = kill::pause();
        self.guest();
        kill::resume(left);
    }
}

/// Kills at every write of a run, then at writes of the recovery after it.
fn kill_everywhere(layout: Layout, size: u16, seed: u64) -> u32 {
    let mut total = 0;
    for first in 0.. {
        let deaths = World::new(layout, size, seed).run(&[first]);
        total += deaths;
        if deaths == 0 {
            break;
        }
        for second in [first % 7, first % 31, first % 97] {
            total += World::new(layout, size, seed).run(&[first, second, first % 5]);
        }
    }
    total
}

#[test]
fn a_split_queue_survives_a_kill_before_every_write() {
    let deaths: u32 = (1..5).map(|seed| kill_everywhere(Layout::Split, 8, seed * 77)).sum();
    assert!(deaths > 1000, "{deaths}");
}

#[test]
fn a_packed_queue_survives_a_kill_before_every_write() {
    let deaths: u32 = (1..5).map(|seed| kill_everywhere(Layout::Packed, 7, seed * 77)).sum();
    assert!(deaths > 1000, "{deaths}");
}

#[test]
fn chains_in_flight_are_taken_again_in_their_order_and_before_new_ones() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut world = World::new(layout, 16, 1);
        let mut device = world.boot();
        let mut chain = Chain::new();
        let segment = |n: u64| [Segment { addr: world.data + 4096 * n, len: 1 }];
        for number in 0..6 {
            world.driver.add(&segment(number), 1).unwrap();
        }
        world.driver.publish();
        let mut tokens = Vec::new();
        for _ in 0..4 {
            tokens.push(device.queue.pop(&device.view, &mut chain).unwrap().unwrap());
        }
        device.queue.complete(tokens.remove(1), 0);
        device.queue.publish();
        drop(device);

        let mut device = world.boot();
        let mut order = Vec::new();
        while let Some(_token) = device.queue.pop(&device.view, &mut chain).unwrap() {
            order.push((chain.readable()[0].addr - world.data) / 4096);
        }

        assert_eq!(order, [0, 2, 3, 4, 5], "{layout:?}");
    }
}

#[test]
fn an_area_that_was_kept_in_its_file_is_found_again() {
    let area = InflightArea::create(4, 128, Layout::Split).unwrap();
    let (fd, size) = (area.fd().try_clone_to_owned().unwrap(), area.mmap_size());
    // The word of the device is behind the parts of the queues.
    let parts = 4 * (16 + 128 * 16_u64).next_multiple_of(64);
    assert_eq!(size, parts + 64);
    assert_eq!(area.note(), None);
    area.set_note(7);
    let again = InflightArea::from_fd(fd, size, 0, 4, 128, Layout::Split).unwrap();
    assert!(again.queue(3).is_some() && again.queue(4).is_none() && !again.is_busy());
    assert_eq!(again.note(), Some(7));
    // An area of another back end has no room for it.
    let short = InflightArea::from_fd(
        area.fd().try_clone_to_owned().unwrap(),
        parts,
        0,
        4,
        128,
        Layout::Split,
    );
    assert_eq!(short.unwrap().note(), None);

    let fd = || area.fd().try_clone_to_owned().unwrap();
    let open = |size, offset, queues, descriptors| {
        InflightArea::from_fd(fd(), size, offset, queues, descriptors, Layout::Split).unwrap_err()
    };
    assert!(matches!(open(parts - 1, 0, 4, 128), Error::BadInflight { .. }));
    assert!(matches!(open(size, 4, 4, 128), Error::BadInflight { .. }));
    assert!(matches!(open(size, 64, 4, 128), Error::FileTooShort { .. }));
    assert!(matches!(open(size, 0, 0, 128), Error::BadInflight { .. }));
    assert!(matches!(open(size, 0, 4, 0), Error::BadInflight { .. }));
    assert!(matches!(open(u64::MAX, 0, u16::MAX, u16::MAX), Error::BadInflight { .. }));
}

#[test]
fn an_area_of_a_ring_that_was_made_anew_is_given_up() {
    let mut world = World::new(Layout::Split, 8, 1);
    let mut device = world.boot();
    let mut chain = Chain::new();
    world.driver.add(&[Segment { addr: world.data, len: 1 }], 1).unwrap();
    world.driver.publish();
    let _lost = device.queue.pop(&device.view, &mut chain).unwrap().unwrap();
    assert!(world.area.is_busy());
    drop(device);
    let areas = world.driver.areas();
    areas.driver.store_u32(0, 0, std::sync::atomic::Ordering::Release);
    areas.device.store_u32(0, 0, std::sync::atomic::Ordering::Release);

    let mut device = world.boot();

    assert!(!device.queue.has_next() && device.queue.base() == 0 && !world.area.is_busy());
}

#[test]
fn a_split_area_of_a_queue_that_somebody_else_served_meanwhile_says_nothing() {
    // Of fewer requests than the queue has, and of more.
    for count in [3_u32, 9] {
        let mut world = World::new(Layout::Split, 8, 1);
        let mut device = world.boot();
        let mut chain = Chain::new();
        let segment = [Segment { addr: world.data, len: 1 }];
        world.driver.add(&segment, 1).unwrap();
        world.driver.publish();
        let token = device.queue.pop(&device.view, &mut chain).unwrap().unwrap();
        device.queue.complete(token, 0);
        device.queue.stop();
        world.area.retire(1);
        // The other process does not know of the area.
        let elsewhere = None;
        let (mut queue, view) =
            crate::queue::tests::device(&world.ram, &world.driver, 1, elsewhere, None);
        for _ in 0..count {
            while world.driver.pop_used().is_some() {}
            world.driver.add(&segment, 1).unwrap();
            world.driver.publish();
            let token = queue.pop(&view, &mut chain).unwrap().unwrap();
            queue.complete(token, 0);
            queue.publish();
        }

        let mut device = world.boot();

        assert_eq!(device.queue.inflight_given_up(), None, "{count}");
        assert!(device.queue.pop(&device.view, &mut chain).unwrap().is_none(), "{count}");
        assert_eq!(device.queue.base(), 1 + count, "{count}");
    }
}

/// One more than the queue has would be walked through the list of the last batch, round and round,
/// and the chains in flight would be forgotten.
#[test]
fn a_batch_that_is_larger_than_its_queue_is_of_another_ring() {
    const USED_IDX: usize = 14;
    for (batch, given_up) in [(8u16, None), (9, Some("its used index is not of this ring"))] {
        let mut world = World::new(Layout::Split, 8, 1);
        let mut device = world.boot();
        let mut chain = Chain::new();
        world.driver.add(&[Segment { addr: world.data, len: 1 }], 1).unwrap();
        world.driver.publish();
        let _lost = device.queue.pop(&device.view, &mut chain).unwrap().unwrap();
        drop(device);
        let memory = world.area.queue(1).unwrap().memory;
        memory.write_bytes(USED_IDX, &0u16.wrapping_sub(batch).to_le_bytes());

        let device = world.boot();

        assert_eq!(device.queue.inflight_given_up(), given_up, "{batch}");
    }
}

#[test]
fn any_bytes_in_an_area_end_in_an_error_or_in_a_queue_that_works() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut world = World::new(layout, 8, 3);
        drop(world.boot());
        let memory = world.area.queue(1).unwrap().memory;
        let mut valid = vec![0; memory.len()];
        memory.read_bytes(0, &mut valid);
        let mut works = 0;
        for _ in 0..20_000 {
            memory.write_bytes(0, &valid);
            for _ in 0..=world.choose(6) {
                // Version and size stay: without them nothing else is looked at.
                let at = 12 + usize::try_from(world.choose(memory.len() as u64 - 12)).unwrap();
                let byte = u8::try_from(world.choose(10)).unwrap();
                memory.write_bytes(at, &[byte]);
            }
            let (config, table) = (world.driver.config(), world.ram.table());
            let user = world.driver.user_addresses();
            let areas = crate::Areas::find(&table, layout, 8, config.event_idx, user).unwrap();
            let queue = Queue::new(crate::QueueConfig {
                layout,
                size: 8,
                areas,
                event_idx: true,
                indirect: true,
                base: PACKED_BASE & if layout == Layout::Split { 0 } else { u32::MAX },
                inflight: world.area.queue(1),
                log: None,
                log_addr: None,
            });
            let Ok(mut queue) = queue else { continue };
            works += 1;
            let (view, mut chain) = (View::new(table), Chain::new());
            while let Ok(Some(token)) = queue.pop(&view, &mut chain) {
                queue.complete(token, 0);
            }
            queue.publish();
        }
        // Else the loop could pass by doing nothing.
        assert!(works > 1000, "{works} queues");
    }
}
