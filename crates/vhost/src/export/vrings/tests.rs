//! Virtqueues that were held go on, whatever becomes of a change.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_export::{EndThread, Numa};
use ringdisk_guest::Layout;
use ringdisk_guest::Segment;
use ringdisk_guest::driver::{Driver, DriverConfig, GuestRam};
use ringdisk_guest::inflight::InflightArea;
use ringdisk_ring::{CpuList, Topology};
use ringdisk_testkit::process::{LIMIT, until};
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::blk::config::Config;
use crate::device::Device;
use crate::export::OnError;
use crate::export::ring_nodes::RingNodes;
use crate::session::Backend;
use crate::session::VringSetup;
use crate::signals::Signals;
use crate::worker::{ThreadSetup, WorkerThread};

fn config() -> Config {
    Config {
        seg_max: 126,
        logical_block: 512,
        physical_block: 512,
        min_transfer: 512,
        optimal_transfer: 0,
        discard_align: 512,
        discard_max: 1 << 20,
        zeroes_max: 1 << 20,
        queues: 2,
        may_unmap: false,
    }
}

/// A device of two threads and no front end.
fn control() -> Control {
    let null = NullOptions { size: Bytes(1 << 20), read_zeroes: true, latency: Duration::ZERO };
    let disk = Disk::null(&null);
    let signals = Arc::new(Signals::new(false).expect("an eventfd"));
    let device = Device::new(
        ("disk", Arc::default()),
        "",
        512,
        false,
        true,
        OnError::Report,
        Arc::clone(&signals),
    );
    let device = Arc::new(device);
    let thread = |index| {
        let setup = ThreadSetup {
            index,
            cpus: CpuList::default(),
            disk: Arc::clone(&disk),
            device: Arc::clone(&device),
            pins: None,
            restricted: false,
        };
        WorkerThread::start(setup).expect("a queue thread")
    };
    let threads = vec![thread(0), thread(1)];
    let views = Arc::new(Mutex::new(threads.iter().map(|it| it.thread.view.clone()).collect()));
    let placed = vec![CpuList::default(); 2];
    let ring_nodes = RingNodes::new(Topology::read(), CpuList::default(), Numa::Off, placed, views);
    let sizes = (false, 64);
    Control::new(Arc::clone(&disk), device, config(), threads, ring_nodes, None, signals, sizes)
}

/// Sends a flush and waits for its answer.
fn works(driver: &mut Driver, ram: &GuestRam, at: u64, kick: &OwnedFd) -> bool {
    let mut header = [0; 16];
    header[0] = 4;
    ram.write(at, &header);
    let segments = [Segment { addr: at, len: 16 }, Segment { addr: at + 64, len: 1 }];
    driver.add(&segments, 1).expect("room");
    driver.publish();
    rustix::io::write(kick, &1_u64.to_ne_bytes()).expect("room");
    until(Duration::from_secs(3), || driver.pop_used()).is_some()
}

#[test]
fn virtqueues_go_on_when_a_thread_is_gone_in_the_middle_of_a_change_of_memory() {
    let mut control = control();
    let mut ram = GuestRam::new(1 << 20).expect("memory");
    let driver = DriverConfig { layout: Layout::Split, size: 16, event_idx: false, indirect: 0 };
    let mut driver = Driver::new(&mut ram, driver).expect("room");
    let at = ram.take(4096, 64).expect("room");
    let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    control.change_memory(Memory::clone(&ram.table())).expect("memory");
    let [descriptor, available, used] = driver.user_addresses();
    let setup = VringSetup {
        size: 16,
        packed: false,
        descriptor,
        available,
        used,
        base: 0,
        log: None,
        kick: kick.try_clone().expect("a descriptor"),
    };
    control.start_vring(0, setup).expect("it starts");
    assert!(works(&mut driver, &ram, at, &kick));
    // The other thread ends, as by a defect.
    control.device.thread_panicked();
    control.threads[1].ask_to_stop();
    assert!(control.threads[1].join(Instant::now() + LIMIT));

    let changed = control.change_memory(Memory::clone(&ram.table()));

    assert!(changed.is_err());
    assert!(works(&mut driver, &ram, at, &kick), "the virtqueue is held for ever");
    control.stop_vring(0).expect("it stops");
    control.threads[0].ask_to_stop();
    assert!(control.threads[0].join(Instant::now() + LIMIT));
}

#[test]
fn a_virtqueue_outside_of_the_front_ends_area_notes_its_requests_in_ours() {
    let mut control = control();
    assert!(control.notes_in_own_area(0, 16), "there is none yet");
    let area = |queues, size| {
        let area = InflightArea::create(queues, size, Layout::Split).expect("memory");
        Some(Arc::new(area))
    };
    control.inflight = area(1, 64);
    assert!(!control.notes_in_own_area(0, 16));
    control.own_area = area(2, 256);
    assert!(!control.notes_in_own_area(0, 64));
    assert!(control.notes_in_own_area(0, 128) && control.notes_in_own_area(1, 16));
}
