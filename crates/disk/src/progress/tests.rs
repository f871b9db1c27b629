use ringdisk_qcow2::Bytes;
use std::time::Instant;

use super::gate::{Gate, Wait};
use super::*;

const SECOND: Duration = Duration::from_secs(1);

/// Bytes that pass the gate in `time` from `from`, in pieces, on a simulated clock; each timer
/// fires `late`.
fn passed(gate: &mut Gate, piece: u64, from: Duration, time: Duration, late: Duration) -> u64 {
    let (mut now, mut bytes) = (from, 0);
    while now < from + time {
        match gate.enter(now, Bytes(piece)) {
            Wait::Go => bytes += piece,
            Wait::Until(_, wait) => now += wait + late,
            Wait::Resume(_) => break,
        }
    }
    bytes
}

fn limited(speed: u64) -> Gate {
    let mut gate = Gate::default();
    gate.set_speed(Duration::ZERO, speed);
    gate
}

#[test]
fn ten_seconds_have_the_bytes_of_the_limit() {
    for speed in [1 << 20, 50 << 20, 3_000_000_000_u64] {
        for late in [Duration::ZERO, Duration::from_millis(3)] {
            let bytes = passed(&mut limited(speed), 1 << 20, SECOND, 10 * SECOND, late);
            let expected = 10 * speed;
            let allowed = expected / 50 + (1 << 20);
            assert!(bytes.abs_diff(expected) <= allowed, "{bytes} of {expected}, {late:?} late");
        }
    }
}

#[test]
fn a_piece_larger_than_the_limit_passes_and_the_next_waits_for_it() {
    let mut gate = limited(1 << 20);
    assert_eq!(gate.enter(SECOND, Bytes(4 << 20)), Wait::Go);
    let Wait::Until(_, wait) = gate.enter(SECOND, Bytes(1)) else { panic!("no limit") };
    assert!(wait > 3 * SECOND && wait <= 4 * SECOND, "{wait:?}");
}

#[test]
fn bytes_that_are_told_afterwards_hold_up_the_next_piece() {
    let mut gate = limited(1 << 20);
    assert_eq!(gate.enter(SECOND, Bytes::ZERO), Wait::Go);
    assert_eq!(gate.enter(SECOND, Bytes::ZERO), Wait::Go);
    gate.charge(SECOND, Bytes(1 << 20));
    gate.charge(SECOND, Bytes(1 << 20));
    let Wait::Until(_, wait) = gate.enter(SECOND, Bytes::ZERO) else { panic!("no limit") };
    assert!(wait > SECOND && wait <= 2 * SECOND, "{wait:?}");
}

#[test]
fn a_new_limit_stretches_and_shortens_the_wait_that_is_left() {
    let mut gate = limited(1 << 20);
    assert_eq!(gate.enter(SECOND, Bytes(8 << 20)), Wait::Go);
    gate.set_speed(SECOND, 8 << 20);
    let Wait::Until(_, wait) = gate.enter(SECOND, Bytes(1)) else { panic!("no limit") };
    assert!(wait <= SECOND, "{wait:?}");
    gate.set_speed(SECOND, 1);
    let Wait::Until(_, wait) = gate.enter(SECOND, Bytes(1)) else { panic!("no limit") };
    assert!(wait > 1000 * SECOND, "{wait:?}");
    gate.set_speed(SECOND, 0);
    assert_eq!(gate.enter(SECOND, Bytes::MAX), Wait::Go);
}

#[test]
fn limits_at_the_edge_of_numbers_do_not_overflow() {
    for speed in [1, u64::MAX] {
        let mut gate = limited(speed);
        for now in [Duration::ZERO, SECOND, Duration::MAX] {
            gate.enter(now, Bytes::MAX);
            gate.set_speed(now, speed);
        }
    }
}

#[test]
fn an_error_pauses_as_the_policy_says() {
    let cases = [
        (OnError::Report, Errno::NOSPC, false),
        (OnError::Ignore, Errno::NOSPC, false),
        (OnError::Stop, Errno::IO, true),
        (OnError::StopWhenFull, Errno::NOSPC, true),
        (OnError::StopWhenFull, Errno::DQUOT, true),
        (OnError::StopWhenFull, Errno::IO, false),
    ];
    for (on_error, errno, stops) in cases {
        let mut gate = Gate::default();
        gate.on_error = on_error;
        assert_eq!(gate.fail(errno), stops, "{on_error:?} {errno:?}");
        assert_eq!(gate.paused(), stops.then_some(Pause::Error(errno)), "{on_error:?} {errno:?}");
    }
}

/// Runs a task on a ring of its own, with what another thread does meanwhile.
fn beside<T>(
    progress: &Progress,
    other: impl FnOnce(&Progress) + Send,
    task: impl AsyncFnOnce(Ring) -> T,
) -> T {
    let mut runtime = ringdisk_ring::Runtime::new(ringdisk_ring::Config::default()).expect("ring");
    let ring = runtime.ring().clone();
    std::thread::scope(|scope| {
        scope.spawn(|| other(progress));
        runtime.block_on(task(ring))
    })
}

#[test]
fn a_paused_operation_rests_until_it_is_resumed_or_cancelled() {
    let progress = Progress::new();
    progress.pause();
    let later = Duration::from_millis(50);
    let begun = Instant::now();
    let resume = |progress: &Progress| {
        std::thread::sleep(later);
        progress.resume();
    };
    let result = beside(&progress, resume, async |ring| progress.pace(&ring, Bytes(1)).await);
    assert_eq!(result, Ok(()));
    assert!(begun.elapsed() >= later);
    progress.pause();
    let cancel = |progress: &Progress| {
        std::thread::sleep(later);
        progress.cancel();
    };
    let result = beside(&progress, cancel, async |ring| progress.pace(&ring, Bytes(1)).await);
    assert_eq!(result, Err(Errno::CANCELED));
}

#[test]
fn a_wait_for_the_limit_ends_when_the_limit_or_the_operation_does() {
    let progress = Progress::new();
    progress.set_speed(1);
    let changes: [fn(&Progress); 2] = [|progress| progress.set_speed(0), Progress::cancel];
    for (change, expected) in changes.into_iter().zip([Ok(()), Err(Errno::CANCELED)]) {
        progress.set_speed(1);
        let change = |progress: &Progress| {
            std::thread::sleep(Duration::from_millis(30));
            change(progress);
        };
        let result = beside(&progress, change, async |ring| {
            progress.pace(&ring, Bytes(1 << 30)).await?;
            progress.pace(&ring, Bytes(1)).await
        });
        assert_eq!(result, expected);
    }
}

#[test]
fn a_full_storage_is_tried_again_after_resume() {
    let progress = Progress::new();
    progress.set_on_error(OnError::StopWhenFull);
    let resume = |progress: &Progress| {
        while progress.paused() != Some(Pause::Error(Errno::NOSPC)) {
            std::thread::yield_now();
        }
        progress.resume();
    };
    let again = beside(&progress, resume, async |ring| progress.failed(&ring, Errno::NOSPC).await);
    assert_eq!(again, Ok(()));
    let ended = beside(&progress, |_| {}, async |ring| progress.failed(&ring, Errno::IO).await);
    assert_eq!(ended, Err(Errno::IO));
}

#[test]
fn an_operation_that_failed_or_was_cancelled_was_not_suspended() {
    let progress = Progress::new();
    let (cut, failed) = (Error::os("copy", Errno::CANCELED), Error::os("copy", Errno::IO));
    assert!(!progress.was_suspended(&cut));
    progress.suspend();
    assert!(progress.was_suspended(&cut) && !progress.was_suspended(&failed));
    progress.cancel();
    assert!(!progress.was_suspended(&cut));
}

#[test]
fn those_who_watch_hear_when_an_operation_begins() {
    let progress = Progress::new();
    let hears = |change: &dyn Fn(&Progress)| {
        let turn = progress.turn();
        change(&progress);
        progress.turn() != turn
    };
    assert!(!hears(&|progress| progress.set_total(Bytes::ZERO)), "it has not begun");
    assert!(hears(&|progress| progress.add_total(Bytes(1))));
    assert!(!hears(&|progress| progress.add_total(Bytes(1))), "it has begun before");
    assert!(!hears(&|progress| progress.set_total(Bytes(9))), "it has begun before");
    progress.begin_again();
    assert!(hears(&|progress| progress.set_total(Bytes(9))));
}
