//! The rule under simulated loads: each mode of a load has a rate, the policy must find the best
//! and stay there.

use super::{Load, Mode, Policy, Polls, WINDOW_NS};

const fn one(queue: usize, polls: Polls) -> Mode {
    Mode { queue: Some(queue), polls }
}

/// Runs `windows` windows; `rate` gives requests per second in a mode. Returns the requests done.
fn run(policy: &mut Policy, now: &mut Load, windows: u64, rate: impl Fn(Mode) -> u64) -> u64 {
    let before = now.requests;
    for window in 0..windows {
        // A little noise, always the same: ±3 %.
        let noise = 97 + window * 7 % 7;
        now.requests += rate(policy.mode()) * noise / 100 * WINDOW_NS / 1_000_000_000;
        now.now += WINDOW_NS;
        policy.step(now);
    }
    now.requests - before
}

#[test]
fn a_better_place_is_found_soon_and_kept() {
    let mut policy = Policy::new(2);
    let mut now = Load { now: 1, ..Load::default() };
    let rate = |mode: Mode| match (mode.queue, mode.polls) {
        (Some(1), Polls::Off) => 100_000,
        (Some(0), Polls::Off) => 60_000,
        _ => 40_000,
    };
    run(&mut policy, &mut now, 100, rate);
    let done = run(&mut policy, &mut now, 1000, rate);
    assert!(done >= 100_000 * 2 * 95 / 100, "{done} of 200000 in two seconds");
}

#[test]
fn without_a_gain_the_mode_stays() {
    let mut policy = Policy::new(2);
    let mut now = Load { now: 1, ..Load::default() };
    let first = policy.mode();
    let mut elsewhere = 0u32;
    for _ in 0..2000 {
        run(&mut policy, &mut now, 1, |_| 50_000);
        elsewhere += u32::from(policy.mode() != first);
    }
    assert!(elsewhere < 200, "{elsewhere} of 2000 windows were trials");
}

#[test]
fn a_change_of_the_load_makes_it_look_again() {
    let mut policy = Policy::new(2);
    let mut now = Load { now: 1, ..Load::default() };
    let deep = |mode: Mode| if mode == one(0, Polls::Off) { 200_000 } else { 100_000 };
    let sync = |mode: Mode| if mode == one(1, Polls::Short) { 90_000 } else { 20_000 };
    run(&mut policy, &mut now, 1000, deep);
    assert_eq!(policy.mode(), one(0, Polls::Off));
    run(&mut policy, &mut now, 100, sync);
    let done = run(&mut policy, &mut now, 500, sync);
    assert!(done > 90_000 * 9 / 10, "{done}");
}

#[test]
fn a_pause_of_the_client_ends_a_trial_without_a_verdict() {
    let mut policy = Policy::new(2);
    let mut now = Load { now: 1, ..Load::default() };
    let home = policy.mode();
    while policy.mode() == home {
        run(&mut policy, &mut now, 1, |_| 50_000);
    }
    now.now += 1_000_000_000;
    policy.step(&now);
    assert_eq!(policy.mode(), home);
}

#[test]
fn a_full_queue_spreads_the_load_at_once() {
    let mut policy = Policy::new(2);
    policy.spread();
    assert_eq!(policy.mode().queue, None);
    let mut single = Policy::new(1);
    single.spread();
    assert_eq!(single.mode().queue, Some(0));
}

#[test]
fn one_queue_chooses_only_whether_to_poll() {
    let mut policy = Policy::new(1);
    let mut now = Load { now: 1, ..Load::default() };
    run(&mut policy, &mut now, 100, |mode| if mode.polls == Polls::Off { 60_000 } else { 30_000 });
    assert_eq!(policy.mode(), one(0, Polls::Off));
}

#[test]
fn large_requests_count_by_their_bytes() {
    let load = Load { now: 0, requests: 1, bytes: 1 << 20 };
    assert_eq!(load.work(), 17);
}
