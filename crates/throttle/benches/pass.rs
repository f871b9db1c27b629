//! What a limit that is not reached costs a request.
//!
//! `cargo bench -p ringdisk-throttle --bench pass`.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use ringdisk_ring::{Config, Runtime};
use ringdisk_throttle::{Group, Kind, Member};

/// Limits that no loop reaches; the first has none.
const LIMITS: [&str; 4] = [
    "none",
    "iops=1000000000",
    "iops=1000000000,bps=100000000000000",
    "iops-read=1000000000,iops-write=1000000000,bps=100000000000000",
];
const REQUEST_BYTES: u64 = 4096;

/// The time of `count` requests.
fn pass(runtime: &mut Runtime, member: &Member, count: u64) -> Duration {
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let begun = Instant::now();
        for _ in 0..count {
            member.pass(&ring, black_box(Kind::Read), black_box(REQUEST_BYTES)).await;
        }
        begun.elapsed()
    })
}

fn limits(criterion: &mut Criterion) {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    for text in LIMITS {
        let group = Group::new(&text.parse().expect(text));
        let member = Member::of(&group);
        criterion.bench_function(text, |bench| {
            bench.iter_custom(|count| pass(&mut runtime, &member, count));
        });
        let waits = member.waits();
        assert_eq!(waits.requests, 0, "{text}: requests waited {:?}", waits.time);
    }
}

criterion_group!(benches, limits);
criterion_main!(benches);
