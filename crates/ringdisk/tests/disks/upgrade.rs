//! `ringdisk serve --upgrade`: a disk goes from process to process while a virtual machine uses it.

use std::fs::Permissions;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{is_root, needs, needs_root};
use ringdisk_testkit::model::{FrontEnd, Load, Request, Vm, ask, bits, words};
use ringdisk_testkit::mount::{for_user, text};
use ringdisk_testkit::process::{LIMIT, command, has, patient, run, until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::confined::assert_confined;
use crate::common::serving::{
    Daemon, Place, SIZE, ctl, judge, load, locked_while, meanwhile, options, serve_command, stats,
    successor_of,
};
use crate::common::tools::qemu_img;

/// Processes that have a disk one after the other.
const TIMES: usize = 3;

/// The next process takes the disk over; the one before ends without a complaint, and nothing else
/// changes.
fn upgrade(old: Daemon, place: &Place, words: &[&str]) -> Daemon {
    let id = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(path).map(|meta| meta.ino()).expect("the socket")
    };
    let before = id(&place.socket);
    let new = place.start(&[&["--upgrade"], words].concat());
    let finished = old.ends(0);
    assert!(finished.stderr.contains("handed over to another process"), "{}", finished.output());
    assert_eq!(id(&place.socket), before, "another socket");
    let text = new.process.output();
    assert!(!text.contains("warning") && !text.contains("WARN"), "{text}");
    // From sandbox to sandbox.
    assert_confined(new.process.pid(), is_root());
    // `ringdisk ctl` talks to the new one, which has served nothing else.
    assert!(stats(&place.socket)["size"].as_u64() >= Some(SIZE));
    new
}

/// Takes a disk from process to process under load.
fn upgrades(
    place: &Place,
    packed: bool,
    top: &Path,
    mut old: Daemon,
    load: &mut Load,
    vm: &mut Vm,
) {
    let (new, tries) = locked_while(top, || {
        meanwhile(vm, load, || {
            for _ in 0..TIMES {
                old = upgrade(old, place, &[]);
            }
            old
        })
    });
    assert!(tries > 10, "{tries} looks at the lock");
    println!("packed {packed}: {} requests, {tries} looks at the lock", load.answered);
    load.read_all(vm);
    // Changes of the configuration still come through, and a new front end is taken.
    let reads = stats(&place.socket)["total"]["reads"].as_u64();
    assert!(reads > Some(0), "{reads:?}");
    drop(new.stop(&[&place.socket]));
}

#[test]
fn a_raw_disk_changes_hands_under_load() {
    let place = Place::new("raw");
    let old = place.start(&[]);
    let (mut vm, mut load) = (place.vm(false), load(1));
    load.run(&mut vm, 100);
    upgrades(&place, false, &place.image, old, &mut load, &mut vm);
    place.judge(&mut load);
}

#[test]
fn a_chain_with_an_overlay_of_this_minute_changes_hands_under_load() {
    let place = Place::new("qcow2");
    let top = place.path("top.qcow2");
    let base = text(&place.image);
    let words = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, text(&top)];
    qemu_img(Path::new("/"), &words).ok();
    let place = Place { image: top, ..place };
    let old = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), load(2));
    load.run(&mut vm, 200);
    let overlay = place.path("overlay.qcow2");
    meanwhile(&mut vm, &mut load, || ctl(&place.socket, &["snapshot", text(&overlay)]).ok());
    upgrades(&place, true, &overlay, old, &mut load, &mut vm);
    judge(&overlay, "qcow2", &mut load);
}

#[test]
fn a_machine_without_load_sees_a_short_pause() {
    let place = Place::new("qcow2");
    let mut old = Some(place.start(&[]));
    let mut vm = Vm::started(FrontEnd::connect(&place.socket), options(false));
    vm.run(0, Request::write(0, vec![7; 1 << 16]));
    for _ in 0..5 {
        let (mut gap, mut count) = (Duration::ZERO, 0_u64);
        let given = old.take().expect("one serves");
        std::thread::scope(|scope| {
            let next = scope.spawn(|| upgrade(given, &place, &[]));
            let mut last = Instant::now();
            while !next.is_finished() {
                let done = vm.run(0, Request::read(8, 4096));
                assert_eq!((done.status, done.data == [7; 4096]), (0, true));
                gap = gap.max(last.elapsed());
                last = Instant::now();
                count += 1;
            }
            old = Some(next.join().expect("it took over"));
        });
        println!("longest pause at depth 1: {gap:?} ({count} requests)");
    }
    old.take().expect("one serves").stop(&[&place.socket]);
}

#[test]
fn nobody_connected_and_a_front_end_that_comes_later() {
    let place = Place::new("raw");
    let old = place.start(&[]);
    let new = upgrade(old, &place, &[]);
    let (mut vm, mut load) = (place.vm(false), load(3));
    load.run(&mut vm, 100);
    let new = meanwhile(&mut vm, &mut load, || upgrade(new, &place, &[]));
    // It goes, and another one comes.
    drop(vm);
    let mut vm = place.vm(true);
    load.run(&mut vm, 100);
    load.drain(&mut vm);
    load.read_all(&mut vm);
    new.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// Runs `ringdisk serve --upgrade`, which must fail, and says why.
fn fails(place: &Place, words: &[&str], code: i32, texts: &[&str]) {
    fails_with(place, &[&place.words(), words].concat(), code, texts);
}

fn fails_with(place: &Place, words: &[&str], code: i32, texts: &[&str]) {
    let socket = ["--upgrade", "--vhost-user-blk", text(&place.socket)];
    let finished = run(serve_command(&[&socket[..], words].concat()));
    assert_eq!(finished.code(), Some(code), "{}", finished.output());
    for wanted in texts {
        assert!(finished.stderr.contains(wanted), "nothing of {wanted}: {}", finished.output());
    }
}

#[test]
fn without_an_old_process_it_says_so() {
    let place = Place::new("raw");
    fails(&place, &[], 4, &["no ringdisk serves a disk at", "without --upgrade"]);
    // One that was killed is none either.
    let old = place.start(&[]);
    old.kill();
    fails(&place, &[], 4, &["no ringdisk serves a disk at"]);
}

#[test]
fn a_process_that_cannot_take_it_leaves_it_where_it_is() {
    let place = Place::new("qcow2");
    let three = place.words_with("3");
    let old = Daemon::start(&place.socket, &three);
    let (mut vm, mut load) = (place.vm(true), load(4));
    meanwhile(&mut vm, &mut load, || {
        fails(&place, &[], 2, &["--queues is '3' there, '2' here", "goes on as before"]);
        let packed = [&three[..], &["--packed", "off"]].concat();
        fails_with(&place, &packed, 2, &["--packed is 'auto' there, 'off' here"]);
    });
    assert_ne!(stats(&place.socket)["total"]["requests"], 0);
    // And it can still be taken over by one that is right.
    let new = meanwhile(&mut vm, &mut load, || {
        let new = Daemon::start(&place.socket, &[&three[..], &["--upgrade"]].concat());
        old.ends(0);
        new
    });
    load.read_all(&mut vm);
    new.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn words_that_would_show_the_guest_another_disk_are_refused_and_it_goes_on() {
    let place = Place::new("raw");
    let shown = ["--serial", "old", "--logical-block-size", "512", "--physical-block-size", "4096"];
    let old = place.start(&shown);
    let (mut vm, mut load) = (place.vm(false), load(12));
    let other = place.path("other");
    images::sparse(&other, SIZE);
    let queues = |count| [&place.words_with(count)[..], &shown].concat();
    let with = |index: usize, value| {
        let mut words = [&place.words()[..], &shown].concat();
        let at = words.len() - shown.len() + index;
        words[at] = value;
        words
    };
    let more = |word| [&place.words()[..], &shown, &[word]].concat();
    let image = {
        let mut words = [&place.words()[..], &shown].concat();
        let at = place.words().len() - 1;
        words[at] = text(&other);
        words
    };
    let wrong_image = format!("the image is '{}', not '{}'", text(&place.image), text(&other));
    meanwhile(&mut vm, &mut load, || {
        for (words, wanted) in [
            (with(1, "new"), "--serial is 'old' there, 'new' here"),
            (with(3, "4096"), "--logical-block-size is '512' there, '4096' here"),
            (with(5, "512"), "--physical-block-size is '4096' there, '512' here"),
            (queues("1"), "--queues is '2' there, '1' here"),
            (queues("4"), "--queues is '2' there, '4' here"),
            (more("--read-only"), "--read-only is 'off' there, 'on' here"),
            (more("--discard=ignore"), "--discard is 'unmap' there, 'ignore' here"),
            (more("--snapshot"), "--snapshot is 'off' there, 'on' here"),
            (more("--queue-size=128"), "--queue-size is '1024' there, '128' here"),
            (more("--size=1M"), "--size is not given there, '1048576' here"),
            (image, wrong_image.as_str()),
        ] {
            fails_with(&place, &words, 2, &[wanted, "goes on as before", "started anew"]);
        }
    });
    // None of them had anything of it, and one with the same words takes it over.
    load.read_all(&mut vm);
    let output = old.process.output();
    assert!(output.contains("not handed over") && !output.contains("panicked"), "{output}");
    let link = place.path("link");
    std::os::unix::fs::symlink(&place.image, &link).expect("a link");
    let new = meanwhile(&mut vm, &mut load, || {
        let mut words = [&place.words()[..], &shown, &["--upgrade"]].concat();
        words[place.words().len() - 1] = text(&link);
        let new = Daemon::start(&place.socket, &words);
        old.ends(0);
        new
    });
    load.read_all(&mut vm);
    new.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// Kills the process that a pid file names if the test ends before that.
struct Background<'a>(&'a Path);

impl Background<'_> {
    fn pid(&self) -> Option<Pid> {
        let text = std::fs::read_to_string(self.0).ok()?;
        text.trim().parse().ok().and_then(Pid::from_raw)
    }
}

impl Drop for Background<'_> {
    fn drop(&mut self) {
        if let Some(pid) = self.pid() {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

#[test]
fn in_the_background_the_pid_file_goes_to_the_new_process() {
    let place = Place::new("raw");
    let (pidfile, overlay) = (place.path("pid"), place.path("overlay.qcow2"));
    let words =
        ["--daemonize", "--pidfile", text(&pidfile), "--vhost-user-blk", text(&place.socket)];
    let words = [&place.words()[..], &words].concat();
    let background = Background(&pidfile);
    let pid = || background.pid().expect("a pid");
    // The process that adopted one that has ended may not have waited for it yet.
    let lives = |pid: Pid| {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    assert_eq!(run(serve_command(&words)).code(), Some(0));
    let (mut vm, mut load) = (place.vm(true), load(13));
    let mut before = pid();
    for turn in 0..TIMES {
        let upgrade = [&words[..], &["--upgrade"]].concat();
        let finished = meanwhile(&mut vm, &mut load, || run(serve_command(&upgrade)));
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
        let now = pid();
        // Its sockets and locks go a moment before itself.
        let gone = until(LIMIT, || (!lives(before)).then_some(()));
        assert!(now != before && lives(now) && gone.is_some(), "{before:?} {now:?}, turn {turn}");
        before = now;
    }
    // An image that was put on top is what it serves, whichever of the two is named.
    ctl(&place.socket, &["snapshot", text(&overlay)]).ok();
    load.run(&mut vm, 50);
    load.drain(&mut vm);
    let held = run(serve_command(&words));
    assert_eq!(held.code(), Some(5), "a second one: {}", held.output());
    assert_eq!(pid(), before);
    load.read_all(&mut vm);
    ctl(&place.socket, &["stop"]).ok();
    let gone = until(LIMIT, || (!lives(before)).then_some(()));
    assert!(gone.is_some() && !pidfile.exists() && !place.socket.exists());
    judge(&overlay, "qcow2", &mut load);
}

#[test]
fn a_pid_file_that_cannot_be_had_does_not_cost_a_disk() {
    let (one, two) = (Place::new("raw"), Place::new("raw"));
    let spec = |place: &Place| {
        format!("image={},format=raw,socket={},queues=2", text(&place.image), text(&place.socket))
    };
    let (first, second) = (spec(&one), spec(&two));
    let pidfile = one.path("pid");
    let words = ["--pidfile", text(&pidfile), "--disk", first.as_str()];
    let old = Daemon::of(&mut serve_command(&[&words[..], &["--disk", &second]].concat()));
    // A name that is no pid file is refused before anything happens.
    let notes = one.path("notes");
    std::fs::write(&notes, "my notes").expect("a file");
    fails(&one, &["--pidfile", text(&notes)], 1, &["something else than a pid"]);
    // The old process keeps its file for the disk that stays with it.
    let (mut vm, mut load) = (one.vm(false), load(14));
    let new = meanwhile(&mut vm, &mut load, || {
        Daemon::of(&mut serve_command(&[&words[..], &["--upgrade"]].concat()))
    });
    let output = new.process.output();
    assert!(output.contains("served without a pid file"), "{output}");
    load.read_all(&mut vm);
    new.stop(&[&one.socket]);
    assert!(pidfile.exists());
    old.stop(&[&two.socket]);
    assert!(!pidfile.exists());
    one.judge(&mut load);
}

#[test]
fn a_process_of_somebody_else_that_has_the_name_is_not_asked() {
    if !(needs_root() && needs("setpriv", has("setpriv"))) {
        return;
    }
    const STRANGER: u32 = 65534;
    let (directory, program) = for_user(&crate::common::program(), STRANGER);
    let [image, socket, runtime] = ["disk", "socket", "run"].map(|n| directory.path().join(n));
    images::sparse(&image, SIZE);
    std::fs::create_dir(&runtime).expect("a directory");
    std::fs::set_permissions(&runtime, Permissions::from_mode(0o700)).expect("chmod");
    for path in [&image, &runtime] {
        std::os::unix::fs::chown(path, Some(STRANGER), Some(STRANGER)).expect("chown");
    }
    // A name in /tmp/ringdisk-0 would do as well; this one is in nobody's way.
    let words = ["--format", "raw", "--queues", "2", text(&image)];
    let words = [&words[..], &["--vhost-user-blk", text(&socket)]].concat();
    let mut planted = command(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
    planted.args([text(&program), "serve"]).args(&words);
    planted.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS").env("XDG_RUNTIME_DIR", &runtime);
    let stranger = Daemon::of(&mut planted);
    let mut successor = serve_command(&[&words[..], &["--upgrade"]].concat());
    successor.env("XDG_RUNTIME_DIR", &runtime);
    let refused = run(successor);
    assert_eq!(refused.code(), Some(4), "{}", refused.output());
    for wanted in ["belongs to another user", "no ringdisk serves a disk at"] {
        assert!(refused.stderr.contains(wanted), "{}", refused.output());
    }
    let output = stranger.process.output();
    assert!(!output.contains("handed over"), "{output}");
    stranger.stop(&[&socket]);
}

/// What a successor says first, with no words of its own.
pub(crate) const ASK: &[u8] = b"A\x02\0\0\0{}";

#[test]
fn a_new_process_that_dies_or_stays_silent_on_the_way_changes_nothing() {
    let place = Place::new("qcow2");
    let old = place.start(&[]);
    let (mut vm, mut load) = (place.vm(false), load(5));
    let path = successor_of(&place.socket);
    meanwhile(&mut vm, &mut load, || {
        // The end of a process is the end of its socket: before it has asked, with half of the
        // answer, with all of it.
        for read in [0, 8, 4096] {
            let mut stream = UnixStream::connect(&path).expect("it listens");
            if read > 0 {
                stream.write_all(ASK).expect("it listens");
                let _ = stream.read(&mut vec![0; read]);
            }
            drop(stream);
        }
        // One that says nothing more: the old process waits for a while (8 s) and goes on.
        let mut stream = UnixStream::connect(&path).expect("it listens");
        stream.write_all(ASK).expect("it listens");
        let mut handed = Vec::new();
        stream.read_to_end(&mut handed).expect("a handed, and the end");
        assert!(handed.len() > 100, "{} bytes", handed.len());
    });
    load.read_all(&mut vm);
    old.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// The call of the kernel that the thread of this name waits in. `None`: it runs, or there is none.
fn call_of(pid: u32, name: &str) -> Option<String> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    let read = |path: &Path, what| std::fs::read_to_string(path.join(what)).unwrap_or_default();
    let thread = threads.map(|it| it.path()).find(|it| read(it, "comm").trim() == name)?;
    let call = read(&thread, "syscall");
    call.split_whitespace().next().filter(|word| *word != "running").map(str::to_owned)
}

#[test]
fn a_process_that_is_stopped_and_goes_on_while_it_listens_to_its_successor_still_hears_it() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let old = place.start(&[]);
    let pid = old.process.pid();
    let path = successor_of(&place.socket);
    let call = || call_of(pid, "upgrade");
    let accepts = until(LIMIT, call).expect("it waits for a successor");
    let mut stream = UnixStream::connect(&path).expect("it listens");
    let reads = || call().filter(|now| *now != accepts);
    assert!(until(LIMIT, reads).is_some(), "it has accepted");
    // A read with a time limit ends with EINTR then (signal(7)).
    old.process.signal(Signal::STOP);
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let stopped = || state()?.rsplit(')').next()?.trim_start().starts_with('T').then_some(());
    assert!(until(LIMIT, stopped).is_some(), "it does not stop");
    old.process.signal(Signal::CONT);
    assert!(until(LIMIT, reads).is_some(), "it has left");
    stream.write_all(ASK).expect("it listens");
    let mut numbers = [0; 8];
    stream.read_exact(&mut numbers).expect("an answer");
    drop(stream);
    old.stop(&[&place.socket]);
}

#[test]
fn a_path_that_is_allowed_and_leads_nowhere_is_said_before_anything_is_given_up() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let old = place.start(&[]);
    fails(
        &place,
        &["--allow-path", "/nothing/there"],
        1,
        &["cannot allow the path '/nothing/there'"],
    );
    old.stop(&[&place.socket]);
}

#[test]
fn a_stop_in_the_middle_of_it_is_the_successors() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    let old = place.start(&[]);
    let mut stream = UnixStream::connect(successor_of(&place.socket)).expect("it listens");
    stream.write_all(ASK).expect("it listens");
    // The length of the words; the number of descriptors, which come with one byte.
    let mut numbers = [0; 8];
    stream.read_exact(&mut numbers).expect("a state");
    let len = u32::from_le_bytes(numbers[..4].try_into().expect("four"));
    stream.read_exact(&mut vec![0; len as usize + 1]).expect("a state");
    old.process.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(200));
    stream.write_all(b"R").expect("it waits");
    let mut said = Vec::new();
    stream.read_to_end(&mut said).expect("its end");
    assert_eq!(said, b"GS");
    old.ends(0);
}

#[test]
fn a_disk_that_is_being_migrated_stays() {
    let place = Place::new("raw");
    let old = place.start(&[]);
    let all = crate::common::serving::options(false);
    let mut vm = Vm::started(FrontEnd::connect(&place.socket), all);
    let log = memfd_create(c"log", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&log, 1 << 20).expect("memory");
    vm.front.ask(ask::SET_LOG_BASE, &words(&[1 << 20, 0]), &[log.as_fd()]).expect("a log");
    vm.front.set(ask::SET_FEATURES, vm.features | bits::LOG_ALL).expect("agreed");
    let mut load = load(6);
    meanwhile(&mut vm, &mut load, || {
        fails(&place, &[], 1, &["is being migrated", "goes on as before"]);
    });
    vm.front.set(ask::SET_FEATURES, vm.features).expect("agreed");
    let new = meanwhile(&mut vm, &mut load, || upgrade(old, &place, &[]));
    load.read_all(&mut vm);
    new.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn two_disks_of_one_process_go_together() {
    let (one, two) = (Place::new("raw"), Place::new("qcow2"));
    let spec = |place: &Place| {
        let (image, socket) = (text(&place.image), text(&place.socket));
        format!("image={image},format={},socket={socket},queues=2", place.format)
    };
    let (first, second) = (spec(&one), spec(&two));
    let words = ["--disk", first.as_str(), "--disk", second.as_str()];
    let old = Daemon::of(&mut serve_command(&words));
    let (mut vm, mut load_one) = (one.vm(true), load(7));
    let (mut other, mut load_two) = (two.vm(false), load(8));
    load_two.run(&mut other, 100);
    // Of one of them alone nothing can be had by halves: the old process has the other one still.
    let new = meanwhile(&mut vm, &mut load_one, || {
        let new = Daemon::of(&mut serve_command(&[&words[..], &["--upgrade"]].concat()));
        let finished = old.ends(0);
        assert!(finished.stderr.contains("handed over"), "{}", finished.output());
        new
    });
    load_two.run(&mut other, 100);
    load_two.drain(&mut other);
    load_two.read_all(&mut other);
    load_one.read_all(&mut vm);
    let stopped = meanwhile(&mut vm, &mut load_one, || ctl(&two.socket, &["stop"]).ok());
    assert_eq!(stopped.code, 0);
    assert!(!two.socket.exists());
    two.judge(&mut load_two);
    new.stop(&[&one.socket]);
    one.judge(&mut load_one);
}

#[test]
fn one_of_two_disks_can_be_taken() {
    let (one, two) = (Place::new("raw"), Place::new("raw"));
    let spec = |place: &Place| {
        format!("image={},format=raw,socket={},queues=2", text(&place.image), text(&place.socket))
    };
    let (first, second) = (spec(&one), spec(&two));
    let old = Daemon::of(&mut serve_command(&["--disk", &first, "--disk", &second]));
    let (mut vm, mut load_one) = (one.vm(false), load(9));
    let (mut other, mut load_two) = (two.vm(false), load(10));
    let (new, time) = meanwhile(&mut vm, &mut load_one, || {
        let begun = Instant::now();
        (one.start(&["--upgrade"]), begun.elapsed())
    });
    // The old process lives on, and does not make the new one wait for its end (8 s): that comes
    // into its sandbox at once.
    assert!(time < patient(Duration::from_secs(6)), "{time:?}");
    assert_confined(new.process.pid(), is_root());
    assert_ne!(stats(&one.socket)["total"]["requests"], 0);
    load_two.run(&mut other, 100);
    load_two.drain(&mut other);
    load_two.read_all(&mut other);
    load_one.read_all(&mut vm);
    new.stop(&[&one.socket]);
    one.judge(&mut load_one);
    old.stop(&[&two.socket]);
    two.judge(&mut load_two);
}

#[test]
fn the_socket_of_a_service_manager_stays_the_managers() {
    let place = Place::new("raw");
    let listener = UnixListener::bind(&place.socket).expect("bind");
    let words = place.words();
    let manager = "LISTEN_PID=$$ LISTEN_FDS=1";
    let old = Daemon::with(&listener, manager, &words);
    let (mut vm, mut load) = (place.vm(false), load(11));
    let new = meanwhile(&mut vm, &mut load, || {
        let new = Daemon::with(&listener, manager, &[&words[..], &["--upgrade"]].concat());
        old.ends(0);
        new
    });
    load.read_all(&mut vm);
    new.process.signal(Signal::TERM);
    new.ends(0);
    assert!(place.socket.exists(), "the socket is the manager's");
    place.judge(&mut load);
}
