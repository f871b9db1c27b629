//! Tests of the ring on the real kernel.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use crate::{
    Config, Errno, Fd, IoBuf, OpSet, RawCommand, Runtime, SharedMemory, SpinPolicy, Timeout,
    cpus_of_thread, pin_to_cpus,
};

fn runtime() -> Runtime {
    Runtime::new(Config::default()).expect("io_uring")
}

fn temp_file(content: &[u8]) -> std::fs::File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(content).unwrap();
    file
}

#[test]
fn read_at_offset_returns_the_bytes_and_short_at_the_end() {
    let file = temp_file(b"hello, ring");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(16, 16);
    let n = runtime.block_on(ring.read(Fd::of(&file), 7, &buf)).unwrap();
    assert_eq!((n, &buf.to_vec()[..4]), (4, &b"ring"[..]));
}

#[test]
fn vectored_write_then_read_through_a_registered_file() {
    let file = temp_file(b"");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let (a, b) = (IoBuf::new(3, 16), IoBuf::new(4, 16));
    a.copy_from_slice(0, b"abc");
    b.copy_from_slice(0, b"defg");
    let fixed = ring.register_file(&file).expect("registered");
    let out = IoBuf::new(7, 16);
    runtime.block_on(async {
        assert_eq!(ring.writev(fixed, 0, &[a.clone(), b.clone()]).await, Ok(7));
        assert_eq!(ring.read(fixed, 0, &out).await, Ok(7));
    });
    assert_eq!(out.to_vec(), b"abcdefg");
    ring.unregister_file(fixed);
}

#[test]
fn more_than_eight_pieces_are_refused() {
    let file = temp_file(b"");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let pieces = vec![IoBuf::new(1, 16); 9];
    assert_eq!(runtime.block_on(ring.readv(Fd::of(&file), 0, &pieces)), Err(Errno::INVAL));
}

#[test]
fn a_thread_does_not_sleep_past_the_only_completion() {
    let file = temp_file(b"0123456789");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(4, 4);
    // Nothing else is in flight: waiting for one completion more would be for ever.
    let read = ring.read(Fd::of(&file), 0, &buf).completes_inline();
    assert_eq!(runtime.block_on(read), Ok(4));
}

#[test]
fn fixed_buffers_read_and_write() {
    let file = temp_file(b"0123456789");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let memory = SharedMemory::new(65536, 4096);
    ring.register_buffers(Some(&memory), 3).unwrap();
    let buf = memory.fixed_buffer(0);
    runtime.block_on(async {
        assert_eq!(ring.read(Fd::of(&file), 2, &buf.slice(8..12)).await, Ok(4));
        assert_eq!(ring.write(Fd::of(&file), 0, &buf.slice(8..12)).await, Ok(4));
        assert_eq!(ring.read(Fd::of(&file), 0, &buf.slice(0..4)).await, Ok(4));
        // An empty slot, and memory that is not what is registered there.
        let wrong = memory.fixed_buffer(2);
        assert_eq!(ring.read(Fd::of(&file), 0, &wrong.slice(0..4)).await, Err(Errno::FAULT));
        let other = SharedMemory::new(65536, 4096).fixed_buffer(0);
        assert_eq!(ring.read(Fd::of(&file), 0, &other.slice(0..4)).await, Err(Errno::FAULT));
    });
    assert_eq!(&buf.to_vec()[..4], b"2345");
    assert_eq!(ring.register_buffers(None, 1), Err(Errno::BUSY));
}

#[test]
fn pages_that_are_not_there_are_an_error_and_never_touched() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    ring.register_buffers(None, 2).unwrap();
    let pages = IoBuf::client_pages(1, 8192);
    let (part, ours) = (pages.slice(4096..8192), IoBuf::new(4096, 4096));
    assert!(!part.is_ours() && !part.is_aligned(1) && part.address() == 4096);
    runtime.block_on(async {
        assert_eq!(ring.zero(&part).await, Err(Errno::FAULT));
        assert_eq!(ring.copy(&ours, &part).await, Err(Errno::FAULT));
        assert_eq!(ring.copy(&part, &ours).await, Err(Errno::FAULT));
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(ring.readv(Fd::of(&null), 0, &[part.clone(), ours]).await, Err(Errno::INVAL));
    });
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| part.fill(0))).is_err());
}

#[test]
fn bytes_of_ours_are_copied_and_zeroed_by_the_same_calls() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let (from, to) = (IoBuf::new(8, 8), IoBuf::new(16, 8));
    from.fill(7);
    to.fill(9);
    runtime.block_on(async {
        ring.copy(&from, &to).await.unwrap();
        ring.zero(&from).await.unwrap();
    });
    assert_eq!(to.to_vec(), [[7; 8], [9; 8]].concat());
    assert!(from.is_zero());
}

#[test]
fn errors_of_the_kernel_arrive_as_errno() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let result = runtime.block_on(ring.read(Fd::Raw(-1), 0, &IoBuf::new(8, 8)));
    assert_eq!(result, Err(Errno::BADF));
}

#[test]
fn fallocate_fsync_and_ftruncate_work() {
    let file = temp_file(b"");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        ring.fallocate(Fd::of(&file), 0, 0, 8192).await.unwrap();
        ring.fsync(Fd::of(&file), true).await.unwrap();
        let result = ring.ftruncate(Fd::of(&file), 4096).await;
        assert!(matches!(result, Ok(0) | Err(Errno::INVAL)), "{result:?}");
    });
    assert!(matches!(file.metadata().unwrap().len(), 4096 | 8192));
}

#[test]
fn sleep_waits_and_within_ends_a_stuck_operation() {
    let (stream, _other) = UnixStream::pair().unwrap();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let start = Instant::now();
    runtime.block_on(async {
        ring.sleep(Duration::from_millis(5)).await;
        let stuck = ring.read(Fd::of(&stream), 0, &IoBuf::new(8, 8));
        assert_eq!(ring.within(Duration::from_millis(5), stuck).await, Err(Timeout));
    });
    assert!(start.elapsed() >= Duration::from_millis(10));
    assert_eq!(ring.counters().snapshot().cancelled, 1);
}

#[test]
fn a_dropped_operation_keeps_its_buffer_until_its_completion() {
    let (stream, mut other) = UnixStream::pair().unwrap();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(8, 8);
    runtime.block_on(async {
        let mut op = Box::pin(ring.read(Fd::of(&stream), 0, &buf));
        assert!(std::future::poll_fn(|cx| Poll::Ready(op.as_mut().poll(cx).is_pending())).await);
        drop(op);
        assert_eq!(ring.in_flight(), 1, "the slot waits for the completion");
        ring.sleep(Duration::from_millis(1)).await;
        assert_eq!(ring.in_flight(), 0, "the cancelled read has completed");
    });
    other.write_all(b"later").unwrap();
    assert!(buf.is_zero(), "nothing was written after the cancellation");
}

#[test]
fn dropping_a_runtime_with_an_operation_in_flight_ends_it() {
    let (stream, _other) = UnixStream::pair().unwrap();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let (task_ring, fd) = (ring.clone(), Fd::of(&stream));
    ring.spawn(async move {
        let _ = task_ring.read(fd, 0, &IoBuf::new(8, 8)).await;
    });
    runtime.block_on(ring.sleep(Duration::from_millis(1)));
    let start = Instant::now();
    drop(runtime);
    assert!(start.elapsed() < Duration::from_millis(500));
}

#[test]
fn more_operations_than_slots_wait_and_all_complete() {
    let file = temp_file(&[7; 4096]);
    let mut runtime =
        Runtime::new(Config { slots: 8, entries: 4, ..Config::default() }).expect("io_uring");
    let ring = runtime.ring().clone();
    let done = Arc::new(AtomicU32::new(0));
    for number in 0..100u64 {
        let (ring, fd, done) = (ring.clone(), Fd::of(&file), Arc::clone(&done));
        ring.clone().spawn(async move {
            let buf = IoBuf::new(8, 8);
            assert_eq!(ring.read(fd, number, &buf).await, Ok(8));
            done.fetch_add(1, Ordering::Relaxed);
        });
    }
    runtime.block_on(async {
        while done.load(Ordering::Relaxed) < 100 {
            ring.yield_now().await;
        }
    });
    let counters = ring.counters().snapshot();
    assert!(counters.slots_full > 0 && counters.queue_full > 0, "{counters:?}");
}

#[test]
fn an_op_set_runs_all_at_once() {
    let file = temp_file(b"0123456789");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let bufs: Vec<IoBuf> = (0..4).map(|_| IoBuf::new(2, 2)).collect();
    let before = ring.counters().snapshot();
    runtime.block_on(async {
        let mut set = OpSet::<4>::new();
        for (at, buf) in bufs.iter().enumerate() {
            set.push(ring.read(Fd::of(&file), at as u64 * 2, buf));
        }
        set.wait(|_, result| assert_eq!(result, Ok(2))).await;
    });
    let after = ring.counters().snapshot();
    assert_eq!(bufs[3].to_vec(), b"67");
    assert_eq!(after.sqes - before.sqes, 4 + 1, "four reads and the poll of the eventfd");
    assert!(after.enters - before.enters <= 2);
}

#[test]
fn offloaded_work_comes_back_to_the_ring_thread() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let here = std::thread::current().id();
    let there = runtime.block_on(ring.offload(move || std::thread::current().id()));
    assert_ne!(here, there);
}

#[test]
fn offloaded_work_of_a_simulation_runs_at_once_on_its_thread() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    ring.offload_here();
    let here = std::thread::current().id();
    let work = ring.offload(move || std::thread::current().id());
    assert_eq!(runtime.block_on(work), here);
}

#[test]
fn other_threads_run_jobs_and_wake_tasks() {
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let remote = ring.remote();
    let ran = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&ran);
    let thread = std::thread::spawn(move || {
        for _ in 0..1000 {
            let counter = Arc::clone(&counter);
            remote.run(move |_| {
                counter.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    runtime.block_on(async {
        while ran.load(Ordering::Relaxed) < 1000 {
            ring.sleep(Duration::from_millis(1)).await;
        }
    });
    thread.join().unwrap();
}

#[test]
fn messages_reach_another_ring() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut runtime = runtime();
        let ring = runtime.ring().clone();
        sender.send(ring.raw_fd()).unwrap();
        runtime.block_on(async { (ring.receive().await, ring.receive().await) })
    });
    let target = receiver.recv().unwrap();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        ring.send_message(target, 7).await.unwrap();
        ring.send_message(target, 8).await.unwrap();
    });
    assert_eq!(thread.join().unwrap(), (7, 8));
}

#[test]
fn read_when_readable_waits_and_reads_with_one_completion() {
    let (stream, mut other) = UnixStream::pair().unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let buf = IoBuf::new(8, 8);
    let writer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(5));
        other.write_all(b"ping").unwrap();
        other
    });
    let before = ring.counters().snapshot().cqes;
    assert_eq!(runtime.block_on(ring.read_when_readable(Fd::of(&stream), &buf)), Ok(4));
    assert_eq!(ring.counters().snapshot().cqes - before, 1);
    assert_eq!(&buf.to_vec()[..4], b"ping");
    let mut other = writer.join().unwrap();
    let _ = other.set_nonblocking(true);
    assert!(other.read(&mut [0; 8]).is_err());
}

#[test]
fn a_cancelled_read_when_readable_ends() {
    let (stream, _other) = UnixStream::pair().unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let op = ring.read_when_readable(Fd::of(&stream), &IoBuf::new(8, 8));
        assert_eq!(ring.within(Duration::from_millis(2), op).await, Err(Timeout));
        ring.sleep(Duration::from_millis(2)).await;
    });
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn raw_commands_need_wide_entries_and_reach_the_driver() {
    let fuse = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    // A REGISTER of FUSE over io_uring on a descriptor that is not mounted.
    let command = RawCommand {
        fd: Fd::of(&fuse.as_fd()),
        operation: 1,
        address: 0,
        len: 2,
        fixed_buffer: None,
        command: [0; 80],
    };
    let mut narrow = runtime();
    let ring = narrow.ring().clone();
    // SAFETY: the command names no memory.
    let result = narrow.block_on(unsafe { ring.command(&command) });
    assert_eq!(result, Err(Errno::OPNOTSUPP));
    assert_eq!(ring.in_flight(), 0);
    let mut wide = Runtime::new(Config { sqe128: true, ..Config::default() }).unwrap();
    let ring = wide.ring().clone();
    // SAFETY: as above.
    let result = wide.block_on(unsafe { ring.command(&command) });
    assert!(matches!(result, Err(Errno::PERM | Errno::OPNOTSUPP)), "{result:?}");
}

#[test]
fn polling_that_does_not_pay_pauses_and_an_idle_ring_sleeps() {
    let mut spin = SpinPolicy::adaptive(Duration::from_micros(50));
    assert!(!spin.budget().is_zero());
    for _ in 0..8 {
        spin.missed();
    }
    assert!(spin.budget().is_zero(), "misses in a row start a pause");
    let mut trials = 0;
    for _ in 0..10_000 {
        if !spin.budget().is_zero() {
            trials += 1;
            spin.missed();
        }
    }
    assert!((5..30).contains(&trials), "{trials}");
    spin.paid();
    spin.slept(Duration::from_secs(1));
    assert!(spin.budget().is_zero(), "an idle ring does not poll");
}

#[test]
fn a_poll_that_loses_its_cpu_is_not_tried_again_for_a_while() {
    let mut spin = SpinPolicy::adaptive(Duration::from_micros(50));
    let lost = Duration::from_millis(3);
    spin.displaced(lost, Instant::now());
    assert!(spin.budget().is_zero());
    // Work that comes now was not found by polling.
    spin.paid();
    assert!(spin.budget().is_zero());
    let long_ago = Instant::now() - 100 * lost;
    spin.displaced(lost, long_ago);
    assert!(!spin.budget().is_zero(), "the next trial");
}

/// The scheduler makes a thread that polls wait for every other one that wants the CPU, and lets
/// one that wakes up go first.
#[test]
fn a_ring_whose_cpu_others_want_sleeps_and_does_not_poll() {
    let config =
        Config { spin: SpinPolicy::adaptive(Duration::from_millis(1)), ..Config::default() };
    let mut runtime = Runtime::new(config).expect("io_uring");
    if !runtime.ring().0.uring.can_poll() {
        return;
    }
    let first = cpus_of_thread().iter().next().expect("a CPU");
    pin_to_cpus(&[first].into_iter().collect()).expect("one CPU");
    let is_over = AtomicBool::new(false);
    let counters = thread::scope(|scope| {
        for _ in 0..3 {
            // Threads have the CPUs of the one that makes them.
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let ring = runtime.ring().clone();
        runtime.block_on(async {
            for _ in 0..200 {
                ring.sleep(Duration::from_micros(500)).await;
            }
        });
        is_over.store(true, Ordering::Relaxed);
        ring.counters().snapshot()
    });
    let polls = counters.polls_paid + counters.polls_missed;
    assert!((1..100).contains(&polls), "{counters:?}");
}

#[test]
fn an_idle_ring_uses_no_cpu() {
    let config =
        Config { spin: SpinPolicy::adaptive(Duration::from_micros(50)), ..Config::default() };
    let mut runtime = Runtime::new(config).unwrap();
    let ring = runtime.ring().clone();
    let before = ring.counters().snapshot().enters;
    runtime.block_on(ring.sleep(Duration::from_millis(200)));
    assert!(ring.counters().snapshot().enters - before < 10);
}

#[test]
fn a_poll_finds_what_ends_meanwhile_and_is_held_back_where_nothing_can() {
    let cap = Duration::from_secs(10);
    for held in [false, true] {
        let mut runtime =
            Runtime::new(Config { spin: SpinPolicy::adaptive(cap), ..Config::default() })
                .expect("io_uring");
        let ring = runtime.ring().clone();
        ring.hold_polling(held);
        runtime.block_on(async {
            // One that is over before the poll begins does not count, and on a busy machine there
            // is no poll for a while.
            for done in 0..if held { 40 } else { 20_000 } {
                if done >= 20 && ring.counters().snapshot().polls_paid >= 20 {
                    break;
                }
                ring.sleep(Duration::from_micros(500)).await;
            }
        });
        let counters = ring.counters().snapshot();
        let can_poll = !held && runtime.ring().0.uring.can_poll();
        assert_eq!(counters.polls_paid >= 20, can_poll, "{counters:?}");
        assert_eq!(counters.polls_missed, 0, "{counters:?}");
    }
}
