use ringdisk_qcow2::Bytes;
use std::time::Instant;

use super::gate::{Failed, Gate, Wait};
use super::*;

const SECOND: Duration = Duration::from_secs(1);
const WAITS: Failed = Failed::WaitsForSpace(0);

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
        (OnError::Report, Errno::NOSPC, Failed::Ends, None),
        (OnError::Ignore, Errno::NOSPC, Failed::Ends, None),
        (OnError::Stop, Errno::IO, Failed::Rests, Some(Pause::Error(Errno::IO))),
        (OnError::Stop, Errno::NOSPC, Failed::Rests, Some(Pause::Error(Errno::NOSPC))),
        (OnError::StopWhenFull, Errno::NOSPC, WAITS, Some(Pause::Full(Errno::NOSPC))),
        (OnError::StopWhenFull, Errno::DQUOT, WAITS, Some(Pause::Full(Errno::DQUOT))),
        (OnError::StopWhenFull, Errno::IO, Failed::Ends, None),
    ];
    for (on_error, errno, failed, paused) in cases {
        let mut gate = Gate::default();
        gate.on_error = on_error;
        assert_eq!(gate.fail(errno), failed, "{on_error:?} {errno:?}");
        assert_eq!(gate.paused(), paused, "{on_error:?} {errno:?}");
        // A pause that a user has asked for stays.
        gate.pause(Pause::Asked);
        gate.fail(errno);
        assert_eq!(gate.paused(), Some(Pause::Asked), "{on_error:?} {errno:?}");
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

/// An operation that waits for space; the second value tells its try of the piece apart.
fn full() -> (Progress, Tries) {
    let progress = Progress::new();
    progress.set_on_error(OnError::StopWhenFull);
    (progress, Tries::default())
}

fn until_it_waits(progress: &Progress) {
    while progress.paused() != Some(Pause::Full(Errno::NOSPC)) {
        std::thread::yield_now();
    }
}

#[test]
fn a_full_storage_is_tried_again_at_once_after_resume() {
    let (progress, mut tries) = full();
    let begun = Instant::now();
    let resume = |progress: &Progress| {
        until_it_waits(progress);
        progress.resume();
    };
    let again = beside(&progress, resume, async |ring| {
        progress.failed(&ring, &mut tries, Errno::NOSPC).await?;
        progress.pace_try(&ring, &tries).await
    });
    assert_eq!(again, Ok(()));
    assert!(begun.elapsed() < SPACE_RETRY_INTERVAL, "{:?}", begun.elapsed());
    // It is not known yet whether there is space, and goes on when there is.
    assert_eq!(progress.paused(), Some(Pause::Full(Errno::NOSPC)));
    progress.written(&mut Tries::default());
    assert_eq!(progress.paused(), Some(Pause::Full(Errno::NOSPC)), "another piece was written");
    progress.written(&mut tries);
    assert_eq!(progress.paused(), None);
    let ended =
        beside(&progress, |_| {}, async |ring| progress.failed(&ring, &mut tries, Errno::IO).await);
    assert_eq!(ended, Err(Errno::IO));
}

#[test]
fn a_full_storage_is_tried_again_by_itself_and_that_changes_nothing_until_there_is_space() {
    let (progress, mut tries) = full();
    let begun = Instant::now();
    let mut turns = Vec::new();
    let result = beside(
        &progress,
        |_| {},
        async |ring| {
            for _ in 0..2 {
                progress.failed(&ring, &mut tries, Errno::NOSPC).await?;
                turns.push(progress.turn());
            }
            Ok(())
        },
    );
    assert_eq!(result, Ok::<(), Errno>(()));
    assert!(begun.elapsed() >= 2 * SPACE_RETRY_INTERVAL, "{:?}", begun.elapsed());
    assert_eq!(turns, [1, 1], "those who watch hear of it once");
    progress.written(&mut tries);
    assert_eq!((progress.paused(), progress.turn()), (None, 2));
}

#[test]
fn an_operation_that_waits_for_space_goes_on_when_each_piece_that_failed_is_written() {
    let (progress, mut tries) = full();
    let mut others = Tries::default();
    let result = beside(
        &progress,
        |_| {},
        async |ring| {
            for tries in [&mut tries, &mut others] {
                progress.failed(&ring, tries, Errno::NOSPC).await?;
            }
            Ok::<(), Errno>(())
        },
    );
    assert_eq!(result, Ok(()));
    for (tries, paused) in [(&mut tries, Some(Pause::Full(Errno::NOSPC))), (&mut others, None)] {
        progress.written(tries);
        assert_eq!(progress.paused(), paused);
    }
}

#[test]
fn a_wait_for_space_ends_when_it_is_cancelled_suspended_or_rests_when_a_user_pauses_it() {
    for end in [Progress::cancel as fn(&Progress), Progress::suspend] {
        let (progress, mut tries) = full();
        let then = |progress: &Progress| {
            until_it_waits(progress);
            end(progress);
        };
        let begun = Instant::now();
        let ended = beside(&progress, then, async |ring| {
            progress.failed(&ring, &mut tries, Errno::NOSPC).await
        });
        assert_eq!(ended, Err(Errno::CANCELED));
        assert!(begun.elapsed() < SPACE_RETRY_INTERVAL, "{:?}", begun.elapsed());
    }
    let (progress, mut tries) = full();
    let rests = SPACE_RETRY_INTERVAL + Duration::from_millis(300);
    let pause = |progress: &Progress| {
        until_it_waits(progress);
        progress.pause();
        std::thread::sleep(rests);
        progress.resume();
    };
    let begun = Instant::now();
    let again = beside(&progress, pause, async |ring| {
        progress.failed(&ring, &mut tries, Errno::NOSPC).await
    });
    assert_eq!((again, progress.paused()), (Ok(()), None));
    assert!(begun.elapsed() >= rests, "it tried while a user had paused it");
}

#[test]
fn an_operation_that_begins_again_waits_for_no_space() {
    let (progress, _) = full();
    progress.gate().fail(Errno::NOSPC);
    progress.begin_again();
    assert_eq!(progress.paused(), None);
    progress.pause();
    progress.begin_again();
    assert_eq!(progress.paused(), Some(Pause::Asked));
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
