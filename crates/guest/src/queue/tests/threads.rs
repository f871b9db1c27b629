//! A driver and a device on two threads, which sleep whenever they may: a wake-up that is missed
//! would leave both asleep.

use std::os::fd::OwnedFd;
use std::sync::Barrier;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::driver::DriverConfig;
use crate::{Chain, Layout, Queue, Segment, View};

use super::{Kit, config};

const CHAINS: u32 = 60_000;

fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1_u64.to_ne_bytes()).unwrap();
}

/// Sleeps until it is signalled. Panics when nothing comes: both sides sleep.
fn wait(fd: &OwnedFd, who: &str) {
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "{who} missed a wake-up");
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).unwrap();
}

fn serve(mut queue: Queue, view: &View, kick: &OwnedFd, call: &OwnedFd) {
    let mut chain = Chain::new();
    let mut tokens = Vec::new();
    let mut done = 0;
    while done < CHAINS {
        while let Some(token) = queue.pop(view, &mut chain).unwrap() {
            let mut head = [0; 4];
            assert!(chain.read(view, 0, &mut head) && chain.write(view, 0, &head));
            tokens.push(token);
        }
        done += u32::try_from(tokens.len()).unwrap();
        while let Some(token) = tokens.pop() {
            queue.complete(token, 4);
        }
        if queue.publish() {
            signal(call);
        }
        if done < CHAINS && !queue.enable_kicks() {
            wait(kick, "the device");
        }
        queue.disable_kicks();
    }
}

fn stress(kit: Kit) {
    let Kit { mut driver, queue, view, data, ram, .. } = kit;
    let memory = std::sync::Arc::clone(view.memory());
    let (kick, call) = (eventfd(0, EventfdFlags::CLOEXEC), eventfd(0, EventfdFlags::CLOEXEC));
    let (kick, call) = (&kick.unwrap(), &call.unwrap());
    drop(view);
    std::thread::scope(|scope| {
        scope.spawn(move || serve(queue, &View::new(memory), kick, call));
        let (mut sent, mut done) = (0_u32, 0);
        while done < CHAINS {
            let mut burst = sent % 7 + 1;
            while burst > 0 && sent < CHAINS && driver.free() >= 2 {
                let at = data + u64::from(sent % 64) * 64;
                let segments = [Segment { addr: at, len: 4 }, Segment { addr: at + 32, len: 4 }];
                // What an earlier chain has there is done: no more than 32 are in flight.
                ram.write(at, &sent.to_le_bytes());
                driver.add(&segments, 1).unwrap();
                sent += 1;
                burst -= 1;
            }
            if driver.publish() {
                signal(kick);
            }
            while driver.pop_used().is_some() {
                done += 1;
            }
            let is_full = driver.free() < 2 || sent == CHAINS;
            if done < CHAINS && is_full && !driver.enable_calls() {
                wait(call, "the driver");
            }
            driver.disable_calls();
        }
        let mut last = [0; 4];
        ram.read(data + u64::from((CHAINS - 1) % 64) * 64 + 32, &mut last);
        assert_eq!(last, (CHAINS - 1).to_le_bytes());
    });
}

fn configs() -> impl Iterator<Item = DriverConfig> {
    let layouts = [(Layout::Split, 64), (Layout::Packed, 50)];
    layouts.into_iter().flat_map(|(layout, size)| {
        [true, false].map(|event_idx| DriverConfig { event_idx, ..config(layout, size) })
    })
}

#[test]
fn two_threads_miss_no_wake_up() {
    configs().for_each(|config| stress(Kit::new(config)));
}

/// For the thread sanitizer (`./test races`): what one side writes before it shows a chain is
/// ordered before the other side's reads, by nothing but the rings.
#[test]
fn two_threads_on_one_mapping_do_not_race() {
    configs().for_each(|config| stress(Kit::on_one_mapping(config)));
}

/// That a sanitizer sees memory of a guest at all: here nothing says when the bytes may be read.
#[test]
#[ignore = "run by ./test races: a race on purpose"]
fn a_race_that_is_there() {
    let Kit { ram, data, .. } = &Kit::on_one_mapping(config(Layout::Split, 64));
    // One that is over before the other begins is ordered by the thread that starts both.
    let both = &Barrier::new(2);
    std::thread::scope(|scope| {
        for seed in 0..2_u8 {
            scope.spawn(move || {
                both.wait();
                (0..1000).for_each(|_| ram.write(*data, &[seed; 64]));
            });
        }
    });
}
