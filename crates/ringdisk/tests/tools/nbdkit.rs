//! NBD exports as images, with nbdkit as the server: over TCP, slow, with errors, cut off; and what
//! a mount does over an export.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{has, until};
use ringdisk_testkit::skips::needs;

use super::nbd::raw;
use crate::common::tools::{child_of, qemu_img, ringdisk};
use crate::common::{MIB, open, serve};

/// A running nbdkit at a port of this machine.
struct Nbdkit {
    child: Child,
    uri: String,
}

impl Drop for Nbdkit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Nbdkit {
    fn start(d: &Path, words: &[&str]) -> Nbdkit {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("port");
        let mut command = Command::new("nbdkit");
        let own = ["--foreground", "--exit-with-parent", "--ipaddr", "127.0.0.1", "--port"];
        command.args(own).arg(port.port().to_string()).args(words).current_dir(d);
        let child = command.stdin(Stdio::null()).stderr(Stdio::null()).spawn().expect("nbdkit");
        let listens = until(Duration::from_secs(20), || TcpStream::connect(port).ok());
        assert!(listens.is_some(), "nbdkit does not listen");
        Nbdkit { child, uri: format!("nbd://127.0.0.1:{}/", port.port()) }
    }
}

fn there() -> bool {
    needs("nbdkit", has("nbdkit"))
}

#[test]
fn a_slow_server_at_a_port_is_an_image_and_its_requests_go_at_once() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    let delays = ["delay-read=20ms", "delay-write=20ms"];
    let server =
        Nbdkit::start(d, &[&["--filter=delay", "file", text(&image)], &delays[..]].concat());
    let disk = serve(Path::new(&server.uri), &["-f", "raw"]);
    assert!(piece(disk.path(), 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
    open(disk.path()).write_all_at(&pattern(5, 0, 1 << 20), 8 * MIB).expect("write");
    assert_eq!(disk.stop().code(), Some(0));
    assert!(piece(&image, 8 * MIB, 1 << 20) == pattern(5, 0, 1 << 20));
    ringdisk(d, &["convert", &server.uri, "copy.qcow2"]).ok();
    qemu_img(d, &["compare", "-f", "raw", "disk.img", "copy.qcow2"]).ok();
}

#[test]
fn errors_of_a_server_are_those_of_the_requests() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    let words = ["--filter=error", "file", text(&image), "error=ENOSPC", "error-pwrite-rate=100%"];
    let server = Nbdkit::start(d, &words);
    let disk = serve(Path::new(&server.uri), &["-f", "raw"]);
    assert!(piece(disk.path(), 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
    let file = open(disk.path());
    let error = file.write_all_at(&[1; 4096], 0).and_then(|()| file.sync_all()).expect_err("full");
    assert_eq!(error.raw_os_error(), Some(28), "{error}");
    // The connection is the same one, and reads go on.
    assert!(piece(disk.path(), 3 * MIB, 4096) == pattern(3, MIB, 4096));
    drop(file);
    disk.stop();
    // Every second read of a copy fails: it says so and ends. Of 64 pieces apart, which are read
    // one by one, all succeed once in 2^64 runs.
    let scattered = d.join("scattered.img");
    images::sparse(&scattered, 64 * MIB);
    let file = fs::File::options().write(true).open(&scattered).expect("open");
    for piece in 0..64 {
        file.write_all_at(&pattern(4, 0, 4096), piece * MIB).expect("write");
    }
    let words = ["--filter=error", "file", text(&scattered), "error-pread-rate=50%"];
    let server = Nbdkit::start(d, &words);
    let ran = ringdisk(d, &["convert", "-f", "raw", &server.uri, "copy.img"]);
    assert!(ran.code != 0, "{ran:?}");
    ran.says("Input/output error");
}

#[test]
fn a_server_that_rounds_its_size_is_seen_with_that_size() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let odd = d.join("odd.img");
    fs::write(&odd, pattern(6, 0, 1_000_001)).expect("write");
    let words = ["--filter=truncate", "file", text(&odd), "round-up=4096"];
    let server = Nbdkit::start(d, &words);
    ringdisk(d, &["convert", "-O", "raw", &server.uri, "copy.img"]).ok();
    let copy = fs::read(d.join("copy.img")).expect("read");
    assert_eq!(copy.len(), 1_003_520);
    assert!(
        copy[..1_000_001] == pattern(6, 0, 1_000_001) && copy[1_000_001..].iter().all(|b| *b == 0)
    );
    // A size that is no multiple of a sector.
    drop(server);
    let server = Nbdkit::start(d, &["file", text(&odd)]);
    ringdisk(d, &["convert", "-O", "raw", &server.uri, "exact.img"]).ok();
    assert!(fs::read(d.join("exact.img")).expect("read")[..1_000_001] == copy[..1_000_001]);
    drop(server);
    let server = Nbdkit::start(d, &words);
    // Writes behind the file's end are errors of the server.
    images::raw(&d.join("new.img"), 1_003_520, 9);
    let ran = ringdisk(d, &["convert", "new.img", &server.uri]);
    assert!(ran.code != 0);
}

#[test]
fn a_server_that_stands_still_delays_nothing_else() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    // It takes connections and answers nothing for a minute.
    let server = Nbdkit::start(d, &["--filter=delay", "file", text(&image), "delay-open=60"]);
    let begun = Instant::now();
    let ran = ringdisk(d, &["info", &server.uri]);
    assert!(ran.code != 0 && begun.elapsed() < Duration::from_secs(30), "{ran:?}");
    ran.says("does not answer in time");
}

#[test]
fn an_overlay_is_committed_into_an_export() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    let server = Nbdkit::start(d, &["file", text(&image)]);
    let overlay = d.join("work.qcow2");
    let words = ["-f", "raw", "--overlay", text(&overlay)];
    let disk = serve(Path::new(&server.uri), &words);
    open(disk.path()).write_all_at(&pattern(7, 0, 1 << 20), 4 * MIB).expect("write");
    assert_eq!(disk.stop().code(), Some(0));
    assert!(piece(&image, 4 * MIB, 1 << 20) == pattern(3, 2 * MIB, 1 << 20));
    ringdisk(d, &["commit", "--allow-host", "127.0.0.1", text(&overlay)]).ok();
    assert!(piece(&image, 4 * MIB, 1 << 20) == pattern(7, 0, 1 << 20));
    assert!(piece(&image, 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
}

#[test]
fn a_mount_of_an_export_is_kept_when_its_server_process_is_killed() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    let server = Nbdkit::start(d, &["file", text(&image)]);
    let words = ["mount", "--daemonize", "--keep-mount", "--pidfile", "pid", "-f", "raw"];
    ringdisk(d, &[&words[..], &[&server.uri, "disk"]].concat()).ok();
    let disk = d.join("disk");
    let file = open(&disk);
    file.write_all_at(&pattern(4, 0, 1 << 20), 8 * MIB).expect("write");
    let keeper = fs::read_to_string(d.join("pid")).expect("a pid");
    let server_pid = child_of(keeper.trim().parse().expect("a number")).expect("a server");
    let killed = Command::new("kill").args(["-9", &server_pid.to_string()]).status();
    assert!(killed.expect("kill").success());
    file.write_all_at(&pattern(5, 0, 1 << 20), 9 * MIB).expect("write");
    file.sync_all().expect("flush");
    drop(file);
    assert!(piece(&disk, 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
    ringdisk(d, &["umount", "disk"]).ok();
    assert!(piece(&image, 8 * MIB, 1 << 20) == pattern(4, 0, 1 << 20));
    assert!(piece(&image, 9 * MIB, 1 << 20) == pattern(5, 0, 1 << 20));
}
