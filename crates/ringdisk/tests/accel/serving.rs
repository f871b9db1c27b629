//! `ringdisk serve --accel`: virtqueues in the host kernel, and back. What needs the module runs
//! where it is loaded (tests/vm/run vhost-blk); `RINGDISK_FULL=1` for more round trips and kills.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;

use ringdisk_testkit::limits::{full, part_needs};
use ringdisk_testkit::model::{FrontEnd, Request, Vm, ask, bits};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, run, until};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;

use crate::common::accel::{
    PLAIN, accel, accelerated, accelerated_at, answered, becomes, by_threads, has_module, kills,
};
use crate::common::disks::disk;
use crate::common::serving::{Place, SIZE, ctl, load, meanwhile, options, serve_command, stats};

/// `writeback` in the configuration space.
const WRITEBACK: u32 = 32;

#[test]
fn what_cannot_be_accelerated_is_refused_or_served_as_ever() {
    let (raw, qcow2) = (Place::new("raw"), Place::new("qcow2"));
    let refused = |place: &Place, words: &[&str], code: i32, why: &str| {
        let socket = ["--vhost-user-blk", text(&place.socket), "--accel", "require"];
        let words = [&place.words()[..], &socket, words].concat();
        let finished = run(&mut serve_command(&words));
        assert_eq!(finished.code(), Some(code), "{why}: {}", finished.output());
        assert!(finished.stderr.contains(why), "{why}: {}", finished.output());
        assert!(!place.socket.exists(), "{why}");
    };
    if part_needs("kernel module vhost_blk", Path::new("/dev/vhost-blk").exists()) {
        refused(&qcow2, &PLAIN, 2, "the image is not raw");
        refused(&raw, &[], 2, "through the page cache (not with --cache none");
        refused(&raw, &["--cache", "none", "--on-error", "stop"], 2, "--on-error stop");
        refused(&raw, &["--cache", "none", "--discard", "ignore"], 2, "discards are ignored");
        refused(&raw, &["--cache", "none", "--logical-block-size", "8k"], 2, "8192 bytes");
        refused(&raw, &["--cache", "none", "--accel-engine", "bio"], 2, "block device");
    } else {
        refused(&raw, &PLAIN, 11, "vhost_blk");
    }
    // Where it is not insisted on.
    for place in [&raw, &qcow2] {
        let daemon = place.start(&[]);
        let mut vm = place.vm(true);
        assert!(vm.has(bits::PACKED), "without acceleration packed virtqueues are offered");
        let mut load = load(1);
        load.run(&mut vm, 50);
        load.drain(&mut vm);
        let shown = accel(place);
        assert_eq!(shown["on"], false, "{shown}");
        assert!(shown["reason"].is_string(), "{shown}");
        ctl(&place.socket, &["accel", "on"]).ends(2).says("since");
        assert!(ctl(&place.socket, &["stats"]).ok().out.contains("does not serve, since"));
        drop(vm);
        daemon.stop(&[&place.socket]);
        place.judge(&mut load);
    }
    let daemon = raw.start(&["--accel", "off"]);
    assert!(stats(&raw.socket).get("accel").is_none());
    ctl(&raw.socket, &["accel", "on"]).ends(2).says("--accel off");
    daemon.stop(&[&raw.socket]);
}

#[test]
fn the_kernel_serves_with_a_thread_for_each_virtqueue() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    assert!(!vm.has(bits::PACKED), "the kernel knows no packed virtqueues");
    let mut load = load(2);
    load.run(&mut vm, 500);
    load.drain(&mut vm);
    let shown = accel(&place);
    assert!(answered(&shown) >= 400, "{shown}");
    let counters = stats(&place.socket);
    assert_eq!(by_threads(&counters), 0, "queue threads have served requests");
    let total = counters["total"]["reads"].as_u64().zip(counters["total"]["writes"].as_u64());
    assert_eq!(total.map(|(reads, writes)| reads + writes), Some(answered(&counters["accel"])));
    assert_eq!((&shown["engine"], &shown["engine-in-force"]), (&"auto".into(), &"kiocb".into()));
    let pid = daemon.process.pid();
    let workers: BTreeSet<u64> =
        shown["workers"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    assert_eq!(workers.len(), 2, "{shown}");
    let queues = shown["queues"].as_array().expect("virtqueues");
    assert!(queues.iter().all(|it| it["in-kernel"] == true && it["state"] == "running"), "{shown}");
    let each: BTreeSet<u64> = queues.iter().filter_map(|it| it["worker"].as_u64()).collect();
    assert_eq!(each, workers, "each has a virtqueue: {shown}");
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a cgroup");
    for worker in workers {
        let of = |name: &str| fs::read_to_string(format!("/proc/{pid}/task/{worker}/{name}"));
        assert!(of("comm").expect("a thread of the process").starts_with("vhost-"));
        assert_eq!(of("cgroup").expect("its cgroup"), cgroup);
    }
    assert!(
        ctl(&place.socket, &["stats", "--internals"])
            .ok()
            .out
            .contains("serves the virtqueues (2 threads, kiocb)")
    );
    let id = vm.run(0, Request::get_id(20));
    assert_eq!(id.status, 0);
    assert!(ctl(&place.socket, &["accel", "on"]).ok().out.contains("serves the disk now"));
    drop(vm);
    let shown = becomes(&place, false);
    assert_eq!((&shown["engine-in-force"], &shown["reason"]), (&Value::Null, &Value::Null));
    let queues = shown["queues"].as_array().expect("virtqueues");
    assert!(queues.iter().all(|it| it["in-kernel"] == false && it["state"] == "idle"), "{shown}");
    assert!(ctl(&place.socket, &["accel", "on"]).ok().out.contains("as soon as a guest uses it"));
    // The next machine.
    let mut vm = place.vm(true);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// The control thread tells a guest of what was answered before it has another eventfd; nothing
/// that it does may wait for a front end.
#[test]
fn a_call_that_has_no_room_keeps_the_control_thread_from_nothing() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    let call = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).expect("room for all of it");
    vm.front.vring_fd(ask::SET_VRING_CALL, 0, Some(call.as_fd())).expect("it is taken");
    assert_eq!(accel(&place)["on"], true);
    vm.change_call(0).expect("one with room");
    assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
    drop(vm);
    daemon.stop(&[&place.socket]);
}

#[test]
fn workers_may_be_fewer_and_are_placed() {
    if !has_module() {
        return;
    }
    let words = ["--accel-workers", "1", "--accel-engine", "kiocb", "--cpus", "1"];
    let (place, daemon, mut vm) = accelerated(&words);
    let shown = accel(&place);
    let [worker] = shown["workers"].as_array().expect("workers").as_slice() else {
        panic!("{shown}")
    };
    let status = format!("/proc/{}/task/{worker}/status", daemon.process.pid());
    let status = fs::read_to_string(status).expect("a thread");
    assert!(status.contains("Cpus_allowed_list:\t1\n"), "{status}");
    let mut load = load(3);
    load.run(&mut vm, 300);
    load.drain(&mut vm);
    let shown = accel(&place);
    for queue in 0..2 {
        let queue = &shown["queues"][queue];
        assert!(queue["reads"].as_u64() > Some(0), "{shown}");
        assert_eq!(queue["bios"], 0, "{shown}");
    }
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn round_trips_under_load_lose_nothing() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    let mut load = load(4);
    let trips = if full() { 1000 } else { 20 };
    meanwhile(&mut vm, &mut load, || {
        for trip in 0..trips {
            for (word, on) in [("off", false), ("on", true)] {
                // It says when it is so; that is looked at each tenth time, since asking takes
                // longer than going.
                ctl(&place.socket, &["accel", word]).ok();
                assert!(trip % 10 != 0 || accel(&place)["on"] == on);
            }
        }
    });
    let shown = accel(&place);
    let served = by_threads(&stats(&place.socket));
    assert!(answered(&shown) > 100 && served > 100, "{served} {shown}");
    println!(
        "{trips} round trips: {} requests, {} of them in the kernel",
        load.answered,
        answered(&shown)
    );
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn a_snapshot_takes_the_disk_back_and_a_commit_gives_it() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    let mut load = load(5);
    for round in 0..3 {
        let overlay = place.path(&format!("overlay{round}.qcow2"));
        meanwhile(&mut vm, &mut load, || {
            ctl(&place.socket, &["snapshot", text(&overlay)]).ok();
            let shown = becomes(&place, false);
            let is_told = until(LIMIT, || {
                let reason = accel(&place)["reason"].as_str().map(str::to_owned);
                reason.filter(|reason| reason.contains("an overlay"))
            });
            assert!(is_told.is_some(), "{shown}");
            ctl(&place.socket, &["commit", "--quiet"]).ok();
            becomes(&place, true);
        });
    }
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn another_size_reaches_the_kernel() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    let mut load = load(6);
    meanwhile(&mut vm, &mut load, || ctl(&place.socket, &["resize", "+4M"]).ok());
    becomes(&place, true);
    let before = answered(&accel(&place));
    let behind = (SIZE >> 9) + 8;
    let done = until(LIMIT, || {
        Some(vm.status(1, Request::write(behind, vec![9; 4096]))).filter(|status| *status == 0)
    });
    assert_eq!(done, Some(0));
    assert_eq!(vm.run(0, Request::read(behind, 4096)).data, vec![9; 4096]);
    assert!(answered(&accel(&place)) > before);
    ctl(&place.socket, &["resize", "8M", "--shrink"]).ok();
    becomes(&place, true);
    assert_eq!(vm.status(1, Request::write(behind, vec![9; 4096])), 1, "past the end");
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn an_upgrade_goes_from_kernel_to_kernel() {
    if !has_module() {
        return;
    }
    let (place, mut daemon, mut vm) = accelerated(&[]);
    let mut load = load(7);
    for _ in 0..3 {
        let old = daemon;
        daemon = meanwhile(&mut vm, &mut load, || {
            let words = [&PLAIN[..], &["--accel", "require", "--upgrade"]].concat();
            let new = place.start(&words);
            old.ends(0);
            new
        });
        becomes(&place, true);
    }
    assert!(answered(&accel(&place)) < load.answered);
    // The kernel's threads are of the process in its sandbox, though they served before it was in
    // there.
    let task = |thread: &str| {
        let path = format!("/proc/{}/task/{thread}/status", daemon.process.pid());
        let status = fs::read_to_string(path).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        line.map(|line| line.trim().to_owned())
    };
    let own = task(&daemon.process.pid().to_string());
    let is_confined = until(LIMIT, || {
        let shown = accel(&place);
        let workers = shown["workers"].as_array().filter(|_| shown["on"] == true)?.clone();
        let all = workers.iter().all(|worker| task(&worker.to_string()) == own);
        (workers.len() == 2 && all).then_some(())
    });
    assert!(is_confined.is_some() && own.is_some(), "{own:?}: {}", accel(&place));
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn kills_with_requests_in_the_kernel_lose_nothing() {
    if !has_module() {
        return;
    }
    kills(&Place::new("raw"), if full() { 100 } else { 10 }, 200, 1500, 8);
}

#[test]
fn memory_logs_and_features_bring_virtqueues_back() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    let mut load = load(9);
    load.run(&mut vm, 100);
    // A migration begins, and is given up.
    let features = vm.features;
    vm.front.set(ask::SET_FEATURES, features | bits::LOG_ALL).expect("agreed");
    let shown = accel(&place);
    assert_eq!(shown["on"], false, "{shown}");
    assert!(shown["reason"].as_str().is_some_and(|why| why.contains("migrated")), "{shown}");
    load.run(&mut vm, 100);
    vm.front.set(ask::SET_FEATURES, features).expect("agreed");
    becomes(&place, true);
    load.run(&mut vm, 100);
    // A region more, and one less.
    let far = [1 << 40, 4096, 1 << 50, 0];
    let memory = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&memory, 4096).expect("memory");
    vm.front.add_region(far, std::os::fd::AsFd::as_fd(&memory)).expect("a region");
    becomes(&place, true);
    load.run(&mut vm, 100);
    vm.front.remove_region(far).expect("no region");
    becomes(&place, true);
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    // Another call eventfd.
    vm.change_call(0).expect("a call");
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    // Without a write cache.
    vm.front.set_config(WRITEBACK, &[0]).expect("write-through");
    load.run(&mut vm, 50);
    load.drain(&mut vm);
    assert_eq!(accel(&place)["on"], true);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn a_guest_that_breaks_a_ring_in_the_kernel_needs_a_reset() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    vm.queues[1].driver.areas().driver.store_u16(2, 1000, Ordering::Release);
    vm.queues[1].kick_anyway();
    let device = until(LIMIT, || {
        let device = stats(&place.socket)["device"].clone();
        (device["needs-reset"] == true).then_some(device)
    });
    let device = device.expect("it needs a reset");
    assert!(device["broken-reason"].as_str().is_some_and(|why| why.contains("virtqueue 1")));
    assert_eq!(accel(&place)["on"], false);
    vm.reset().expect("a reset");
    becomes(&place, true);
    assert_eq!(vm.status(1, Request::read(0, 512)), 0);
    daemon.stop(&[&place.socket]);
}

#[test]
fn a_machine_that_the_kernel_cannot_serve_is_served_here_or_refused() {
    if !has_module() {
        return;
    }
    // Packed virtqueues are offered to who insists, and forgo it.
    let place = Place::new("raw");
    let daemon = place.start(&[&PLAIN[..], &["--packed", "on"]].concat());
    let mut vm = place.vm(true);
    assert!(vm.has(bits::PACKED));
    ctl(&place.socket, &["accel", "on"]).ends(2).says("--packed on");
    let mut load = load(10);
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    drop(vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
    // A legacy driver.
    for (word, is_served) in [("auto", true), ("require", false)] {
        let daemon = place.start(&[&PLAIN[..], &["--accel", word]].concat());
        let mut options = options(false);
        options.features &= !bits::VERSION_1;
        let started = Vm::start(FrontEnd::connect(&place.socket), options);
        assert_eq!(started.is_ok(), is_served, "{word}: {}", daemon.process.output());
        let reason = accel(&place)["reason"].as_str().map(str::to_owned).unwrap_or_default();
        assert!(!is_served || reason.contains("VERSION_1"), "{reason}");
        drop(started);
        daemon.stop(&[&place.socket]);
    }
}

#[test]
fn where_virtqueues_are_is_said_once_for_each_machine() {
    if !has_module() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&["-v"]);
    let far = [1 << 40, 4096, 1 << 50, 0];
    let memory = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).expect("memory");
    rustix::fs::ftruncate(&memory, 4096).expect("memory");
    // Both take virtqueues back for a moment.
    vm.front.add_region(far, std::os::fd::AsFd::as_fd(&memory)).expect("a region");
    ctl(&place.socket, &["resize", "+4M"]).ok();
    becomes(&place, true);
    assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
    drop(vm);
    becomes(&place, false);
    let mut vm = place.vm(true);
    becomes(&place, true);
    assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
    drop(vm);
    let output = daemon.stop(&[&place.socket]).output();
    let said = output.matches("the kernel serves the virtqueues").count();
    assert_eq!(said, 2, "{output}");
}

/// Lets the next flush of a disk of scsi_debug fail, and no other. Source: its debugfs interface,
/// "Documentation" of the kernel: type 2 (a command fails), once, SYNCHRONIZE CACHE (10), CHECK
/// CONDITION with MEDIUM ERROR.
fn fail_the_next_flush(disk: &Path) {
    let disk = disk.canonicalize().expect("a disk");
    let name = disk.file_name().and_then(|name| name.to_str()).expect("a name");
    let address = fs::read_link(format!("/sys/block/{name}/device")).expect("a disk of SCSI");
    let address = address.file_name().and_then(|name| name.to_str()).expect("an address");
    let error = format!("/sys/kernel/debug/scsi_debug/{address}/error");
    fs::write(&error, "2 -1 0x35 0 0 0x2 0x3 0x11 0x0\n").expect(&error);
}

#[test]
fn a_write_cache_that_the_kernel_cannot_turn_off_brings_virtqueues_back() {
    let Some(disk) = disk("scsi") else { return };
    let place = &disk.place;
    let (daemon, mut vm) = accelerated_at(place, &[]);
    assert_eq!(vm.status(0, Request::write(4096, vec![7; 4096])), 0);
    // That of the kernel; the one after it is that of a queue thread.
    fail_the_next_flush(&place.image);
    vm.front.set_config(WRITEBACK, &[0]).expect("write-through, by the queue threads");
    let shown = accel(place);
    assert_eq!(shown["on"], false, "{shown}");
    let reason = shown["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("turn the write cache off"), "{shown}");
    let before = by_threads(&stats(&place.socket));
    assert_eq!(vm.status(1, Request::write(4096, vec![8; 4096])), 0);
    assert!(by_threads(&stats(&place.socket)) > before);
    // The administrator has mended it.
    ctl(&place.socket, &["accel", "on"]).ok();
    becomes(place, true);
    assert_eq!(vm.run(0, Request::read(4096, 4096)).data, vec![8; 4096]);
    drop(vm);
    daemon.stop(&[&place.socket]);
}

#[test]
fn an_image_that_got_shorter_is_refused_when_a_machine_starts_or_served_here() {
    if !has_module() {
        return;
    }
    for (word, is_served) in [("auto", true), ("require", false)] {
        let place = Place::new("raw");
        let daemon = place.start(&[&PLAIN[..], &["--accel", word]].concat());
        let image = fs::File::options().write(true).open(&place.image).expect("the image");
        image.set_len(SIZE / 2).expect("a shorter image");
        let started = Vm::start(FrontEnd::connect(&place.socket), options(false));
        assert_eq!(started.is_ok(), is_served, "{word}: {}", daemon.process.output());
        let shown = accel(&place);
        let reason = shown["reason"].as_str().unwrap_or_default();
        assert!(shown["on"] == false && reason.contains("shorter than the guest"), "{shown}");
        let said =
            until(LIMIT, || Some(daemon.process.output()).filter(|it| it.contains("shorter")));
        assert!(said.is_some(), "{word}: {}", daemon.process.output());
        assert_eq!(daemon.process.output().contains("--accel require: the kernel"), !is_served);
        if let Ok(mut vm) = started {
            assert_eq!(vm.status(0, Request::read(0, 4096)), 0);
        }
        // As long as it was, for the next one.
        image.set_len(SIZE).expect("an image");
        let mut vm = place.vm(true);
        becomes(&place, true);
        assert_eq!(vm.status(0, Request::read((SIZE - 4096) >> 9, 4096)), 0);
        drop(vm);
        daemon.stop(&[&place.socket]);
    }
}
