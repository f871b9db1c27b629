//! A driver that does what no driver may: descriptors by hand.

use std::sync::atomic::Ordering;

use ringdisk_guest::{Areas, Layout};
use ringdisk_testkit::model::Vm;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;
/// In a packed ring: made available in the first lap.
const AVAIL: u16 = 1 << 7;

/// A descriptor: address, length, flags, and the next one where there is a choice.
pub(crate) type Descriptor = (u64, u32, u16, u16);

/// Writes descriptors from the first place of a table or ring on; in a packed one the first one's
/// flags last.
fn lay(areas: &Areas, layout: Layout, descriptors: &[Descriptor]) {
    for (number, (addr, len, flags, next)) in descriptors.iter().enumerate().rev() {
        let (ring, at) = (&areas.descriptors, number * 16);
        let (third, fourth) = match layout {
            Layout::Split => (*flags, *next),
            // Its id is 0.
            Layout::Packed => (0, *flags | AVAIL),
        };
        ring.store_u64(at, *addr, Ordering::Relaxed);
        ring.store_u32(at + 8, *len, Ordering::Relaxed);
        ring.store_u16(at + 12, third, Ordering::Relaxed);
        ring.store_u16(at + 14, fourth, Ordering::Release);
    }
}

/// Bytes of an entry of a table of descriptors.
pub(crate) fn entry(layout: Layout, (addr, len, flags, next): Descriptor) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    let (third, fourth) = match layout {
        Layout::Split => (flags, next),
        Layout::Packed => (0, flags),
    };
    bytes[12..14].copy_from_slice(&third.to_le_bytes());
    bytes[14..].copy_from_slice(&fourth.to_le_bytes());
    bytes
}

/// Makes the first chain of a new virtqueue of these descriptors, and kicks.
pub(crate) fn send(vm: &mut Vm, queue: usize, descriptors: &[Descriptor]) {
    let layout = vm.queues[queue].driver.config().layout;
    lay(vm.queues[queue].driver.areas(), layout, descriptors);
    if layout == Layout::Split {
        avail(vm, queue, &[0], 1);
    }
    vm.queues[queue].kick_anyway();
}

/// Writes the avail ring of a split virtqueue from its beginning, and its index; kicks.
pub(crate) fn avail(vm: &mut Vm, queue: usize, heads: &[u16], index: u16) {
    let ring = &vm.queues[queue].driver.areas().driver;
    for (number, head) in heads.iter().enumerate() {
        ring.store_u16(4 + 2 * number, *head, Ordering::Relaxed);
    }
    ring.store_u16(2, index, Ordering::Release);
    vm.queues[queue].kick_anyway();
}
