//! Each byte that is judged is read once: what a driver writes over it meanwhile is never looked
//! at.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::driver::{DriverConfig, GuestRam};
use crate::memory::reads::Reads;
use crate::{Areas, Layout, Segment, Token};

use super::{Kit, base, config, device};
use crate::inflight::InflightArea;

const SIZE: u16 = 8;

fn watch() -> Reads {
    Reads::of_threads(std::thread::current().name().expect("a test"))
}

/// How often each byte of a range was read; of all that were.
fn reads(counts: &BTreeMap<u64, u32>, range: Range<u64>) -> Vec<u32> {
    range.map(|at| counts.get(&at).copied().unwrap_or(0)).collect()
}

fn bytes(start: u64, len: u64) -> Range<u64> {
    start..start + len
}

/// Takes a chain as a device does that was kicked, and the 16 bytes of its header.
fn take(kit: &mut Kit) -> Token {
    let token = kit.queue.pop(&kit.view, &mut kit.chain).expect("a good chain").expect("a chain");
    let mut header = [0; 16];
    assert!(kit.chain.read(&kit.view, 0, &mut header));
    token
}

/// Header in two pieces, data in two, a status.
fn segments(data: u64) -> [Segment; 5] {
    let segment = |at, len| Segment { addr: data + at, len };
    [segment(3, 5), segment(100, 11), segment(512, 512), segment(2048, 77), segment(4000, 1)]
}

fn add(kit: &mut Kit, indirect: bool) {
    let segments = segments(kit.data);
    let added = match indirect {
        true => kit.driver.add_indirect(&segments, 3),
        false => kit.driver.add(&segments, 3),
    };
    assert_eq!(added, Some(0));
    kit.driver.publish();
}

/// All that was read while one chain was taken from a queue that begins.
fn expected(areas: &Areas, layout: Layout, indirect: Option<u64>, data: u64) -> Vec<Range<u64>> {
    let mut ranges = vec![bytes(data + 3, 5), bytes(data + 100, 11)];
    let in_ring = if indirect.is_some() { 1 } else { 5 };
    ranges.push(bytes(areas.descriptors.guest_addr(), in_ring * 16));
    ranges.extend(indirect.map(|table| bytes(table, 5 * 16)));
    if layout == Layout::Split {
        // The index, and the first entry.
        ranges.push(bytes(areas.driver.guest_addr() + 2, 4));
    }
    ranges
}

fn all(ranges: &[Range<u64>]) -> BTreeMap<u64, u32> {
    ranges.iter().cloned().flatten().map(|at| (at, 1)).collect()
}

#[test]
fn every_byte_of_descriptors_tables_and_headers_is_read_once() {
    for layout in [Layout::Split, Layout::Packed] {
        for indirect in [false, true] {
            let mut kit = Kit::new(config(layout, SIZE));
            add(&mut kit, indirect);
            let table = indirect.then(|| {
                let mut addr = [0; 8];
                kit.ram.read(kit.driver.areas().descriptors.guest_addr(), &mut addr);
                u64::from_le_bytes(addr)
            });
            let areas = kit.driver.areas().clone();
            let watch = watch();
            let token = take(&mut kit);
            let found = watch.take();
            let expected = all(&expected(&areas, layout, table, kit.data));
            assert_eq!(found, expected, "{layout:?}, indirect: {indirect}");

            // To give it back takes a look at what the driver wishes to be told, and no other.
            kit.queue.complete(token, 1);
            kit.queue.publish();
            let found = watch.take();
            let wish = match layout {
                Layout::Split => bytes(areas.driver.guest_addr() + 4 + 2 * u64::from(SIZE), 2),
                Layout::Packed => bytes(areas.driver.guest_addr(), 4),
            };
            assert_eq!(found, all(&[wish]), "{layout:?}, indirect: {indirect}");
        }
    }
}

/// Asking whether there is a chain judges nothing that taking it does not look at by itself: of a
/// packed ring the flags, twice then.
#[test]
fn a_look_before_a_chain_is_taken_reads_at_most_the_flags_again() {
    for (layout, most) in [(Layout::Split, 1), (Layout::Packed, 2)] {
        let mut kit = Kit::new(config(layout, SIZE));
        add(&mut kit, false);
        let watch = watch();
        assert!(kit.queue.has_next());
        let _token = take(&mut kit);
        let found = watch.take();
        let flags = bytes(kit.driver.areas().descriptors.guest_addr() + 14, 2);
        let twice: Vec<u64> = found.iter().filter(|(_, n)| **n > 1).map(|(at, _)| *at).collect();
        let allowed: Vec<u64> = if most == 2 { flags.collect() } else { Vec::new() };
        assert_eq!(twice, allowed);
        assert_eq!(found.values().max(), Some(&most));
    }
}

/// Where a table does not lie in one region, each of its descriptors is put together from parts.
#[test]
fn a_table_across_two_regions_is_read_once_too() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut kit = Kit::new(config(layout, SIZE));
        add(&mut kit, true);
        let ring = kit.driver.areas().descriptors.guest_addr();
        let mut addr = [0; 8];
        kit.ram.read(ring, &mut addr);
        let table = u64::from_le_bytes(addr);
        // The second descriptor of the table is cut in two.
        let border = table + 24 - crate::driver::GUEST_BASE;
        kit.view = cut(&kit.ram, border);
        let watch = watch();
        let _token = take(&mut kit);
        let found = watch.take();
        assert_eq!(reads(&found, bytes(table, 5 * 16)), vec![1; 80], "{layout:?}");
        assert_eq!(found.values().max(), Some(&1), "{layout:?}");
    }
}

/// Memory in two regions with a border `at` bytes in.
fn cut(ram: &GuestRam, at: u64) -> crate::View {
    use crate::driver::{GUEST_BASE, USER_BASE};
    let fd = || ram.fd().try_clone_to_owned().expect("a descriptor");
    let rest = ram.size() - at;
    let first = crate::Region::map(fd(), GUEST_BASE, USER_BASE, at, 0).expect("a region");
    let second = crate::Region::map(fd(), GUEST_BASE + at, USER_BASE + at, rest, at);
    let regions = vec![first, second.expect("a region")];
    crate::View::new(std::sync::Arc::new(crate::Memory::new(regions).expect("two regions")))
}

/// What a process before us had taken: from its area, which the front end can change, each entry is
/// copied once when the chain is taken again.
#[test]
fn what_is_taken_again_is_read_once() {
    for layout in [Layout::Split, Layout::Packed] {
        let area = InflightArea::create(1, SIZE, layout).expect("an area");
        let mut kit = Kit::new(DriverConfig { indirect: 0, ..config(layout, SIZE) });
        let part = || area.queue(0);
        (kit.queue, kit.view) = device(&kit.ram, &kit.driver, base(layout), part(), None);
        add(&mut kit, false);
        let _lost = take(&mut kit);

        (kit.queue, kit.view) = device(&kit.ram, &kit.driver, base(layout), part(), None);
        let watch = watch();
        assert!(kit.queue.has_replays());
        let _token = take(&mut kit);
        let found = watch.take();
        assert_eq!(found.values().max(), Some(&1), "{layout:?}: {found:?}");
        // Of a packed ring the copies in the area count, whose descriptors may be written over by
        // now.
        let ring = bytes(kit.driver.areas().descriptors.guest_addr(), 5 * 16);
        let from_ring = u32::from(layout == Layout::Split);
        assert_eq!(reads(&found, ring), vec![from_ring; 80], "{layout:?}");
    }
}
