//! Model of the notifications between driver and device: the rules of `layout/event.rs` under
//! orders of steps that a checker chooses.
//!
//! Promises: a failure prints the schedule, which repeats it. Only tests build it.

use std::sync::Arc;

use shuttle::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use shuttle::sync::mpsc::channel;
use shuttle::{check_random, thread};

use crate::layout::event::{PACKED_DESCRIPTOR, PACKED_DISABLE, PACKED_WRAP, packed_wants, passed};

/// Orders to try. Each takes well under a millisecond.
const SCHEDULES: usize = 3000;
const ENTRIES: u16 = 6;
const SIZE: u16 = 4;

#[test]
fn an_entry_of_a_split_ring_is_never_slept_over() {
    check_random(
        || {
            // An index just before it wraps, and what the other side waits for.
            let begin = u16::MAX - 2;
            let index = Arc::new(AtomicU16::new(begin));
            let event = Arc::new(AtomicU16::new(begin.wrapping_sub(1)));
            let (signal, signals) = channel();
            let producer = {
                let (index, event) = (Arc::clone(&index), Arc::clone(&event));
                thread::spawn(move || {
                    let mut at = begin;
                    for batch in [1, 2, ENTRIES - 3] {
                        let old = at;
                        at = at.wrapping_add(batch);
                        index.store(at, Ordering::SeqCst);
                        if passed(event.load(Ordering::SeqCst), at, old) {
                            signal.send(()).unwrap();
                        }
                    }
                    signal
                })
            };
            let mut seen = begin;
            while seen != begin.wrapping_add(ENTRIES) {
                event.store(seen, Ordering::SeqCst);
                if index.load(Ordering::SeqCst) == seen {
                    // A missed signal leaves the consumer here: the checker reports a deadlock.
                    signals.recv().unwrap();
                }
                seen = index.load(Ordering::SeqCst);
            }
            drop(producer.join().unwrap());
        },
        SCHEDULES,
    );
}

#[test]
fn a_descriptor_of_a_packed_ring_is_never_slept_over() {
    let place = |count: u16| (count % SIZE, (count / SIZE).is_multiple_of(2));
    check_random(
        move || {
            let index = Arc::new(AtomicU16::new(0));
            let wish = Arc::new(AtomicU32::new(u32::from(PACKED_DISABLE) << 16));
            let (signal, signals) = channel();
            let producer = {
                let (index, wish) = (Arc::clone(&index), Arc::clone(&wish));
                thread::spawn(move || {
                    let mut at = 0;
                    for batch in [2, 1, ENTRIES - 3] {
                        at += batch;
                        index.store(at, Ordering::SeqCst);
                        let wish = wish.load(Ordering::SeqCst);
                        if packed_wants(wish, true, SIZE, place(at), batch) {
                            signal.send(()).unwrap();
                        }
                    }
                    signal
                })
            };
            let mut seen = 0;
            while seen != ENTRIES {
                let (at, wrap) = place(seen);
                let at = at | if wrap { PACKED_WRAP } else { 0 };
                let asks = u32::from(at) | u32::from(PACKED_DESCRIPTOR) << 16;
                wish.store(asks, Ordering::SeqCst);
                if index.load(Ordering::SeqCst) == seen {
                    signals.recv().unwrap();
                }
                wish.store(u32::from(PACKED_DISABLE) << 16, Ordering::SeqCst);
                seen = index.load(Ordering::SeqCst);
            }
            drop(producer.join().unwrap());
        },
        SCHEDULES,
    );
}

#[test]
fn an_index_is_passed_when_the_entry_at_it_was_used() {
    assert!(passed(5, 6, 5) && passed(5, 9, 3) && passed(u16::MAX, 0, u16::MAX));
    assert!(!passed(5, 5, 4) && !passed(5, 9, 6) && !passed(5, 5, 5));
}
