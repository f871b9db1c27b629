//! `ringdisk serve` is killed at any moment under load, and another one goes on: every request is
//! answered exactly once, and the disk holds what was answered. `RINGDISK_KILLS=N` or
//! `RINGDISK_FULL=1` (1,000) for more kills.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{
    BaseRule, Discards, FrontEnd, Load, LoadOptions, Refused, Vm, VmOptions, bits,
};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, run};
use ringdisk_testkit::sim::Prng;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::{MIB, program};

const SIZE: u64 = 8 * MIB;
/// `writeback` in the configuration space.
const WRITEBACK: u32 = 32;

fn kills() -> u64 {
    let wanted = std::env::var("RINGDISK_KILLS").ok().and_then(|n| n.parse().ok());
    // Four disks share them.
    wanted.unwrap_or(if full() { 10_000_u64 } else { 1000 }).div_ceil(4)
}

struct Daemon {
    image: PathBuf,
    format: &'static str,
    socket: PathBuf,
}

impl Daemon {
    fn start(&self) -> Running {
        let mut command = Command::new(program());
        command.args(["serve", "--format", self.format, "--queues", "3", "--threads", "2"]);
        command.arg("--vhost-user-blk").arg(&self.socket).arg(&self.image);
        Running(Process::spawn(&mut command), self.socket.clone())
    }
}

/// A process that serves; says what it has said when the test fails.
struct Running(Process, PathBuf);

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let stats = run(command(&[&program(), "ctl", text(&self.1), "stats"]));
            eprintln!("the last process: {}\n{}", self.0.output(), stats.output());
        }
    }
}

fn kill_after(pid: u32, time: Duration) {
    std::thread::sleep(time);
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(pid, Signal::KILL).expect("it runs");
}

/// A connection to a process that has just been started; it may be killed meanwhile.
fn connect(process: &mut Process, socket: &Path) -> Option<FrontEnd> {
    let begin = std::time::Instant::now();
    loop {
        if let Ok(stream) = std::os::unix::net::UnixStream::connect(socket) {
            return Some(FrontEnd::on(stream));
        }
        if process.ended().is_some() {
            return None;
        }
        assert!(begin.elapsed() < LIMIT, "it does not listen: {}", process.output());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A kill may leak clusters, which nobody uses; it must leave no other error.
fn assert_no_errors(image: &Path) {
    const ONLY_LEAKS: i32 = 3;
    let checked = run(command(&["qemu-img", "check", "-f", "qcow2", text(image)]));
    assert!(matches!(checked.code(), Some(0 | ONLY_LEAKS)), "{}", checked.output());
}

/// What the disk shows, from its image.
fn content(daemon: &Daemon) -> Vec<u8> {
    let content = match daemon.format {
        "raw" => daemon.image.clone(),
        _ => {
            assert_no_errors(&daemon.image);
            images::reference(&daemon.image, daemon.format)
        }
    };
    std::fs::read(content).expect("the image")
}

/// Starts processes until one goes on with the guest; some are killed while they begin.
///
/// * `kill`: number of the kill before, for messages.
fn go_on(daemon: &Daemon, vm: &mut Vm, load: &mut Load, prng: &mut Prng, kill: u64) -> Running {
    loop {
        let mut process = daemon.start();
        let early = prng.below(4) == 0;
        let pause = Duration::from_micros(prng.below(20_000));
        let pid = process.0.pid();
        let rule = match prng.below(3) {
            0 => BaseRule::Used,
            1 => BaseRule::Avail,
            _ => BaseRule::Beginning,
        };
        let resumed = std::thread::scope(|scope| {
            let killer = early.then(|| scope.spawn(move || kill_after(pid, pause)));
            let resumed = resume(daemon, &mut process, vm, rule, if early { 0 } else { 3 });
            if let Some(killer) = killer {
                killer.join().expect("it was killed");
            }
            resumed
        });
        match resumed {
            Ok(()) if !early => return process,
            // Killed while it began; what it answered counts.
            _ if early => {
                process.0.wait(LIMIT).expect("it was killed");
                load.reap(vm);
            }
            other => panic!("kill {kill}: {other:?}: {}", process.0.output()),
        }
    }
}

/// Has the guest go on with a process. The child of a process that was killed in its start had the
/// socket for a moment: then it is tried again, as VMMs do.
///
/// * `again`: how often at most.
fn resume(
    daemon: &Daemon,
    process: &mut Running,
    vm: &mut Vm,
    rule: BaseRule,
    again: u32,
) -> Result<(), Refused> {
    let mut tries = 0;
    loop {
        let front = connect(&mut process.0, &daemon.socket).ok_or(Refused::Gone)?;
        match vm.resume(front, rule) {
            Err(Refused::Gone) if tries < again && process.0.ended().is_none() => tries += 1,
            resumed => return resumed,
        }
    }
}

/// Serves, kills and goes on.
///
/// * `through`: the driver has turned the write cache off.
fn survive(format: &'static str, packed: bool, through: bool, seed: u64) {
    let directory = scratch();
    let image = directory.path().join("disk");
    match format {
        "raw" => images::sparse(&image, SIZE),
        _ => images::qcow2(&image, "8M", "cluster_size=4k"),
    }
    let daemon = Daemon { image, format, socket: directory.path().join("socket") };
    let mut process = daemon.start();
    let options = VmOptions {
        features: !bits::LOG_ALL & if packed { u64::MAX } else { !bits::PACKED },
        queues: 3,
        size: 64,
        indirect: 16,
        regions: 2,
        seed,
        ..VmOptions::default()
    };
    let front = connect(&mut process.0, &daemon.socket);
    let front = front.unwrap_or_else(|| panic!("it ended: {}", process.0.output()));
    let mut vm = Vm::started(front, options);
    if through {
        vm.front.set_config(WRITEBACK, &[0]).expect("CONFIG_WCE was agreed on");
    }
    let mut prng = Prng::new(seed);
    let block = if seed.is_multiple_of(2) { 512 } else { 4096 };
    let (bytes_max, discards) = (64 << 10, Discards::Zero);
    let load = LoadOptions { size: SIZE, block, bytes_max, segments: 8, depth: 8, discards, seed };
    let mut load = Load::new(load);
    let kills = kills();
    // Requests that a killed process left behind.
    let mut left = 0;
    for kill in 1..=kills {
        load.run(&mut vm, prng.below(120));
        (0..3).for_each(|queue| {
            load.fill(&mut vm, queue);
        });
        kill_after(process.0.pid(), Duration::from_micros(prng.below(1500)));
        let ended = process.0.wait(LIMIT).expect("it was killed");
        assert!(ended.code().is_none(), "it ended by itself ({ended}): {}", process.0.output());
        load.reap(&mut vm);
        left += load.in_flight();
        // The guest goes on while nobody serves it.
        if prng.coin() {
            (0..3).for_each(|queue| {
                load.fill(&mut vm, queue);
            });
        }
        process = go_on(&daemon, &mut vm, &mut load, &mut prng, kill);
        if through {
            assert_eq!(vm.front.config(WRITEBACK, 1).expect("a byte"), [0], "kill {kill}");
        }
    }
    load.drain(&mut vm);
    load.read_all(&mut vm);
    println!(
        "{format}, packed {packed}: {kills} kills left {left} requests behind, of {}",
        load.answered
    );
    assert!(left > 0, "all kills came too late");
    drop(vm);
    process.0.signal(Signal::TERM);
    let ended = process.0.wait(LIMIT).expect("it was asked to end");
    assert!(ended.success(), "{}", process.0.output());
    load.judge(&content(&daemon));
}

#[test]
fn a_raw_disk_on_split_rings_survives_kills() {
    survive("raw", false, false, 1);
}

#[test]
fn a_raw_disk_on_packed_rings_survives_kills_and_stays_write_through() {
    survive("raw", true, true, 2);
}

#[test]
fn a_qcow2_disk_on_split_rings_survives_kills_and_stays_write_through() {
    survive("qcow2", false, true, 3);
}

#[test]
fn a_qcow2_disk_on_packed_rings_survives_kills() {
    survive("qcow2", true, false, 4);
}
