//! A disk for virtual machines, served in a sandbox: what it still does, what it shows of itself,
//! and what it leaves behind. Upgrades and migrations from sandbox to sandbox are in their own
//! tests.

use std::fs::{self, File, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::model::{FrontEnd, Request, Vm, ask};
use ringdisk_testkit::mount::{Loop, Mounted, copy_program, scratch, text};
use ringdisk_testkit::process::{self, LIMIT, Process, command, run, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::confined::{assert_confined, children, is_gone};
use crate::common::serving::{
    Daemon, Place, ctl, judge, load, meanwhile, options, serve_command, stats,
};
use crate::common::tools::names;
use crate::common::{MIB, program};

/// `ringdisk serve`, whose sockets for `ringdisk ctl` and for its successor are in a directory of
/// the test.
fn serve_in(runtime: &Path, words: &[&str]) -> Command {
    let mut command = serve_command(words);
    command.env("XDG_RUNTIME_DIR", runtime);
    command
}

/// `ringdisk ctl` with such a disk.
fn ctl_in(runtime: &Path, socket: &Path, words: &[&str]) -> String {
    let mut command = Command::new(crate::common::program());
    command.arg("ctl").arg(socket).args(words).env("XDG_RUNTIME_DIR", runtime);
    let finished = run(command);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    finished.output()
}

/// Words for one disk at a socket.
fn words_at(place: &Place) -> Vec<&str> {
    [&place.words()[..], &["--vhost-user-blk", text(&place.socket)]].concat()
}

fn in_force(socket: &Path) -> String {
    stats(socket)["sandbox"].as_str().expect("in force").to_owned()
}

/// Whether files are behind a wall too.
fn has_landlock(socket: &Path) -> bool {
    needs("a kernel with landlock", in_force(socket).starts_with("landlock"))
}

#[test]
fn a_disk_in_its_sandbox_does_everything_and_leaves_nothing() {
    if !needs_root() {
        return;
    }
    let (place, runtime) = (Place::new("qcow2"), scratch());
    let runtime = runtime.path();
    let pidfile = place.path("pid");
    let allowed = ["--allow-path", text(place.directory.path())];
    let words = [&words_at(&place)[..], &allowed, &["--pidfile", text(&pidfile), "-v"]].concat();
    let daemon = Daemon::of(&mut serve_in(runtime, &words));
    let pid = daemon.process.pid();
    assert_confined(pid, true);
    assert!(daemon.process.output().contains("sandbox: "), "{}", daemon.process.output());
    let helper = children(pid);
    assert_eq!(helper.len(), 1, "the helper process");
    assert_eq!(names(&runtime.join("ringdisk")).len(), 2);
    let (mut vm, mut load) = (place.vm(false), load(1));
    load.run(&mut vm, 100);
    let overlay = place.path("overlay.qcow2");
    let copy = place.path("copy.qcow2");
    let control = |words: &[&str]| ctl_in(runtime, &place.socket, words);
    let shown = meanwhile(&mut vm, &mut load, || {
        control(&["snapshot", text(&overlay)]);
        fs::copy(&place.image, &copy).expect("copy");
        control(&["backing", "-F", "qcow2", text(&copy)]);
        control(&["commit", "--quiet"]);
        control(&["resize", "+4M"]);
        control(&["resize", "8M", "--shrink"]);
        control(&["snapshot", "--internal", "inside"]);
        control(&["stats", "--json"])
    });
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    let sandbox = shown["sandbox"].as_str().expect("in force");
    assert!(sandbox.contains("seccomp with") && sandbox.contains("rings restricted"), "{sandbox}");
    assert!(control(&["stats"]).contains("sandbox: "));
    load.read_all(&mut vm);
    // Threads that were started since.
    assert_confined(pid, true);
    let finished = daemon.stop(&[&place.socket]);
    assert!(!finished.output().contains("warning"), "{}", finished.output());
    assert!(is_gone(helper[0]));
    assert_eq!(names(&runtime.join("ringdisk")), [""; 0]);
    assert_eq!(names(place.directory.path()), ["copy.qcow2", "disk", "overlay.qcow2"]);
    judge(&copy, "qcow2", &mut load);
}

#[test]
fn an_overlay_elsewhere_needs_a_word_and_strict_makes_none() {
    if !needs_root() {
        return;
    }
    let (place, other) = (Place::new("qcow2"), scratch());
    let (elsewhere, here) = (other.path().join("new.qcow2"), place.path("new.qcow2"));
    let daemon = place.start(&[]);
    if !has_landlock(&place.socket) {
        return;
    }
    ctl(&place.socket, &["snapshot", text(&elsewhere)]).ends(6).says("--allow-path");
    daemon.stop(&[&place.socket]);
    let daemon = place.start(&["--sandbox", "strict"]);
    ctl(&place.socket, &["snapshot", text(&here)]).ends(6).says("--sandbox");
    ctl(&place.socket, &["snapshot", "--internal", "inside"]).ok();
    daemon.stop(&[&place.socket]);
    assert_eq!(names(place.directory.path()), ["disk"]);
    let daemon = place.start(&["--allow-path", text(other.path())]);
    ctl(&place.socket, &["snapshot", text(&elsewhere)]).ok();
    daemon.stop(&[&place.socket]);
}

#[test]
fn off_is_off() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let daemon = place.start(&["--sandbox", "off"]);
    assert_confined(daemon.process.pid(), false);
    assert_eq!(children(daemon.process.pid()), [0; 0]);
    assert_eq!(stats(&place.socket)["sandbox"], Value::Null);
    let (mut vm, mut load) = (place.vm(true), load(2));
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    daemon.stop(&[&place.socket]);
    let refused = run(serve_command(&["--null", "1M", "--sandbox", "perhaps"]));
    assert_eq!(refused.code(), Some(2), "{}", refused.output());
}

#[test]
fn each_of_several_disks_goes_for_itself() {
    if !needs_root() {
        return;
    }
    let (one, two) = (Place::new("raw"), Place::new("qcow2"));
    let spec = |place: &Place| {
        let (image, socket) = (text(&place.image), text(&place.socket));
        format!("image={image},format={},socket={socket},queues=2", place.format)
    };
    let (first, second) = (spec(&one), spec(&two));
    let daemon = Daemon::of(&mut serve_command(&["--disk", &first, "--disk", &second]));
    assert_confined(daemon.process.pid(), true);
    assert_eq!(in_force(&one.socket), in_force(&two.socket));
    let (mut vm, mut load) = (two.vm(true), load(3));
    meanwhile(&mut vm, &mut load, || ctl(&one.socket, &["stop"]).ok());
    assert!(!one.socket.exists() && two.socket.exists());
    let overlay = two.path("overlay.qcow2");
    meanwhile(&mut vm, &mut load, || ctl(&two.socket, &["snapshot", text(&overlay)]).ok());
    load.read_all(&mut vm);
    daemon.stop(&[&two.socket]);
    judge(&overlay, "qcow2", &mut load);
}

#[test]
fn it_connects_again_though_it_can_make_no_socket() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let connect = [&place.words()[..], &["--connect", text(&place.socket)]].concat();
    let mut daemon = Daemon::of(&mut serve_command(&connect));
    let mut load = load(4);
    for round in 0..3 {
        let listener = UnixListener::bind(&place.socket).expect("bind");
        let (stream, _) = listener.accept().expect("it connects");
        assert_confined(daemon.process.pid(), true);
        let mut vm = Vm::started(FrontEnd::on(stream), options(round == 1));
        load.run(&mut vm, 100);
        load.drain(&mut vm);
        // The successor is confined, and connects again as well.
        if round == 1 {
            daemon = meanwhile(&mut vm, &mut load, || {
                let new = Daemon::of(&mut serve_command(&[&connect[..], &["--upgrade"]].concat()));
                daemon.ends(0);
                new
            });
        }
        drop((vm, listener));
        fs::remove_file(&place.socket).expect("ours");
    }
    daemon.process.signal(Signal::TERM);
    daemon.ends(0);
    place.judge(&mut load);
}

#[test]
fn who_takes_over_has_the_same_reach() {
    if !needs_root() {
        return;
    }
    let (place, runtime) = (Place::new("qcow2"), scratch());
    let runtime = runtime.path();
    let pidfile = place.path("pid");
    let words = [&words_at(&place)[..], &["--pidfile", text(&pidfile)]].concat();
    let old = Daemon::of(&mut serve_in(runtime, &words));
    let (mut vm, mut load) = (place.vm(true), load(5));
    load.run(&mut vm, 100);
    let overlays = ["one", "two", "three"].map(|name| place.path(name));
    meanwhile(&mut vm, &mut load, || {
        ctl_in(runtime, &place.socket, &["snapshot", text(&overlays[0])])
    });
    let helper = children(old.process.pid());
    let new = meanwhile(&mut vm, &mut load, || {
        let new = Daemon::of(&mut serve_in(runtime, &[&words[..], &["--upgrade"]].concat()));
        old.ends(0);
        new
    });
    assert!(is_gone(helper[0]));
    assert_confined(new.process.pid(), true);
    assert_eq!(children(new.process.pid()).len(), 1, "its helper process");
    let told = fs::read_to_string(&pidfile).expect("the pid file");
    assert_eq!(told.trim(), new.process.pid().to_string());
    meanwhile(&mut vm, &mut load, || {
        for overlay in &overlays[1..] {
            ctl_in(runtime, &place.socket, &["snapshot", text(overlay)]);
        }
        ctl_in(runtime, &place.socket, &["commit", "--quiet"]);
    });
    load.read_all(&mut vm);
    new.stop(&[&place.socket]);
    assert_eq!(names(&runtime.join("ringdisk")), [""; 0]);
    assert_eq!(names(place.directory.path()), ["disk", "one", "three", "two"]);
    judge(&overlays[1], "qcow2", &mut load);
}

#[test]
fn memory_of_the_guest_is_registered_and_lost_inside() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let daemon = place.start(&["--pin-guest-memory"]);
    let (mut vm, mut load) = (place.vm(false), load(6));
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    drop(vm);
    let mut vm = place.vm(true);
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    assert!(!daemon.process.output().contains("not pinned"), "{}", daemon.process.output());
    daemon.stop(&[&place.socket]);
    let daemon = place.start(&[]);
    let mut lost = place.vm(false);
    assert_eq!(lost.status(0, Request::flush()), 0);
    rustix::fs::ftruncate(lost.ram.fd(), 0).expect("truncate");
    lost.queues[0].kick_anyway();
    let broken = || daemon.process.output().contains("gone").then_some(());
    assert!(until(Duration::from_secs(10), broken).is_some(), "{}", daemon.process.output());
    drop(lost);
    let mut vm = place.vm(false);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// A process that does nothing, for as long as this lives: also when a test fails, since what it
/// serves could not be closed.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: u32) -> Stopped {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
        process::stop(pid);
        Stopped(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[test]
fn memory_that_another_process_serves_is_refused() {
    if !needs_root() {
        return;
    }
    let (place, other) = (Place::new("raw"), Place::new("raw"));
    let spec = |place: &Place| {
        format!("image={},format=raw,socket={}", text(&place.image), text(&place.socket))
    };
    let (first, second) = (spec(&place), spec(&other));
    let daemon = Daemon::of(&mut serve_command(&["--disk", &first, "--disk", &second]));
    let announce = |file: &File| {
        let mut front = FrontEnd::connect(&place.socket);
        front.get(ask::GET_FEATURES).expect("features");
        let _ = front.memory_table(&[[0, MIB, 1 << 40, 0]], &[file.as_fd()]);
        front.expect_end();
    };
    // A file of a file system of this machine that has no seals.
    let local = place.path("memory");
    images::sparse(&local, MIB);
    let local = File::options().read(true).write(true).open(local).expect("a file");
    let mut front = FrontEnd::connect(&place.socket);
    front.get(ask::GET_FEATURES).expect("features");
    front.memory_table(&[[0, MIB, 1 << 40, 0]], &[local.as_fd()]).expect("memory on a disk");
    front.get(ask::GET_FEATURES).expect("it goes on");
    drop(front);

    let mount = Mounted::start(&program(), &["--null", "1M", "--transport", "dev"]);
    let file = File::options().read(true).write(true).open(mount.path()).expect("the mount");
    announce(&file);
    let said = |what: &str| daemon.process.output().contains(what).then_some(());
    assert!(
        until(LIMIT, || said("a file on FUSE is not taken")).is_some(),
        "{}",
        daemon.process.output()
    );
    // It does not even say what it is.
    let stopped = Stopped::new(mount.pid());
    announce(&file);
    let waited = until(LIMIT, || said("does not say what it is"));
    assert!(waited.is_some(), "{}", daemon.process.output());
    let (mut vm, mut load) = (other.vm(false), load(7));
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    // The end of a process that has held such a file waits for its server, whichever process that
    // is: fuse_flush() of the kernel.
    drop(stopped);
    daemon.stop(&[&place.socket, &other.socket]);
    drop(file);
    mount.stop();
}

#[test]
fn in_the_background_nothing_is_left_either() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let pidfile = place.path("pid");
    let more = ["--daemonize", "--pidfile", text(&pidfile)];
    let started = run(serve_command(&[&words_at(&place)[..], &more].concat()));
    assert_eq!(started.code(), Some(0), "{}", started.output());
    let pid: u32 = fs::read_to_string(&pidfile).expect("a pid").trim().parse().expect("a number");
    assert_confined(pid, true);
    let (mut vm, mut load) = (place.vm(true), load(7));
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    ctl(&place.socket, &["stop"]).ok();
    assert!(is_gone(pid));
    assert_eq!(names(place.directory.path()), ["disk"]);
    place.judge(&mut load);
}

#[test]
fn a_block_device_is_used_inside_and_makes_it_an_io_flusher() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let Some(device) = Loop::attach(&place.image, &[]) else { return };
    let mut load = load(9);
    let mut serve = |image: &Path, is_one: bool| {
        // What is asked of the kernel is told; it may refuse.
        let words = ["-vv", "--format", "raw", "--queues", "2", text(image)];
        let daemon = Daemon::start(&place.socket, &words);
        let output = daemon.process.output();
        assert_eq!(output.contains("PR_SET_IO_FLUSHER"), is_one, "{output}");
        assert_confined(daemon.process.pid(), true);
        let mut vm = place.vm(is_one);
        load.run(&mut vm, 200);
        load.drain(&mut vm);
        load.read_all(&mut vm);
        drop(vm);
        daemon.stop(&[&place.socket]);
    };
    serve(device.device(), true);
    drop(device);
    serve(&place.image, false);
    place.judge(&mut load);
}

/// `ringdisk serve WORDS…` where /proc is not mounted.
fn without_proc(words: &[&str]) -> Command {
    let mut command = command(&["unshare", "-m", "sh", "-c"]);
    let program = crate::common::program();
    // In a virtual machine that has another machine's root, below its /proc is that of the other
    // one.
    let script = "mount -t tmpfs empty /proc && exec \"$@\"";
    command.args([script, "sh", program.as_str(), "serve"]).args(words);
    command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
    command
}

#[test]
fn what_is_insisted_on_is_looked_for_before_a_disk_is_taken_over() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(false), load(10));
    load.run(&mut vm, 100);
    let words = [&words_at(&place)[..], &["--upgrade", "--sandbox", "on"]].concat();
    let refused = meanwhile(&mut vm, &mut load, || run(without_proc(&words)));
    assert_eq!(refused.code(), Some(11), "{}", refused.output());
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn what_is_missing_when_a_disk_was_taken_does_not_cost_the_guest_its_disk() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let old = place.start(&[]);
    let (mut vm, mut load) = (place.vm(false), load(11));
    load.run(&mut vm, 100);
    // A program that nobody may start a second time: the new process gets no helper process.
    // Nothing is taken before that is so.
    let program = place.path("program");
    copy_program(&crate::common::program(), &program);
    let words = [&["serve"], &words_at(&place)[..], &["--upgrade", "--sandbox", "on"]].concat();
    let mut successor = Command::new(&program);
    successor.args(&words).env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
    let new = meanwhile(&mut vm, &mut load, || {
        old.process.signal(Signal::STOP);
        let new = Process::spawn(&mut successor);
        fs::set_permissions(&program, Permissions::from_mode(0o600)).expect("chmod");
        old.process.signal(Signal::CONT);
        let new = Daemon { process: new }.ready();
        old.ends(0);
        new
    });
    let output = new.process.output();
    assert!(output.contains("error: the sandbox is not complete"), "{output}");
    let in_force = in_force(&place.socket);
    assert!(in_force.starts_with("no landlock, seccomp with"), "{in_force}");
    assert_confined(new.process.pid(), true);
    load.read_all(&mut vm);
    // It makes overlays itself.
    let overlay = place.path("overlay");
    meanwhile(&mut vm, &mut load, || {
        ctl(&place.socket, &["snapshot", text(&overlay)]).ok();
        ctl(&place.socket, &["commit", "--quiet"]).ok()
    });
    new.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn without_proc_some_walls_are_missing_and_it_says_so() {
    if !needs_root() {
        return;
    }
    // Images cannot be opened without it.
    let directory = scratch();
    let (socket, front) = (directory.path().join("socket"), directory.path().join("front"));
    let connect = format!("null=1M,connect={}", text(&front));
    let listen = format!("null=1M,queues=2,socket={}", text(&socket));
    let words = ["--disk", &listen, "--disk", &connect];
    let refused = run(without_proc(&[&words[..], &["--sandbox", "on"]].concat()));
    assert_eq!(refused.code(), Some(11), "{}", refused.output());
    assert!(!socket.exists());
    let daemon = Daemon::of(&mut without_proc(&words));
    assert!(daemon.process.output().contains("not complete"), "{}", daemon.process.output());
    let in_force = in_force(&socket);
    assert!(in_force.starts_with("no landlock, seccomp with"), "{in_force}");
    let mut vm = Vm::started(FrontEnd::connect(&socket), options(true));
    assert_eq!(vm.status(1, Request::write(1, vec![1; 512])), 0);
    // Nobody does it for this process.
    let listener = UnixListener::bind(&front).expect("bind");
    listener.accept().expect("it connects");
    daemon.stop(&[&socket]);
}

#[test]
fn the_helper_ends_with_a_process_that_is_killed() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let daemon = place.start(&[]);
    let helper: Vec<PathBuf> = children(daemon.process.pid())
        .into_iter()
        .map(|pid| PathBuf::from(format!("/proc/{pid}")))
        .collect();
    assert_eq!(helper.len(), 1);
    daemon.kill();
    let gone = until(Duration::from_secs(5), || (!helper[0].exists()).then_some(()));
    assert!(gone.is_some());
    // What it left is replaced.
    let daemon = place.start(&[]);
    assert_confined(daemon.process.pid(), true);
    daemon.stop(&[&place.socket]);
}
