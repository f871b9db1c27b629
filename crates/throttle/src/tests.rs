use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use ringdisk_ring::{Config, Ring, Runtime};

use super::*;
use crate::buckets::lock;
use crate::queue::{Queue, Ticket};

/// Runs a task on a ring of its own.
fn run<T>(task: impl AsyncFnOnce(Ring) -> T) -> T {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    runtime.block_on(task(ring))
}

const SECOND: u64 = 1_000_000_000;

/// Requests that a client gets through which always has one more, from `from` for `nanos`, on a
/// simulated clock; the client asks again up to `late` nanoseconds after it could go on.
fn served(group: &Group, kind: Kind, bytes: u64, from: u64, nanos: u64, late: u64) -> u64 {
    let (mut now, mut count) = (from, 0);
    while now < from + nanos {
        match group.shared.take(now, kind, bytes) {
            Ok(()) => count += 1,
            Err(wait) => now += wait + late,
        }
    }
    count
}

fn group(text: &str) -> Arc<Group> {
    Group::new(&text.parse().expect(text))
}

/// Whether `count` is at most 2 % beside `expected`.
#[track_caller]
fn assert_near(count: u64, expected: u64) {
    let difference = count.abs_diff(expected);
    assert!(difference * 50 <= expected.max(50), "{count} instead of {expected}");
}

#[test]
fn ten_seconds_have_the_rate_from_100_to_a_million_requests() {
    for rate in [100, 1000, 12_345, 100_000, 1_000_000] {
        for late in [0, 50_000, 3_000_000] {
            let group = group(&format!("iops={rate}"));
            assert_near(served(&group, Kind::Read, 4096, 0, 10 * SECOND, late), 10 * rate);
        }
    }
}

#[test]
fn bytes_are_counted_whatever_the_size_of_requests() {
    for (bytes, rate) in [(512, 10_000_000_000_u64), (1 << 20, 100 << 20), (4096, 1_000_000)] {
        let group = group(&format!("bps-write={rate}"));
        let count = served(&group, Kind::Write, bytes, 0, SECOND, 0);
        // A second has the burst of a tenth of a second, too.
        assert_near(count * bytes, rate + rate / 10 + bytes);
        assert!(!group.shared.holds(Kind::Read));
    }
}

#[test]
fn a_burst_is_as_large_and_lasts_as_long_as_it_may() {
    // At once 5000; then 1000 a second.
    let at_once = group("iops=1000,iops-max=5000");
    assert_near(served(&at_once, Kind::Read, 1, 0, SECOND / 1000, 0), 5001);
    assert_near(served(&at_once, Kind::Read, 1, SECOND / 1000, 10 * SECOND, 0), 10_000);
    // 5000 a second for 10 seconds less what the average takes out meanwhile; then 1000 a second.
    let lasting = group("iops=1000,iops-max=5000,iops-max-length=10");
    assert_near(served(&lasting, Kind::Read, 1, 0, 5 * SECOND, 0), 25_000 + 500);
    let rest = served(&lasting, Kind::Read, 1, 5 * SECOND, 30 * SECOND, 0);
    // The bucket holds 50,000 and loses 1000 in each of the 35 seconds.
    assert_near(rest + 25_500, 50_000 + 35_000);
    // After a rest a burst is possible again.
    assert_near(served(&lasting, Kind::Read, 1, 1000 * SECOND, 5 * SECOND, 0), 25_500);
}

#[test]
fn long_requests_count_as_several() {
    let group = group("iops=1000,iops-size=4096");
    let from = 100 * SECOND;
    served(&group, Kind::Read, 4096, 0, from, 0);
    assert_near(served(&group, Kind::Read, 8192, from, 10 * SECOND, 0), 5000);
    let from = from + 10 * SECOND;
    assert_near(served(&group, Kind::Read, 512, from, 10 * SECOND, 0), 10_000);
}

#[test]
fn reads_and_writes_share_a_total_and_nothing_else() {
    let total = group("iops=1000");
    let reads = served(&total, Kind::Read, 1, 0, 10 * SECOND, 0);
    assert_near(reads, 10_000);
    assert!(total.shared.take(10 * SECOND - 1, Kind::Write, 1).is_err());
    let apart = group("iops-read=1000,iops-write=10");
    served(&apart, Kind::Read, 1, 0, 10 * SECOND, 0);
    assert!(apart.shared.take(10 * SECOND - 1, Kind::Write, 1).is_ok());
}

#[test]
fn members_take_turns_however_many_requests_they_have() {
    let group = group("iops=1000");
    let now = 5 * SECOND;
    while group.shared.take(now, Kind::Write, 1).is_ok() {}
    let ticket = || {
        let has_passed = AtomicBool::new(false);
        Arc::new(Ticket { kind: Kind::Write, bytes: 1, has_passed })
    };
    // 64 requests of one member, 2 of another; who was served comes back.
    let members = [0].repeat(64).into_iter().chain([1, 1]);
    let mut waiting: Vec<(usize, Arc<Ticket>)> = members.map(|m| (m, ticket())).collect();
    let mut queue = Queue::default();
    let mut served = [0_u64; 2];
    for turn in 0..1000 {
        for (member, ticket) in &waiting {
            queue.put(*member, ticket, Waker::noop(), &group.shared);
        }
        // A millisecond for each request: one at a time.
        let keeper = Arc::clone(&waiting[0].1);
        let admitted = queue.admit(&group.shared, now + turn * SECOND / 1000, &keeper);
        assert!(admitted.wakers.len() <= 3, "{admitted:?}");
        for (member, of) in &mut waiting {
            if of.has_passed.load(Ordering::Relaxed) {
                served[*member] += 1;
                *of = ticket();
            }
        }
    }
    assert!(served[0].abs_diff(served[1]) <= 2 && served[0] >= 400, "{served:?}");
}

#[test]
fn a_request_that_is_dropped_leaves_the_time_to_another() {
    let group = group("iops=50");
    let member = Member::of(&group);
    run(async |ring| {
        while group.shared.take(group.now(), Kind::Read, 1).is_ok() {}
        let second = Cell::new(false);
        {
            // The first one keeps the time; it goes away while the second one waits.
            let mut first = Box::pin(member.pass(&ring, Kind::Read, 1));
            let mut other = Box::pin(async {
                member.pass(&ring, Kind::Read, 1).await;
                second.set(true);
            });
            let poll = |future: Pin<&mut dyn Future<Output = ()>>, context: &mut Context<'_>| {
                assert!(future.poll(context).is_pending());
            };
            std::future::poll_fn(|context| {
                poll(first.as_mut(), context);
                poll(other.as_mut(), context);
                Poll::Ready(())
            })
            .await;
            assert_eq!(member.waits().now, 2);
            drop(first);
            assert_eq!(member.waits().now, 1);
            other.await;
        }
        assert!(second.get());
    });
    assert_eq!((member.waits().now, member.waits().requests), (0, 1));
    assert_eq!(group.shared.waiting[0].load(Ordering::Relaxed), 0);
}

#[test]
fn who_waits_goes_on_when_the_limit_goes_or_is_lifted() {
    let group = group("iops=1,bps=1");
    let (member, other) = (Member::of(&group), Member::of(&group));
    let waits_until = |change: &(dyn Fn() + Sync)| {
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                run(async |ring| {
                    // Each byte takes a second.
                    member.pass(&ring, Kind::Write, 1 << 40).await;
                    member.pass(&ring, Kind::Write, 1 << 40).await;
                    member.pass(&ring, Kind::Write, 1 << 40).await;
                });
            });
            while member.waits().now == 0 {
                std::thread::yield_now();
            }
            change();
            waiter.join().expect("ends");
        });
    };
    let lifted = Mutex::new(None);
    waits_until(&|| *lock(&lifted) = Some(member.lift()));
    // Three requests of 2^40 bytes went through, and count.
    assert!(group.shared.take(group.now(), Kind::Write, 1).is_err_and(|wait| wait > 1 << 50));
    drop(lifted);
    assert!(!member.is_lifted());
    waits_until(&|| group.set(&Limits::default()));
    group.set(&"iops=1,bps=1".parse().expect("good"));
    waits_until(&|| group.set(&"bps=1000000000000000".parse().expect("good")));
    // Of another member nothing was lifted.
    assert!(!other.is_lifted());
}
