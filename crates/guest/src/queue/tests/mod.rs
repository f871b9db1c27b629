//! Both sides of a queue in one process: what a driver puts in comes out, and nothing else.

mod hostile;
mod order;
mod reads;
mod threads;

use std::sync::Arc;

use crate::driver::{Driver, DriverConfig, GuestRam};
use crate::inflight::InflightQueue;
use crate::{Chain, Layout, Log, Memory, PACKED_BASE, Queue, QueueConfig, View};

/// A driver and a device.
pub(crate) struct Kit {
    pub(crate) ram: GuestRam,
    pub(crate) driver: Driver,
    pub(crate) queue: Queue,
    pub(crate) view: View,
    pub(crate) chain: Chain,
    /// Memory for data.
    pub(crate) data: u64,
}

pub(crate) const DATA_BYTES: u64 = 1 << 20;

pub(crate) fn config(layout: Layout, size: u16) -> DriverConfig {
    DriverConfig { layout, size, event_idx: true, indirect: 32 }
}

/// Where a queue of this layout begins.
pub(crate) fn base(layout: Layout) -> u32 {
    if layout == Layout::Split { 0 } else { PACKED_BASE }
}

/// A device's queue for a driver's.
pub(crate) fn device(
    ram: &GuestRam,
    driver: &Driver,
    base: u32,
    inflight: Option<InflightQueue>,
    log: Option<Arc<Log>>,
) -> (Queue, View) {
    device_in(ram.table(), driver, base, inflight, log)
}

/// The same in memory that is mapped already.
fn device_in(
    memory: Arc<Memory>,
    driver: &Driver,
    base: u32,
    inflight: Option<InflightQueue>,
    log: Option<Arc<Log>>,
) -> (Queue, View) {
    let DriverConfig { layout, size, event_idx, indirect } = driver.config();
    let user = driver.user_addresses();
    let areas = crate::Areas::find(&memory, layout, size, event_idx, user).unwrap();
    let indirect = indirect > 0;
    let config = QueueConfig {
        layout,
        size,
        areas,
        event_idx,
        indirect,
        base,
        inflight,
        log,
        log_addr: None,
    };
    (Queue::new(config).unwrap(), View::new(memory))
}

impl Kit {
    pub(crate) fn new(config: DriverConfig) -> Kit {
        Kit::with_data(config, DATA_BYTES)
    }

    pub(crate) fn with_data(config: DriverConfig, bytes: u64) -> Kit {
        let mut ram = GuestRam::new(bytes + (4 << 20)).unwrap();
        let driver = Driver::new(&mut ram, config).unwrap();
        let data = ram.take(bytes, 4096).unwrap();
        let (queue, view) = device(&ram, &driver, base(config.layout), None, None);
        Kit { ram, driver, queue, view, chain: Chain::new(), data }
    }

    /// Driver and device on one mapping, for a sanitizer.
    pub(crate) fn on_one_mapping(config: DriverConfig) -> Kit {
        let mut ram = GuestRam::new(DATA_BYTES + (4 << 20)).unwrap();
        let memory = ram.shared_table();
        let driver = Driver::new(&mut ram, config).unwrap();
        let data = ram.take(DATA_BYTES, 4096).unwrap();
        let (queue, view) = device_in(memory, &driver, base(config.layout), None, None);
        Kit { ram, driver, queue, view, chain: Chain::new(), data }
    }
}
