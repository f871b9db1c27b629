//! What a guest and its front end can make us say is bounded. Alone in its program: it counts the
//! lines of all of the process.

mod common;

use std::io::{Result, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{MIB, serve, simulated};
use ringdisk_testkit::model::{FrontEnd, Refused, VmOptions, ask};

static LINES: AtomicUsize = AtomicUsize::new(0);

/// Counts lines.
struct Counter;

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        LINES.fetch_add(bytes.iter().filter(|byte| **byte == b'\n').count(), Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Lines that were written meanwhile.
fn lines(what: impl FnOnce()) -> usize {
    let before = LINES.load(Ordering::Relaxed);
    what();
    LINES.load(Ordering::Relaxed) - before
}

#[test]
fn nobody_fills_a_log() {
    let warnings = tracing::Level::WARN;
    tracing_subscriber::fmt().with_max_level(warnings).with_writer(|| Counter).init();
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});

    // As a guest makes QEMU do with a write to configuration space.
    let mut vm = served.vm(VmOptions::default());
    let refused = lines(|| {
        for _ in 0..2500 {
            assert_eq!(vm.front.set_config(0, &[0; 4]), Err(Refused::Number(1)));
        }
    });
    assert_eq!(refused, 12);

    // Bytes of a front end that are no message.
    drop(vm);
    let ends = lines(|| {
        for _ in 0..100 {
            let mut front: FrontEnd = served.front();
            assert!(front.send(ask::GET_FEATURES, 0, &[1], &[]));
            front.expect_end();
        }
    });
    assert_eq!(ends, 10);
}
