//! `serve --keep` and `serve --upgrade` together: a disk goes to a successor whose parent keeps it,
//! or to one that nobody keeps, and back. Whichever process is killed meanwhile, one goes on, and
//! the front end, which never connects again, sees each request answered once. `RINGDISK_KILLS=N`
//! or `RINGDISK_FULL=1` for more kills.

use std::time::{Duration, Instant};

use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{FrontEnd, Load, Request, Vm};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, command, run, until};
use ringdisk_testkit::sim::Prng;

use crate::common::program;
use crate::common::tools::child_of;
use crate::keep::{Server, Two, judge, kill, load, options};

fn kills() -> u64 {
    let wanted = std::env::var("RINGDISK_KILLS").ok().and_then(|n| n.parse().ok());
    // Two disks share them.
    wanted.unwrap_or(if full() { 400_u64 } else { 16 }).div_ceil(2)
}

/// Has a machine work until this process has ended. Gives its code.
fn ends(process: &mut Process, vm: &mut Vm, load: &mut Load) -> Option<i32> {
    let begun = Instant::now();
    loop {
        load.run(vm, 8);
        if let Some(status) = process.ended() {
            return status.code();
        }
        assert!(begun.elapsed() < LIMIT, "it does not end: {}", process.output());
    }
}

/// The next process takes the disk over; the processes before it end without a complaint.
fn upgrade(server: &mut Server, words: &[&str], vm: &mut Vm, load: &mut Load) {
    let new = server.successor(&[&["--upgrade"], words].concat());
    let mut old = std::mem::replace(&mut server.helper, new);
    let code = ends(&mut old, vm, load);
    let (old, new) = (old.output(), server.helper.output());
    assert_eq!(code, Some(0), "the old: {old}\nthe new: {new}");
    assert!(old.contains("handed over to another process"), "{old}");
    assert!(!complains(&old) && !complains(&new), "the old: {old}\nthe new: {new}");
    server.ready();
}

/// Whether a process says more than that a server was killed, or a successor.
fn complains(said: &str) -> bool {
    let expected = ["was killed by signal 9", "was not handed over", "ended while it handed"];
    let mut lines = said.lines().filter(|line| !expected.iter().any(|it| line.contains(it)));
    lines.any(|line| ["warning", "error", "panicked"].iter().any(|word| line.contains(word)))
}

/// A kept server is killed, and the machine goes on.
fn kill_server(server: &Server, vm: &mut Vm, load: &mut Load) {
    (0..3).for_each(|queue| {
        load.fill(vm, queue);
    });
    kill(server.server());
    load.run(vm, 20);
}

/// From hand to hand: kept or not, killed where it is kept.
fn travels(format: &str, packed: bool, inflight: bool, seed: u64) {
    let pid = |server: &Server| {
        std::fs::read_to_string(server.pidfile()).ok().and_then(|text| text.trim().parse().ok())
    };
    let mut server = Server::start(format, &[]);
    let pidfile = server.pidfile();
    let front = FrontEnd::connect(&server.socket);
    let mut vm = Vm::started(front, options(packed, inflight, seed));
    let mut load = load(seed);
    for words in [&["--keep"][..], &[], &["--keep"], &["--keep", "--daemonize"]] {
        load.run(&mut vm, 40);
        let words = [words, &["--pidfile", text(&pidfile)]].concat();
        if words.contains(&"--daemonize") {
            // Its parent ends when the disk is served.
            let daemon = server.successor(&[&["--upgrade"], &words[..]].concat());
            let mut old = std::mem::replace(&mut server.helper, daemon);
            assert_eq!(ends(&mut old, &mut vm, &mut load), Some(0), "{}", old.output());
            assert_eq!(ends(&mut server.helper, &mut vm, &mut load), Some(0));
            let stopped = server.ctl(&["stop"]);
            assert_eq!(stopped.code(), Some(0), "{}", stopped.output());
            break;
        }
        upgrade(&mut server, &words, &mut vm, &mut load);
        // The file names the process that was started, however often another one serves.
        let is_named = || (pid(&server) == Some(server.helper.pid())).then_some(());
        assert!(until(LIMIT, is_named).is_some(), "{:?}", pid(&server));
        if words.contains(&"--keep") {
            (0..2).for_each(|_| kill_server(&server, &mut vm, &mut load));
            assert_eq!(pid(&server), Some(server.helper.pid()));
        }
    }
    vm.front.expect_end();
    assert!(until(LIMIT, || (!pidfile.exists()).then_some(())).is_some(), "the pid file is left");
    assert!(until(LIMIT, || (!server.socket.exists()).then_some(())).is_some(), "the socket is");
    drop(vm);
    judge(&mut load, &server.image, format);
}

#[test]
fn a_raw_disk_on_split_rings_without_an_area_of_the_front_end() {
    travels("raw", false, false, 1);
}

#[test]
fn a_qcow2_disk_on_packed_rings_without_an_area_of_the_front_end() {
    travels("qcow2", true, false, 2);
}

#[test]
fn a_raw_disk_on_packed_rings_with_an_area_of_the_front_end() {
    travels("raw", true, true, 3);
}

/// What commands have changed goes along, and is there after a kill.
#[test]
fn an_overlay_limits_and_copy_on_read() {
    let mut server = Server::start("qcow2", &["--limit", "iops=100000"]);
    let mut vm = Vm::started(FrontEnd::connect(&server.socket), options(false, false, 4));
    let mut load = load(4);
    load.run(&mut vm, 30);
    let overlay = server.image.with_file_name("overlay.qcow2");
    for words in
        [&["snapshot", text(&overlay)][..], &["limit", "iops=200000"], &["copy-on-read", "on"]]
    {
        let done = server.ctl(words);
        assert_eq!(done.code(), Some(0), "{}", done.output());
    }
    load.run(&mut vm, 30);
    upgrade(&mut server, &["--keep", "--limit", "iops=100000"], &mut vm, &mut load);
    for _ in 0..2 {
        kill_server(&server, &mut vm, &mut load);
        let limit = until(LIMIT, || Some(server.ctl(&["limit"])).filter(|it| it.code() == Some(0)));
        assert_eq!(limit.expect("it answers").stdout.trim(), "iops=200000");
        let stats = server.ctl(&["stats"]).stdout;
        assert!(stats.contains("overlay.qcow2") && stats.contains("copy-on-read"), "{stats}");
    }
    load.drain(&mut vm);
    load.read_all(&mut vm);
    drop(vm);
    let (_directory, _) = server.stop();
    judge(&mut load, &overlay, "qcow2");
}

/// A process of the old pair or of the new one is killed at any moment of a hand-over: the machine
/// goes on, and no process has to be started for that.
fn survives(format: &str, packed: bool, seed: u64) {
    let mut prng = Prng::new(seed);
    let mut server = Server::start(format, &[]);
    let front = FrontEnd::connect(&server.socket);
    let mut vm = Vm::started(front, options(packed, false, seed));
    let mut load = load(seed);
    let mut usual = Duration::from_millis(200);
    let mut counts = [[0_u64; 2]; 2];
    for number in 0..kills() {
        load.run(&mut vm, prng.below(60));
        server.ready();
        let kills_old = prng.coin();
        let mut new = server.successor(&["--keep", "--upgrade"]);
        let begun = Instant::now();
        let moment = usual * u32::try_from(prng.below(100)).unwrap_or(0) / 80;
        while begun.elapsed() < moment {
            load.run(&mut vm, 2);
        }
        let helper = if kills_old { server.helper.pid() } else { new.pid() };
        // It may not have started one yet, or have ended.
        child_of(helper).into_iter().for_each(kill);
        // One of the two pairs ends; the other one serves.
        let begun = Instant::now();
        let new_serves = loop {
            load.run(&mut vm, 8);
            if server.helper.ended().is_some() {
                break true;
            }
            if new.ended().is_some() {
                break false;
            }
            let said = || format!("the old: {}\nthe new: {}", server.helper.output(), new.output());
            assert!(begun.elapsed() < LIMIT, "kill {number}: both go on: {}", said());
        };
        counts[usize::from(kills_old)][usize::from(new_serves)] += 1;
        let other = if new_serves { std::mem::replace(&mut server.helper, new) } else { new };
        for said in [other.output(), server.helper.output()] {
            assert!(!said.contains("panicked"), "kill {number}: {said}");
        }
        load.drain(&mut vm);
        assert_eq!(vm.status(0, Request::flush()), 0, "{}", server.helper.output());
        // An undisturbed one tells how long they take, and that what kills have left can be handed
        // over.
        if number % 4 == 1 {
            server.ready();
            let begun = Instant::now();
            upgrade(&mut server, &["--keep"], &mut vm, &mut load);
            usual = begun.elapsed();
        }
    }
    load.drain(&mut vm);
    load.read_all(&mut vm);
    println!("{format}: new killed, old killed: [old serves, new serves] {counts:?}; {usual:?}");
    drop(vm);
    server.ready();
    let (_directory, image) = server.stop();
    judge(&mut load, &image, format);
}

#[test]
fn a_raw_disk_goes_on_whoever_is_killed_in_a_hand_over() {
    survives("raw", false, 5);
}

#[test]
fn a_qcow2_disk_goes_on_whoever_is_killed_in_a_hand_over() {
    survives("qcow2", true, 6);
}

/// Two disks of one process, which go one after the other: each goes on in the process that has it,
/// whichever process is killed in between.
#[test]
fn two_disks_go_on_whoever_is_killed_in_their_hand_over() {
    let (mut prng, mut split) = (Prng::new(8), 0);
    for number in 0..kills() {
        let mut two = Two::start();
        let mut machines = [0, 1].map(|disk| two.machine(disk));
        for disk in 0..2 {
            let socket = two.socket(disk);
            let words = [&*program(), "ctl", text(&socket), "stats"];
            let answers = || (run(command(&words)).code() == Some(0)).then_some(());
            assert!(until(LIMIT, answers).is_some(), "{}", two.helper.output());
        }
        let mut new = two.process(&["--keep", "--upgrade"]);
        std::thread::sleep(Duration::from_micros(prng.below(150_000)));
        let helper = if prng.coin() { two.helper.pid() } else { new.pid() };
        child_of(helper).into_iter().for_each(kill);
        for _ in 0..3 {
            for machine in &mut machines {
                let said = || format!("{}\nthe new: {}", two.helper.output(), new.output());
                assert_eq!(machine.status(0, Request::flush()), 0, "kill {number}: {}", said());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        split += u64::from(two.helper.ended().is_none() && new.ended().is_none());
        for machine in machines {
            drop(machine);
        }
        for process in [&mut two.helper, &mut new] {
            process.signal(rustix::process::Signal::TERM);
            let output = process.output();
            assert!(process.wait(LIMIT).is_some(), "kill {number}: {output}");
            assert!(!output.contains("panicked"), "kill {number}: {output}");
        }
    }
    println!("of {} kills, {split} left each disk with another pair of processes", kills());
}
