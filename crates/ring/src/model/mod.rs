//! Model of what ring threads share with others: the very source files `handoff.rs` and
//! `mailbox.rs`, built on simulated locks, under orders of steps that the checker chooses.
//!
//! Promises: a failure prints the schedule, which repeats it. Only tests build it.

#![allow(clippy::duplicate_mod, reason = "the model is the same source on other primitives")]

mod sync;

#[path = "../handoff.rs"]
mod handoff;
#[path = "../mailbox.rs"]
mod mailbox;

use shuttle::future::block_on;
use shuttle::sync::mpsc::channel;
use shuttle::{check_random, thread};

use handoff::handoff;
use mailbox::Mailbox;
use sync::Arc;

/// Schedules to try. Each takes well under a millisecond.
const SCHEDULES: usize = 5000;

#[test]
fn a_value_arrives_once_however_the_threads_run() {
    check_random(
        || {
            let (finish, value) = handoff();
            let worker = thread::spawn(move || finish.done(7));
            assert_eq!(block_on(value), 7);
            worker.join().unwrap();
        },
        SCHEDULES,
    );
}

#[test]
fn a_waiter_that_is_dropped_leaves_the_worker_alone_and_frees_the_value() {
    check_random(
        || {
            let (finish, value) = handoff::<Arc<u32>>();
            let token = Arc::new(1);
            let sent = Arc::clone(&token);
            let worker = thread::spawn(move || finish.done(sent));
            drop(value);
            worker.join().unwrap();
            assert_eq!(Arc::strong_count(&token), 1);
        },
        SCHEDULES,
    );
}

#[test]
fn nothing_put_into_a_mailbox_is_lost_and_the_receiver_is_signalled() {
    check_random(
        || {
            let mailbox = Arc::new(Mailbox::default());
            // The eventfd: a count of signals that the receiver waits for.
            let (signal, signals) = channel();
            let senders: Vec<_> = (0..3)
                .map(|number| {
                    let (mailbox, signal) = (Arc::clone(&mailbox), signal.clone());
                    thread::spawn(move || {
                        for value in [number * 10, number * 10 + 1] {
                            if mailbox.put(value) {
                                signal.send(()).unwrap();
                            }
                        }
                    })
                })
                .collect();
            let mut got = Vec::new();
            while got.len() < 6 {
                // A lost signal would leave the receiver here for ever: the checker reports a
                // deadlock.
                signals.recv().unwrap();
                got.extend(mailbox.take());
            }
            for sender in senders {
                sender.join().unwrap();
            }
            for number in 0..3 {
                let order: Vec<i32> =
                    got.iter().copied().filter(|value| value / 10 == number).collect();
                assert_eq!(order, [number * 10, number * 10 + 1]);
            }
        },
        SCHEDULES,
    );
}
