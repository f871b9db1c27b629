//! Eventfds on the real kernel.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::{Config, Errno, Fd, Ring, Runtime, Timeout};

const IN: u32 = libc::POLLIN as u32;

fn runtime() -> Runtime {
    Runtime::new(Config::default()).expect("io_uring")
}

fn event(flags: EventfdFlags) -> OwnedFd {
    eventfd(0, flags | EventfdFlags::CLOEXEC).unwrap()
}

fn add(fd: &OwnedFd, count: u64) {
    rustix::io::write(fd, &count.to_ne_bytes()).unwrap();
}

fn value(fd: &OwnedFd) -> Result<u64, Errno> {
    let mut bytes = [0; 8];
    rustix::io::read(fd, &mut bytes).map(|_| u64::from_ne_bytes(bytes))
}

/// Lets completions arrive.
async fn a_moment(ring: &Ring) {
    ring.sleep(Duration::from_millis(5)).await;
}

#[test]
fn a_signal_takes_no_slot_and_gives_no_completion() {
    for flags in [EventfdFlags::NONBLOCK, EventfdFlags::empty()] {
        let fd = event(flags);
        let mut runtime = runtime();
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            a_moment(&ring).await;
            let before = ring.counters().snapshot();
            for _ in 0..3 {
                ring.signal(Fd::of(&fd));
            }
            assert_eq!(ring.in_flight(), 0);
            a_moment(&ring).await;
            let after = ring.counters().snapshot();
            assert_eq!(after.sqes - before.sqes, 3 + 1, "three signals and the timer");
            assert_eq!(after.cqes - before.cqes, 1, "the timer");
        });
        // In blocking mode a thread of the kernel does it, perhaps later, and a read waits for it.
        let mut sum = 0;
        while sum < 3 {
            sum += value(&fd).expect("three signals");
        }
        assert_eq!(sum, 3, "{flags:?}");
    }
}

#[test]
fn a_signal_that_fails_is_lost_and_hurts_nobody() {
    let full = event(EventfdFlags::NONBLOCK);
    add(&full, u64::MAX - 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        ring.signal(Fd::of(&full));
        ring.signal(Fd::Raw(-1));
        a_moment(&ring).await;
        a_moment(&ring).await;
    });
    assert_eq!(ring.in_flight(), 0);
    assert_eq!(value(&full), Ok(u64::MAX - 1));
}

#[test]
fn each_event_is_heard_once_without_another_operation() {
    let fd = event(EventfdFlags::NONBLOCK);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        add(&fd, 1);
        let mut events = ring.poll_multishot(Fd::of(&fd), IN);
        assert_eq!(events.next().await, Ok(IN), "what was ready before counts");
        assert_eq!(value(&fd), Ok(1));
        for _ in 0..100 {
            let before = ring.counters().snapshot().sqes;
            let nothing = ring.within(Duration::from_micros(200), events.next()).await;
            assert_eq!(nothing, Err(Timeout));
            add(&fd, 2);
            add(&fd, 3);
            assert_eq!(events.next().await, Ok(IN));
            assert_eq!(value(&fd), Ok(5));
            let sqes = ring.counters().snapshot().sqes - before;
            assert_eq!(sqes, 1, "the timer only: the poll stays");
            assert_eq!(ring.in_flight(), 1);
        }
        drop(events);
        a_moment(&ring).await;
        assert_eq!(ring.in_flight(), 0, "cancelled");
    });
}

#[test]
fn events_that_come_while_nobody_asks_are_not_lost_nor_counted() {
    let (near, mut far) = UnixStream::pair().unwrap();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut events = ring.poll_multishot(Fd::of(&near), IN | libc::POLLHUP as u32);
        assert!(ring.within(Duration::from_millis(1), events.next()).await.is_err());
        for _ in 0..50 {
            far.write_all(b"a").unwrap();
            a_moment(&ring).await;
        }
        drop(far);
        a_moment(&ring).await;
        let all = events.next().await.unwrap();
        assert_eq!(all & (IN | libc::POLLHUP as u32), IN | libc::POLLHUP as u32);
    });
}

#[test]
fn a_descriptor_that_cannot_be_watched_is_an_error_each_time() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let mut events = ring.poll_multishot(Fd::Raw(-1), IN);
        assert_eq!(events.next().await, Err(Errno::BADF));
        assert_eq!(events.next().await, Err(Errno::BADF));
    });
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn a_runtime_ends_while_a_descriptor_is_watched() {
    let fd = event(EventfdFlags::NONBLOCK);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let mut events = ring.poll_multishot(Fd::of(&fd), IN);
    ring.spawn(async move {
        let _ = events.next().await;
    });
    runtime.block_on(a_moment(&ring));
    let start = std::time::Instant::now();
    drop(runtime);
    assert!(start.elapsed() < Duration::from_millis(500));
}
