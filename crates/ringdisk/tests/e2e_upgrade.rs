//! `ringdisk serve --upgrade`: a disk goes from process to process while a virtual machine uses it.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::confined::assert_confined;
use common::serving::{
    Daemon, Place, SIZE, ctl, judge, load, locked_while, meanwhile, options, serve_command, stats,
};
use common::tools::qemu_img;
use ringdisk_testkit::limits::is_root;
use ringdisk_testkit::model::{FrontEnd, Load, Request, Vm, ask, bits, words};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::run;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::process::Signal;

/// Processes that have a disk one after the other.
const TIMES: usize = 3;

/// The next process takes the disk over; the one before ends without a complaint, and nothing else changes.
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
        fails(&place, &[], 1, &["more virtqueues"]);
        let packed = [&three[..], &["--packed", "off"]].concat();
        fails_with(&place, &packed, 1, &["not offered any more"]);
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

/// Where the process that serves a disk waits for its successor.
fn successor_of(socket: &Path) -> PathBuf {
    let name = socket.canonicalize().expect("the socket");
    let hash = name
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
            (hash ^ u128::from(*byte)).wrapping_mul((1 << 88) + 0x13b)
        });
    let runtime = std::env::var("XDG_RUNTIME_DIR").unwrap_or_default();
    let user = rustix::process::geteuid().as_raw();
    let places = [format!("{runtime}/ringdisk"), format!("/run/user/{user}/ringdisk")];
    let places =
        places.into_iter().chain([String::from("/run/ringdisk"), format!("/tmp/ringdisk-{user}")]);
    let mut paths =
        places.map(|place| Path::new(&place).join(format!("upgrade-disk-{hash:032x}.sock")));
    paths.find(|path| path.exists()).expect("a socket for the successor")
}

#[test]
fn a_new_process_that_dies_or_stays_silent_on_the_way_changes_nothing() {
    let place = Place::new("qcow2");
    let old = place.start(&[]);
    let (mut vm, mut load) = (place.vm(false), load(5));
    let path = successor_of(&place.socket);
    meanwhile(&mut vm, &mut load, || {
        // The end of a process is the end of its socket: before it has asked, with half of the answer, with all of it.
        for read in [0, 8, 4096] {
            let mut stream = UnixStream::connect(&path).expect("it listens");
            if read > 0 {
                stream.write_all(b"A").expect("it listens");
                let _ = stream.read(&mut vec![0; read]);
            }
            drop(stream);
        }
        // One that says nothing more: the old process waits for a while (8 s) and goes on.
        let mut stream = UnixStream::connect(&path).expect("it listens");
        stream.write_all(b"A").expect("it listens");
        let mut parcel = Vec::new();
        stream.read_to_end(&mut parcel).expect("a parcel, and the end");
        assert!(parcel.len() > 100, "{} bytes", parcel.len());
    });
    load.read_all(&mut vm);
    old.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn a_disk_that_is_being_migrated_stays() {
    let place = Place::new("raw");
    let old = place.start(&[]);
    let all = common::serving::options(false);
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
    let new = meanwhile(&mut vm, &mut load_one, || one.start(&["--upgrade"]));
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
