//! `ringdisk serve` with a front end of our own: sockets of every kind, control while it works,
//! errors of the image, ends.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::model::{BaseRule, FrontEnd, Request, Vm, ask, bits};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{Process, command, ok_words, patient, pause, run, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::program;
use crate::common::serving::{
    Daemon, Place, SIZE, ctl, judge, load, meanwhile, options, serve_command, stats,
};
use crate::common::tools::ringdisk;

/// Bytes of a disk, as its guest sees them.
fn capacity(vm: &mut Vm) -> u64 {
    let bytes = vm.front.config(0, 8).expect("the configuration");
    u64::from_le_bytes(bytes.try_into().expect("8 bytes")) * 512
}

#[test]
fn control_works_while_a_front_end_does() {
    let place = Place::new("qcow2");
    let daemon = place.start(&["--stats"]);
    let (mut vm, mut load) = (place.vm(true), load(1));
    let overlay = place.path("overlay.qcow2");
    let (socket, name) = (&place.socket, text(&overlay));
    let shown = meanwhile(&mut vm, &mut load, || {
        ctl(socket, &["snapshot", name]).ok();
        let shown = stats(socket);
        ctl(socket, &["resize", "+4M"]).ok();
        shown
    });
    assert!(shown["total"]["requests"].as_u64() > Some(0), "{shown}");
    assert_eq!(shown["layers"].as_array().map(Vec::len), Some(2), "{shown}");
    assert_eq!(capacity(&mut vm), SIZE + (4 << 20));
    assert_eq!(vm.status(1, Request::write((SIZE >> 9) + 8, vec![9; 4096])), 0);
    meanwhile(&mut vm, &mut load, || {
        ctl(socket, &["commit", "--quiet"]).ok();
        ctl(socket, &["resize", "8M"]).ends(2).says("--shrink");
        ctl(socket, &["snapshot", "--internal", "one"]).ok();
    });
    let shown = stats(socket);
    assert_eq!(shown["layers"].as_array().map(Vec::len), Some(1), "{shown}");
    assert!(ctl(socket, &["stats"]).ok().out.contains("reads/s"));
    load.read_all(&mut vm);
    let done = vm.run(0, Request::read((SIZE >> 9) + 8, 4096));
    assert_eq!((done.status, done.data), (0, vec![9; 4096]));
    ctl(socket, &["stop"]).ok();
    assert!(!socket.exists());
    vm.front.expect_end();
    let finished = daemon.ends(0);
    assert!(finished.stderr.contains("IOPS"), "--stats: {}", finished.output());
    place.judge(&mut load);
}

#[test]
fn two_disks_of_one_process_end_one_by_one() {
    let (one, two) = (Place::new("raw"), Place::new("qcow2"));
    let spec = |place: &Place, serial: &str| {
        let (image, socket) = (text(&place.image), text(&place.socket));
        format!("image={image},format={},socket={socket},queues=2,serial={serial}", place.format)
    };
    let (first, second) = (spec(&one, "first"), spec(&two, "second"));
    let daemon = Daemon::of(&mut serve_command(&["--disk", &first, "--disk", &second]));
    let (mut vm, mut load_one) = (one.vm(false), load(2));
    let (mut other, mut load_two) = (two.vm(true), load(3));
    for (vm, serial) in [(&mut vm, "first"), (&mut other, "second")] {
        let id = vm.run(0, Request::get_id(20)).data;
        assert_eq!(String::from_utf8_lossy(&id).trim_end_matches('\0'), serial);
    }
    load_one.run(&mut vm, 100);
    load_one.drain(&mut vm);
    meanwhile(&mut other, &mut load_two, || ctl(&one.socket, &["stop"]).ok());
    vm.front.expect_end();
    assert!(!one.socket.exists() && two.socket.exists());
    one.judge(&mut load_one);
    load_two.read_all(&mut other);
    daemon.stop(&[&two.socket]);
    two.judge(&mut load_two);
}

#[test]
fn it_connects_to_a_front_end_and_again_when_that_comes_back() {
    let place = Place::new("raw");
    let words = place.words();
    let connect = ["--connect", text(&place.socket)];
    let daemon = Daemon::of(&mut serve_command(&[&words[..], &connect].concat()));
    let mut load = load(4);
    for packed in [false, true] {
        // It tries again and again.
        let listener = UnixListener::bind(&place.socket).expect("bind");
        let (stream, _) = listener.accept().expect("it connects");
        let mut vm = Vm::started(FrontEnd::on(stream), options(packed));
        load.run(&mut vm, 100);
        load.drain(&mut vm);
        // The control socket goes by the same name.
        assert!(stats(&place.socket)["total"]["requests"].as_u64() >= Some(100));
        drop((vm, listener));
        std::fs::remove_file(&place.socket).expect("ours");
    }
    daemon.process.signal(Signal::TERM);
    daemon.ends(0);
    place.judge(&mut load);
}

#[test]
fn a_socket_of_a_service_manager_is_used_and_left() {
    let place = Place::new("raw");
    let listener = UnixListener::bind(&place.socket).expect("bind");
    // A front end may come before the process does.
    let early = UnixStream::connect(&place.socket).expect("the manager listens");
    let daemon = Daemon::with(&listener, "LISTEN_PID=$$ LISTEN_FDS=1", &place.words());
    let mut load = load(5);
    let mut vm = Vm::started(FrontEnd::on(early), options(true));
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    ctl(&place.socket, &["stop"]).ok();
    daemon.ends(0);
    assert!(place.socket.exists(), "the name is the manager's");
    place.judge(&mut load);
}

#[test]
fn a_descriptor_that_listens_or_is_connected_is_served() {
    let place = Place::new("raw");
    let words = place.words();
    let words = [&words[..], &["--socket-fd", "3"]].concat();
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    let daemon = Daemon::with(&theirs, "X=1", &words);
    drop(theirs);
    let mut load = load(6);
    let mut vm = Vm::started(FrontEnd::on(ours), options(false));
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    drop(vm);
    // Nobody can ever come again.
    daemon.ends(0);
    let listener = UnixListener::bind(&place.socket).expect("bind");
    let daemon = Daemon::with(&listener, "X=1", &words);
    for packed in [true, false] {
        let mut vm = place.vm(packed);
        load.run(&mut vm, 100);
        load.drain(&mut vm);
    }
    daemon.process.signal(Signal::TERM);
    daemon.ends(0);
    place.judge(&mut load);
}

#[test]
fn a_second_front_end_waits() {
    let place = Place::new("raw");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(false), load(7));
    load.run(&mut vm, 50);
    let mut second = FrontEnd::connect(&place.socket);
    assert!(second.send(ask::GET_FEATURES, 0, &[], &[]));
    load.run(&mut vm, 50);
    load.drain(&mut vm);
    second.socket().set_nonblocking(true).expect("a flag");
    let error = std::io::Read::read(second.socket(), &mut [0; 1]).expect_err("no answer yet");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    second.socket().set_nonblocking(false).expect("a flag");
    drop(vm);
    second.reply(ask::GET_FEATURES).expect("its turn");
    let mut vm = Vm::started(second, options(true));
    load.run(&mut vm, 50);
    load.drain(&mut vm);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// CPU time that a process has used, in 1/100 s (proc(5): utime and stime).
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
    let (_, fields) = stat.rsplit_once(')').expect("a name");
    fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(|ticks| ticks.parse::<u64>().expect("a number"))
        .sum()
}

#[test]
fn without_descriptors_a_front_end_waits_and_the_log_stays_short() {
    for refuses in [false, true] {
        let place = Place::new("raw");
        let mode = if refuses { "refuse" } else { "wait" };
        let daemon = place.start(&["--second-front-end", mode]);
        let mut vm = refuses.then(|| place.vm(false));
        let pid = daemon.process.pid();
        // What is open stays; nothing more can be.
        let limit = |soft: u32| {
            ok_words(&["prlimit", "--pid", &pid.to_string(), &format!("--nofile={soft}:")]);
        };
        limit(4);
        let cpu = cpu_ticks(pid);
        let mut second = FrontEnd::connect(&place.socket);
        pause(Duration::from_secs(2));
        let output = daemon.process.output();
        let lines = output.lines().filter(|line| line.contains("cannot be accepted")).count();
        assert_eq!(lines, 1, "{output}");
        let ticks = cpu_ticks(pid) - cpu;
        assert!(ticks < 20, "{ticks} ticks of CPU time in 2 s");
        if let Some(vm) = &mut vm {
            assert_eq!(vm.status(0, Request::read(0, 512)), 0);
        }
        limit(1024);
        match vm {
            Some(_) => second.expect_end(),
            None => drop(Vm::started(second, options(false))),
        }
    }
}

#[test]
fn a_second_front_end_is_sent_away() {
    let place = Place::new("raw");
    let daemon = place.start(&["--second-front-end", "refuse"]);
    let (mut vm, mut load) = (place.vm(false), load(8));
    load.run(&mut vm, 50);
    FrontEnd::connect(&place.socket).expect_end();
    load.run(&mut vm, 50);
    load.drain(&mut vm);
    drop(vm);
    // One that comes after it is the first.
    let vm = until(Duration::from_secs(10), || {
        Vm::start(FrontEnd::connect(&place.socket), options(false)).ok()
    });
    load.read_all(&mut vm.expect("it is served"));
    let finished = daemon.stop(&[&place.socket]);
    assert!(finished.stderr.contains("a second front end was sent away"), "{}", finished.output());
}

/// A file system of 4 MiB, with a place whose image does not fit into it.
struct Small {
    mountpoint: PathBuf,
    place: Place,
}

impl Small {
    fn new() -> Small {
        let place = Place::new("raw");
        let mountpoint = place.path("small");
        std::fs::create_dir(&mountpoint).expect("a directory");
        ok_words(&["mount", "-t", "tmpfs", "-o", "size=4M", "none", text(&mountpoint)]);
        let image = mountpoint.join("disk");
        images::sparse(&image, SIZE);
        Small { mountpoint, place: Place { image, ..place } }
    }

    fn grow(&self) {
        ok_words(&["mount", "-o", "remount,size=16M", text(&self.mountpoint)]);
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let words = ["umount", "-l", text(&self.mountpoint)];
        let _ = run(ringdisk_testkit::process::command(&words));
    }
}

fn piece(number: u64) -> Request {
    Request::write(number * 128, vec![u8::try_from(number + 1).expect("few"); 64 << 10])
}

#[test]
fn an_error_of_the_image_is_told_and_counted() {
    if !needs_root() {
        return;
    }
    let small = Small::new();
    let place = &small.place;
    let daemon = place.start(&[]);
    let mut vm = place.vm(false);
    let failed: Vec<u64> = (0..100).filter(|n| vm.status(0, piece(*n)) != 0).collect();
    assert!(failed.len() > 10, "4 MiB hold {} pieces", 100 - failed.len());
    assert!(!failed.contains(&0));
    let counters = stats(&place.socket);
    assert_eq!(counters["total"]["errors"], Value::from(failed.len()), "{counters}");
    for name in ["io-errors", "image-errors"] {
        assert_eq!(counters["device"][name], Value::from(failed.len()), "{counters}");
    }
    assert_eq!(counters["device"]["needs-reset"], false, "{counters}");
    assert!(counters["total"]["kicks"].as_u64() > Some(0), "{counters}");
    assert!(counters["total"]["calls"].as_u64() > Some(0), "{counters}");
    let shown = ctl(&place.socket, &["stats"]).ok().out;
    let wanted = format!("{} requests answered with an I/O error", failed.len());
    assert!(shown.contains(&wanted), "{shown}");
    // What is there can be read, and what failed works as soon as there is room.
    assert_eq!(vm.run(1, Request::read(0, 512)).data, [1; 512]);
    small.grow();
    for number in failed {
        assert_eq!(vm.status(0, piece(number)), 0, "piece {number}");
    }
    let finished = daemon.stop(&[&place.socket]);
    // The first one with where and why, the others as counts.
    let image = format!("(a write of '{}', ", text(&place.image));
    for text in ["a write of 65536 bytes at", "No space left on device", &image, "more times"] {
        assert!(finished.stderr.contains(text), "no '{text}': {}", finished.output());
    }
    assert!(finished.stderr.lines().count() < 10, "{}", finished.output());
}

#[test]
fn an_error_of_the_image_stops_it_and_nothing_is_lost() {
    if !needs_root() {
        return;
    }
    let small = Small::new();
    let place = &small.place;
    let daemon = place.start(&["--on-error", "stop"]);
    let mut vm = place.vm(true);
    let mut number = 0;
    let pending = loop {
        let id = vm.submit(0, piece(number)).expect("room");
        match vm.queues[0].wait_for(&vm.ram, patient(Duration::from_secs(1))) {
            Some(done) => assert_eq!((done.id, done.status), (id, 0)),
            None => break id,
        }
        number += 1;
        assert!(number < 100, "4 MiB are not full");
    };
    vm.front.expect_end();
    let finished = daemon.ends(12);
    assert!(finished.stderr.contains("stopped after an I/O error"), "{}", finished.output());
    // Once there is room, the next one answers it.
    small.grow();
    let daemon = place.start(&["--on-error", "stop"]);
    vm.resume(FrontEnd::connect(&place.socket), BaseRule::Used).expect("it goes on");
    let done = vm.queues[0].wait(&vm.ram);
    assert_eq!((done.id, done.status), (pending, 0));
    assert_eq!(vm.run(0, Request::read(number * 128, 1)).status, 1, "no whole sector");
    let done = vm.run(0, Request::read(number * 128, 512));
    assert_eq!(done.data, vec![u8::try_from(number + 1).expect("few"); 512]);
    daemon.stop(&[&place.socket]);
}

#[test]
fn a_device_that_its_guest_has_broken_says_why() {
    let place = Place::new("raw");
    let daemon = place.start(&[]);
    let mut vm = place.vm(false);
    let mut events = command(&[&program(), "ctl", text(&place.socket), "events"]);
    let events = Process::spawn(&mut events);
    // It follows when it tells of something.
    let follows = || {
        ctl(&place.socket, &["limit", "none"]).ok();
        events.output().contains("\"event\":\"limited\"").then_some(())
    };
    until(Duration::from_secs(10), follows).expect("it follows");
    assert_eq!(vm.status(0, Request::read(SIZE >> 9, 512)), 1, "past the end");
    // The index of the avail ring of the second virtqueue jumps.
    vm.queues[1].driver.areas().driver.store_u16(2, 1000, Ordering::Release);
    vm.queues[1].kick_anyway();
    let device = until(Duration::from_secs(10), || {
        let device = stats(&place.socket)["device"].clone();
        (device["needs-reset"] == true).then_some(device)
    });
    let device = device.expect("it needs a reset");
    let reason = device["broken-reason"].as_str().expect("a reason").to_owned();
    assert!(reason.contains("virtqueue 1: "), "{reason}");
    assert_eq!(
        (&device["io-errors"], &device["refused"], &device["image-errors"], &device["breaks"]),
        (&Value::from(1), &Value::from(1), &Value::from(0), &Value::from(1)),
        "{device}"
    );
    let shown = ctl(&place.socket, &["stats"]).ok().out;
    assert!(shown.contains(&format!("NEEDS A RESET by its driver: {reason}")), "{shown}");
    let listed = ringdisk(Path::new("/"), &["ps", "--json"]).ok().json();
    let mut listed = listed.as_array().expect("a list").iter();
    let one = listed.find(|one| one["where"] == text(&place.socket)).expect("it is listed");
    assert_eq!((&one["state"], &one["why"]), (&"needs-reset".into(), &reason.as_str().into()));
    let told = || events.output().contains("\"event\":\"needs-reset\"").then_some(());
    assert!(until(Duration::from_secs(10), told).is_some(), "{}", events.output());
    drop(events);
    vm.reset().expect("a reset");
    assert_eq!(vm.status(1, Request::read(0, 512)), 0);
    let device = stats(&place.socket)["device"].clone();
    assert_eq!((&device["needs-reset"], &device["breaks"]), (&Value::from(false), &Value::from(1)));
    let finished = daemon.stop(&[&place.socket]);
    for text in ["a read at sector 16384 is refused", "the device needs a reset"] {
        assert!(finished.stderr.contains(text), "{}", finished.output());
    }
}

#[test]
fn a_disk_that_can_only_be_read_stays_as_it_is() {
    let place = Place::new("raw");
    images::raw(&place.image, SIZE, 3);
    let daemon = place.start(&["--read-only"]);
    let mut vm = place.vm(false);
    assert!(vm.has(bits::READ_ONLY) && !vm.has(bits::DISCARD) && !vm.has(bits::CONFIG_WCE));
    let done = vm.run(0, Request::read(8, 4096));
    assert_eq!(done.data, images::pattern(3, 4096, 4096));
    assert_eq!(vm.status(0, Request::write(8, vec![0; 4096])), 1);
    // Another process may read it, too.
    let words = ["qemu-img", "compare", "-f", "raw", "-F", "raw"];
    ok_words(&[&words[..], &[text(&place.image), text(&place.image)]].concat());
    ctl(&place.socket, &["stop"]).ok();
    daemon.ends(0);
    assert_eq!(images::piece(&place.image, 4096, 4096), images::pattern(3, 4096, 4096));
}

#[test]
fn what_a_killed_process_left_is_replaced() {
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), load(9));
    load.run(&mut vm, 100);
    load.fill(&mut vm, 0);
    daemon.kill();
    assert!(place.socket.exists());
    let daemon = place.start(&[]);
    assert!(daemon.process.output().contains("was left by a process that is gone"));
    vm.resume(FrontEnd::connect(&place.socket), BaseRule::Used).expect("it goes on");
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    // Of what was about to be allocated something may be left.
    ok_words(&["qemu-img", "check", "-q", "-f", "qcow2", "-r", "leaks", text(&place.image)]);
    place.judge(&mut load);
}

#[test]
fn an_idle_disk_with_a_connected_machine_does_nothing() {
    let place = Place::new("raw");
    let daemon = place.start(&[]);
    let mut vm = place.vm(false);
    let mut load = load(10);
    load.run(&mut vm, 500);
    load.drain(&mut vm);
    pause(Duration::from_millis(300));
    let count = || -> Vec<Value> {
        let counters = stats(&place.socket);
        let queues = counters["queues"].as_array().expect("queues").clone();
        queues.iter().map(|queue| queue["ring"].clone()).collect()
    };
    let before = count();
    pause(Duration::from_secs(1));
    assert_eq!(count(), before, "it works for nobody");
    daemon.stop(&[&place.socket]);
}

#[test]
fn the_image_is_ours_alone() {
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let other = place.path("other");
    let words = place.words();
    let socket = ["--vhost-user-blk", text(&other)];
    let refused = run(serve_command(&[&words[..], &socket].concat()));
    assert_eq!(refused.code(), Some(5), "{}", refused.output());
    assert!(!other.exists());
    daemon.stop(&[&place.socket]);
    judge(&place.image, "qcow2", &mut load(1));
    assert!(Path::new(&place.image).exists());
}
