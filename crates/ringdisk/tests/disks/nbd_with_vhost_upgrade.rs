//! `--upgrade` of disks that guests and NBD clients use: both go along, kept or not, or stay where
//! they were. `RINGDISK_KILLS=N` or `RINGDISK_FULL=1` for more kills.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::limits::{full, is_root};
use ringdisk_testkit::model::{Load, Request, Vm};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, run, until};
use ringdisk_testkit::sim::Prng;
use serde_json::Value;

use crate::common::confined::assert_confined;
use crate::common::serving::{
    Daemon, Place, ctl, load, meanwhile, serve_command, stats, successor_of,
};
use crate::common::tools::{child_of, ringdisk};
use crate::keep::kill;
use crate::nbd_moves::{client, rounds, uri};
use crate::upgrade::ASK;

/// Bytes behind those that the guest writes: NBD clients have these.
const OF_CLIENTS: u64 = 8 << 20;

fn kills() -> u64 {
    let wanted = std::env::var("RINGDISK_KILLS").ok().and_then(|n| n.parse().ok());
    wanted.unwrap_or(if full() { 200 } else { 10 })
}

/// A disk that both may write to: its first half is the guest's, the second one is that of NBD
/// clients.
struct Scene {
    place: Place,
    nbd: PathBuf,
    stop: PathBuf,
    more: Vec<&'static str>,
}

impl Scene {
    /// * `more`: words that all processes have.
    fn new(format: &'static str, more: &[&'static str]) -> Scene {
        let place = Place::new(format);
        let (nbd, stop) = (place.path("nbd.sock"), place.path("stop"));
        Scene { place, nbd, stop, more: more.to_vec() }
    }

    fn process(&self, words: &[&str]) -> Process {
        let nbd = ["--nbd", text(&self.nbd), "--share-rw"];
        let socket = ["--vhost-user-blk", text(&self.place.socket)];
        let all = [&self.place.words()[..], &self.more, &nbd, words, &socket];
        Process::spawn(&mut serve_command(&all.concat()))
    }

    /// Starts the first process.
    fn start(&self, words: &[&str]) -> Process {
        let process = Daemon { process: self.process(words) }.ready().process;
        self.answers(&process);
        ctl(&self.place.socket, &["resize", "+8M"]).ok();
        process
    }

    /// Waits until it answers commands.
    fn answers(&self, process: &Process) {
        let words = ["stats"];
        let answers = || (self.try_ctl(&words).code() == Some(0)).then_some(());
        assert!(until(LIMIT, answers).is_some(), "{}", process.output());
    }

    fn try_ctl(&self, words: &[&str]) -> ringdisk_testkit::process::Finished {
        let program = crate::common::program();
        run(command(&[&[&*program, "ctl", text(&self.place.socket)], words].concat()))
    }

    /// Clients of libnbd, each on one connection. Their handshakes are over: one in the middle of
    /// it would not go along.
    fn clients(&self) -> [Process; 2] {
        let clients = [0, 2 << 20].map(|at| client(&uri(&self.nbd), OF_CLIENTS + at, &self.stop));
        let both = until(LIMIT, || (self.known() == 3).then_some(()));
        assert!(both.is_some(), "{}", clients.each_ref().map(Process::output).concat());
        clients
    }

    /// The clients have written and read, without an error, on the connections that they began
    /// with.
    fn clients_went_on(&self, clients: [Process; 2]) {
        File::create(&self.stop).expect("a file");
        for client in clients {
            assert!(rounds(client) > 3);
        }
    }

    /// How many clients a server knows: the guest, and those over NBD.
    fn known(&self) -> usize {
        stats(&self.place.socket)["serving"]["clients"].as_array().map_or(0, Vec::len)
    }

    /// Both are served by this process.
    fn is_served(&self, vm: &mut Vm, process: &Process) {
        assert_eq!(vm.status(0, Request::flush()), 0, "{}", process.output());
        let info = || run(command(&["nbdinfo", "--size", &uri(&self.nbd)])).code() == Some(0);
        assert!(until(LIMIT, || info().then_some(())).is_some(), "{}", process.output());
    }

    fn end(&self, process: Process, vm: Vm, load: &mut Load) {
        drop(vm);
        let sockets: [&Path; 2] = [&self.place.socket, &self.nbd];
        Daemon { process }.stop(&sockets);
        self.place.judge(load);
    }
}

/// Waits for the end of a process that has handed over, and says no more than of a refusal before.
fn has_handed_over(old: Process, new: &Process) {
    let old = old.finish(LIMIT);
    let said = format!("the old: {}\nthe new: {}", old.output(), new.output());
    assert_eq!(old.code(), Some(0), "{said}");
    assert!(old.output().contains("handed over to another process"), "{said}");
    let mut lines = said.lines().filter(|line| !line.contains("was not handed over"));
    let words = ["warning", "WARN", "error", "panicked"];
    assert!(!lines.any(|line| words.iter().any(|word| line.contains(word))), "{said}");
}

/// Connects again and again while something happens: no connection is refused.
fn connecting<T>(nbd: &Path, what: impl FnOnce() -> T) -> T {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                UnixStream::connect(nbd).expect("it listens");
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        let result = what();
        is_done.store(true, Ordering::Relaxed);
        result
    })
}

#[test]
fn a_guest_and_nbd_clients_go_from_process_to_process_under_load() {
    for (format, more) in [("raw", &[][..]), ("qcow2", &["--nbd", "127.0.0.1:0"])] {
        let scene = Scene::new(format, more);
        let mut process = scene.start(&[]);
        let (mut vm, mut load) = (scene.place.vm(false), load(3));
        let clients = scene.clients();
        for _ in 0..3 {
            load.run(&mut vm, 100);
            let new = meanwhile(&mut vm, &mut load, || {
                connecting(&scene.nbd, || {
                    Daemon { process: scene.process(&["--upgrade"]) }.ready().process
                })
            });
            has_handed_over(std::mem::replace(&mut process, new), &process);
            assert_confined(process.pid(), is_root());
            assert!(scene.known() >= 3, "{}", process.output());
        }
        meanwhile(&mut vm, &mut load, || std::thread::sleep(Duration::from_millis(300)));
        scene.clients_went_on(clients);
        scene.end(process, vm, &mut load);
    }
}

/// The parent of a kept one holds what the guest needs; connections of NBD clients go along all the
/// same.
#[test]
fn both_go_to_a_process_that_keeps_them_and_to_one_that_does_not() {
    // A kill leaks clusters of a qcow2 image.
    let scene = Scene::new("raw", &[]);
    let mut process = scene.start(&["--keep"]);
    let (mut vm, mut load) = (scene.place.vm(false), load(4));
    let clients = scene.clients();
    for words in [&["--keep"][..], &[], &["--keep"]] {
        load.run(&mut vm, 50);
        let new = scene.process(&[&["--upgrade"], words].concat());
        let mut old = std::mem::replace(&mut process, new);
        let begun = Instant::now();
        while old.ended().is_none() {
            load.run(&mut vm, 8);
            assert!(begun.elapsed() < LIMIT, "{}\nthe new: {}", old.output(), process.output());
        }
        has_handed_over(old, &process);
        scene.answers(&process);
        assert!(scene.known() >= 3, "{}", process.output());
    }
    meanwhile(&mut vm, &mut load, || std::thread::sleep(Duration::from_millis(300)));
    scene.clients_went_on(clients);
    // Killed, the guest goes on and NBD clients connect again.
    for _ in 0..2 {
        kill(until(LIMIT, || child_of(process.pid())).expect("a server"));
        load.run(&mut vm, 50);
        load.drain(&mut vm);
        scene.is_served(&mut vm, &process);
    }
    scene.end(process, vm, &mut load);
}

/// A successor that finds in the middle that it cannot serve, or is killed: the guest and NBD
/// clients go on where they were.
#[test]
fn both_go_on_where_they_were_when_the_successor_fails() {
    let scene = Scene::new("raw", &[]);
    let process = scene.start(&[]);
    let (mut vm, mut load) = (scene.place.vm(true), load(5));
    let clients = scene.clients();
    for _ in 0..3 {
        load.run(&mut vm, 50);
        let failed = meanwhile(&mut vm, &mut load, || {
            scene.process(&["--upgrade", "--cpus", "4000"]).finish(LIMIT)
        });
        assert!(!failed.output().contains("panicked"), "{}", failed.output());
        assert!(![None, Some(0)].contains(&failed.code()), "{}", failed.output());
    }
    // One that ends when it has everything, and one that says nothing more: the old process goes on
    // after 8 s.
    let path = successor_of(&scene.place.socket);
    meanwhile(&mut vm, &mut load, || {
        for waits in [false, true] {
            let mut stream = UnixStream::connect(&path).expect("it listens");
            stream.write_all(ASK).expect("it listens");
            let mut handed = vec![0; 4096];
            let mut count = stream.read(&mut handed).expect("a state");
            while waits && count > 0 {
                count = stream.read(&mut handed).expect("a state, and the end");
            }
        }
    });
    meanwhile(&mut vm, &mut load, || std::thread::sleep(Duration::from_millis(200)));
    assert!(scene.known() >= 3, "{}", process.output());
    scene.clients_went_on(clients);
    scene.end(process, vm, &mut load);
}

/// A process of the old pair or of the new one is killed at any moment of a hand-over: the guest
/// goes on without a start of another one, and NBD clients find the disk, connected still or again.
#[test]
fn both_are_served_whoever_is_killed_in_a_hand_over() {
    let (scene, mut prng) = (Scene::new("raw", &[]), Prng::new(9));
    let mut process = scene.start(&["--keep"]);
    let (mut vm, mut load) = (scene.place.vm(false), load(6));
    let (mut usual, mut counts) = (Duration::from_millis(200), [[0_u64; 2]; 2]);
    for number in 0..kills() {
        load.run(&mut vm, prng.below(60));
        scene.answers(&process);
        let clients = scene.clients();
        let kills_old = prng.coin();
        let mut new = scene.process(&["--keep", "--upgrade"]);
        let moment = usual * u32::try_from(prng.below(100)).unwrap_or(0) / 80;
        let begun = Instant::now();
        while begun.elapsed() < moment {
            load.run(&mut vm, 2);
        }
        let holder = if kills_old { process.pid() } else { new.pid() };
        // It may not have started one yet, or have ended.
        child_of(holder).into_iter().for_each(kill);
        let begun = Instant::now();
        let new_serves = loop {
            load.run(&mut vm, 8);
            if process.ended().is_some() {
                break true;
            }
            if new.ended().is_some() {
                break false;
            }
            let said = || format!("the old: {}\nthe new: {}", process.output(), new.output());
            assert!(begun.elapsed() < LIMIT, "kill {number}: both go on: {}", said());
        };
        counts[usize::from(kills_old)][usize::from(new_serves)] += 1;
        let other = if new_serves { std::mem::replace(&mut process, new) } else { new };
        for said in [other.output(), process.output()] {
            assert!(!said.contains("panicked"), "kill {number}: {said}");
        }
        load.drain(&mut vm);
        scene.is_served(&mut vm, &process);
        drop(clients);
        if number % 4 == 1 {
            scene.answers(&process);
            let begun = Instant::now();
            let new = scene.process(&["--keep", "--upgrade"]);
            let mut old = std::mem::replace(&mut process, new);
            while old.ended().is_none() {
                load.run(&mut vm, 8);
                assert!(begun.elapsed() < LIMIT, "{}\nthe new: {}", old.output(), process.output());
            }
            usual = begun.elapsed();
        }
    }
    println!("new killed, old killed: [old serves, new serves] {counts:?}; {usual:?}");
    load.drain(&mut vm);
    scene.answers(&process);
    scene.is_served(&mut vm, &process);
    scene.end(process, vm, &mut load);
}

/// Nobody keeps either: a new process that is killed leaves both with the old one, or, when it has
/// them already, nobody.
#[test]
fn a_new_process_that_is_killed_has_both_or_neither() {
    let mut prng = Prng::new(10);
    let (mut old_serves, mut none) = (0, 0);
    // How long one takes that nobody disturbs; a moment more than that is tried, too.
    let mut usual = Duration::from_millis(150);
    for number in 0..kills() {
        let scene = Scene::new("qcow2", &[]);
        let mut process = scene.start(&[]);
        let (mut vm, mut load) = (scene.place.vm(false), load(number));
        let clients = scene.clients();
        load.run(&mut vm, 20);
        let mut new = scene.process(&["--upgrade"]);
        let part = u32::try_from(prng.below(100)).unwrap_or(0);
        let (begun, moment) = (Instant::now(), usual * part / 80);
        while begun.elapsed() < moment && process.ended().is_none() {
            load.reap(&mut vm);
            (0..2).for_each(|queue| {
                load.fill(&mut vm, queue);
            });
            std::thread::sleep(Duration::from_micros(200));
        }
        new.signal(rustix::process::Signal::KILL);
        new.wait(LIMIT).expect("it was killed");
        let over = || process.output().contains("handed over to another process").then_some(());
        if until(Duration::from_millis(300), over).is_some() {
            assert!(process.wait(LIMIT).is_some_and(|status| status.success()));
            none += 1;
            continue;
        }
        old_serves += 1;
        load.run(&mut vm, 40);
        load.drain(&mut vm);
        assert!(scene.known() >= 3, "{}", process.output());
        let begun = Instant::now();
        let new = meanwhile(&mut vm, &mut load, || {
            Daemon { process: scene.process(&["--upgrade"]) }.ready().process
        });
        usual = begun.elapsed();
        has_handed_over(std::mem::replace(&mut process, new), &process);
        scene.clients_went_on(clients);
        scene.end(process, vm, &mut load);
    }
    println!("the old process has gone on {old_serves} times, and handed over before {none} times");
}

/// Two disks, names of one address, with a guest and an NBD client each.
#[test]
fn several_disks_go_together_with_their_clients() {
    let (a, b) = (Place::new("raw"), Place::new("qcow2"));
    let (nbd, stop) = (a.path("nbd.sock"), a.path("stop"));
    let spec = |place: &Place, name: &str| {
        let (image, socket) = (text(&place.image), text(&place.socket));
        let format = place.format;
        format!("image={image},format={format},socket={socket},queues=2,export-name={name}")
    };
    let (first, second) = (spec(&a, "a"), spec(&b, "b"));
    let words = ["--disk", &first, "--disk", &second, "--nbd", text(&nbd), "--share-rw"];
    let serve = |more: &[&str]| Daemon::of(&mut serve_command(&[&words[..], more].concat()));
    let mut process = serve(&[]).process;
    for place in [&a, &b] {
        ctl(&place.socket, &["resize", "+8M"]).ok();
    }
    let (mut vm, mut load_a) = (a.vm(false), load(7));
    let (mut other, mut load_b) = (b.vm(true), load(8));
    let clients = ["a", "b"].map(|name| {
        client(&format!("nbd+unix:///{name}?socket={}", text(&nbd)), OF_CLIENTS, &stop)
    });
    // One of them alone would leave clients of the other one with a process that listens no more.
    let one = ["serve", "--disk", &first, "--nbd", text(&nbd), "--share-rw", "--upgrade"];
    let refused = meanwhile(&mut vm, &mut load_a, || ringdisk(Path::new("/"), &one));
    refused.ends(11).says("another disk of the same process, 'b'").says("it goes on as before");
    for _ in 0..3 {
        load_b.run(&mut other, 50);
        load_b.drain(&mut other);
        let new = meanwhile(&mut vm, &mut load_a, || serve(&["--upgrade"]).process);
        has_handed_over(std::mem::replace(&mut process, new), &process);
    }
    std::thread::sleep(Duration::from_millis(300));
    File::create(&stop).expect("a file");
    clients.into_iter().for_each(|client| assert!(rounds(client) > 3));
    // One that has ended is named no more.
    drop(vm);
    ctl(&a.socket, &["stop"]).ok();
    a.judge(&mut load_a);
    let words = ["--disk", &second, "--nbd", text(&nbd), "--share-rw", "--upgrade"];
    let new = Daemon::of(&mut serve_command(&words)).process;
    has_handed_over(std::mem::replace(&mut process, new), &process);
    let list = ok_words(&["nbdinfo", "--list", "--json", &uri(&nbd)]);
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!(list["exports"][0]["export-name"], "b", "{list}");
    load_b.run(&mut other, 50);
    load_b.drain(&mut other);
    drop(other);
    Daemon { process }.stop(&[&b.socket, &nbd]);
    b.judge(&mut load_b);
}

#[test]
fn other_words_about_nbd_are_refused_before_anything_stands_still() {
    let scene = Scene::new("qcow2", &[]);
    let process = scene.start(&[]);
    let mut vm = scene.place.vm(false);
    let clients = scene.clients();
    let socket = ["--vhost-user-blk", text(&scene.place.socket), "--upgrade"];
    let other = scene.place.path("other.sock");
    for (words, wanted) in [
        (&["--share-rw", "--nbd", text(&other)][..], "--nbd is"),
        (&[], "--nbd is"),
        (&["--nbd", text(&scene.nbd)], "--share-rw is 'on' there, 'off' here"),
        (&["--nbd", text(&scene.nbd), "--share-rw", "--export-name", "x"], "--export-name is"),
    ] {
        let all = [&["serve"], &scene.place.words()[..], &socket, words].concat();
        ringdisk(Path::new("/"), &all).ends(2).says(wanted).says("it goes on as before");
        assert_eq!(vm.status(0, Request::flush()), 0);
    }
    assert!(!other.exists());
    scene.clients_went_on(clients);
    drop(vm);
    Daemon { process }.stop(&[&scene.place.socket, &scene.nbd]);
    // A disk that NBD clients do not have yet.
    let place = Place::new("raw");
    let alone = place.start(&[]);
    let all = [&["serve"], &place.words()[..], &["--nbd", text(&other), "--upgrade"]].concat();
    let all = [&all[..], &["--vhost-user-blk", text(&place.socket)]].concat();
    ringdisk(Path::new("/"), &all).ends(2).says("--nbd is not given there");
    alone.stop(&[&place.socket]);
}
