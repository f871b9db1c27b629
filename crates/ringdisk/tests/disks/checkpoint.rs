//! Checkpoints of mounts, disks of guests and NBD disks: one instant, readers, bitmaps, and what
//! becomes of them when something goes wrong.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::model::Request;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, ok_words, until};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::serving::{Daemon, Place, SIZE, ctl, load, meanwhile, serve_command};
use crate::common::tools::{Ran, qemu_img};
use crate::common::{BLOCK, open, program, serve};

/// `ringdisk ctl TARGET checkpoint WORDS…`.
fn checkpoint(target: &Path, words: &[&str]) -> Ran {
    ctl(target, &[&["checkpoint"], words].concat())
}

/// Begins one, and gives what it says.
fn begin(target: &Path, words: &[&str]) -> Value {
    checkpoint(target, &[words, &["--json"]].concat()).ok().json()
}

/// The URI of a disk of a checkpoint.
fn uri(begun: &Value, number: usize) -> String {
    begun["disks"][number]["uri"].as_str().expect("a URI").to_owned()
}

/// The disk as readers see it.
fn read(uri: &str) -> Vec<u8> {
    let directory = scratch();
    let copy = directory.path().join("copy");
    ok_words(&["nbdcopy", uri, text(&copy)]);
    fs::read(copy).expect("the copy")
}

/// What the list says of the only checkpoint.
fn listed(target: &Path) -> Value {
    checkpoint(target, &["--list", "--json"]).ok().json()
}

fn count(target: &Path) -> usize {
    listed(target)["checkpoints"].as_array().expect("a list").len()
}

/// A qcow2 of 8 MiB that is mounted.
struct Disk {
    mounted: Mounted,
    image: PathBuf,
    directory: TempDir,
}

/// An image that is served no longer, and its directory.
struct Image {
    path: PathBuf,
    _directory: TempDir,
}

fn mounted(words: &[&str]) -> Disk {
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    let mounted = serve(&image, words);
    Disk { mounted, image, directory }
}

impl Disk {
    fn write(&self, byte: u8, offset: u64, len: usize) {
        open(self.mounted.path()).write_all_at(&vec![byte; len], offset).expect("write");
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.mounted.path()).expect("read")
    }

    fn path(&self) -> &Path {
        self.mounted.path()
    }

    /// Stops it: the image is sound.
    fn stop(self) -> Image {
        assert_eq!(self.mounted.stop().code(), Some(0));
        images::assert_clean(&self.image);
        Image { path: self.image, _directory: self.directory }
    }
}

#[test]
fn readers_see_the_instant_while_a_mount_is_overwritten() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&["--sandbox", "on"]);
    disk.write(1, 0, 2 << 20);
    let before = disk.bytes();
    let begun = begin(disk.path(), &["c1", "--bitmap", "b1"]);
    let uri = uri(&begun, 0);
    let name = disk.path().file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(begun["disks"][0]["export"].as_str(), Some(name.as_str()));
    disk.write(2, 1 << 20, 3 << 20);
    assert!(read(&uri) == before, "the state of the instant");
    let info: Value = serde_json::from_str(&ok_words(&["nbdinfo", "--json", &uri])).unwrap();
    let export = &info["exports"][0];
    assert_eq!((&export["is_read_only"], &export["export-size"]), (&true.into(), &SIZE.into()));
    let list = listed(disk.path());
    let socket = PathBuf::from(list["checkpoints"][0]["socket"].as_str().expect("a socket"));
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(list["checkpoints"][0]["fleeced"], 1 << 20, "only data is copied: {list}");
    assert_eq!(list["image"]["bitmaps"][0]["records"], true, "{list}");
    checkpoint(disk.path(), &["c1"]).ends(5).says("has a checkpoint 'c1' already");
    checkpoint(disk.path(), &["c2"]).ends(5).says("one at a time");
    checkpoint(disk.path(), &["--end", "c1"]).ok();
    assert!(!socket.exists(), "its socket goes with it");
    checkpoint(disk.path(), &["--end", "c1"]).ends(2).says("no checkpoint 'c1'");
    let after = disk.bytes();
    let image = disk.stop();
    let content = images::reference(&image.path, "qcow2");
    assert!(fs::read(content).unwrap() == after);
}

#[test]
fn a_bitmap_says_what_has_changed_and_a_failed_round_loses_nothing() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&["--sandbox", "on"]);
    checkpoint(disk.path(), &["c1", "--bitmap", "b1"]).ok();
    checkpoint(disk.path(), &["--end", "c1"]).ok();
    disk.write(1, 1 << 20, 1 << 20);
    // The round fails: what comes during it is in the old bitmap, too.
    checkpoint(disk.path(), &["c2", "--bitmap", "b2", "--since", "b1"]).ok();
    disk.write(2, 4 << 20, 1 << 16);
    checkpoint(disk.path(), &["--end", "--merge", "c2"]).ok();
    let begun = begin(disk.path(), &["c3", "--bitmap", "b3", "--since", "b1"]);
    disk.write(3, 6 << 20, 1 << 16);
    let uri = uri(&begun, 0);
    let map = ok_words(&["nbdinfo", "--json", "--map=qemu:dirty-bitmap:b1", &uri]);
    let map: Value = serde_json::from_str(&map).unwrap();
    let dirty = |run: &&Value| run["type"] != 0;
    let dirty: Vec<(u64, u64)> = map.as_array().unwrap().iter().filter(dirty).map(range).collect();
    assert_eq!(dirty, [(1 << 20, 1 << 20), (4 << 20, 1 << 16)]);
    let socket = listed(disk.path())["checkpoints"][0]["socket"].as_str().unwrap().to_owned();
    let export = begun["disks"][0]["export"].as_str().unwrap();
    let options = format!(
        "driver=nbd,server.type=unix,server.path={socket},export={export},\
         x-dirty-bitmap=qemu:dirty-bitmap:b1"
    );
    let map = ["map", "--output=json", "--image-opts", &options];
    let map = qemu_img(Path::new("/"), &map).ok().json();
    let marked: Vec<(u64, u64)> =
        map.as_array().unwrap().iter().filter(|run| run["data"] == false).map(start).collect();
    assert_eq!(marked, [(1 << 20, 1 << 20), (4 << 20, 1 << 16)], "{map}");
    checkpoint(disk.path(), &["--end", "c3"]).ok();
    let image = disk.stop();
    let info = qemu_img(Path::new("/"), &["info", "--output=json", text(&image.path)]).ok().json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap().clone();
    assert_eq!(bitmaps.len(), 1, "{bitmaps:?}");
    assert_eq!(
        (&bitmaps[0]["name"], bitmaps[0]["flags"].to_string()),
        (&"b3".into(), "[\"auto\"]".into())
    );
}

fn range(run: &Value) -> (u64, u64) {
    (run["offset"].as_u64().unwrap(), run["length"].as_u64().unwrap())
}

fn start(run: &Value) -> (u64, u64) {
    (run["start"].as_u64().unwrap(), run["length"].as_u64().unwrap())
}

#[test]
fn the_disk_of_a_guest_stands_still_for_readers_while_the_guest_works() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(format);
        let daemon = place.start(&["--sandbox", "on"]);
        let (mut vm, mut load) = (place.vm(true), load(11));
        load.run(&mut vm, 500);
        load.drain(&mut vm);
        let begun = begin(&place.socket, &["c1", "--nbd", text(&place.path("readers"))]);
        let uri = uri(&begun, 0);
        let first = read(&uri);
        load.judge(&first);
        let second = meanwhile(&mut vm, &mut load, || read(&uri));
        assert!(first == second, "{format}: the kept state has changed");
        load.run(&mut vm, 500);
        load.drain(&mut vm);
        assert!(read(&uri) == first, "{format}");
        let end = checkpoint(&place.socket, &["--end", "c1"]);
        end.ok();
        assert!(!place.path("readers").exists());
        load.read_all(&mut vm);
        daemon.stop(&[&place.socket]);
        place.judge(&mut load);
    }
}

#[test]
fn an_nbd_disk_has_checkpoints_too() {
    let place = Place::new("qcow2");
    let words = [text(&place.image), "-f", "qcow2", "--nbd", text(&place.socket)];
    let daemon = Daemon::of(&mut serve_command(&[&words[..], &["--sandbox", "on"]].concat()));
    let live = format!("nbd+unix:///?socket={}", text(&place.socket));
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 0 1M", &live]);
    let before = read(&live);
    let begun = begin(&place.socket, &["c1"]);
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 8 0 2M", &live]);
    assert!(read(&uri(&begun, 0)) == before);
    // The end of the server is the end of the checkpoint; the image is free then.
    daemon.stop(&[&place.socket]);
    images::assert_clean(&place.image);
}

#[test]
fn two_disks_of_two_processes_are_frozen_at_one_instant() {
    if !needs_root() {
        return;
    }
    // A counter is written to A, then to B: at no instant is B ahead of A.
    let a = mounted(&["--sandbox", "on"]);
    let b = Place::new("qcow2");
    let daemon = b.start(&["--sandbox", "on"]);
    let mut vm = b.vm(true);
    let is_done = AtomicBool::new(false);
    let counts = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let file = open(a.path());
            let mut count = 0_u64;
            while !is_done.load(Ordering::Relaxed) {
                count += 1;
                let mut block = vec![0; BLOCK];
                block[..8].copy_from_slice(&count.to_le_bytes());
                file.write_all_at(&block, 0).expect("write A");
                assert_eq!(vm.status(0, Request::write(0, block)), 0, "write B");
            }
            count
        });
        for number in 0..8 {
            let name = format!("c{number}");
            let begun = begin(a.path(), &[&name, "--with", text(&b.socket)]);
            let counter =
                |disk| u64::from_le_bytes(read(&uri(&begun, disk))[..8].try_into().unwrap());
            let (in_a, in_b) = (counter(0), counter(1));
            assert!(in_b <= in_a && in_a <= in_b + 1, "A has {in_a}, B {in_b}");
            // Either one ends it for both.
            let target = if number % 2 == 0 { a.path() } else { &b.socket };
            checkpoint(target, &["--end", &name]).ok();
            assert_eq!((count(a.path()), count(&b.socket)), (0, 0));
        }
        is_done.store(true, Ordering::Relaxed);
        writer.join().expect("no panic")
    });
    assert!(counts > 8, "{counts}");
    daemon.stop(&[&b.socket]);
    a.stop();
}

#[test]
fn disks_of_one_process_share_an_address() {
    let (one, two) = (Place::new("raw"), Place::new("qcow2"));
    let spec = |place: &Place| {
        let (image, socket) = (text(&place.image), text(&place.socket));
        format!("image={image},format={},socket={socket}", place.format)
    };
    let daemon = Daemon::of(&mut serve_command(&["--disk", &spec(&one), "--disk", &spec(&two)]));
    let address = one.path("readers");
    let words = ["c1", "--with", text(&two.socket), "--nbd", text(&address)];
    let begun = begin(&one.socket, &words);
    // Both sockets have the same last part.
    let names: Vec<&str> =
        (0..2).map(|number| begun["disks"][number]["export"].as_str().unwrap()).collect();
    assert_eq!(names, ["socket", "socket-2"]);
    let list = format!("nbd+unix:///?socket={}", text(&address));
    let list = ok_words(&["nbdinfo", "--list", "--json", &list]);
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list["exports"].as_array().map(Vec::len), Some(2), "{list}");
    assert_eq!((0..2).map(|n| read(&uri(&begun, n)).len()).collect::<Vec<_>>(), [8 << 20, 8 << 20]);
    checkpoint(&two.socket, &["--end", "c1"]).ok();
    assert!(!address.exists() && count(&one.socket) == 0);
    daemon.stop(&[&one.socket, &two.socket]);
}

/// A disk with a request in flight that does not end: its image is an export of a server that is
/// stopped.
struct Stuck {
    server: Daemon,
    daemon: Daemon,
    client: Process,
    place: Place,
    below: Place,
}

impl Stuck {
    fn new() -> Stuck {
        let (below, place) = (Place::new("raw"), Place::new("raw"));
        let words = [text(&below.image), "-f", "raw", "--nbd", text(&below.socket)];
        let server = Daemon::of(&mut serve_command(&words));
        let image = format!("nbd+unix:///?socket={}", text(&below.socket));
        let words = [&image, "-f", "raw", "--nbd", text(&place.socket)];
        let daemon = Daemon::of(&mut serve_command(&words));
        server.process.signal(Signal::STOP);
        let live = format!("nbd+unix:///?socket={}", text(&place.socket));
        let mut command = Command::new("qemu-io");
        let client = Process::spawn(command.args(["-f", "raw", "-c", "write 0 4k", &live]));
        let in_flight = || {
            let stats = crate::common::serving::stats(&place.socket);
            (stats["total"]["in-flight"].as_u64() > Some(0)).then_some(())
        };
        until(LIMIT, in_flight).expect("a request in flight");
        Stuck { server, daemon, client, place, below }
    }

    fn end(mut self) {
        self.server.process.signal(Signal::CONT);
        self.client.wait(LIMIT).expect("the request ends");
        assert_eq!(count(&self.place.socket), 0);
        self.daemon.stop(&[&self.place.socket]);
        self.server.stop(&[&self.below.socket]);
    }
}

#[test]
fn a_disk_that_does_not_drain_undoes_the_others() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&["--sandbox", "on"]);
    let stuck = Stuck::new();
    let words = ["c1", "--with", text(&stuck.place.socket)];
    checkpoint(disk.path(), &words).ends(5).says("did not end within");
    let list = listed(disk.path());
    assert_eq!(list["checkpoints"], Value::Array(Vec::new()));
    disk.write(5, 0, 4096);
    checkpoint(disk.path(), &["c1"]).ok();
    checkpoint(disk.path(), &["--end", "c1"]).ok();
    stuck.end();
    disk.stop();
}

/// Waits until a client has begun the steps of the checkpoint `c1`: the name is taken then.
fn begins(disk: &Disk) {
    let is_taken = || checkpoint(disk.path(), &["--end", "c1"]).err.contains("it has: c1");
    until(LIMIT, || is_taken().then_some(())).expect("a begin");
}

#[test]
fn a_client_that_is_killed_in_the_middle_leaves_nothing() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&["--sandbox", "on"]);
    let stuck = Stuck::new();
    let mut command = Command::new(program());
    command.args(["ctl", disk.mounted.text(), "checkpoint", "c1", "--with"]);
    let mut client = Process::spawn(command.arg(text(&stuck.place.socket)));
    begins(&disk);
    client.signal(Signal::KILL);
    client.wait(LIMIT).expect("it was killed");
    // Requests go on, and the name is free.
    disk.write(5, 0, 4096);
    until(LIMIT, || (checkpoint(disk.path(), &["c1"]).code == 0).then_some(())).expect("a begin");
    checkpoint(disk.path(), &["--end", "c1"]).ok();
    stuck.end();
    disk.stop();
}

#[test]
fn a_full_fleecing_file_fails_the_checkpoint_and_never_the_client() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&["--sandbox", "on"]);
    disk.write(1, 0, 8 << 20);
    checkpoint(disk.path(), &["c0", "--bitmap", "b0"]).ok();
    checkpoint(disk.path(), &["--end", "c0"]).ok();
    let words = ["c1", "--since", "b0", "--bitmap", "b1", "--fleece-max", "128K"];
    let uri = uri(&begin(disk.path(), &words), 0);
    disk.write(2, 0, 1 << 20);
    assert!(disk.bytes()[..1 << 20].iter().all(|byte| *byte == 2));
    let list = listed(disk.path());
    assert!(list["checkpoints"][0]["failed"].is_string(), "{list}");
    let failed = |words: &[&str]| {
        let mut command = Command::new(words[0]);
        !command.args(&words[1..]).output().expect("it starts").status.success()
    };
    assert!(failed(&["nbdcopy", &uri, "null:"]), "reads fail");
    checkpoint(disk.path(), &["--end", "--merge", "c1"]).ok().says("could not be read");
    let bitmaps = || {
        let list = listed(disk.path());
        let all = list["image"]["bitmaps"].as_array().unwrap().clone();
        all.iter().filter_map(|b| b["name"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(bitmaps(), ["b0"]);
    assert!(disk.mounted.output().contains("checkpoint 'c1'"), "{}", disk.mounted.output());
    // Nobody can have read all of it, so a program that ends it as if it had loses nothing.
    begin(disk.path(), &["c2", "--since", "b0", "--bitmap", "b2", "--fleece-max", "128K"]);
    disk.write(3, 0, 1 << 20);
    checkpoint(disk.path(), &["--end", "c2"]).ok().says("its bitmaps were merged");
    assert_eq!(bitmaps(), ["b0"]);
    disk.stop();
}

#[test]
fn what_cannot_be_is_refused_in_words() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&[]);
    let path = disk.path();
    checkpoint(path, &["c1", "--since", "nope"]).ends(3).says("nope");
    checkpoint(path, &["a/b"]).ends(2).says("letters, digits");
    checkpoint(path, &["c1", "--with", text(path)]).ends(2).says("named twice");
    checkpoint(path, &["c1", "--fleece-dir", "/nonexistent"]).ends(2).says("--fleece-dir");
    checkpoint(path, &["--merge", "c1"]).ends(2).says("--end");
    let directory = scratch();
    let taken = directory.path().join("taken");
    let _listener = std::os::unix::net::UnixListener::bind(&taken).expect("a socket");
    checkpoint(path, &["c1", "--nbd", text(&taken)]).ends(5).says("another process listens");
    let file = directory.path().join("file");
    fs::write(&file, "x").unwrap();
    checkpoint(path, &["c1", "--nbd", text(&file)]).ends(4).says("is no socket");
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    checkpoint(path, &["c1", "--nbd", &address]).ends(5).says("cannot listen");
    assert_eq!(count(path), 0, "nothing of all that stays");
    let null = crate::common::mount(&["--null", "8M"]);
    checkpoint(null.path(), &["c1"]).ends(11).says("null disk");
    let raw = crate::common::serve_raw(1 << 20, &[]);
    checkpoint(raw.mounted.path(), &["c1", "--bitmap", "b1"]).ends(11).says("qcow2");
    // With one disk that cannot, none has it, and the new bitmap goes again.
    let words = ["c1", "--bitmap", "b1", "--with", raw.mounted.text()];
    checkpoint(path, &words).ends(11);
    let list = listed(path);
    assert_eq!((count(path), &list["image"]["bitmaps"]), (0, &Value::Array(Vec::new())));
    disk.stop();
}

#[test]
fn a_checkpoint_ends_with_its_server_while_a_reader_reads() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&["--sandbox", "on"]);
    disk.write(1, 0, 8 << 20);
    let begun = begin(disk.path(), &["c1", "--bitmap", "b1"]);
    let uri = uri(&begun, 0);
    let script = "
import time
h.connect_uri(uri)
assert len(h.pread(65536, 0)) == 65536
print('reads', flush=True)
try:
    while True:
        h.pread(65536, 0)
        time.sleep(0.01)
except nbd.Error:
    pass
";
    let connect = format!("uri = '{uri}'");
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-m", "nbd", "-c", &connect, "-c", script]);
    let mut reader = Process::spawn(&mut command);
    until(LIMIT, || reader.output().contains("reads").then_some(())).expect("a reader");
    let image = disk.stop();
    assert!(reader.wait(LIMIT).expect("it ends").success());
    // The bitmap is on the disk, and sound.
    let info = qemu_img(Path::new("/"), &["info", "--output=json", text(&image.path)]).ok().json();
    let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
    assert_eq!((&bitmap["name"], bitmap["flags"].to_string()), (&"b1".into(), "[\"auto\"]".into()));
}

#[test]
fn a_silent_client_holds_a_disk_for_a_moment_only() {
    if !needs_root() {
        return;
    }
    let disk = mounted(&["--sandbox", "on"]);
    let stuck = Stuck::new();
    let mut command = Command::new(program());
    command.args(["ctl", disk.mounted.text(), "checkpoint", "c1", "--with"]);
    let client = Process::spawn(command.arg(text(&stuck.place.socket)));
    begins(&disk);
    client.signal(Signal::STOP);
    // Longer than a hold may last.
    ringdisk_testkit::process::pause(Duration::from_secs(4));
    disk.write(5, 0, 4096);
    client.signal(Signal::CONT);
    assert_ne!(client.finish(LIMIT).code(), Some(0));
    assert_eq!(count(disk.path()), 0);
    stuck.end();
    disk.stop();
}
