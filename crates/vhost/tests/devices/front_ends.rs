//! Front ends that wait, come second, are silent, stop in the middle of a message or never stop;
//! and those that exist, with the features each takes (their orders of messages:
//! `session/tests/front_ends.rs`).

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ringdisk_testkit::model::{FrontEnd, Request, Vm, VmOptions, ask, bits};
use ringdisk_vhost::export::{Connector, Listen, Second};

use crate::common::{MIB, serve, simulated};

fn works(vm: &mut Vm) {
    assert_eq!(vm.status(0, Request::write(1, vec![4; 512])), 0);
    assert_eq!(vm.run(0, Request::read(1, 512)).data, [4; 512]);
}

#[test]
fn a_second_front_end_waits_until_the_first_has_gone() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(VmOptions::default());
    let mut second = served.front();
    assert!(second.send(ask::GET_FEATURES, 0, &[], &[]));
    second.socket().set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    let early = second.socket().read(&mut [0; 12]);
    assert_eq!(early.expect_err("no reply").kind(), std::io::ErrorKind::WouldBlock);
    works(&mut vm);
    drop(vm);
    second.socket().set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    second.reply(ask::GET_FEATURES).expect("a reply");
    works(&mut Vm::started(second, VmOptions::default()));
}

#[test]
fn nothing_is_answered_before_a_held_export_is_released() {
    let (_sim, disk) = simulated(MIB);
    let (served, never) = (
        serve(disk.clone(), |options| options.held = true),
        serve(disk, |options| options.held = true),
    );
    let mut early = served.front();
    assert!(early.send(ask::GET_FEATURES, 0, &[], &[]));
    early.socket().set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout");
    let error = early.socket().read(&mut [0; 12]).expect_err("no reply");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    served.export.release();
    early.socket().set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    early.reply(ask::GET_FEATURES).expect("a reply");
    works(&mut Vm::started(early, VmOptions::default()));
    // One that never is ends all the same.
    never.export.stop_handle().stop();
    never.export.wait().expect("a clean end");
}

#[test]
fn a_connector_brings_front_ends_and_is_asked_again() {
    let (_sim, disk) = simulated(MIB);
    let asked = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&asked);
    let (send, made) = channel();
    let connector = Connector::new(move |path: &Path| {
        assert_eq!(path, Path::new("/a/name"));
        // Nobody is there every other time.
        if count.fetch_add(1, Ordering::Relaxed).is_multiple_of(2) {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        let (ours, theirs) = UnixStream::pair()?;
        send.send(theirs).map_err(std::io::Error::other)?;
        Ok(ours.into())
    });
    let served = serve(disk, |options| {
        options.connector = connector;
        options.listen = Listen::Connect(PathBuf::from("/a/name"));
    });
    for _ in 0..2 {
        let front = made.recv_timeout(Duration::from_secs(20)).expect("it connects");
        works(&mut Vm::started(FrontEnd::on(front), VmOptions::default()));
    }
    drop(served);
    assert!(asked.load(Ordering::Relaxed) >= 4);
}

#[test]
fn a_second_front_end_is_sent_away_where_that_is_wanted() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |options| options.second = Second::Refuse);
    let mut vm = served.vm(VmOptions::default());
    for _ in 0..3 {
        served.front().expect_end();
    }
    works(&mut vm);
    drop(vm);
    let gone = Instant::now();
    while Vm::start(served.front(), VmOptions::default()).is_err() {
        assert!(gone.elapsed() < Duration::from_secs(20), "nobody is served any more");
    }
}

#[test]
fn half_a_message_ends_its_connection_and_nothing_else() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let message = [2_u32, 1, 8, 0, 0].map(u32::to_ne_bytes).concat();
    for len in 1..message.len() {
        let mut front = served.front();
        assert!(front.send_raw(&message[..len], &[]));
    }
    works(&mut served.vm(VmOptions::default()));
    // One that stays.
    let mut front = served.front();
    assert!(front.send_raw(&message[..13], &[]));
    front.expect_end();
    works(&mut served.vm(VmOptions::default()));
}

#[test]
fn a_silent_front_end_is_waited_for_and_keeps_nobody_from_stopping() {
    let (_sim, disk) = simulated(MIB);
    let (silent, other) = (serve(disk.clone(), |_| {}), serve(disk, |_| {}));
    let _front = silent.front();
    let mut vm = other.vm(VmOptions::default());
    std::thread::sleep(Duration::from_millis(50));
    works(&mut vm);
    let begin = Instant::now();
    drop(silent);
    assert!(begin.elapsed() < Duration::from_secs(5));
    works(&mut vm);
}

#[test]
fn a_silent_front_end_keeps_another_one_waiting_for_ten_seconds_and_no_longer() {
    let (_sim, disk) = simulated(MIB);
    let served = [Second::Wait, Second::Refuse]
        .map(|second| serve(disk.clone(), |options| options.second = second));
    // One that says nothing at all, and one that asks and takes nothing.
    let mut silent = served.each_ref().map(crate::common::Served::front);
    silent[1].get(ask::GET_FEATURES).expect("features");
    let begin = Instant::now();
    let mut second = served[0].front();
    assert!(second.send(ask::GET_FEATURES, 0, &[], &[]));
    second.reply(ask::GET_FEATURES).expect("a reply");
    let waited = begin.elapsed();
    assert!((9..20).contains(&waited.as_secs()), "{waited:?}");
    silent[0].expect_end();
    // Where a second one is sent away, it is so until then.
    while Vm::start(served[1].front(), VmOptions::default()).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(50));
    }
    silent[1].expect_end();
}

#[test]
fn a_front_end_that_is_alone_or_has_the_device_may_be_silent() {
    let (_sim, disk) = simulated(MIB);
    let served = [serve(disk.clone(), |_| {}), serve(disk, |_| {})];
    let alone = served[0].front();
    let mut owner = served[1].front();
    owner.tell(ask::SET_OWNER, &[], &[]).expect("taken");
    let mut second = served[1].front();
    assert!(second.send(ask::GET_FEATURES, 0, &[], &[]));
    std::thread::sleep(Duration::from_secs(12));
    works(&mut Vm::started(alone, VmOptions::default()));
    works(&mut Vm::started(owner, VmOptions::default()));
    second.reply(ask::GET_FEATURES).expect("a reply, now that nobody is before it");
}

#[test]
fn a_flood_of_messages_costs_time_of_its_own_export_only() {
    const MESSAGES: usize = 20_000;
    let (_sim, disk) = simulated(MIB);
    let (flooded, other) = (serve(disk.clone(), |_| {}), serve(disk, |_| {}));
    let mut vm = other.vm(VmOptions::default());
    let mut front = flooded.front();
    let mut socket = front.socket().try_clone().expect("a second descriptor");
    let begin = Instant::now();
    let writer = std::thread::spawn(move || {
        let message = [ask::GET_FEATURES, 1, 0].map(u32::to_ne_bytes).concat();
        let many = message.repeat(50);
        (0..MESSAGES / 50).for_each(|_| socket.write_all(&many).expect("it is read"));
    });
    for _ in 0..MESSAGES {
        front.reply(ask::GET_FEATURES).expect("a reply");
    }
    let time = begin.elapsed();
    writer.join().expect("all was written");
    println!("{MESSAGES} messages in {time:?}");
    works(&mut vm);
    works(&mut Vm::started(front, VmOptions::default()));
    // Messages that are refused, with descriptors: those are closed.
    for _ in 0..200 {
        let mut front = flooded.front();
        let null = std::fs::File::open("/dev/null").expect("open");
        let fds = [std::os::fd::AsFd::as_fd(&null); 32];
        assert!(front.send(ask::GET_FEATURES, 0, &[], &fds));
        front.expect_end();
    }
}

/// Bits that the front ends that exist take, and how they announce memory.
fn profiles() -> [(&'static str, u64, u64); 5] {
    let blk = bits::SEG_MAX
        | bits::BLK_SIZE
        | bits::FLUSH
        | bits::TOPOLOGY
        | bits::CONFIG_WCE
        | bits::MQ
        | bits::DISCARD
        | bits::WRITE_ZEROES;
    let rings = bits::INDIRECT | bits::EVENT_IDX;
    let modern = bits::VERSION_1 | bits::PROTOCOL;
    let vmm = bits::P_CONFIG | bits::P_MQ | bits::P_REPLY_ACK;
    let cloud = vmm | bits::P_MEM_SLOTS | bits::P_INFLIGHT | bits::P_LOG_SHMFD;
    [
        ("QEMU", blk | rings | modern, u64::MAX),
        ("Cloud Hypervisor", blk | rings | modern, cloud | bits::P_DEVICE_STATE),
        ("Firecracker", modern | bits::EVENT_IDX | bits::FLUSH, bits::P_CONFIG),
        ("crosvm", blk | rings | modern, vmm | bits::P_BACKEND_REQ | bits::P_DEVICE_STATE),
        ("libblkio", blk | modern | bits::EVENT_IDX, vmm | bits::P_MEM_SLOTS),
    ]
}

#[test]
fn the_front_ends_that_exist_start_stop_and_start_again() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    for (name, features, protocol) in profiles() {
        println!("{name}");
        let firmware =
            VmOptions { features: bits::VERSION_1 | bits::PROTOCOL, ..options(protocol) };
        let mut vm = served.vm(firmware);
        works(&mut vm);
        // What firmware leaves: ENABLE 0 and GET_VRING_BASE, then the driver of an operating system
        // with other features.
        vm.front.vring(ask::SET_VRING_ENABLE, 0, 0).expect("disabled");
        vm.front.vring_base(0).expect("a base");
        let offered = vm.front.get(ask::GET_FEATURES).expect("features");
        vm.features = offered & features;
        vm.front.set(ask::SET_FEATURES, vm.features).expect("other features");
        vm.options.queues = if vm.has(bits::MQ) { 4 } else { 1 };
        vm.inflight = None;
        vm.make_queues();
        vm.take_inflight().expect("an area for more virtqueues");
        for index in 0..vm.queues.len() {
            vm.start_queue(index, None).expect("it starts");
        }
        for index in 0..vm.queues.len() {
            assert_eq!(vm.status(index, Request::read(0, 4096)), 0);
        }
        works(&mut vm);
    }
}

fn options(protocol: u64) -> VmOptions {
    VmOptions { protocol, indirect: 16, ..VmOptions::default() }
}

#[test]
fn kicks_call_after_kick_and_rings_that_are_full_at_the_start() {
    // libblkio: SET_VRING_CALL comes after SET_VRING_KICK, and requests may be there before.
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    let mut vm = served.vm(VmOptions::default());
    vm.front.vring_base(0).expect("it stops");
    for sector in 0..8 {
        vm.submit(0, Request::read(sector, 512)).expect("room");
    }
    // The kick is lost: it went to an eventfd that nobody reads any more.
    rustix::io::read(&vm.queues[0].kick, &mut [0; 8]).expect("kicked");
    vm.start_queue(0, Some(0)).expect("it starts");
    vm.change_call(0).expect("a call after all");
    for _ in 0..8 {
        assert_eq!(vm.queues[0].wait(&vm.ram).status, 0);
    }
}

#[test]
fn what_was_negotiated_does_not_stay_for_the_next_front_end() {
    let (_sim, disk) = simulated(MIB);
    let served = serve(disk, |_| {});
    works(&mut served.vm(VmOptions::default()));
    let mut front: FrontEnd = served.front();
    assert!(front.send(ask::GET_QUEUE_NUM, 0, &[], &[]));
    front.expect_end();
}
