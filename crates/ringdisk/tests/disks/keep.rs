//! `ringdisk serve --keep`: the serving process is killed, and the front end, which never connects
//! again, sees every request answered exactly once. `RINGDISK_KILLS=N` or `RINGDISK_FULL=1` for
//! more kills.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::full;
use ringdisk_testkit::model::{
    Discards, FrontEnd, Load, LoadOptions, Request, Vm, VmOptions, bits,
};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, run, until};
use ringdisk_testkit::sim::Prng;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::common::tools::child_of;
use crate::common::{MIB, program};

pub(crate) const SIZE: u64 = 8 * MIB;
/// `writeback` in the configuration space.
const WRITEBACK: u32 = 32;
/// New processes within 10 s of serving; the next death is the end.
const RESTARTS: u64 = 5;

fn kills() -> u64 {
    let wanted = std::env::var("RINGDISK_KILLS").ok().and_then(|n| n.parse().ok());
    // Four disks share them.
    wanted.unwrap_or(if full() { 400_u64 } else { 80 }).div_ceil(4)
}

/// Processes that keep and serve a disk.
pub(crate) struct Server {
    directory: TempDir,
    pub(crate) image: PathBuf,
    pub(crate) socket: PathBuf,
    format: String,
    /// The one that keeps it.
    pub(crate) helper: Process,
}

impl Server {
    pub(crate) fn start(format: &str, args: &[&str]) -> Server {
        let directory = scratch();
        let image = directory.path().join("disk");
        match format {
            "raw" => images::sparse(&image, SIZE),
            _ => images::qcow2(&image, "8M", "cluster_size=4k"),
        }
        let socket = directory.path().join("socket");
        let words = [&["--keep"], args].concat();
        let helper = Server::process(&image, format, &socket, &words);
        let format = format.to_owned();
        Server { directory, image, socket, format, helper }
    }

    fn process(image: &Path, format: &str, socket: &Path, args: &[&str]) -> Process {
        let mut command = Command::new(program());
        command.args(["serve", "--format", format, "--queues", "3", "--threads", "2"]);
        command.env_remove("NOTIFY_SOCKET");
        Process::spawn(command.args(args).arg("--vhost-user-blk").arg(socket).arg(image))
    }

    /// A process with the same words for the disk, and these.
    pub(crate) fn successor(&self, args: &[&str]) -> Process {
        Server::process(&self.image, &self.format, &self.socket, args)
    }

    /// A place for a pid file.
    pub(crate) fn pidfile(&self) -> PathBuf {
        self.directory.path().join("pid")
    }

    /// Waits until it answers commands.
    pub(crate) fn ready(&self) {
        let answers = || (self.ctl(&["stats"]).code() == Some(0)).then_some(());
        assert!(until(LIMIT, answers).is_some(), "{}", self.helper.output());
    }

    /// The process that serves.
    pub(crate) fn server(&self) -> u32 {
        let server = until(LIMIT, || child_of(self.helper.pid()));
        server.unwrap_or_else(|| panic!("nobody serves: {}", self.helper.output()))
    }

    /// Kills it.
    fn kill(&self) {
        kill(self.server());
    }

    pub(crate) fn ctl(&self, words: &[&str]) -> ringdisk_testkit::process::Finished {
        run(command(&[&[&*program(), "ctl", text(&self.socket)], words].concat()))
    }

    /// Ends it with a signal; nothing is left.
    pub(crate) fn stop(mut self) -> (TempDir, PathBuf) {
        self.helper.signal(Signal::TERM);
        let ended = self.helper.wait(LIMIT).expect("it was asked to end");
        assert!(ended.success(), "{}", self.helper.output());
        assert!(!self.socket.exists(), "its socket is left");
        (self.directory, self.image)
    }
}

pub(crate) fn kill(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    let _ = kill_process(pid, Signal::KILL);
}

/// A machine with three virtqueues.
pub(crate) fn options(packed: bool, inflight: bool, seed: u64) -> VmOptions {
    let ours = VmOptions::default();
    VmOptions {
        features: !bits::LOG_ALL & if packed { u64::MAX } else { !bits::PACKED },
        protocol: if inflight { ours.protocol } else { ours.protocol & !bits::P_INFLIGHT },
        queues: 3,
        size: 64,
        indirect: 16,
        regions: 2,
        seed,
        ..ours
    }
}

pub(crate) fn load(seed: u64) -> Load {
    let (bytes_max, discards) = (64 << 10, Discards::Zero);
    Load::new(LoadOptions {
        size: SIZE,
        block: 512,
        bytes_max,
        segments: 8,
        depth: 8,
        discards,
        seed,
    })
}

/// The image has what was answered.
pub(crate) fn judge(load: &mut Load, image: &Path, format: &str) {
    let content = match format {
        "raw" => image.to_owned(),
        _ => images::reference(image, format),
    };
    load.judge(&std::fs::read(content).expect("the image"));
}

/// Serves under load, is killed, and goes on with the same connection.
///
/// * `inflight`: the front end has an area of requests in flight.
fn survive(format: &'static str, packed: bool, inflight: bool, seed: u64) {
    let mut prng = Prng::new(seed);
    let (mut left, mut answered) = (0, 0);
    for round in 0..kills().div_ceil(RESTARTS) {
        let server = Server::start(format, &[]);
        let front = FrontEnd::connect(&server.socket);
        let mut vm = Vm::started(front, options(packed, inflight, seed + round));
        vm.front.set_config(WRITEBACK, &[0]).expect("CONFIG_WCE was agreed on");
        let mut load = load(seed + round);
        for _ in 0..RESTARTS {
            load.run(&mut vm, prng.below(120));
            (0..3).for_each(|queue| {
                load.fill(&mut vm, queue);
            });
            let old = server.server();
            std::thread::sleep(Duration::from_micros(prng.below(1500)));
            kill(old);
            load.reap(&mut vm);
            left += load.in_flight();
            load.run(&mut vm, 20);
            assert_eq!(vm.front.config(WRITEBACK, 1).expect("a byte"), [0]);
        }
        load.drain(&mut vm);
        load.read_all(&mut vm);
        answered += load.answered;
        drop(vm);
        let (_directory, image) = server.stop();
        judge(&mut load, &image, format);
    }
    println!("{format}, packed {packed}: {left} requests were left behind, of {answered}");
    assert!(left > 0, "all kills came too late");
}

#[test]
fn limits_and_copy_on_read_that_a_command_has_set_outlive_the_server() {
    let directory = scratch();
    let pidfile = directory.path().join("pid");
    let server = Server::start("qcow2", &["--limit", "iops=1000", "--pidfile", text(&pidfile)]);
    // Before, nobody takes the place of a server that is killed.
    until(LIMIT, || pidfile.exists().then_some(())).expect("it serves");
    let limits = || {
        let shown = until(LIMIT, || Some(server.ctl(&["limit"])).filter(|it| it.code() == Some(0)));
        shown.expect("it answers").stdout
    };
    for wanted in ["iops=2000", "none"] {
        assert!(limits().starts_with("iops="), "{}", limits());
        server.ctl(&["limit", wanted]);
        let copy_on_read = if wanted == "none" { "off" } else { "on" };
        server.ctl(&["copy-on-read", copy_on_read]);
        let old = server.server();
        server.kill();
        let is_next = until(LIMIT, || (server.server() != old).then_some(()));
        assert!(is_next.is_some(), "{}", server.helper.output());
        assert_eq!(limits().trim(), wanted);
        let stats = server.ctl(&["stats"]).stdout;
        assert_eq!(stats.contains("copy-on-read"), copy_on_read == "on", "{stats}");
    }
    server.stop();
}

#[test]
fn a_kept_raw_disk_on_split_rings_goes_on_without_an_area_of_the_front_end() {
    survive("raw", false, false, 1);
}

#[test]
fn a_kept_raw_disk_on_packed_rings_goes_on_without_an_area_of_the_front_end() {
    survive("raw", true, false, 2);
}

#[test]
fn a_kept_qcow2_disk_on_split_rings_goes_on() {
    survive("qcow2", false, true, 3);
}

#[test]
fn a_kept_raw_disk_on_packed_rings_goes_on() {
    survive("raw", true, true, 4);
}

/// Two disks of one pair of processes, with their directory and sockets.
pub(crate) struct Two {
    directory: TempDir,
    pub(crate) helper: Process,
}

impl Two {
    pub(crate) fn start() -> Two {
        let directory = scratch();
        let mut two = Two { directory, helper: Process::spawn(&mut Command::new("true")) };
        (0..2).for_each(|number| images::qcow2(&two.image(number), "8M", "cluster_size=4k"));
        two.helper = two.process(&["--keep"]);
        two
    }

    /// A process that serves both.
    pub(crate) fn process(&self, words: &[&str]) -> Process {
        let mut command = Command::new(program());
        command.args(["serve", "--queues", "1"]).args(words).env_remove("NOTIFY_SOCKET");
        for number in 0..2 {
            let (image, socket) = (self.image(number), self.socket(number));
            let spec = format!("image={},socket={}", text(&image), text(&socket));
            command.args(["--disk", &spec]);
        }
        Process::spawn(&mut command)
    }

    fn image(&self, number: usize) -> PathBuf {
        self.directory.path().join(format!("disk{number}"))
    }

    pub(crate) fn socket(&self, number: usize) -> PathBuf {
        self.directory.path().join(format!("socket{number}"))
    }

    pub(crate) fn machine(&self, number: usize) -> Vm {
        let options = VmOptions { queues: 1, ..options(false, false, number as u64) };
        Vm::started(FrontEnd::connect(&self.socket(number)), options)
    }

    fn kill(&self) {
        kill(until(LIMIT, || child_of(self.helper.pid())).expect("a process serves"));
    }

    fn end(&mut self) -> Option<i32> {
        self.helper.signal(Signal::TERM);
        self.helper.wait(LIMIT).expect("it ends").code()
    }
}

#[test]
fn a_kept_disk_that_was_stopped_is_not_gone_on_with_and_the_others_are() {
    let mut two = Two::start();
    let (mut goes_on, mut ends) = (two.machine(0), two.machine(1));
    assert_eq!(ends.status(0, Request::write(8, vec![5; 4096])), 0);
    let second = two.socket(1);
    let done = run(command(&[&program(), "ctl", text(&second), "stop"]));
    assert_eq!(done.code(), Some(0), "{}", done.output());
    ends.front.expect_end();
    // The image is another process's now.
    let mut other = Command::new(program());
    other.args(["serve", "--queues", "1", "--vhost-user-blk"]).arg(&second).arg(two.image(1));
    let mut other = Process::spawn(&mut other);
    let mut there = two.machine(1);
    assert_eq!(there.run(0, Request::read(8, 4096)).data, [5; 4096]);
    for round in 0..2 {
        two.kill();
        let bytes = vec![round; 4096];
        let written = goes_on.status(0, Request::write(8, bytes));
        assert_eq!(written, 0, "{}", two.helper.output());
        assert_eq!(there.status(0, Request::flush()), 0);
    }
    drop((goes_on, there));
    assert_eq!(two.end(), Some(0), "{}", two.helper.output());
    assert!(second.exists(), "the socket of the other process is gone");
    other.signal(Signal::TERM);
    assert!(other.wait(LIMIT).expect("it ends").success(), "{}", other.output());
}

#[test]
fn a_kept_disk_that_cannot_be_opened_again_ends_alone() {
    let mut two = Two::start();
    let (mut goes_on, mut ends) = (two.machine(0), two.machine(1));
    assert_eq!(ends.status(0, Request::flush()), 0);
    std::fs::remove_file(two.image(1)).expect("it was there");
    two.kill();
    assert_eq!(goes_on.status(0, Request::flush()), 0, "{}", two.helper.output());
    ends.front.expect_end();
    assert!(!two.socket(1).exists(), "its socket is left");
    drop((goes_on, ends));
    assert!(two.end().is_some_and(|code| code != 0), "{}", two.helper.output());
    assert!(two.helper.output().contains("disk1"), "{}", two.helper.output());
}

#[test]
fn several_kept_disks_go_on_together_and_what_was_put_on_top_stays_there() {
    let mut two = Two::start();
    let mut vms: Vec<Vm> = (0..2).map(|number| two.machine(number)).collect();
    let overlay = two.directory.path().join("overlay");
    let (program, second) = (program(), two.socket(1));
    let words = [&program, "ctl", text(&second), "snapshot", text(&overlay)];
    let done = run(ringdisk_testkit::process::command(&words));
    assert!(done.code() == Some(0), "{}", done.output());
    for round in 0..3 {
        two.kill();
        for (number, vm) in (0..).zip(&mut vms) {
            let bytes = vec![number + round; 4096];
            assert_eq!(
                vm.status(0, Request::write(8, bytes.clone())),
                0,
                "{}",
                two.helper.output()
            );
            assert_eq!(vm.run(0, Request::read(8, 4096)).data, bytes);
        }
    }
    drop(vms);
    assert_eq!(two.end(), Some(0), "{}", two.helper.output());
    let below = images::reference(&two.image(1), "qcow2");
    let below = std::fs::read(below).expect("the image");
    assert!(below[4096..8192].iter().all(|byte| *byte == 0), "written below the overlay");
}

#[test]
fn without_the_process_that_keeps_it_a_disk_goes_on_and_ends_cleanly_at_a_stop() {
    let mut server = Server::start("raw", &[]);
    let mut vm = Vm::started(FrontEnd::connect(&server.socket), options(false, false, 9));
    assert_eq!(vm.status(0, Request::write(0, vec![7; 4096])), 0);
    let serving = server.server();
    server.helper.signal(Signal::KILL);
    server.helper.wait(LIMIT).expect("it was killed");
    assert_eq!(vm.status(0, Request::write(8, vec![8; 4096])), 0, "{}", server.helper.output());
    // What the next front end lends is kept by nobody.
    drop(vm);
    let mut vm = Vm::started(FrontEnd::connect(&server.socket), options(false, false, 9));
    assert_eq!(vm.status(0, Request::write(16, vec![9; 4096])), 0, "{}", server.helper.output());
    let serving = i32::try_from(serving).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(serving, Signal::TERM).expect("it goes on");
    vm.front.expect_end();
    let gone = || (!Path::new(&format!("/proc/{serving}")).exists()).then_some(());
    assert!(until(LIMIT, gone).is_some(), "it goes on");
    let image = std::fs::read(&server.image).expect("the image");
    assert_eq!([image[0], image[4096], image[8192]], [7, 8, 9]);
    // Its socket, which nobody could remove, is in nobody's way.
    server.helper = Server::process(&server.image, "raw", &server.socket, &[]);
    let mut vm = Vm::started(FrontEnd::connect(&server.socket), options(false, false, 9));
    assert_eq!(vm.status(0, Request::flush()), 0, "{}", server.helper.output());
    drop(vm);
    server.stop();
}

#[test]
fn a_process_that_dies_again_and_again_is_given_up() {
    let mut server = Server::start("raw", &[]);
    let mut vm = Vm::started(FrontEnd::connect(&server.socket), options(false, true, 9));
    for _ in 0..RESTARTS {
        server.kill();
        assert_eq!(vm.status(0, Request::flush()), 0, "{}", server.helper.output());
    }
    server.kill();
    vm.front.expect_end();
    let ended = server.helper.wait(LIMIT).expect("it gives up");
    assert_eq!(ended.code(), Some(7), "{}", server.helper.output());
    assert!(server.helper.output().contains("the disk is given up"), "{}", server.helper.output());
}

#[test]
fn a_kept_disk_is_stopped_and_asked_as_any_other() {
    let server = Server::start("raw", &[]);
    let mut vm = Vm::started(FrontEnd::connect(&server.socket), options(false, false, 9));
    server.kill();
    assert_eq!(vm.status(0, Request::flush()), 0);
    let stats = until(LIMIT, || Some(server.ctl(&["stats"])).filter(|done| done.code() == Some(0)));
    assert!(stats.is_some(), "{}", server.helper.output());
    let mut server = server;
    assert_eq!(server.ctl(&["stop"]).code(), Some(0));
    vm.front.expect_end();
    assert!(server.helper.wait(LIMIT).expect("it ends").success(), "{}", server.helper.output());
}

#[test]
fn what_cannot_be_kept_is_refused_in_words() {
    let program = program();
    for words in
        [&["--incoming"][..], &["--snapshot"], &["--accel", "require"], &["--socket-fd", "9"]]
    {
        let place: &[&str] =
            if words[0] == "--socket-fd" { &[] } else { &["--vhost-user-blk", "/nowhere/s"] };
        let all = [&[&program, "serve", "--keep"], words, place, &["/nowhere/disk"]].concat();
        let done = run(command(&all));
        assert_eq!(done.code(), Some(2), "{}", done.output());
        assert!(
            done.stderr.contains(words[0]) && done.stderr.contains("--keep"),
            "{}",
            done.output()
        );
    }
}
