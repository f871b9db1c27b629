use ringdisk_qcow2::Bytes;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use ringdisk_ring::{Config, Runtime};

use super::*;

const MS: u64 = 1_000_000;
const MIB: u64 = 1 << 20;

fn run(test: impl AsyncFnOnce(Ring)) {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring");
    let ring = runtime.ring().clone();
    runtime.block_on(test(ring));
}

/// A turn beside clients, or not.
fn turn(background: Option<&Background>) -> Turn<'_> {
    Turn { beside: background, begun: 1, rests: 1, is_long: false, _guard: None }
}

/// The lengths of all parts of a range, of which each copies `copied` of its bytes.
fn lengths(
    turn: &Turn<'_>,
    mut parts: Parts,
    copied: impl Fn(GuestOffset, u64) -> u64,
) -> Vec<u64> {
    let mut lengths = Vec::new();
    while !parts.is_over() {
        let (at, len) = parts.next(turn);
        assert_eq!(parts.next(turn), (at, len), "the same until it is done");
        parts.done(len, Bytes(copied(at, len.0)));
        lengths.push(len.0);
    }
    lengths
}

#[test]
fn clients_are_at_work_for_a_while_after_each_request() {
    let background = Background::default();
    let at_work = |ms: u64, requests: u64| background.has_clients(1 + ms * MS, || requests);
    assert!(!at_work(0, 1000), "all of them are old");
    assert!(!at_work(5, 1000));
    assert!(at_work(10, 1001));
    assert!(at_work(11, 1001), "it was looked a moment ago");
    assert!(at_work(109, 1001));
    assert!(!at_work(111, 1001));
    assert!(at_work(115, 7), "another number, whichever");
    assert!(at_work(200, 7) && at_work(214, 8) && at_work(300, 8));
    assert!(!at_work(320, 8));
}

#[test]
fn the_storage_is_left_to_clients_for_as_long_as_a_piece_took() {
    let background = Background::default();
    background.ended(10 * MS, 13 * MS, 1);
    assert_eq!(background.rest(13 * MS), Duration::from_millis(3));
    assert_eq!(background.rest(15 * MS), Duration::from_millis(1));
    assert_eq!(background.rest(16 * MS), Duration::ZERO);
    // What was not waited for is added.
    background.ended(15 * MS, 15 * MS + 1000, 1);
    assert_eq!(background.rest(15 * MS + 1000), Duration::from_nanos(MS + 1000));
    // A reader rests for longer.
    background.ended(17 * MS, 18 * MS, READER_RESTS);
    assert_eq!(background.rest(18 * MS), Duration::from_millis(2));
    // A piece that hung does not stop the work for as long.
    background.ended(20 * MS, 20_000 * MS, 1);
    assert_eq!(background.rest(20_000 * MS), REST_MAX);
    // Nor do several that were slow at once.
    for _ in 0..4 {
        background.ended(20_000 * MS, 20_050 * MS, 1);
    }
    assert_eq!(background.rest(20_050 * MS + as_nanos(REST_MAX)), Duration::ZERO);
}

#[test]
fn parts_are_small_beside_clients_and_end_at_units() {
    let (background, range) = (Background::default(), (GuestOffset(70 << 10), MIB));
    let parts = |unit| Parts::new(range.0, Bytes(range.1), unit);
    let quiet = turn(None);
    assert_eq!(lengths(&quiet, parts(Bytes(1)), |_, len| len), [MIB]);
    let beside = turn(Some(&background));
    let small = lengths(&beside, parts(Bytes(1)), |_, len| len);
    assert_eq!((small[0], small[1], small.iter().sum()), (58 << 10, SMALL_BYTES.0, MIB));
    assert!(small.iter().all(|len| *len <= SMALL_BYTES.0));
    let unit = 256 << 10;
    assert_eq!(lengths(&beside, parts(Bytes(unit)), |_, len| len)[..2], [186 << 10, 256 << 10]);
    assert_eq!(lengths(&beside, parts(Bytes(4 << 20)), |_, len| len), [MIB]);
    assert_eq!(lengths(&beside, Parts::new(range.0, Bytes::ZERO, Bytes(1)), |_, _| 1), [0; 0]);
    let of_reader = || Parts::of_reader(range.0, Bytes(range.1));
    assert_eq!(lengths(&beside, of_reader(), |_, len| len)[..2], [10 << 10, READER_BYTES.0]);
    assert_eq!(lengths(&quiet, of_reader(), |_, len| len), [MIB]);
}

#[test]
fn a_piece_after_a_slow_one_has_more_bytes_until_they_are_why_it_is_slow() {
    let background = Background::default();
    let is_slow = |took_ms: u64, was_long: bool| {
        background.look_at_pace(took_ms * MS, was_long);
        background.is_slow.load(Ordering::Relaxed)
    };
    assert!(!is_slow(20, false) && is_slow(21, false), "a small one");
    assert!(is_slow(100, true), "a long one that its bytes do not explain");
    assert!(!is_slow(80, true), "four times the bytes in four times the time");
    let mut long = turn(Some(&background));
    long.is_long = true;
    let parts = |unit| Parts::new(GuestOffset(0), Bytes(MIB), unit);
    assert_eq!(lengths(&long, parts(Bytes(1)), |_, len| len)[0], 256 << 10);
    assert_eq!(lengths(&long, parts(Bytes(128 << 10)), |_, len| len)[0], 256 << 10);
    assert_eq!(lengths(&long, parts(Bytes(512 << 10)), |_, len| len)[0], 512 << 10);
    let of_reader = Parts::of_reader(GuestOffset(0), Bytes(MIB));
    assert_eq!(lengths(&long, of_reader, |_, len| len)[0], 64 << 10);
}

#[test]
fn parts_without_data_grow_until_there_is_some() {
    let background = Background::default();
    let beside = turn(Some(&background));
    let data_from = GuestOffset(512 << 10);
    let copied = |at: GuestOffset, len: u64| if at + Bytes(len) > data_from { len } else { 0 };
    let found = lengths(&beside, Parts::new(GuestOffset(0), Bytes(MIB), Bytes(1)), copied);
    let kib: Vec<u64> = found.iter().map(|len| len >> 10).collect();
    assert_eq!(kib, [64, 64, 128, 256, 512]);
    let few = lengths(&beside, Parts::new(GuestOffset(0), Bytes(1 << 40), Bytes(1)), |_, _| 0);
    assert!(few.len() < 70_000, "a large hole does not take for ever: {}", few.len());
}

#[test]
fn one_piece_is_under_way_while_clients_work_and_all_of_them_otherwise() {
    run(async |ring| {
        let background = Rc::new(Background::default());
        let requests = Rc::new(Cell::new(0));
        let (now, most) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let count = |is_client: bool| {
            if is_client {
                requests.set(requests.get() + 1);
            }
            requests.get()
        };
        for (is_client, expected) in [(false, 3), (true, 1), (false, 3)] {
            // What came before is seen, and over.
            ring.sleep(2 * POLL_INTERVAL).await;
            drop(background.turn(&ring, || count(false)).await);
            ring.sleep(QUIET + 10 * POLL_INTERVAL).await;
            drop(background.turn(&ring, || count(is_client)).await);
            most.set(0);
            let tasks = (0..3).map(|_| async {
                for _ in 0..3 {
                    let turn = background.turn(&ring, || count(is_client)).await;
                    assert_eq!(turn.beside.is_some(), is_client);
                    now.set(now.get() + 1);
                    most.set(most.get().max(now.get()));
                    ring.sleep(Duration::from_millis(1)).await;
                    now.set(now.get() - 1);
                }
            });
            all(tasks).await;
            assert_eq!((now.get(), most.get()), (0, expected), "{is_client}");
        }
    });
}

#[test]
fn a_piece_that_hangs_does_not_hold_up_the_others_for_ever() {
    run(async |ring| {
        let background = Background::default();
        background.busy_until.store(u64::MAX, Ordering::Relaxed);
        let hangs = background.turn(&ring, || 1).await;
        let begun = Instant::now();
        let other = background.turn(&ring, || 1).await;
        assert!(begun.elapsed() >= TURN_MAX);
        assert!(other._guard.is_none(), "the one that hangs has it");
        drop((hangs, other));
        assert!(background.turn(&ring, || 1).await._guard.is_some());
    });
}

/// Waits for all of the futures.
async fn all<F: Future<Output = ()>>(futures: impl Iterator<Item = F>) {
    let mut futures: Vec<_> = futures.map(Box::pin).collect();
    std::future::poll_fn(|context| {
        futures.retain_mut(|future| future.as_mut().poll(context).is_pending());
        if futures.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}
