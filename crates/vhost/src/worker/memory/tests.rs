//! On a machine with one node nothing has to move; `tests/vm/run fuse machine::numa` looks at one
//! with two.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_ring::{CpuList, Topology, pages_by_node, pin_to_cpus};

use crate::device::Device;
use crate::device::OnError;
use crate::signals::Signals;
use crate::worker::{ThreadSetup, WorkerThread};

fn thread(cpus: CpuList) -> WorkerThread {
    let null = NullOptions { size: Bytes(1 << 20), read_zeroes: true, latency: Duration::ZERO };
    let signals = Arc::new(Signals::new(false).expect("an eventfd"));
    let device =
        Device::new(("disk", Arc::default()), "", 512, false, true, OnError::Report, signals);
    let setup = ThreadSetup {
        index: 0,
        cpus,
        disk: Disk::null(&null),
        device: Arc::new(device),
        pins: None,
        restricted: false,
    };
    WorkerThread::start(setup).expect("a queue thread")
}

#[test]
fn all_that_a_thread_uses_for_requests_goes_where_the_thread_goes() {
    let nodes: Vec<_> =
        Topology::read().nodes.into_iter().filter(|node| node.is_memory_usable).collect();
    let first = nodes.first().expect("memory somewhere");
    let thread = thread(first.cpus.clone());
    for node in nodes.iter().rev() {
        let (id, cpus) = (node.id, node.cpus.clone());
        let moved = thread.ask(move |worker| {
            pin_to_cpus(&cpus)?;
            worker.add_slots();
            Ok((worker.move_to(id)?, worker.own_memory()))
        });
        let moved: Result<_, ringdisk_ring::Errno> = moved.wait(|| true).expect("it answers");
        let Ok((found, ranges)) = moved else {
            let refused = moved.map(drop).expect_err("as seen");
            let is_refused =
                matches!(refused, ringdisk_ring::Errno::PERM | ringdisk_ring::Errno::NOSYS);
            assert!(
                ringdisk_testkit::limits::needs("leave to move memory", !is_refused),
                "{refused}"
            );
            return;
        };
        // A stack, a ring and 32 slots of some KiB.
        assert!(found.touched() >= 32, "{found:?}");
        assert_eq!(found.by_node.keys().collect::<Vec<_>>(), [&id], "{found:?}");
        let again = pages_by_node(&ranges).expect("asked before");
        assert_eq!(again.by_node.keys().collect::<Vec<_>>(), [&id], "{again:?}");
        // It still works.
        assert_eq!(
            thread.ask(|worker| worker.own_memory().len()).wait(|| true).ok(),
            Some(ranges.len())
        );
    }
}
