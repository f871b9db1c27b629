//! Model of requests and changes: the very source file `shards.rs`, built on simulated locks, under
//! orders of steps that the checker chooses.
//!
//! Promises: a failure prints the schedule, which repeats it. Only tests build it.

mod sync;

#[path = "../shards.rs"]
// Requests are not counted here.
#[allow(dead_code)]
mod shards;

use std::future::poll_fn;

use shuttle::future::block_on;
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::{check_random, thread};

use shards::Shards;

/// Schedules to try. Each takes well under a millisecond.
const SCHEDULES: usize = 5000;

/// Makes a change: `next` in all copies, while no request is inside.
fn change(shards: &Shards<u32>, inside: &AtomicUsize, next: u32) {
    let mut closed = shards.close();
    block_on(poll_fn(|context| closed.poll_alone(context)));
    assert_eq!(inside.load(Ordering::SeqCst), 0, "a request is in flight");
    assert!(shards.is_closed_alone());
    closed.replace(&next);
}

#[test]
fn requests_see_one_value_and_a_change_sees_no_request() {
    check_random(
        || {
            let shards = Arc::new(Shards::new(0_u32, 2));
            let inside = Arc::new(AtomicUsize::new(0));
            let clients: Vec<_> = (0..3)
                .map(|client| {
                    let (shards, inside) = (Arc::clone(&shards), Arc::clone(&inside));
                    thread::spawn(move || {
                        let mut last = 0;
                        for _ in 0..2 {
                            let pass = block_on(shards.enter(client % 2));
                            inside.fetch_add(1, Ordering::SeqCst);
                            let seen = *pass;
                            thread::yield_now();
                            assert_eq!(*pass, seen, "the value changed under a request");
                            assert!(seen >= last, "an old value came back");
                            last = seen;
                            inside.fetch_sub(1, Ordering::SeqCst);
                        }
                    })
                })
                .collect();
            for next in 1..=2 {
                change(&shards, &inside, next);
            }
            for client in clients {
                client.join().unwrap();
            }
            assert_eq!(*block_on(shards.enter(1)), 2);
        },
        SCHEDULES,
    );
}

#[test]
fn a_change_that_is_dropped_lets_requests_in_again() {
    check_random(
        || {
            let shards = Arc::new(Shards::new(0_u32, 2));
            let inside = Arc::new(AtomicUsize::new(0));
            let clients: Vec<_> = (0..2)
                .map(|client| {
                    let shards = Arc::clone(&shards);
                    thread::spawn(move || assert!(*block_on(shards.enter(client)) <= 1))
                })
                .collect();
            {
                let mut closed = shards.close();
                // One look, ready or not, and the caller is gone.
                block_on(poll_fn(|context| {
                    let _ = closed.poll_alone(context);
                    std::task::Poll::Ready(())
                }));
            }
            change(&shards, &inside, 1);
            for client in clients {
                client.join().unwrap();
            }
        },
        SCHEDULES,
    );
}
