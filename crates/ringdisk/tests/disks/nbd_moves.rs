//! `serve --nbd` with `--upgrade` and with `--keep`: a process goes, and its clients go on.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{is_root, needs, needs_root};
use ringdisk_testkit::mount::{Mounted, for_user, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, command, has, ok_words, until};
use rustix::process::{Pid, Signal, kill_process};

use crate::common::confined::assert_confined;
use crate::common::program;
use crate::common::serving::{Daemon, Place, SIZE, ctl, serve_command, stats};
use crate::common::tools::{child_of, ringdisk};

/// Processes that serve one after the other.
const TIMES: usize = 3;
/// Bytes of a block that a client writes.
const BLOCK: usize = 4096;

/// A client of libnbd that keeps its one connection: it writes and reads back with 16 requests in
/// flight, until the file `stop` exists. An end of the connection, an answer twice or one to
/// nothing is an error of the library.
const CLIENT: &str = "
import os, sys
h.connect_uri(uri)
rounds = 0
while not os.path.exists(stop):
    rounds += 1
    for writes in (True, False):
        answered = []
        bufs = []
        for at in range(16):
            data = bytes([(rounds + at) % 251]) * 65536
            offset = base + at * 65536
            done = lambda error, at=at: answered.append((at, error.value)) or 1
            if writes:
                buf = nbd.Buffer.from_bytearray(bytearray(data))
                h.aio_pwrite(buf, offset, completion=done)
            else:
                buf = nbd.Buffer(65536)
                h.aio_pread(buf, offset, completion=done)
            bufs.append((buf, data))
        while len(answered) < 16:
            h.poll(-1)
        assert sorted(answered) == [(at, 0) for at in range(16)], answered
        if not writes:
            for buf, data in bufs:
                assert buf.to_bytearray() == data, rounds
h.flush()
h.shutdown()
print('rounds', rounds)
";

/// Starts such a client.
pub(crate) fn client(uri: &str, base: u64, stop: &Path) -> Process {
    let set = format!("uri = '{uri}'\nstop = '{}'\nbase = {base}\n", text(stop));
    // The python of the system has the module.
    Process::spawn(&mut command(&["/usr/bin/python3", "-m", "nbd", "-c", &set, "-c", CLIENT]))
}

/// Waits for its end, and gives how often it has written and read.
pub(crate) fn rounds(client: Process) -> u64 {
    let ended = client.finish(LIMIT);
    let output = ended.output();
    assert_eq!(ended.code(), Some(0), "{output}");
    output.split_whitespace().last().and_then(|n| n.parse().ok()).expect("a number")
}

pub(crate) fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", text(socket))
}

fn upgrade(old: Daemon, words: &[&str], socket: &Path) -> Daemon {
    let id = |path: &Path| std::fs::metadata(path).map(|meta| meta.ino()).expect("the socket");
    let before = id(socket);
    let new = Daemon::of(&mut serve_command(&[words, &["--upgrade"]].concat()));
    let finished = old.ends(0);
    assert!(finished.stderr.contains("handed over to another process"), "{}", finished.output());
    assert_eq!(id(socket), before, "another socket");
    let output = new.process.output();
    assert!(!output.contains("warning") && !output.contains("WARN"), "{output}");
    assert_confined(new.process.pid(), is_root());
    new
}

/// Blocks of a disk that a thread writes through a mount of an export, one after the other.
fn write_blocks(path: &Path, first: u64, done: &AtomicBool) -> u64 {
    let file = File::options().read(true).write(true).open(path).expect("the mount");
    let mut count = 0;
    while !done.load(Ordering::Acquire) {
        let at = first + count % 64 * BLOCK as u64;
        let bytes = [u8::try_from(count % 251).unwrap(); BLOCK];
        file.write_all_at(&bytes, at).unwrap_or_else(|error| panic!("write {count}: {error}"));
        file.sync_data().unwrap_or_else(|error| panic!("flush {count}: {error}"));
        count += 1;
    }
    count
}

/// The image has the last of those blocks.
fn check_blocks(image: &Path, first: u64, count: u64) {
    let file = File::open(image).expect("the image");
    for number in count.saturating_sub(64)..count {
        let mut bytes = [0; BLOCK];
        file.read_exact_at(&mut bytes, first + number % 64 * BLOCK as u64).expect("read");
        let wanted = u8::try_from(number % 251).unwrap();
        assert!(bytes == [wanted; BLOCK], "write {number} is lost: {}", bytes[0]);
    }
}

#[test]
fn clients_go_from_process_to_process_under_load() {
    for format in ["raw", "qcow2"] {
        let place = Place::new(format);
        let (image, socket, stop) = (text(&place.image), &place.socket, place.path("stop"));
        let words = [image, "-f", format, "--nbd", text(socket), "--nbd", "127.0.0.1:0"];
        let words = if format == "raw" { &words[..5] } else { &words[..] };
        let daemon = Daemon::of(&mut serve_command(words));
        let clients = [0, 2 << 20].map(|base| client(&uri(socket), base, &stop));
        let mount = Mounted::start(&program(), &[&uri(socket), "-f", "raw", "--reconnect", "20s"]);
        let done = AtomicBool::new(false);
        let (count, daemon) = std::thread::scope(|scope| {
            let writes = scope.spawn(|| write_blocks(mount.path(), 6 << 20, &done));
            let mut daemon = Some(daemon);
            for _ in 0..TIMES {
                std::thread::sleep(Duration::from_millis(300));
                daemon = daemon.map(|old| upgrade(old, words, socket));
                // All are still there, and the server knows them.
                let clients = stats(socket)["serving"]["clients"].as_array().map_or(0, Vec::len);
                assert!(clients >= 3, "{clients} clients");
            }
            std::thread::sleep(Duration::from_millis(300));
            done.store(true, Ordering::Release);
            (writes.join().expect("it wrote"), daemon.expect("it serves"))
        });
        File::create(&stop).expect("a file");
        let [first, second] = clients.map(rounds);
        assert!(first > 5 && second > 5 && count > 5, "{first}, {second}, {count}");
        drop(mount.stop());
        daemon.stop(&[socket]);
        if format == "raw" {
            check_blocks(&place.image, 6 << 20, count);
        } else {
            ok_words(&["qemu-img", "check", "-q", image]);
        }
    }
}

#[test]
fn several_disks_go_together_and_other_words_are_refused() {
    let directory = scratch();
    let [a, b, socket] = ["a", "b", "socket"].map(|name| directory.path().join(name));
    images::sparse(&a, SIZE);
    images::qcow2(&b, "8M", "cluster_size=4k");
    let disks = [
        format!("image={},format=raw,export-name=a", text(&a)),
        format!("image={},format=qcow2,export-name=b", text(&b)),
    ];
    let words = ["--disk", &disks[0], "--disk", &disks[1], "--nbd", text(&socket)];
    let mut daemon = Daemon::of(&mut serve_command(&words));
    ctl(&socket.join("b"), &["resize", "+8M"]).ok();
    let others = ["serve", "--upgrade", "--disk", &disks[0], "--nbd", text(&socket)];
    let refused = ringdisk(Path::new("/"), &others);
    refused.ends(2).says("2 disks are served there, 1 here").says("it goes on as before");
    let named = [text(&a), "-f", "raw", "--export-name", "c", "--nbd", text(&socket)];
    let others = [&["serve", "--upgrade"], &named[..]].concat();
    ringdisk(Path::new("/"), &others).ends(2);
    for _ in 0..TIMES {
        daemon = upgrade(daemon, &words, &socket);
    }
    let size = |name: &str| {
        let uri = format!("nbd+unix:///{name}?socket={}", text(&socket));
        ok_words(&["nbdinfo", "--size", &uri]).trim().to_owned()
    };
    assert_eq!([size("a"), size("b")], ["8388608", "16777216"]);
    ctl(&socket.join("a"), &["stats"]).ok();
    daemon.stop(&[&socket]);
}

#[test]
fn an_upgrade_of_nothing_says_so_and_what_cannot_be_is_refused() {
    let place = Place::new("raw");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let serve = |words: &[&str]| {
        ringdisk(Path::new("/"), &[&["serve", image, "-f", "raw"], words].concat())
    };
    let nothing = serve(&["--nbd", socket, "--upgrade"]);
    nothing.ends(4).says("no ringdisk serves a disk").says("without --upgrade");
    serve(&["--nbd", "0", "--upgrade"]).ends(2).says("name the port");
    serve(&["--nbd", "fd:3", "--keep"]).ends(2).says("--keep does not go with --nbd fd:N");
    let both = ["--nbd", socket, "--vhost-user-blk", "/tmp/x/s", "--upgrade"];
    serve(&both).ends(4).says("cannot find '/tmp/x/s'");
}

/// Processes that keep and serve a disk.
struct Kept {
    helper: Process,
}

impl Kept {
    fn start(command: &mut Command) -> Kept {
        let helper = Process::spawn(command);
        let says = || helper.output().contains("is served over NBD").then_some(());
        assert!(until(LIMIT, says).is_some(), "{}", helper.output());
        Kept { helper }
    }

    /// Kills the process that serves, and waits for the next one.
    fn kill(&self) {
        let server = until(LIMIT, || child_of(self.helper.pid())).expect("a server");
        let pid = i32::try_from(server).ok().and_then(Pid::from_raw).expect("a pid");
        kill_process(pid, Signal::KILL).expect("it lives");
        let next = until(LIMIT, || child_of(self.helper.pid()).filter(|pid| *pid != server));
        assert!(next.is_some(), "no next one: {}", self.helper.output());
    }

    fn stop(mut self, socket: &Path) {
        self.helper.signal(Signal::TERM);
        let ended = self.helper.wait(LIMIT).expect("it was asked to end");
        assert!(ended.success(), "{}", self.helper.output());
        assert!(!socket.exists(), "its socket is left");
    }
}

#[test]
fn a_kill_ends_connections_and_clients_that_connect_again_go_on() {
    let place = Place::new("raw");
    let (image, socket) = (text(&place.image), &place.socket);
    let words = [image, "-f", "raw", "--nbd", text(socket), "--keep"];
    let kept = Kept::start(&mut serve_command(&words));
    let mount = Mounted::start(&program(), &[&uri(socket), "-f", "raw", "--reconnect", "20s"]);
    let done = AtomicBool::new(false);
    let count = std::thread::scope(|scope| {
        let writes = scope.spawn(|| write_blocks(mount.path(), 0, &done));
        for _ in 0..TIMES {
            std::thread::sleep(Duration::from_millis(300));
            kept.kill();
            // The socket has never stopped listening: no connection is refused.
            assert_eq!(ok_words(&["nbdinfo", "--size", &uri(socket)]).trim(), "8388608");
        }
        done.store(true, Ordering::Release);
        writes.join().expect("it wrote")
    });
    assert!(count > 5, "{count} writes");
    drop(mount.stop());
    kept.stop(socket);
    check_blocks(&place.image, 0, count);
}

/// A connection goes along where a process hands the disks over, whether or not they are kept.
#[test]
fn kept_disks_go_to_a_successor_with_their_connections() {
    let (place, other) = (Place::new("raw"), Place::new("qcow2"));
    let (socket, stop) = (&place.socket, place.path("stop"));
    let disks = [
        format!("image={},format=raw,export-name=a", text(&place.image)),
        format!("image={},format=qcow2,export-name=b", text(&other.image)),
    ];
    let words = ["--disk", &disks[0], "--disk", &disks[1], "--nbd", text(socket)];
    let serve = |more: &[&str]| Process::spawn(&mut serve_command(&[&words[..], more].concat()));
    let is_ready = |process: &Process| {
        let says = || process.output().contains("served over NBD as 'b'").then_some(());
        assert!(until(LIMIT, says).is_some(), "{}", process.output());
    };
    let mut process = serve(&["--keep"]);
    is_ready(&process);
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", text(socket));
    let clients = ["a", "b"].map(|name| client(&uri(name), 0, &stop));
    for more in [&["--keep"][..], &[], &["--keep"]] {
        std::thread::sleep(Duration::from_millis(200));
        let new = serve(&[more, &["--upgrade"]].concat());
        let old = std::mem::replace(&mut process, new).finish(LIMIT);
        assert_eq!(old.code(), Some(0), "{}\nthe new: {}", old.output(), process.output());
        is_ready(&process);
    }
    std::thread::sleep(Duration::from_millis(200));
    File::create(&stop).expect("a file");
    for client in clients {
        assert!(rounds(client) > 3);
    }
    // The last one is kept, and its server killed: all of it is there.
    let kept = Kept { helper: process };
    kept.kill();
    for name in ["a", "b"] {
        assert_eq!(ok_words(&["nbdinfo", "--size", &uri(name)]).trim(), "8388608");
    }
    kept.stop(socket);
}

/// As a user, without rights: upgrades and kills.
#[test]
fn a_user_has_both() {
    if !(needs_root() && needs("setpriv", has("setpriv"))) {
        return;
    }
    const USER: u32 = 65534;
    let (directory, program) = for_user(&program(), USER);
    let [image, socket, runtime] = ["disk", "socket", "run"].map(|n| directory.path().join(n));
    images::sparse(&image, SIZE);
    std::fs::create_dir(&runtime).expect("a directory");
    for path in [&image, &runtime] {
        std::os::unix::fs::chown(path, Some(USER), Some(USER)).expect("chown");
    }
    let serve = |more: &str| {
        let mut command = command(&["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
        let words = ["serve", text(&image), "-f", "raw", "--nbd", text(&socket)];
        command.arg(&program).args(words).args(more.split_whitespace());
        command.env_remove("NOTIFY_SOCKET").env_remove("LISTEN_FDS");
        command.env("XDG_RUNTIME_DIR", &runtime);
        command
    };
    let stop = directory.path().join("stop");
    let mut daemon = Daemon::of(&mut serve(""));
    let load = client(&uri(&socket), 0, &stop);
    for _ in 0..TIMES {
        std::thread::sleep(Duration::from_millis(200));
        let new = Daemon::of(&mut serve("--upgrade"));
        daemon.ends(0);
        daemon = new;
    }
    File::create(&stop).expect("a file");
    assert!(rounds(load) > 3);
    daemon.stop(&[&socket]);
    let kept = Kept::start(&mut serve("--keep"));
    for _ in 0..TIMES {
        kept.kill();
        assert_eq!(ok_words(&["nbdinfo", "--size", &uri(&socket)]).trim(), "8388608");
    }
    kept.stop(&socket);
}
