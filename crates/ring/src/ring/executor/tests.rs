//! Whose turn it is: counted in turns of others, never in time.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::Write;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use ringdisk_testkit::sim::Prng;

use crate::{Config, Fd, Ring, Runtime};

/// What happened to the tasks of a thread.
struct Turns {
    polled: Vec<u64>,
    /// For each task that was woken: how often each had been polled then.
    woken: Vec<Option<Vec<u64>>>,
    wakers: Vec<Option<Waker>>,
    /// The largest number of polls that one task got while another one was ready.
    worst: u64,
}

impl Turns {
    fn wake(&mut self, task: usize) {
        if let Some(waker) = &self.wakers[task] {
            waker.wake_by_ref();
            let polled = self.polled.clone();
            self.woken[task].get_or_insert(polled);
        }
    }

    fn is_polled(&mut self, task: usize) {
        self.polled[task] += 1;
        let before = self.woken[task].take();
        let others = before.iter().flatten().zip(&self.polled).enumerate();
        let most = others.filter(|(other, _)| *other != task).map(|(_, (then, now))| now - then);
        self.worst = self.worst.max(most.max().unwrap_or(0));
    }
}

/// One that the other is owed from before, and one for what it is woken for meanwhile.
#[test]
fn a_task_that_is_ready_waits_for_two_polls_of_each_other_at_most() {
    for seed in 0..50 {
        let mut choice = Prng::new(seed);
        let count = 2 + usize::try_from(choice.below(30)).expect("small");
        let turns = Rc::new(RefCell::new(Turns {
            polled: vec![0; count],
            woken: vec![None; count],
            wakers: vec![None; count],
            worst: 0,
        }));
        let mut runtime = Runtime::new(Config::default()).expect("io_uring");
        for task in 0..count {
            let (turns, mut prng) = (Rc::clone(&turns), Prng::new(seed << 8 | task as u64));
            runtime.ring().spawn(poll_fn(move |cx| {
                let mut turns = turns.borrow_mut();
                turns.wakers[task].get_or_insert_with(|| cx.waker().clone());
                turns.is_polled(task);
                // Some always have more to do, some have it now and then, some give it to others.
                if task % 3 == 0 || prng.coin() {
                    turns.wake(task);
                }
                for _ in 0..prng.below(3) {
                    turns.wake(usize::try_from(prng.below(count as u64)).expect("small"));
                }
                Poll::<()>::Pending
            }));
        }
        let seen = Rc::clone(&turns);
        let mut left = 200;
        runtime.block_on(poll_fn(|cx| {
            left -= 1;
            cx.waker().wake_by_ref();
            if left == 0 { Poll::Ready(()) } else { Poll::Pending }
        }));
        let seen = seen.borrow();
        assert!(seen.polled.iter().sum::<u64>() > 500, "{:?}", seen.polled);
        assert!(seen.worst <= 2, "seed {seed}: {} polls of one while another waited", seen.worst);
    }
}

/// An operation that the kernel ends while it is submitted.
async fn operation(ring: &Ring, readable: Fd) {
    ring.poll(readable, 1).await.expect("readable");
}

/// `greedy` tasks that always have another operation, beside one that has one after the other.
/// Returns the largest number of operations that ended between the moment at which it wants one and
/// its end.
fn others_meanwhile(greedy: u64, slots: u32) -> u64 {
    /// Of the one.
    const WANTED: u64 = 100;
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(b"x").expect("room");
    let readable = Fd::of(&reader);
    let mut runtime = Runtime::new(Config { slots, ..Config::default() }).expect("io_uring");
    let ring = runtime.ring().clone();
    let (done, stop) = (Rc::new(Cell::new(0_u64)), Rc::new(Cell::new(false)));
    // When the one began to want its operation, and the worst so far.
    let (since, worst) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    for _ in 0..greedy {
        let (ring, done, stop) = (ring.clone(), Rc::clone(&done), Rc::clone(&stop));
        let (worst, since) = (Rc::clone(&worst), Rc::clone(&since));
        runtime.ring().spawn(async move {
            while !stop.get() {
                operation(&ring, readable).await;
                done.set(done.get() + 1);
                // Where the other one is starved for ever this still ends.
                worst.set(worst.get().max(done.get() - since.get()));
                stop.set(stop.get() || done.get() - since.get() > 100_000);
            }
        });
    }
    let (own, count, begun, end) =
        (ring.clone(), Rc::clone(&done), Rc::clone(&since), Rc::clone(&stop));
    runtime.ring().spawn(async move {
        for _ in 0..WANTED {
            begun.set(count.get());
            operation(&own, readable).await;
        }
        end.set(true);
    });
    runtime.block_on(async {
        while !stop.get() {
            ring.sleep(Duration::from_millis(1)).await;
        }
    });
    worst.get()
}

#[test]
fn a_task_waits_for_a_few_operations_of_each_other_at_most() {
    for greedy in [1, 16, 200] {
        let worst = others_meanwhile(greedy, 512);
        println!("{greedy} beside one: {worst} operations meanwhile");
        assert!(worst <= 2 * greedy, "{greedy} beside one: {worst}");
    }
}

#[test]
fn a_task_gets_its_slot_in_turn_when_there_are_too_few() {
    for (greedy, slots) in [(16, 8), (64, 8), (200, 16)] {
        let worst = others_meanwhile(greedy, slots);
        println!("{greedy} beside one, {slots} slots: {worst} operations meanwhile");
        assert!(worst <= 3 * greedy, "{greedy} beside one, {slots} slots: {worst}");
    }
}
