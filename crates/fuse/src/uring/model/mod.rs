//! Model of entries that move between queue threads, and of a start: the very source file
//! `ownership.rs`, built on simulated atomics, under orders of steps that the checker chooses.
//!
//! Promises: a failure prints the schedule, which repeats it; only tests build it. Around it: a
//! kernel that delivers the next request of an entry to the thread that committed the last one;
//! messages between threads, which may be refused, and among which are some of other mounts; a rule
//! that changes where entries belong at any moment.

#![allow(clippy::duplicate_mod, reason = "the model is the same source on other primitives")]

#[path = "../ownership.rs"]
mod ownership;
mod sync;

use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use shuttle::sync::mpsc::{Receiver, Sender, channel};
use shuttle::{check_random, thread};

use ownership::{Outcome, Ownership};

/// Schedules to try. Each takes well under a millisecond.
const SCHEDULES: usize = 5000;

const THREADS: usize = 2;
const ENTRIES: usize = 3;
/// Requests that each entry carries.
const REQUESTS: usize = 3;

/// What a queue thread finds in its ring.
#[derive(Clone, Copy, Debug)]
enum Completion {
    /// A request is in the entry.
    Request(usize),
    /// A message: the entry is yours.
    Handed(usize),
    /// Look whether the thread shall end.
    Wake,
}

/// An entry, as the kernel and the threads have it.
struct Entry {
    ownership: Ownership,
    /// A thread touches it: twice at once would be two owners.
    touched: AtomicBool,
    served: AtomicUsize,
}

/// A mount.
struct Mount {
    entries: Vec<Entry>,
    /// Where each entry belongs.
    places: Vec<AtomicUsize>,
    rings: Vec<Sender<Completion>>,
    draining: AtomicBool,
    /// Requests that have begun and not ended.
    in_flight: AtomicUsize,
    stop: AtomicBool,
    /// Entries that have carried all their requests, or were parked by the drain.
    at_rest: AtomicUsize,
}

impl Mount {
    fn new() -> (Arc<Mount>, Vec<Receiver<Completion>>) {
        let (rings, ends): (Vec<_>, Vec<_>) = (0..THREADS).map(|_| channel()).unzip();
        let entry = |_| Entry {
            ownership: Ownership::new(),
            touched: AtomicBool::new(false),
            served: AtomicUsize::new(0),
        };
        let mount = Mount {
            entries: (0..ENTRIES).map(entry).collect(),
            places: (0..ENTRIES).map(|_| AtomicUsize::new(0)).collect(),
            rings,
            draining: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            at_rest: AtomicUsize::new(0),
        };
        (Arc::new(mount), ends)
    }

    fn touch<T>(&self, index: usize, what: impl FnOnce() -> T) -> T {
        let entry = &self.entries[index];
        assert!(!entry.touched.swap(true, Ordering::SeqCst), "entry {index} has two owners");
        let out = what();
        assert!(entry.touched.swap(false, Ordering::SeqCst));
        out
    }

    /// A queue thread: until it is told to stop.
    fn run(&self, thread: usize, completions: &Receiver<Completion>) {
        while !self.stop.load(Ordering::SeqCst) {
            match completions.recv().expect("rings live as long as the mount") {
                Completion::Wake => {}
                Completion::Request(index) => self.carry(thread, index),
                Completion::Handed(index) => {
                    if self.entries[index].ownership.take() {
                        self.carry(thread, index);
                    }
                }
            }
        }
    }

    /// As `entry::live`: the entry is this thread's, with a request in it.
    fn carry(&self, thread: usize, index: usize) {
        if self.draining.load(Ordering::SeqCst) {
            self.at_rest.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let to = self.places[index].load(Ordering::SeqCst);
        if to != thread && self.hand_over(index, to) {
            return;
        }
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        self.touch(index, thread::yield_now);
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        // COMMIT: the next request comes to this ring.
        if self.entries[index].served.fetch_add(1, Ordering::SeqCst) + 1 < REQUESTS {
            self.post(thread, Completion::Request(index));
        } else {
            self.at_rest.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// As `entry::hand_over`. A message may be refused, or be delivered although its sender is told
    /// that it was not.
    fn hand_over(&self, index: usize, to: usize) -> bool {
        let ownership = &self.entries[index].ownership;
        self.touch(index, || ());
        ownership.send();
        let (delivered, told) =
            [(true, true), (false, false), (true, false)][thread_rng().gen_range(0..3)];
        if delivered {
            self.post(to, Completion::Handed(index));
        }
        told || !ownership.take_back()
    }

    /// Puts something into the ring of a thread; one that has ended does not mind.
    fn post(&self, thread: usize, completion: Completion) {
        let _ = self.rings[thread].send(completion);
    }

    fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
        (0..THREADS).for_each(|thread| self.post(thread, Completion::Wake));
    }
}

/// Starts the threads of a mount, with a request in each entry, and a rule that moves entries.
fn start() -> (Arc<Mount>, Vec<thread::JoinHandle<()>>) {
    let (mount, ends) = Mount::new();
    for index in 0..ENTRIES {
        mount.rings[index % THREADS].send(Completion::Request(index)).unwrap();
    }
    let mut threads: Vec<_> = ends
        .into_iter()
        .enumerate()
        .map(|(number, end)| {
            let mount = Arc::clone(&mount);
            thread::spawn(move || mount.run(number, &end))
        })
        .collect();
    let rule = Arc::clone(&mount);
    threads.push(thread::spawn(move || {
        for _ in 0..4 {
            let index = thread_rng().gen_range(0..ENTRIES);
            rule.places[index].store(thread_rng().gen_range(0..THREADS), Ordering::SeqCst);
            // A message of another mount, to a ring that has the number of its own.
            rule.post(thread_rng().gen_range(0..THREADS), Completion::Handed(index));
        }
    }));
    (mount, threads)
}

fn wait_until(mut done: impl FnMut() -> bool) {
    while !done() {
        thread::yield_now();
    }
}

#[test]
fn every_request_is_served_by_one_thread_wherever_entries_move() {
    check_random(
        || {
            let (mount, threads) = start();
            // An entry that is lost never comes to rest: the checker reports that this goes on for
            // ever.
            wait_until(|| mount.at_rest.load(Ordering::SeqCst) == ENTRIES);
            mount.end();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            for entry in &mount.entries {
                assert_eq!(entry.served.load(Ordering::SeqCst), REQUESTS);
                assert!(!entry.ownership.take(), "still on its way");
            }
        },
        SCHEDULES,
    );
}

#[test]
fn a_drain_brings_every_entry_to_rest_and_none_is_served_afterwards() {
    check_random(
        || {
            let (mount, threads) = start();
            mount.draining.store(true, Ordering::SeqCst);
            wait_until(|| mount.at_rest.load(Ordering::SeqCst) == ENTRIES);
            assert_eq!(mount.in_flight.load(Ordering::SeqCst), 0);
            let served: Vec<usize> =
                mount.entries.iter().map(|entry| entry.served.load(Ordering::SeqCst)).collect();
            mount.end();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let after: Vec<usize> =
                mount.entries.iter().map(|entry| entry.served.load(Ordering::SeqCst)).collect();
            assert_eq!(served, after);
        },
        SCHEDULES,
    );
}

#[test]
fn an_entry_that_fails_is_heard_of_by_the_start_or_by_the_mount() {
    check_random(
        || {
            let outcome = Arc::new(Outcome::new());
            // What queue threads tell the control of a mount that is live.
            let (ended, reasons) = channel();
            let entries: Vec<_> = [5, 107]
                .into_iter()
                .map(|errno| {
                    let (outcome, ended) = (Arc::clone(&outcome), ended.clone());
                    thread::spawn(move || {
                        if !outcome.fail(errno) {
                            assert_eq!(outcome.failure(), None, "it is live");
                            ended.send(errno).unwrap();
                        }
                    })
                })
                .collect();
            // The start looks first, and then decides.
            let live = match outcome.failure() {
                Some(errno) => Err(errno),
                None => outcome.go_live(),
            };
            entries.into_iter().for_each(|entry| entry.join().unwrap());
            drop(ended);
            let told: Vec<i32> = reasons.iter().collect();
            match live {
                Ok(()) => assert_eq!(told.len(), 2, "a failure of a live mount was lost"),
                Err(errno) => {
                    assert_eq!(outcome.failure(), Some(errno));
                    assert!(told.is_empty());
                }
            }
        },
        SCHEDULES,
    );
}
