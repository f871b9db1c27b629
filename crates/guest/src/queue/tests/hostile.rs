//! Drivers at their worst.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::collection::vec;
use proptest::prelude::*;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::driver::{DriverConfig, GUEST_BASE};
use crate::layout::descriptor::{INDIRECT, NEXT, WRITE};
use crate::layout::packed::AVAIL;
use crate::{Areas, Broken, Error, Layout, Memory, Region, Segment, View};

use super::{Kit, base, config, device_in};

const SIZE: u16 = 8;

/// A descriptor: address from the start of the data, length, flags, and the next one.
type Raw = (u64, u32, u16, u16);

fn bytes(kit: &Kit, (addr, len, flags, other): Raw, layout: Layout) -> [u8; 16] {
    let (third, fourth) = if layout == Layout::Split { (flags, other) } else { (other, flags) };
    let addr = kit.data.wrapping_add(addr);
    let all = u128::from(addr) | u128::from(len) << 64;
    (all | u128::from(third) << 96 | u128::from(fourth) << 112).to_le_bytes()
}

/// What comes of descriptors that are made available by hand, the first being the head.
fn pop(kit: &mut Kit, descriptors: &[Raw]) -> Result<bool, Broken> {
    let layout = kit.driver.config().layout;
    for (number, raw) in descriptors.iter().enumerate() {
        let lap = if layout == Layout::Packed { AVAIL } else { 0 };
        let raw = (raw.0, raw.1, raw.2 | lap, raw.3);
        let bytes = bytes(kit, raw, layout);
        kit.driver.areas().descriptors.write_bytes(number * 16, &bytes);
    }
    if layout == Layout::Split {
        make_available(kit, 0, 1);
    }
    kit.queue.pop(&kit.view, &mut kit.chain).map(|token| token.is_some())
}

fn make_available(kit: &Kit, head: u16, idx: u16) {
    let driver = &kit.driver.areas().driver;
    driver.store_u16(4 + 2 * usize::from(idx.wrapping_sub(1) % SIZE), head, Ordering::Relaxed);
    driver.store_u16(2, idx, Ordering::Release);
}

fn split() -> Kit {
    Kit::new(config(Layout::Split, SIZE))
}

fn packed() -> Kit {
    Kit::new(config(Layout::Packed, SIZE))
}

#[test]
fn chains_that_break_a_rule_break_the_queue_in_both_layouts() {
    let outside = |addr: u64, len| Broken::Address { addr: addr.wrapping_add(data()), len };
    // The end of memory.
    let far = split().ram.size() - (data() - GUEST_BASE);
    let cases: Vec<(Vec<Raw>, Broken)> = vec![
        (vec![(far, 1, 0, 0)], outside(far, 1)),
        (vec![(far - 1, 2, WRITE, 0)], outside(far - 1, 2)),
        (vec![(0, u32::MAX, WRITE, 0)], outside(0, u32::MAX)),
        (vec![(0_u64.wrapping_sub(data()), 16, 0, 0)], Broken::Address { addr: 0, len: 16 }),
        (
            vec![(u64::MAX.wrapping_sub(data()), 2, 0, 0)],
            Broken::Address { addr: u64::MAX, len: 2 },
        ),
        (vec![(0, 16, WRITE | NEXT, 1), (0, 16, 0, 0)], Broken::Order),
        (vec![(0, 16, INDIRECT | NEXT, 1), (0, 16, 0, 0)], Broken::IndirectNested),
        (vec![(0, 0, INDIRECT, 0)], Broken::IndirectLength { len: 0 }),
        (vec![(0, 15, INDIRECT, 0)], Broken::IndirectLength { len: 15 }),
        (vec![(0, 33, INDIRECT, 0)], Broken::IndirectLength { len: 33 }),
        (vec![(far - 16, 32, INDIRECT, 0)], outside(far - 16, 32)),
        (vec![(far, 16, INDIRECT, 0)], outside(far, 16)),
        (vec![(0, 0xffff_fff0, INDIRECT, 0)], outside(0, 0xffff_fff0)),
    ];
    for (descriptors, expected) in &cases {
        for mut kit in [split(), packed()] {
            assert_eq!(kit.data, data());
            assert_eq!(pop(&mut kit, descriptors), Err(*expected), "{descriptors:?}");
            assert_eq!(kit.queue.broken(), Some(*expected));
            assert!(!kit.queue.has_next() && !kit.queue.enable_kicks());
            assert!(kit.queue.pop(&kit.view, &mut kit.chain).is_err());
            assert!(!expected.to_string().is_empty());
        }
    }
}

/// Where the data of every kit of this size begins.
fn data() -> u64 {
    split().data
}

/// A memory of small regions that follow one another, behind that of a kit. Gives its first address
/// and the file.
fn small_regions(kit: &mut Kit, count: u64, bytes: u64) -> (u64, OwnedFd) {
    const AT: u64 = 1 << 40;
    let file = memfd_create(c"small", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, count * bytes).unwrap();
    let mut memory = Memory::clone(kit.view.memory());
    for at in (0..count).map(|number| number * bytes) {
        let region = Region::map(file.try_clone().unwrap(), AT + at, AT + at, bytes, at).unwrap();
        memory = memory.with(region).unwrap();
    }
    kit.view = View::new(Arc::new(memory));
    (AT - kit.data, file)
}

/// Each segment over all of them is as many pieces, which cost memory for each request in flight.
#[test]
fn chains_over_more_regions_than_buffers_of_a_driver_can_be_break_the_queue() {
    for mut kit in [split(), packed()] {
        let (at, _file) = small_regions(&mut kit, 300, 16);
        let chain = |count: u16| -> Vec<Raw> {
            let next = |number| if number < count { NEXT } else { 0 };
            (1..=count).map(|number| (at, 4800, next(number), number)).collect()
        };
        // 5 * 300 are no more than 1026 segments and 509 ends of regions.
        assert_eq!(pop(&mut kit, &chain(5)), Ok(true));
        assert_eq!(kit.chain.readable_len(), 5 * 4800);
    }
    for mut kit in [split(), packed()] {
        let (at, _file) = small_regions(&mut kit, 300, 16);
        let chain: Vec<Raw> = (1..=6).map(|next| (at, 4800, NEXT, next)).collect();
        assert_eq!(pop(&mut kit, &chain), Err(Broken::Pieces { limit: 1535 }));
    }
}

#[test]
fn a_queue_that_begins_on_memory_that_was_lost_before_is_broken() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::new(config(layout, SIZE));
        let (at, file) = small_regions(&mut kit, 1, 4096);
        ftruncate(&file, 0).unwrap();
        assert!(kit.view.read(kit.data + at, &mut [0; 16]), "zeroes are in its place");
        assert_eq!(kit.queue.check(&kit.view), Err(Broken::MemoryLost));
        // The device is reset.
        let memory = Arc::clone(kit.view.memory());
        let (mut queue, view) = device_in(memory, &kit.driver, base(layout), None, None);
        assert_eq!(queue.check(&view), Err(Broken::MemoryLost));
    }
}

#[test]
fn split_chains_that_run_in_circles_or_out_of_the_table_end() {
    let ring: Vec<Raw> = (0..SIZE).map(|n| (0, 1, NEXT, (n + 1) % SIZE)).collect();
    let size = u32::from(SIZE);
    let cases: Vec<(Vec<Raw>, Broken)> = vec![
        (vec![(0, 1, NEXT, 0)], Broken::Loop { descriptors: size }),
        (vec![(0, 0, NEXT, 0)], Broken::Loop { descriptors: size }),
        (ring, Broken::Loop { descriptors: size }),
        (vec![(0, 1, NEXT, SIZE)], Broken::OutOfTable { index: SIZE, size }),
        (vec![(0, 1, NEXT, u16::MAX)], Broken::OutOfTable { index: u16::MAX, size }),
    ];
    for (descriptors, expected) in &cases {
        let mut kit = split();
        assert_eq!(pop(&mut kit, descriptors), Err(*expected));
    }
}

#[test]
fn avail_rings_that_lie_break_the_queue() {
    let jump = |to| {
        let mut kit = split();
        make_available(&kit, 0, to);
        kit.queue.pop(&kit.view, &mut kit.chain).map(|token| token.is_some())
    };
    assert_eq!(jump(SIZE + 1), Err(Broken::AvailJump { from: 0, to: SIZE + 1 }));
    assert_eq!(jump(u16::MAX), Err(Broken::AvailJump { from: 0, to: u16::MAX }));
    let mut kit = split();
    make_available(&kit, SIZE, 1);
    let error = kit.queue.pop(&kit.view, &mut kit.chain).unwrap_err();
    assert_eq!(error, Broken::OutOfTable { index: SIZE, size: u32::from(SIZE) });
}

#[test]
fn a_chain_that_is_in_flight_is_not_taken_twice() {
    let mut kit = split();
    assert_eq!(pop(&mut kit, &[(0, 16, 0, 0)]), Ok(true));
    make_available(&kit, 0, 2);

    let error = kit.queue.pop(&kit.view, &mut kit.chain).unwrap_err();

    assert_eq!(error, Broken::InFlight { head: 0 });
}

#[test]
fn packed_rings_give_no_more_than_they_have() {
    let mut kit = packed();
    let endless: Vec<Raw> = (0..SIZE).map(|n| (0, 1, NEXT, n)).collect();
    let size = u32::from(SIZE);
    assert_eq!(pop(&mut kit, &endless), Err(Broken::Loop { descriptors: size }));

    let mut kit = packed();
    let single: Vec<Raw> = (0..SIZE).map(|n| (0, 1, 0, n)).collect();
    assert_eq!(pop(&mut kit, &single), Ok(true));
    let mut tokens = Vec::new();
    while let Some(token) = kit.queue.pop(&kit.view, &mut kit.chain).unwrap() {
        tokens.push(token);
    }
    assert_eq!(tokens.len(), usize::from(SIZE) - 1);
    // The next lap, while all of the last one is in flight.
    kit.driver.areas().descriptors.store_u16(14, 1 << 15, Ordering::Release);
    assert_eq!(kit.queue.pop(&kit.view, &mut kit.chain).unwrap_err(), Broken::RingFull);
}

#[test]
fn a_chain_of_four_gigabytes_is_refused() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::with_data(config(layout, SIZE), 3 << 30);
        let two = [(0, 1 << 31, NEXT, 1), (0, (1 << 31) - 1, 0, 0)];
        assert_eq!(pop(&mut kit, &two), Ok(true));
        assert_eq!(kit.chain.readable_len(), u64::from(u32::MAX));
        let mut kit = Kit::with_data(config(layout, SIZE), 3 << 30);
        let two = [(0, 1 << 31, NEXT, 1), (0, 1 << 31, 0, 0)];
        assert_eq!(pop(&mut kit, &two), Err(Broken::TooLong));
    }
}

#[test]
fn indirect_tables_that_break_a_rule_break_the_queue() {
    let table = |mut kit: Kit, entries: &[Raw]| {
        let layout = kit.driver.config().layout;
        for (number, raw) in entries.iter().enumerate() {
            let bytes = bytes(&kit, *raw, layout);
            kit.ram.write(kit.data + number as u64 * 16, &bytes);
        }
        let len = u32::try_from(entries.len() * 16).unwrap();
        pop(&mut kit, &[(0, len, INDIRECT, 0)])
    };
    let nested = [(0, 16, INDIRECT, 0)];
    assert_eq!(table(split(), &nested), Err(Broken::IndirectNested));
    assert_eq!(table(packed(), &nested), Err(Broken::IndirectNested));
    let order = [(0, 16, WRITE | NEXT, 1), (0, 16, 0, 0)];
    assert_eq!(table(split(), &order), Err(Broken::Order));
    assert_eq!(table(packed(), &order), Err(Broken::Order));
    let circle = [(0, 16, NEXT, 1), (0, 16, NEXT, 0)];
    assert_eq!(table(split(), &circle), Err(Broken::Loop { descriptors: 2 }));
    let out = [(0, 16, NEXT, 2), (0, 16, NEXT, 0)];
    assert_eq!(table(split(), &out), Err(Broken::OutOfTable { index: 2, size: 2 }));
    let many = vec![(0, 0, 0, 0); 1027];
    assert_eq!(table(packed(), &many), Err(Broken::Loop { descriptors: 1026 }));
    let many: Vec<Raw> = (0..2000).map(|n| (0, 1, NEXT, n + 1)).collect();
    assert_eq!(table(split(), &many), Err(Broken::Loop { descriptors: 1026 }));
    let plain = || DriverConfig { indirect: 0, ..config(Layout::Split, SIZE) };
    assert_eq!(table(Kit::new(plain()), &[(0, 1, 0, 0)]), Err(Broken::IndirectRefused));
}

#[test]
fn queues_that_cannot_be_are_refused() {
    let kit = split();
    let memory = kit.view.memory();
    let user = kit.driver.user_addresses();
    let find = |layout, size, user| Areas::find(memory, layout, size, true, user).unwrap_err();
    for size in [0, 3, 12, 2048, 65535] {
        let expected = Error::BadQueueSize { size: u32::from(size) };
        assert_eq!(find(Layout::Split, size, user), expected);
    }
    assert!(matches!(find(Layout::Packed, 0, user), Error::BadQueueSize { .. }));
    for (part, shift) in [(0, 8), (1, 1), (2, 2)] {
        let mut user = user;
        user[part] += shift;
        assert!(matches!(find(Layout::Split, SIZE, user), Error::BadArea { .. }));
        user[part] = GUEST_BASE;
        assert!(matches!(find(Layout::Split, SIZE, user), Error::NotInMemory { .. }));
        user[part] = u64::MAX - 15;
        assert!(matches!(find(Layout::Split, SIZE, user), Error::NotInMemory { .. }));
    }
}

#[test]
fn memory_that_goes_under_a_queue_breaks_it() {
    for mut kit in [split(), packed()] {
        kit.driver.add(&[Segment { addr: kit.data, len: 16 }], 1).unwrap();
        kit.driver.publish();
        let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();
        assert_eq!(kit.queue.check(&kit.view), Ok(()));
        rustix::fs::ftruncate(kit.ram.fd(), 0).unwrap();

        kit.queue.complete(token, 0);
        kit.queue.publish();
        let mut byte = [1];
        assert!(kit.chain.read(&kit.view, 0, &mut byte));

        assert_eq!(kit.queue.check(&kit.view), Err(Broken::MemoryLost));
        assert!(kit.queue.pop(&kit.view, &mut kit.chain).is_err());
    }
}

#[test]
fn what_is_in_flight_still_completes_after_the_queue_broke() {
    for mut kit in [split(), packed()] {
        kit.driver.add(&[Segment { addr: kit.data, len: 16 }], 1).unwrap();
        kit.driver.add(&[Segment { addr: 0, len: 16 }], 1).unwrap();
        kit.driver.publish();
        let token = kit.queue.pop(&kit.view, &mut kit.chain).unwrap().unwrap();
        assert!(kit.queue.pop(&kit.view, &mut kit.chain).is_err());

        kit.queue.complete(token, 0);
        assert!(kit.queue.publish());

        assert!(kit.driver.pop_used().is_some() && kit.driver.pop_used().is_none());
    }
}

/// All segments of a chain, looked at again, are in memory.
fn is_inside(view: &View, chain: &crate::Chain) -> bool {
    chain.readable().iter().chain(chain.writable()).all(|s| view.contains(s.addr, s.len as usize))
}

#[test]
fn descriptors_that_change_while_they_are_read_are_checked_as_they_were_used() {
    let mut taken = [0, 0];
    for round in 0..200 {
        let layout = [Layout::Split, Layout::Packed][round % 2];
        let mut kit = Kit::new(config(layout, SIZE));
        let (end, data) = (AtomicBool::new(false), kit.data);
        let ring = kit.driver.areas().descriptors.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in (0_u64..).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
                    let at = usize::try_from(turn >> 61).unwrap() * 16;
                    let outside = if turn & (63 << 40) == 0 { 1 << 40 } else { 0 };
                    ring.store_u64(at, data + outside, Ordering::Relaxed);
                    ring.store_u32(at + 8, 1 << (turn >> 50 & 15), Ordering::Relaxed);
                    if end.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            let segments = [Segment { addr: data, len: 16 }; 4];
            for _ in 0..2000 {
                kit.driver.add(&segments, 4).unwrap();
                kit.driver.publish();
                // Packed lengths and ids that were torn apart are the driver's loss too.
                let Ok(Some(token)) = kit.queue.pop(&kit.view, &mut kit.chain) else { break };
                assert!(is_inside(&kit.view, &kit.chain));
                taken[round % 2] += 1;
                kit.queue.complete(token, 0);
                kit.queue.publish();
                kit.driver.pop_used().unwrap();
            }
            end.store(true, Ordering::Relaxed);
        });
    }
    assert!(taken.iter().all(|chains| *chains > 100), "{taken:?}");
}

proptest! {
    #[test]
    fn any_bytes_as_rings_and_tables_break_at_most_their_queue(
        ring in vec(any::<u8>(), 16 * usize::from(SIZE)),
        table in vec(any::<u8>(), 512),
        avail in vec(0..2 * SIZE, usize::from(SIZE) + 2),
        near in any::<u8>(),
        layout in prop_oneof![Just(Layout::Split), Just(Layout::Packed)],
    ) {
        let mut kit = Kit::new(config(layout, SIZE));
        let areas = kit.driver.areas().clone();
        areas.descriptors.write_bytes(0, &ring);
        kit.ram.write(kit.data, &table);
        for (number, byte) in ring.iter().take(usize::from(SIZE)).enumerate() {
            // Most addresses and lengths would be far outside, most flags nonsense.
            if near & (1 << number) != 0 {
                areas.descriptors.store_u64(number * 16, kit.data, Ordering::Relaxed);
                let len = u32::from(*byte) & 0xf0;
                areas.descriptors.store_u32(number * 16 + 8, len, Ordering::Relaxed);
                let at = number * 16 + if layout == Layout::Split { 12 } else { 14 };
                let flags = areas.descriptors.load_u16(at, Ordering::Relaxed) & 7;
                let lap = if layout == Layout::Packed { AVAIL } else { 0 };
                areas.descriptors.store_u16(at, flags | lap, Ordering::Relaxed);
            }
        }
        if layout == Layout::Split {
            for (number, entry) in avail.iter().enumerate() {
                let at = 2 * number + 2;
                if at + 2 <= areas.driver.len() {
                    areas.driver.store_u16(at, *entry, Ordering::Relaxed);
                }
            }
        }
        let mut tokens = Vec::new();
        while let Ok(Some(token)) = kit.queue.pop(&kit.view, &mut kit.chain) {
            prop_assert!(is_inside(&kit.view, &kit.chain));
            tokens.push(token);
            prop_assert!(tokens.len() <= usize::from(SIZE));
        }
        for token in tokens {
            kit.queue.complete(token, 7);
        }
        kit.queue.publish();
    }
}
