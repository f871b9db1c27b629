//! `ringdisk ctl` and the control socket: what it does, who may use it, and what rubbish does to
//! it.

mod changes;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{self, assert_clean, pattern, piece};
use ringdisk_testkit::limits::{mount_at, needs_root, part_needs};
use ringdisk_testkit::mount::{Loop, Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, patient, until};
use rustix::io::Errno;
use rustix::process::Signal;
use rustix::thread::Uid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::tools::{Ran, names, qemu_img, ringdisk};
use crate::common::{MIB, program, serve};

/// `ringdisk ctl MOUNTPOINT WORDS…`.
fn ctl(disk: &Mounted, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["ctl", disk.text()], words].concat())
}

/// The socket of a mount of root.
fn socket(disk: &Mounted) -> PathBuf {
    let mount = mount_at(disk.path()).expect("mounted");
    let name = format!("ringdisk/mount-0-{}.sock", mount.minor);
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let places = [runtime, Some(PathBuf::from("/run/user/0")), Some(PathBuf::from("/run"))];
    let mut all = places.into_iter().flatten().map(|place| place.join(&name));
    all.find(|path| path.exists()).expect("a socket")
}

/// A connection that has been greeted.
struct Raw {
    stream: UnixStream,
    lines: BufReader<UnixStream>,
}

impl Raw {
    fn connect(path: &Path) -> Raw {
        Raw::try_connect(path).unwrap_or_else(|told| panic!("not greeted: {told}"))
    }

    /// Errors: what is said in place of the greeting.
    fn try_connect(path: &Path) -> Result<Raw, Value> {
        let stream = UnixStream::connect(path).expect("connect");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        let lines = BufReader::new(stream.try_clone().expect("a second descriptor"));
        let mut raw = Raw { stream, lines };
        let told = raw.line();
        if told["ringdisk"]["protocol"] == 1 { Ok(raw) } else { Err(told) }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("send");
    }

    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn ends(mut self) {
        let mut rest = Vec::new();
        let _ = self.lines.read_to_end(&mut rest);
    }
}

/// A qcow2 of 16 MiB with some content, served.
fn qcow2(args: &[&str]) -> (Mounted, TempDir) {
    let directory = scratch();
    let image = directory.path().join("base.qcow2");
    images::qcow2(&image, "16M", "");
    let disk = serve(&image, args);
    write(&disk, 1, 0, MIB);
    (disk, directory)
}

fn write(disk: &Mounted, seed: u64, offset: u64, len: u64) {
    let bytes = pattern(seed, offset, usize::try_from(len).expect("small"));
    let file = crate::common::open(disk.path());
    file.write_all_at(&bytes, offset).and_then(|()| file.sync_all()).expect("write");
}

fn assert_pattern(path: &Path, seed: u64, offset: u64, len: u64) {
    let len = usize::try_from(len).expect("small");
    assert!(piece(path, offset, len) == pattern(seed, offset, len), "{offset}+{len}");
}

#[test]
fn stats_tell_programs_and_people_what_was_served() {
    if !needs_root() {
        return;
    }
    let (disk, _directory) = qcow2(&[]);
    let value = ctl(&disk, &["stats", "--json"]).ok().json();
    assert_eq!(value["size"], 16 * MIB);
    assert_eq!(value["layers"][0]["format"], "qcow2");
    assert_eq!(value["total"]["write-bytes"], MIB);
    assert_eq!(value["fault"], Value::Null);
    let text = ctl(&disk, &["stats", "--internals"]).ok().out;
    for words in ["IOPS", "latency", "CPU", "metadata", "base.qcow2"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn stop_ends_the_mount_and_its_server() {
    if !needs_root() {
        return;
    }
    let (mut disk, directory) = qcow2(&[]);
    ctl(&disk, &["stop"]).ok();
    assert!(disk.process().wait(LIMIT).is_some_and(|status| status.success()));
    assert_eq!(mount_at(disk.path()), None);
    assert_clean(&directory.path().join("base.qcow2"));
    ctl(&disk, &["stop"]).ends(4).says("no disk of ringdisk is mounted");
}

/// In a directory of its own: elsewhere a mount of another test may get the same number, and have
/// its socket under the same name.
#[test]
fn stop_takes_the_socket_away() {
    if !needs_root() {
        return;
    }
    let runtime = scratch();
    let (mut disk, _directory) = private(runtime.path());
    assert!(ctl_in(runtime.path(), &disk, "stop"));
    assert!(disk.process().wait(LIMIT).is_some_and(|status| status.success()));
    assert_eq!(sockets(runtime.path()), Vec::<PathBuf>::new());
}

#[test]
fn a_mount_in_the_background_names_its_images_for_good() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    ringdisk(d, &["mount", "--daemonize", "--create", "8M", "a.qcow2", "disk"]).ok();
    ringdisk(d, &["ctl", "disk", "snapshot", "b.qcow2"]).ok();
    ringdisk(d, &["ctl", "disk", "stop"]).ok();
    let info = qemu_img(d, &["info", "--output=json", "b.qcow2"]).ok().json();
    assert_eq!(info["backing-filename"], "a.qcow2");
    qemu_img(d, &["check", "b.qcow2"]).ok();
    assert_eq!(names(d), ["a.qcow2", "b.qcow2"]);
}

/// A mount whose socket is in a directory of the test.
fn private(runtime: &Path) -> (Mounted, TempDir) {
    fs::set_permissions(runtime, fs::Permissions::from_mode(0o700)).expect("chmod");
    let (directory, image) = crate::common::raw_image(MIB, 1);
    let path = directory.path().join("disk");
    let mut command = Command::new(program());
    command.args(["mount", "--format", "raw"]).args([&image, &path]);
    (Mounted::from_command(command.env("XDG_RUNTIME_DIR", runtime), &path), directory)
}

/// Whether `ctl` of such a mount succeeds.
fn ctl_in(runtime: &Path, disk: &Mounted, word: &str) -> bool {
    let mut command = Command::new(program());
    command.args(["ctl", disk.text(), word]).env("XDG_RUNTIME_DIR", runtime);
    command.output().expect("it starts").status.success()
}

/// Sockets below a directory that `private` used.
fn sockets(runtime: &Path) -> Vec<PathBuf> {
    names(&runtime.join("ringdisk"))
        .iter()
        // That for a process that takes the mount over is another one.
        .filter(|name| !name.starts_with("upgrade-"))
        .map(|name| runtime.join("ringdisk").join(name))
        .collect()
}

#[test]
fn the_socket_belongs_to_its_owner_alone() {
    if !needs_root() {
        return;
    }
    let runtime = scratch();
    let (disk, _directory) = private(runtime.path());
    // The second name, after the path, leads to the same socket.
    let [socket, _name] = sockets(runtime.path()).try_into().expect("a socket with two names");
    let meta = fs::symlink_metadata(&socket).expect("there");
    assert_eq!((meta.uid(), meta.mode() & 0o777), (0, 0o600));
    let place = fs::metadata(socket.parent().expect("a directory")).expect("there");
    assert_eq!((place.uid(), place.mode() & 0o777), (0, 0o700));
    // A stranger does not even get a word through a directory that was left open.
    for (path, mode) in
        [(runtime.path(), 0o755), (socket.parent().expect("a directory"), 0o755), (&socket, 0o666)]
    {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
    }
    let path = socket.clone();
    let said = std::thread::spawn(move || {
        // Of this thread only; it ends with it.
        let nobody = Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
        let mut stream = UnixStream::connect(path).expect("connect");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout");
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        said
    });
    assert_eq!(said.join().expect("no panic"), b"");
    drop(Raw::connect(&socket));
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn rubbish_and_slow_clients_hurt_nobody() {
    if !needs_root() {
        return;
    }
    let (disk, _directory) = qcow2(&[]);
    let path = socket(&disk);
    // Ends in the middle of a line, silent, never reading, and too long a line.
    let mut half = Raw::connect(&path);
    half.send(b"{\"execute\": \"sta");
    let silent = Raw::connect(&path);
    let mut deaf = Raw::connect(&path);
    deaf.stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a timeout");
    let many = "{\"execute\": \"stats\"}\n".repeat(10_000);
    let _ = deaf.stream.write_all(many.as_bytes());
    let mut endless = Raw::connect(&path);
    endless.stream.set_write_timeout(Some(Duration::from_secs(5))).expect("a timeout");
    let _ = endless.stream.write_all(&vec![b'x'; 200 << 10]);
    let start = Instant::now();
    ctl(&disk, &["stats"]).ok();
    assert!(start.elapsed() < patient(Duration::from_secs(5)));
    assert_eq!(endless.line()["error"]["desc"], "the line is too long");
    endless.ends();
    let mut raw = Raw::connect(&path);
    for (line, reason) in [
        (&b"hello\n"[..], "not a line of JSON"),
        (b"\xff\x00\n", "not a line of JSON"),
        (b"{\"execute\": \"format-disk\"}\n", "no such command"),
        (b"{\"execute\": \"resize\", \"arguments\": {\"size\": -5}}\n", "resize"),
        (
            b"{\"execute\": \"resize\", \"arguments\": {\"size\": {\"to\": \
            9223372036854775808}}}\n",
            "",
        ),
        (b"{\"execute\": \"snapshot\", \"arguments\": {\"file\": \"\"}}\n", "needs a name"),
        (
            b"{\"execute\": \"snapshot\", \"arguments\": {\"file\": \"a\\nb\"}}\n",
            "control character",
        ),
        (b"{\"execute\": \"snapshot\"}\n", "either 'file' or 'internal'"),
        (
            b"{\"execute\": \"commit\", \"arguments\": {\"top\": \"/nowhere\"}}\n",
            "not in the \
            chain",
        ),
    ] {
        raw.send(line);
        let reply = raw.line();
        let said = reply["error"]["desc"].as_str().unwrap_or_default();
        assert!(!said.is_empty() && said.contains(reason), "{reply}");
    }
    raw.send(b"\n \n{\"execute\": \"stats\", \"id\": {\"a\": [1]}}\n");
    assert_eq!(raw.line()["id"], json!({"a": [1]}));
    drop((half, silent, deaf));
    assert_pattern(disk.path(), 1, 0, MIB);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn several_clients_are_served_and_too_many_are_told() {
    if !needs_root() {
        return;
    }
    let (disk, _directory) = qcow2(&[]);
    let path = socket(&disk);
    // A mount that another test starts looks whether a server listens here: a client for a moment.
    let connect = |_| until(LIMIT, || Raw::try_connect(&path).ok()).expect("a place");
    let mut clients: Vec<Raw> = (0..32).map(connect).collect();
    for client in &mut clients {
        client.send(b"{\"execute\": \"stats\"}\n");
    }
    for client in &mut clients {
        assert_eq!(client.line()["return"]["size"], 16 * MIB);
    }
    ctl(&disk, &["stats"]).ends(5).says("clients are connected already");
    drop(clients);
    let again = until(LIMIT, || (ctl(&disk, &["stats"]).code == 0).then_some(()));
    assert!(again.is_some());
    // One that has said all it has to say still gets its answer.
    let mut last = Raw::connect(&path);
    last.send(b"{\"execute\": \"stats\"}\n");
    last.stream.shutdown(Shutdown::Write).expect("shutdown");
    assert_eq!(last.line()["return"]["size"], 16 * MIB);
}

#[test]
fn a_socket_that_was_left_is_taken_away_by_the_next_mount() {
    if !needs_root() {
        return;
    }
    let runtime = scratch();
    let (mut disk, _directory) = private(runtime.path());
    let left = sockets(runtime.path());
    disk.process().signal(Signal::KILL);
    assert!(disk.process().wait(LIMIT).is_some());
    assert_eq!(sockets(runtime.path()), left);
    ringdisk_testkit::mount::unmount(disk.path());
    ctl(&disk, &["stats"]).ends(4);
    let (next, _other) = private(runtime.path());
    assert_eq!(sockets(runtime.path()).len(), 2, "one with two names");
    assert!(ctl_in(runtime.path(), &next, "stats"));
    // Without the variable it cannot be found, and that is said.
    ctl(&next, &["stats"]).ends(4).says("no control socket");
    assert_eq!(next.stop().code(), Some(0));
    assert_eq!(sockets(runtime.path()), Vec::<PathBuf>::new());
}

#[test]
fn a_mount_of_something_else_is_not_ours_to_control() {
    let directory = scratch();
    let d = directory.path();
    fs::write(d.join("file"), "").expect("write");
    ringdisk(d, &["ctl", "file", "stats"]).ends(4).says("no disk of ringdisk");
    ringdisk(d, &["ctl", "nosuch", "stats"]).ends(4);
    ringdisk(d, &["ctl", "file"]).ends(2);
    ringdisk(d, &["ctl", "file", "explode"]).ends(2);
}

#[test]
fn a_disk_is_not_put_below_itself() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let (base, top) = (directory.path().join("base.raw"), directory.path().join("top.qcow2"));
    images::raw(&base, 4 * MIB, 7);
    let words = ["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&top)];
    qemu_img(Path::new("/"), &words).ok();
    // What lies beside the image is allowed, and the mountpoint does.
    let at = directory.path().join("disk");
    fs::write(&at, "").expect("a mountpoint");
    let allowed = ["--allow-path", "/dev", "--allow-path", text(directory.path())];
    let disk = Mounted::start_at(&program(), &[&allowed[..], &[text(&top)]].concat(), &at);
    ctl(&disk, &["backing", "-F", "raw", disk.text()]).ends(3).says("this very disk");
    // An image that lies over it.
    let over = directory.path().join("over.qcow2");
    let words = ["create", "-q", "-f", "qcow2", "-b", disk.text(), "-F", "raw", text(&over), "4M"];
    qemu_img(Path::new("/"), &words).ok();
    ctl(&disk, &["backing", "-F", "qcow2", text(&over)]).ends(3).says("this very disk");
    if part_needs("loop devices", Path::new("/dev/loop-control").exists()) {
        let looped = Loop::attach(disk.path(), &[]).expect("a loop device");
        let refused = ctl(&disk, &["backing", "-F", "raw", text(looped.device())]);
        refused.ends(3).says("this very disk");
    }
    assert_pattern(disk.path(), 7, 0, 4 * MIB);
    assert_eq!(disk.stop().code(), Some(0));
    let info = qemu_img(Path::new("/"), &["info", text(&top)]).ok();
    assert!(info.out.contains("base.raw"), "{}", info.out);
}

#[test]
fn an_empty_name_takes_the_backing_file_away() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let run = |words: &[&str]| ringdisk(directory.path(), words);
    run(&["create", "-q", "base.qcow2", "4M"]).ok();
    run(&["create", "-q", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    let disk = serve(&directory.path().join("top.qcow2"), &[]);
    write(&disk, 3, MIB, MIB);
    ctl(&disk, &["backing", "-F", "raw", ""]).ends(2).says("no backing file");
    let changed = ctl(&disk, &["backing", ""]).ok();
    assert_eq!(changed.out, "Backing file changed.\n");
    let layers = ctl(&disk, &["stats", "--json"]).ok().json()["layers"].clone();
    assert_eq!(layers.as_array().expect("a list").len(), 1, "{layers}");
    assert_pattern(disk.path(), 3, MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    let info = run(&["info", "--json", "top.qcow2"]).ok().json();
    assert_eq!(info.get("backing-filename"), None, "{info}");
    assert_clean(&directory.path().join("top.qcow2"));
}

/// Zeroes for some seconds.
const ADDED: &str = "+6G";

#[test]
fn a_resize_that_nobody_waits_for_is_given_up() {
    if !needs_root() {
        return;
    }
    for format in ["raw", "qcow2"] {
        let directory = scratch();
        let image = directory.path().join("disk.img");
        qemu_img(Path::new("/"), &["create", "-q", "-f", format, text(&image), "64M"]).ok();
        let disk = serve(&image, &["--format", format]);
        write(&disk, 6, 0, MIB);
        let before = fs::metadata(&image).expect("an image").len();
        let mut command = Command::new(program());
        let words = ["ctl", disk.text(), "resize", ADDED, "--preallocation", "full"];
        let mut client = Process::spawn(command.args(words));
        let len = || fs::metadata(&image).expect("an image").len();
        let begun = until(LIMIT, || (len() > before + 32 * MIB).then_some(()));
        assert!(begun.is_some() && client.ended().is_none(), "{}", client.output());
        client.signal(Signal::INT);
        client.finish(LIMIT);
        // It ends after a piece, not when all is written; a stop would wait as long.
        let cut = until(patient(Duration::from_secs(5)), || (len() < before + MIB).then_some(()));
        assert!(cut.is_some(), "{format}: {} bytes, {before} before", len());
        let is_over = || (ctl(&disk, &["resize", "+0"]).code == 0).then_some(());
        assert!(until(LIMIT, is_over).is_some(), "{format}: another change is refused");
        assert_eq!(fs::metadata(disk.path()).expect("mounted").len(), 64 * MIB);
        assert_pattern(disk.path(), 6, 0, MIB);
        assert_eq!(disk.stop().code(), Some(0));
    }
}

#[test]
fn damage_that_a_write_finds_is_told_everywhere() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "2G", "");
    // The L2 table of the second half comes last in the file.
    images::qemu_io(&image, "qcow2", &["write -P 1 0 64k", "write -z 1G 64k"]);
    let word = |at: u64| u64::from_be_bytes(piece(&image, at, 8).try_into().expect("8 bytes"));
    let l2 = word(word(40) + 16) & 0x00ff_ffff_ffff_fe00;
    let block = word(word(48));
    // The L2 table is free, says its reference count of 16 bits: the next cluster that is allocated
    // lies on it.
    crate::common::patch(&image, block + (l2 >> 16) * 2, &[0, 0]);
    let disk = serve(&image, &[]);
    let mut follow = std::process::Command::new(program());
    let follow = Process::spawn(follow.args(["ctl", disk.text(), "events"]));
    std::thread::sleep(patient(Duration::from_millis(500)));
    let file = crate::common::open(disk.path());
    let bytes = vec![7; 64 << 10];
    let errors: Vec<_> = (1..40)
        .filter_map(|n| {
            let written = file.write_all_at(&bytes, n << 16).and_then(|()| file.sync_all());
            crate::common::errno(written)
        })
        .collect();
    assert_eq!(errors.first(), Some(&Errno::IO), "{errors:?}");
    assert!(errors.contains(&Errno::ROFS), "{errors:?}");
    drop(file);
    let told = until(LIMIT, || follow.output().contains("\"event\":\"fault\"").then_some(()));
    assert!(told.is_some(), "{}", follow.output());
    assert_eq!(follow.output().matches("\"event\":\"fault\"").count(), 1);
    drop(follow);
    let fault = ctl(&disk, &["stats", "--json"]).ok().json()["fault"].clone();
    let fault = fault.as_str().expect("a reason");
    assert!(fault.contains("marked corrupt"), "{fault}");
    let listed = ringdisk(Path::new("/"), &["ps", "--json"]).ok().json();
    let mut listed = listed.as_array().expect("a list").iter();
    let one = listed.find(|one| one["where"] == disk.text()).expect("it is listed");
    assert_eq!((&one["state"], &one["why"]), (&"fault".into(), &fault.into()));
    let text = ctl(&disk, &["stats"]).ok().out;
    assert!(text.contains(&format!("fault    {fault}")), "{text}");
    let ended = disk.stop();
    assert_eq!(ended.code(), Some(12), "{}", ended.output());
    // Once when it was found, once at the end.
    assert_eq!(ended.stderr.matches("marked corrupt").count(), 2, "{}", ended.stderr);
    assert!(!ended.stderr.contains("last flush"), "{}", ended.stderr);
    assert_eq!(word(72) & 2, 2, "the corrupt bit");
}

#[test]
fn the_backing_file_changes_under_clients() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let run = |words: &[&str]| ringdisk(directory.path(), words);
    images::raw(&directory.path().join("raw"), 16 * MIB, 5);
    run(&["convert", "-f", "raw", "-O", "qcow2", "raw", "old.qcow2"]).ok();
    run(&["create", "-q", "-b", "old.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    fs::write(directory.path().join("other"), vec![1; 16 << 20]).expect("a file");
    let allowed = ["--allow-path", text(directory.path())];
    let disk = serve(&directory.path().join("top.qcow2"), &allowed);
    let mount = disk.text();
    let is_over = AtomicBool::new(false);
    let rounds = std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut rounds = 0_u64;
            while !is_over.load(Ordering::Relaxed) || rounds == 0 {
                let at = (rounds % 4) * MIB;
                write(&disk, 9, at, MIB);
                assert_pattern(disk.path(), 9, at, MIB);
                assert_pattern(disk.path(), 5, 8 * MIB + at, MIB);
                rounds += 1;
            }
            rounds
        });
        let changed = run(&["ctl", mount, "backing", "-F", "raw", "raw"]);
        let other = run(&["ctl", mount, "backing", "-F", "raw", "other"]);
        let unstated = run(&["ctl", mount, "backing", "raw"]);
        is_over.store(true, Ordering::Relaxed);
        let rounds = client.join().expect("the client");
        assert_eq!(changed.ok().out, "Backing file changed.\n");
        assert_ne!(other.says("other content").code, 0);
        unstated.ends(2).says("never guessed");
        rounds
    });
    assert!(rounds > 0);
    let layers = ctl(&disk, &["stats", "--json"]).ok().json()["layers"].clone();
    assert_eq!(layers[1]["format"], "raw", "{layers}");
    assert_pattern(disk.path(), 5, 10 * MIB, MIB);
    assert_eq!(disk.stop().code(), Some(0));
    let info = run(&["info", "--json", "top.qcow2"]).ok().json();
    let name = directory.path().join("raw");
    assert_eq!(info["backing-filename"], text(&name), "{info}");
    assert_clean(&directory.path().join("top.qcow2"));
}
