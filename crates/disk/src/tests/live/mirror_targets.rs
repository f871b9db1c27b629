//! Targets of mirrors that hang, fail or end at a bad moment: the disk goes on, and the mirror ends
//! when it is told to.

use std::sync::Arc;
use std::time::Duration;

use ringdisk_testkit::sim::{Fault, OpKind, When};

use super::mirroring::{
    BACKGROUND, BLOCKING, Running, complete_with_a_flush, simulated, source, until,
};
use super::{SIZE, SOME, opened};
use crate::tests::load::Load;
use crate::tests::{assert_same, buffer, directory, read_steps, run};
use crate::{CommitOptions, ErrorKind, MirrorEnd, MirrorOptions, OnError, Progress};

/// What a target does not answer any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hangs {
    /// From the beginning.
    Copies,
    /// When it is ready: what clients send.
    Writes,
    /// The flush before the last step, and the one in it.
    Flush(u64),
}

/// Whatever a target does not answer, a mirror that is given up ends, and changes go on.
fn a_cancelled_mirror_ends(hangs: Hangs, options: MirrorOptions) {
    let directory = directory();
    let (top, mut bytes) = source(&directory, false);
    run(async |ring| {
        let disk = opened(&ring, &directory, top).await;
        let (target, sim) = simulated(SIZE);
        let load = Load::start(&disk, &bytes, 71);
        let hang = |kind| sim.on(When::kind(kind), Fault::Hang);
        if hangs == Hangs::Copies {
            hang(OpKind::Write);
        }
        let mirror = Running::start(&ring, &disk, target, options);
        match hangs {
            Hangs::Copies => {}
            Hangs::Writes => {
                assert!(mirror.control.ready().await);
                hang(OpKind::Write);
            }
            Hangs::Flush(skip) => {
                assert!(mirror.control.ready().await);
                sim.on(When::kind(OpKind::Flush).skip(skip), Fault::Hang);
                match skip {
                    0 => mirror.control.complete(true).expect("complete"),
                    _ => complete_with_a_flush(&ring, &disk, &mirror, &sim).await,
                }
            }
        }
        until(&ring, || sim.hanging() > 0).await;
        load.progress(&ring, SOME / 2).await;
        mirror.progress.cancel();
        until(&ring, || mirror.is_over()).await;
        let error = mirror.end(&ring).await.expect_err("cancelled");
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{hangs:?}: {error}");
        load.progress(&ring, SOME / 2).await;
        disk.commit(&ring, CommitOptions::TOP, &Arc::default()).await.expect("commit");
        super::finish(&ring, &directory, disk, load, "base.raw", &mut bytes).await;
    });
}

#[test]
fn a_mirror_that_is_given_up_while_its_target_hangs_ends() {
    a_cancelled_mirror_ends(Hangs::Copies, BACKGROUND);
    a_cancelled_mirror_ends(Hangs::Writes, BLOCKING);
}

/// The next process copies all of it again.
#[test]
fn a_target_that_hangs_does_not_keep_the_disk_from_being_handed_over() {
    for kind in [OpKind::Write, OpKind::Flush] {
        let directory = directory();
        let (top, mut bytes) = source(&directory, false);
        run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, sim) = simulated(SIZE);
            sim.on(When::kind(kind), Fault::Hang);
            let mirror = Running::start(&ring, &disk, target, BACKGROUND);
            until(&ring, || sim.hanging() > 0 || mirror.control.is_ready()).await;
            disk.suspend_for_hand_over(vec![Arc::clone(&mirror.progress)]);
            drop(disk.hand_over(&ring).await.expect("nothing is in the way"));
            assert!(mirror.control.take_left().is_none(), "nobody knows what the target has");
            let error = mirror.end(&ring).await.expect_err("suspended");
            assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
            disk.resume(&ring).await.expect("it goes on here");
            let load = Load::start(&disk, &bytes, 76);
            load.progress(&ring, SOME / 2).await;
            super::finish(&ring, &directory, disk, load, top, &mut bytes).await;
        });
    }
}

#[test]
fn a_mirror_that_is_given_up_in_its_last_step_ends() {
    a_cancelled_mirror_ends(Hangs::Flush(0), BACKGROUND);
    a_cancelled_mirror_ends(Hangs::Flush(1), BACKGROUND);
}

/// Each operation of the target from the request to switch over on fails once, and then the target
/// answers again: clients see nothing, and the disk switches over in the end.
#[test]
fn any_operation_of_a_switch_over_fails_and_it_is_made_all_the_same() {
    let mut number = 0;
    loop {
        let directory = directory();
        let (top, bytes) = source(&directory, false);
        let reached = run(async |ring| {
            let disk = opened(&ring, &directory, top).await;
            let (target, sim) = simulated(SIZE);
            let progress = Arc::new(Progress::new());
            progress.set_on_error(OnError::Stop);
            let mirror = Running::with(&ring, &disk, target, BACKGROUND, Arc::clone(&progress));
            assert!(mirror.control.ready().await);
            // Something is left to send, whatever number fails.
            for at in 0..4 {
                let data = buffer(&[at; 4096]);
                assert_eq!(disk.write(&ring, u64::from(at) << 20, &data).await, Ok(4096));
            }
            let begin = sim.log().len() as u64;
            sim.on(When::number(begin + number), Fault::Fail(crate::Errno::IO));
            mirror.control.complete(true).expect("complete");
            while !mirror.is_over() {
                if progress.paused().is_some() {
                    assert_eq!(disk.layers().len(), 2);
                    progress.resume();
                }
                ring.sleep(Duration::from_millis(1)).await;
            }
            mirror.end(&ring).await.expect("mirror");
            let reached = sim.log().len() as u64 > begin + number;
            sim.clear_rules();
            assert_eq!(disk.layers().len(), 1);
            let mut wanted = bytes.clone();
            for at in 0..4u8 {
                let start = usize::from(at) << 20;
                wanted[start..start + 4096].fill(at);
            }
            assert_same(&read_steps(&ring, &disk, 1 << 20).await, &wanted);
            assert_eq!(disk.close(&ring).await, Ok(()));
            assert_same(&sim.durable_image(), &wanted);
            reached
        });
        if !reached {
            break;
        }
        number += 1;
        assert!(number < 100, "a switch-over has a few operations");
    }
    assert!(number > 2, "{number} operations failed");
}

/// A client's write is in flight when clients are stopped for the last step, and its copy fails: it
/// is sent in that step.
#[test]
fn what_a_client_could_not_send_goes_in_the_last_step() {
    run(async |ring| {
        let (disk, from) = simulated(SIZE);
        let (target, to) = simulated(SIZE);
        let mirror = Running::start(&ring, &disk, target, BLOCKING);
        assert!(mirror.control.ready().await);
        while !mirror.is_in_step(&disk) {
            ring.sleep(Duration::from_millis(1)).await;
        }
        from.on(When::kind(OpKind::Write).once(), Fault::Hold);
        to.on(When::kind(OpKind::Write).once(), Fault::Fail(crate::Errno::IO));
        let (other, handle) = (Arc::clone(&disk), ring.clone());
        let written = crate::task_join::spawn(&ring, async move {
            other.write(&handle, 5 << 20, &buffer(&[7; 4096])).await
        });
        mirror.control.complete(true).expect("complete");
        // The last step has begun when a client has to wait.
        while disk.gateway().try_enter().is_some() {
            ring.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(from.release_all(), 1);
        assert_eq!(written.await, Some(Ok(4096)), "no error of the target is one of a client");
        assert_eq!(mirror.end(&ring).await.expect("mirror"), MirrorEnd::Pivoted);
        let mut wanted = vec![0; SIZE];
        wanted[5 << 20..(5 << 20) + 4096].fill(7);
        assert_same(&to.image(), &wanted);
        assert_same(&read_steps(&ring, &disk, 1 << 20).await, &wanted);
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}
