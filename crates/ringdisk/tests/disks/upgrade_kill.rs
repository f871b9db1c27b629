//! A hand-over in which the old or the new process is killed at any moment, under load: one of them
//! serves, or, as after every kill, the next one that is started; every request is answered exactly
//! once, and the disk holds what was answered. `RINGDISK_KILLS=N` or `RINGDISK_FULL=1` (1,000) for
//! more kills.

use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{BaseRule, FrontEnd, Load, Vm};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, command, run};
use ringdisk_testkit::sim::Prng;
use rustix::process::{Pid, Signal, kill_process};

use crate::common::serving::{Daemon, Place, judge, load, options, serve_command};

fn kills() -> u64 {
    let wanted = std::env::var("RINGDISK_KILLS").ok().and_then(|n| n.parse().ok());
    // Two disks share them.
    wanted.unwrap_or(if full() { 1000_u64 } else { 24 }).div_ceil(2)
}

/// What came of the hand-overs, by who was killed.
#[derive(Debug, Default)]
struct Counts {
    old_serves: u64,
    new_serves: u64,
    /// Among these: the old one had not said that it is over.
    of_a_dead_one: u64,
    nobody: u64,
}

/// A disk with its machine.
struct Scene {
    place: Place,
    vm: Vm,
    load: Load,
    prng: Prng,
}

impl Scene {
    /// Keeps the machine busy, whether a process serves it or not.
    fn step(&mut self) {
        self.load.reap(&mut self.vm);
        (0..2).for_each(|queue| {
            self.load.fill(&mut self.vm, queue);
        });
        std::thread::sleep(Duration::from_micros(200));
    }

    fn successor(&self) -> Process {
        let words = self.place.words();
        let more = ["--upgrade", "--vhost-user-blk", text(&self.place.socket)];
        Process::spawn(&mut serve_command(&[&words[..], &more].concat()))
    }

    /// Whether a process has the disk: it answers, or has ended. `others` are gone.
    fn serves(&mut self, process: &mut Process) -> bool {
        self.load.reap(&mut self.vm);
        let (before, begun) = (self.load.answered, Instant::now());
        loop {
            self.step();
            if self.load.answered > before {
                return true;
            }
            if process.ended().is_some() {
                return false;
            }
            assert!(begun.elapsed() < LIMIT, "it hangs: {}", process.output());
        }
    }

    /// The next process after one that was killed and left nobody.
    fn start_anew(&mut self) -> Process {
        let process = self.place.start(&[]).process;
        let rule = [BaseRule::Used, BaseRule::Avail][usize::from(self.prng.coin())];
        let front = FrontEnd::connect(&self.place.socket);
        let resumed = self.vm.resume(front, rule);
        assert!(resumed.is_ok(), "{resumed:?}: {}", process.output());
        process
    }
}

fn kill(process: &mut Process) {
    let pid = i32::try_from(process.pid()).ok().and_then(Pid::from_raw).expect("a pid");
    if process.ended().is_none() {
        kill_process(pid, Signal::KILL).expect("it was not waited for");
    }
    process.wait(LIMIT).expect("it was killed");
}

/// Kills in hand-overs, and goes on.
fn survive(format: &'static str, packed: bool, seed: u64) {
    let place = Place::new(format);
    let mut process = place.start(&[]).process;
    let vm = Vm::started(FrontEnd::connect(&place.socket), options(packed));
    let mut scene = Scene { place, vm, load: load(seed), prng: Prng::new(seed) };
    // How long one takes that nobody disturbs; a moment more than that is tried, too.
    let mut usual = Duration::from_millis(50);
    let mut counts = [Counts::default(), Counts::default()];
    for number in 1..=kills() {
        let kills_old = scene.prng.coin();
        let requests = scene.prng.below(100);
        scene.load.run(&mut scene.vm, requests);
        // One that serves since this moment may not wait for a successor yet.
        process = Daemon { process }.ready().process;
        let mut new = scene.successor();
        let (begun, micros) = (Instant::now(), u64::try_from(usual.as_micros()).unwrap_or(0));
        let moment = Duration::from_micros(scene.prng.below(micros * 5 / 4));
        while begun.elapsed() < moment {
            scene.step();
        }
        let count = &mut counts[usize::from(kills_old)];
        if kills_old {
            kill(&mut process);
            // It had ended by itself where the moment came too late.
            if scene.serves(&mut new) {
                count.new_serves += 1;
                let said = "ended while it handed the disk over";
                count.of_a_dead_one += u64::from(new.output().contains(said));
                process = new;
            } else {
                let output = new.output();
                assert!(!output.contains("panicked"), "kill {number}: {output}");
                count.nobody += 1;
                process = scene.start_anew();
            }
        } else {
            kill(&mut new);
            if scene.serves(&mut process) {
                count.old_serves += 1;
            } else {
                let output = process.output();
                assert!(!output.contains("panicked"), "kill {number}: {output}");
                assert!(output.contains("handed over"), "kill {number}: it ended: {output}");
                count.nobody += 1;
                process = scene.start_anew();
            }
        }
        assert!(!process.output().contains("panicked"), "{}", process.output());
        // An undisturbed one tells how long they take now, and that the state that kills have left
        // can be handed over.
        if number % 4 == 1 {
            let mut old = Daemon { process }.ready().process;
            let begun = Instant::now();
            process = scene.successor();
            while old.ended().is_none() {
                let said = || format!("the old: {}\nthe new: {}", old.output(), process.output());
                assert!(begun.elapsed() < LIMIT, "{}", said());
                scene.step();
            }
            usual = begun.elapsed();
        }
    }
    let Scene { place, mut vm, mut load, .. } = scene;
    load.drain(&mut vm);
    load.read_all(&mut vm);
    let [new, old] = &counts;
    println!(
        "{format}, packed {packed}: new killed: {new:?}, old killed: {old:?}; usual {usual:?}"
    );
    drop(vm);
    Daemon { process }.ready().stop(&[&place.socket]);
    if format == "raw" {
        place.judge(&mut load);
    } else {
        // A kill may leak clusters, which nobody uses; it leaves no other error.
        const ONLY_LEAKS: i32 = 3;
        let checked = run(command(&["qemu-img", "check", "-f", "qcow2", text(&place.image)]));
        assert!(matches!(checked.code(), Some(0 | ONLY_LEAKS)), "{}", checked.output());
        judge(&images::reference(&place.image, format), "raw", &mut load);
    }
}

#[test]
fn a_raw_disk_survives_kills_in_its_hand_over() {
    survive("raw", false, 1);
}

#[test]
fn a_qcow2_disk_on_packed_rings_survives_kills_in_its_hand_over() {
    survive("qcow2", true, 2);
}
