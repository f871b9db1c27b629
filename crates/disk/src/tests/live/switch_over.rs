//! The last step of a mirror.

use std::cell::Cell;
use std::fs;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use super::mirroring::{
    BACKGROUND, Running, complete_with_a_flush, simulated, simulated_image, source, target, until,
};
use super::{SIZE, SOME, opened};
use crate::tests::load::Load;
use crate::tests::{assert_same, buffer, directory, qemu_img, read_steps, run};
use crate::{Errno, MirrorEnd, OnError, Progress};

/// Clients wait for a flush of the target only where one of them has flushed the disk.
#[test]
fn a_switch_over_flushes_for_clients_that_have_flushed() {
    for flushes in [false, true] {
        let directory = directory();
        let (top, mut bytes) = source(&directory, false);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, sim) = simulated(SIZE);
            let mirror = Running::start(&ring, &disk, target, BACKGROUND);
            assert!(mirror.control.ready().await);
            sim.on(When::kind(OpKind::Flush).once(), Fault::Hold);
            mirror.control.complete(true).expect("complete");
            until(&ring, || !sim.held().is_empty()).await;
            // Sent before it is answered, and not in the flush that is under way.
            assert_eq!(disk.write(&ring, 5 << 20, &buffer(&[8; 4096])).await, Ok(4096));
            bytes[5 << 20..(5 << 20) + 4096].fill(8);
            if flushes {
                assert_eq!(disk.flush(&ring).await, Ok(()));
            }
            let before = sim.count(OpKind::Flush);
            sim.release_all();
            assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
            assert_eq!(sim.count(OpKind::Flush) - before, usize::from(flushes));
            // From now on a flush is one of the target, with what came before.
            assert_eq!(disk.flush(&ring).await, Ok(()));
            assert_same(&sim.durable_image(), &bytes);
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}

/// The target dies in the last step: clients go on with the disk as it was.
#[test]
fn a_target_that_fails_in_the_last_step_leaves_the_disk() {
    for fault in [Fault::Fail(Errno::IO), Fault::Hold] {
        let directory = directory();
        let (top, bytes) = source(&directory, false);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, sim) = simulated(SIZE);
            let load = Load::start(&disk, &bytes, 62);
            let progress = Arc::new(Progress::new());
            progress.set_on_error(OnError::Stop);
            let mirror = Running::with(&ring, &disk, target, BACKGROUND, Arc::clone(&progress));
            assert!(mirror.control.ready().await);
            // The first flush is made while clients work, the second one is the last step's.
            sim.on(When::kind(OpKind::Flush).skip(1).once(), fault);
            complete_with_a_flush(&ring, &disk, &mirror, &sim).await;
            load.progress(&ring, SOME).await;
            while progress.paused().is_none() && sim.held().is_empty() {
                ring.sleep(Duration::from_millis(1)).await;
            }
            load.progress(&ring, SOME).await;
            assert_eq!(disk.layers().len(), 2);
            sim.clear_rules();
            sim.release_all();
            progress.resume();
            assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
            load.progress(&ring, SOME).await;
            let known = load.halt(&ring).await;
            assert_eq!(disk.close(&ring).await, Ok(()));
            assert_same(&sim.image()[..known.len()], &known);
        });
    }
}

/// The power fails right after the switch-over: the target has everything that the disk had when
/// the switch-over began, also what no client had flushed.
#[test]
fn a_target_is_on_stable_storage_when_clients_go_on_with_it() {
    for is_raw in [false, true] {
        let directory = directory();
        let (top, bytes) = source(&directory, false);
        qemu_img(&directory, &["create", "-q", "-f", "qcow2", "empty", &SIZE.to_string()]);
        let empty = fs::read(directory.path().join("empty")).expect("read");
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let load = Load::start(&disk, &bytes, 63);
            let (target, sim) = if is_raw {
                simulated(SIZE)
            } else {
                let sim = SimStorage::from_image(&empty, 5);
                (simulated_image(&ring, &sim).await, sim)
            };
            let mirror = Running::start(&ring, &disk, target, BACKGROUND);
            assert!(mirror.control.ready().await);
            load.progress(&ring, SOME).await;
            let known = load.halt(&ring).await;
            mirror.control.complete(true).expect("complete");
            assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
            for seed in 0..4 {
                let left = SimStorage::from_image(&sim.crash_image(seed), 1);
                let shown = match is_raw {
                    true => left.image(),
                    false => {
                        read_steps(&ring, &*simulated_image(&ring, &left).await, 1 << 20).await
                    }
                };
                assert_same(&shown[..known.len()], &known);
            }
            assert_eq!(disk.close(&ring).await, Ok(()));
        });
    }
}

/// The longest that a client waits around a switch-over, printed; far from a hang.
#[test]
fn a_switch_over_is_a_short_pause() {
    let directory = directory();
    let (top, _) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let mut pauses = Vec::new();
        for round in 0..3 {
            let name = format!("{round}.raw");
            let target = target(&ring, &directory, &name, SIZE).await;
            let mirror = Running::start(&ring, &disk, target, BACKGROUND);
            assert!(mirror.control.ready().await);
            let longest = Rc::new(Cell::new(Duration::ZERO));
            let running = Rc::new(Cell::new(32));
            let is_over = Rc::new(Cell::new(false));
            for client in 0..32u64 {
                let (disk, handle) = (Arc::clone(&disk), ring.clone());
                let (longest, running) = (longest.clone(), running.clone());
                let is_over = is_over.clone();
                ring.spawn(async move {
                    let data = buffer(&[7; 4096]);
                    let mut at = client * 4096;
                    while !is_over.get() {
                        let begun = Instant::now();
                        assert_eq!(disk.write(&handle, at, &data).await, Ok(4096));
                        longest.set(longest.get().max(begun.elapsed()));
                        at = (at + 37 * 4096) % (SIZE as u64);
                    }
                    running.set(running.get() - 1);
                });
            }
            ring.sleep(Duration::from_millis(50)).await;
            longest.set(Duration::ZERO);
            mirror.control.complete(true).expect("complete");
            assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
            is_over.set(true);
            while running.get() > 0 {
                ring.sleep(Duration::from_millis(1)).await;
            }
            pauses.push(longest.get());
        }
        println!("longest request while a mirror completes, of 32: {pauses:?}");
        assert!(pauses.iter().all(|pause| *pause < Duration::from_secs(2)), "{pauses:?}");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}
