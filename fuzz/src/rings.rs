//! What the ring targets share: a device's queue in memory that the input writes to, between steps
//! that it chooses.

use std::sync::atomic::Ordering;

use ringdisk_guest::driver::{Driver, DriverConfig, GuestRam};
use ringdisk_guest::inflight::InflightArea;
use ringdisk_guest::{Areas, Chain, Layout, PACKED_BASE, Queue, QueueConfig, Token, View};

const SIZE: u16 = 8;
const RAM_BYTES: u64 = 64 << 10;

struct Device {
    ram: GuestRam,
    driver: Driver,
    area: InflightArea,
    /// A page that indirect tables and data lie in.
    data: u64,
}

impl Device {
    fn new(layout: Layout) -> Device {
        let mut ram = GuestRam::new(RAM_BYTES).expect("memory");
        let config = DriverConfig { layout, size: SIZE, event_idx: true, indirect: 0 };
        let driver = Driver::new(&mut ram, config).expect("it fits");
        let data = ram.take(4096, 4096).expect("it fits");
        let area = InflightArea::create(1, SIZE, layout).expect("memory");
        Device { ram, driver, area, data }
    }

    /// None when the area was damaged.
    fn boot(&self, base: u16) -> Option<(Queue, View)> {
        let DriverConfig { layout, size, event_idx, .. } = self.driver.config();
        let memory = self.ram.table();
        let user = self.driver.user_addresses();
        let areas = Areas::find(&memory, layout, size, event_idx, user).expect("they are there");
        let base = if layout == Layout::Split { u32::from(base) } else { PACKED_BASE };
        let config = QueueConfig {
            layout,
            size,
            areas,
            event_idx,
            indirect: true,
            base,
            inflight: self.area.queue(0),
            log: None,
            log_addr: None,
        };
        Some((Queue::new(config).ok()?, View::new(memory)))
    }

    /// A descriptor that is mostly legal, in the ring or in a table.
    fn write(&self, number: u8, word: u32, in_ring: bool) {
        let layout = self.driver.config().layout;
        let [kind, at, len, other] = word.to_le_bytes();
        let far = if kind & 0x30 == 0x30 { 1_u64 << (at % 64) } else { 0 };
        let addr = self.data.wrapping_add(u64::from(at) * 16).wrapping_add(far);
        let len = if kind & 0xc0 == 0xc0 { u32::MAX >> (len % 32) } else { u32::from(len) * 16 };
        let mut flags = u16::from(kind & 7);
        if layout == Layout::Packed {
            flags |= u16::from(kind >> 3 & 1) << 7 | u16::from(other >> 7) << 15;
        }
        let other = u16::from(other);
        let (third, fourth) = if layout == Layout::Split { (flags, other) } else { (other, flags) };
        let all = u128::from(addr)
            | u128::from(len) << 64
            | u128::from(third) << 96
            | u128::from(fourth) << 112;
        let number = usize::from(number);
        match in_ring {
            true => {
                let at = number % usize::from(SIZE) * 16;
                self.driver.areas().descriptors.write_bytes(at, &all.to_le_bytes());
            }
            false => self.ram.write(self.data + number as u64 % 128 * 16, &all.to_le_bytes()),
        }
    }
}

/// Runs one input: commands of six bytes.
pub fn drive(layout: Layout, bytes: &[u8]) {
    let device = Device::new(layout);
    let Some((mut queue, mut view)) = device.boot(0) else { return };
    let (mut chain, mut tokens) = (Chain::new(), Vec::<Token>::new());
    for command in bytes.chunks_exact(6).take(400) {
        let (what, number) = (command[0], command[1]);
        let word = u32::from_le_bytes(command[2..6].try_into().expect("four bytes"));
        let [low, high, ..] = word.to_le_bytes();
        let half = u16::from_le_bytes([low, high]);
        match what % 10 {
            0 | 1 => device.write(number, word, true),
            2 => device.write(number, word, false),
            3 => {
                let driver = &device.driver.areas().driver;
                let at = usize::from(number) % (driver.len() / 2) * 2;
                let value = if what & 0x80 == 0 { half % (2 * SIZE) } else { half };
                driver.store_u16(at, value, Ordering::Release);
            }
            4 | 5 => {
                if let Ok(Some(token)) = queue.pop(&view, &mut chain) {
                    tokens.push(token);
                    let all = chain.readable().iter().chain(chain.writable());
                    let total: u64 = all.clone().map(|s| u64::from(s.len)).sum();
                    assert_eq!(total, chain.readable_len() + chain.writable_len());
                    assert!(all.into_iter().all(|s| view.contains(s.addr, s.len as usize)));
                }
                assert!(tokens.len() <= usize::from(SIZE));
                assert_eq!(tokens.len(), usize::from(queue.in_flight()));
            }
            6 => {
                if !tokens.is_empty() {
                    let token = tokens.swap_remove(usize::from(number) % tokens.len());
                    queue.complete(token, word);
                }
            }
            7 => {
                queue.publish();
                queue.enable_kicks();
            }
            8 => {
                // Killed, and another one goes on.
                tokens.clear();
                let Some(next) = device.boot(half) else { return };
                (queue, view) = next;
            }
            _ => {
                let device = &device.driver.areas().device;
                let at = usize::from(number) % (device.len() / 2) * 2;
                device.store_u16(at, half, Ordering::Release);
            }
        }
    }
    for token in tokens {
        queue.complete(token, 0);
    }
    let _ = queue.stop();
}
