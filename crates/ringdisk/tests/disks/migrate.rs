//! A migration on one host: two processes, one image, and a front end that goes from one to the
//! other.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use ringdisk_testkit::limits::is_root;
use ringdisk_testkit::model::{BaseRule, FrontEnd, Load, Request, Vm, ask, bits, words};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::keep::kill;
use crate::common::confined::assert_confined;
use crate::common::serving::{Daemon, Place, ctl, judge, load, locked_while, options, stats};
use crate::common::tools::child_of;

/// Source and destination of one image, and a machine on the source whose memory is being copied.
struct Both {
    place: Place,
    source: Daemon,
    destination: Daemon,
    vm: Vm,
    load: Load,
    _log: Option<OwnedFd>,
}

/// The same without a log: a machine that just runs.
fn quiet(format: &'static str, packed: bool) -> Both {
    let place = Place::new(format);
    let source = place.start(&[]);
    let incoming = place.path("incoming");
    let there = [&place.words()[..], &["--incoming"]].concat();
    // Before anything of what follows is written: what it knows of the image then is not what it
    // may use.
    let destination = Daemon::start(&incoming, &there);
    for daemon in [&source, &destination] {
        assert_confined(daemon.process.pid(), is_root());
    }
    let mut vm = Vm::started(FrontEnd::connect(&place.socket), options(packed));
    let mut load = load(1);
    load.run(&mut vm, 300);
    load.drain(&mut vm);
    Both { place, source, destination, vm, load, _log: None }
}

fn both(format: &'static str, packed: bool) -> Both {
    let mut both = quiet(format, packed);
    both.log();
    both.load.run(&mut both.vm, 300);
    both.load.drain(&mut both.vm);
    both
}

impl Both {
    /// Turns the log on.
    fn log(&mut self) {
        let log = memfd_create(c"log", MemfdFlags::CLOEXEC).expect("memory");
        ftruncate(&log, 1 << 20).expect("memory");
        let Vm { front, features, .. } = &mut self.vm;
        front.ask(ask::SET_LOG_BASE, &words(&[1 << 20, 0]), &[log.as_fd()]).expect("a log");
        front.set(ask::SET_FEATURES, *features | bits::LOG_ALL).expect("agreed");
        self._log = Some(log);
    }

    /// Stops all virtqueues, as at the end of a migration. Gives where they go on.
    fn stop(&mut self) -> Vec<u32> {
        (0..2).map(|index| self.vm.front.vring_base(index).expect("it stops")).collect()
    }

    /// Goes on with the other process. The machine's memory is the same here.
    fn move_over(&mut self) -> FrontEnd {
        let new = FrontEnd::connect(&self.place.path("incoming"));
        // The area of requests in flight does not move: there are none.
        self.vm.inflight = None;
        let old = std::mem::replace(&mut self.vm.front, FrontEnd::connect(&self.place.socket));
        self.vm.resume(new, BaseRule::Used).expect("the disk is there");
        old
    }

    fn exercise(&mut self) {
        self.load.read_all(&mut self.vm);
        self.load.run(&mut self.vm, 200);
        self.load.drain(&mut self.vm);
    }
}

fn moves(format: &'static str, packed: bool) {
    let mut both = both(format, packed);
    both.stop();
    let old = both.move_over();
    both.exercise();
    // The source is told to end only now, and does nothing to the image any more.
    drop(old);
    both.source.stop(&[&both.place.socket]);
    both.load.read_all(&mut both.vm);
    let incoming = both.place.path("incoming");
    both.destination.stop(&[&incoming]);
    both.place.judge(&mut both.load);
}

#[test]
fn a_raw_disk_moves() {
    moves("raw", false);
}

#[test]
fn a_qcow2_disk_moves() {
    moves("qcow2", true);
}

#[test]
fn a_destination_that_was_upgraded_takes_the_disk_too() {
    let mut both = both("qcow2", false);
    let incoming = both.place.path("incoming");
    let there = [&both.place.words()[..], &["--incoming"]].concat();
    // The command line of a successor says nothing of a migration: the state that it gets says
    // that the disk is not owned yet.
    for words in [&there[..there.len() - 1], &there[..there.len() - 1]] {
        let new = Daemon::start(&incoming, &[words, &["--upgrade"]].concat());
        std::mem::replace(&mut both.destination, new).ends(0);
    }
    both.exercise();
    both.stop();
    let old = both.move_over();
    both.exercise();
    drop(old);
    both.source.stop(&[&both.place.socket]);
    both.destination.stop(&[&incoming]);
    both.place.judge(&mut both.load);
}

#[test]
fn a_kept_source_that_gave_the_disk_away_is_killed_and_does_not_take_it_back() {
    for logs in [true, false] {
        let place = Place::new("raw");
        let source = place.start(&["--keep"]);
        let incoming = place.path("incoming");
        let there = [&place.words()[..], &["--incoming"]].concat();
        let destination = Daemon::start(&incoming, &there);
        let vm = Vm::started(FrontEnd::connect(&place.socket), options(false));
        let load = load(1);
        let mut both = Both { place, source, destination, vm, load, _log: None };
        both.load.run(&mut both.vm, 100);
        both.load.drain(&mut both.vm);
        if logs {
            both.log();
        }
        both.stop();
        let mut old = both.move_over();
        both.exercise();
        let helper = both.source.process.pid();
        let server = child_of(helper).expect("a process serves");
        kill(server);
        let next = process::until(process::LIMIT, || child_of(helper).filter(|new| *new != server));
        assert!(next.is_some(), "{}", both.source.process.output());
        old.get(ask::GET_FEATURES).expect("the connection goes on");
        both.exercise();
        drop(old);
        both.source.stop(&[&both.place.socket]);
        both.load.read_all(&mut both.vm);
        both.destination.stop(&[&incoming]);
        both.place.judge(&mut both.load);
    }
}

/// The front end of the source at the end of a migration of a guest that was paused before.
enum Source {
    /// It says nothing more, as QEMU does.
    Waits,
    /// It turns the log on, when nothing runs any more.
    Logs,
    /// It is gone.
    Gone,
}

#[test]
fn a_guest_that_was_paused_before_its_migration_moves() {
    for (format, packed, source) in [
        ("raw", false, Source::Waits),
        ("qcow2", true, Source::Logs),
        ("qcow2", false, Source::Gone),
    ] {
        let mut both = quiet(format, packed);
        both.stop();
        // Nobody but a ringdisk that waits gets the image of a guest that is paused.
        let (place, image) = (both.place.socket.clone(), both.place.image.clone());
        let ((), tries) = locked_while(&image, || {
            process::pause(Duration::from_millis(1500));
            assert_eq!(stats(&place)["device"]["needs-reset"], false);
        });
        assert!(tries > 100);
        if let Source::Logs = source {
            both.log();
        }
        if let Source::Gone = source {
            let gone = std::mem::replace(&mut both.vm.front, FrontEnd::connect(&place));
            drop(gone);
        }
        let old = both.move_over();
        both.exercise();
        drop(old);
        both.source.stop(&[&place]);
        both.load.read_all(&mut both.vm);
        both.destination.stop(&[&both.place.path("incoming")]);
        both.place.judge(&mut both.load);
    }
}

#[test]
fn a_guest_that_has_no_driver_yet_moves() {
    for is_gone in [false, true] {
        let place = Place::new("qcow2");
        let source = place.start(&[]);
        let incoming = place.path("incoming");
        let there = [&place.words()[..], &["--incoming"]].concat();
        let destination = Daemon::start(&incoming, &there);
        let mut front = FrontEnd::connect(&place.socket);
        front.tell(ask::SET_OWNER, &[], &[]).expect("agreed");
        front.get(ask::GET_FEATURES).expect("features");
        let front = Some(front).filter(|_| !is_gone);
        let mut vm = Vm::started(FrontEnd::connect(&incoming), options(true));
        let mut load = load(2);
        load.run(&mut vm, 200);
        load.drain(&mut vm);
        drop(front);
        source.stop(&[&place.socket]);
        load.read_all(&mut vm);
        destination.stop(&[&incoming]);
        place.judge(&mut load);
    }
}

#[test]
fn a_disk_that_is_used_is_not_given_to_who_waits() {
    let mut both = quiet("qcow2", false);
    let bases = both.stop();
    start_again(&mut both, &bases).expect("a guest that was paused for a moment");
    both.exercise();
    let incoming = both.place.path("incoming");
    // It waits for the locks, and then gives up.
    let refused = Vm::start(FrontEnd::connect(&incoming), options(false));
    assert!(refused.is_err(), "two processes have the disk");
    both.exercise();
    // The disk is where the guest runs, also when both are there: the other one's is paused.
    both.stop();
    let old = both.move_over();
    both.exercise();
    let bases = both.stop();
    let there = std::mem::replace(&mut both.vm.front, old);
    start_again(&mut both, &bases).expect("it comes back");
    both.exercise();
    drop(there);
    both.destination.stop(&[&incoming]);
    both.source.stop(&[&both.place.socket]);
    both.place.judge(&mut both.load);
}

/// Starts the virtqueues of the source again, as when a migration has failed.
fn start_again(both: &mut Both, bases: &[u32]) -> Result<(), ringdisk_testkit::model::Refused> {
    both.vm.front.set(ask::SET_FEATURES, both.vm.features)?;
    (0..2).try_for_each(|index| both.vm.start_queue(index, Some(bases[index])))
}

#[test]
fn a_migration_that_fails_leaves_the_disk_at_its_source() {
    for (format, packed) in [("raw", true), ("qcow2", false)] {
        let mut both = both(format, packed);
        for _ in 0..2 {
            let bases = both.stop();
            start_again(&mut both, &bases).expect("the disk is ours again");
            both.exercise();
            let features = both.vm.features | bits::LOG_ALL;
            both.vm.front.set(ask::SET_FEATURES, features).expect("agreed");
        }
        let bases = both.stop();
        start_again(&mut both, &bases).expect("the disk is ours again");
        both.exercise();
        let incoming = both.place.path("incoming");
        both.destination.stop(&[&incoming]);
        both.load.read_all(&mut both.vm);
        both.source.stop(&[&both.place.socket]);
        both.place.judge(&mut both.load);
    }
}

/// The destination has opened the image that was on top then. It lies below an overlay now, which
/// a write to it would damage.
#[test]
fn a_disk_that_got_an_overlay_since_does_not_move_without_it() {
    let mut both = quiet("qcow2", false);
    ctl(&both.place.socket, &["snapshot", text(&both.place.path("overlay.qcow2"))]).ok();
    both.exercise();
    both.log();
    let bases = both.stop();
    let incoming = both.place.path("incoming");
    // It waits for the locks, and then gives up.
    assert!(Vm::start(FrontEnd::connect(&incoming), options(false)).is_err(), "an older disk");
    start_again(&mut both, &bases).expect("the disk is ours again");
    both.exercise();
    both.destination.stop(&[&incoming]);
    both.source.stop(&[&both.place.socket]);
    let image = both.place.path("overlay.qcow2");
    judge(&image, "qcow2", &mut both.load);
}

#[test]
fn a_disk_that_has_moved_is_not_taken_back() {
    let mut both = both("qcow2", false);
    let bases = both.stop();
    let old = both.move_over();
    both.exercise();
    let new = std::mem::replace(&mut both.vm.front, old);
    // It waits for the locks, and then gives up.
    assert!(start_again(&mut both, &bases).is_err(), "two processes have the disk");
    both.vm.front = new;
    both.exercise();
    assert_eq!(both.vm.status(0, Request::flush()), 0);
    let incoming = both.place.path("incoming");
    both.destination.stop(&[&incoming]);
    drop(both.source);
    both.place.judge(&mut both.load);
    assert!(text(&incoming).ends_with("incoming"));
}
