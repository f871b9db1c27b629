//! NBD exports as images of every command, with qemu-nbd as the server.

use std::fs;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ringdisk_testkit::images::{self, assert_clean, pattern, piece, qemu_io};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{has, until};
use ringdisk_testkit::skips::needs;

use crate::common::tools::{qemu_img, ringdisk};
use crate::common::{MIB, open, refused, serve};

/// A running qemu-nbd.
pub(crate) struct Server {
    child: Child,
    pub(crate) socket: PathBuf,
    words: Vec<String>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Serves `image` until the end of the test.
    pub(crate) fn start(d: &Path, socket: &str, words: &[&str]) -> Server {
        let socket = d.join(socket);
        let mut all = vec![String::from("-k"), text(&socket).to_owned()];
        all.extend(words.iter().map(|word| (*word).to_owned()));
        let child = Server::spawn(&socket, &all);
        Server { child, socket, words: all }
    }

    fn spawn(socket: &Path, words: &[String]) -> Child {
        let _ = fs::remove_file(socket);
        let mut command = Command::new("qemu-nbd");
        command.args(words).stdin(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("qemu-nbd starts");
        let listens = until(Duration::from_secs(20), || UnixStream::connect(socket).ok());
        assert!(listens.is_some(), "qemu-nbd does not listen");
        child
    }

    /// It is killed, and another one takes its place after a while.
    pub(crate) fn replace(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("kill");
        std::thread::sleep(Duration::from_millis(200));
        self.child = Server::spawn(&self.socket, &self.words);
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", text(&self.socket))
    }
}

pub(crate) fn there() -> bool {
    needs("qemu-nbd", has("qemu-nbd"))
}

/// A raw image with data and holes.
pub(crate) fn raw(d: &Path, name: &str) -> PathBuf {
    let image = d.join(name);
    images::sparse(&image, 16 * MIB);
    let file = fs::File::options().write(true).open(&image).expect("open");
    file.write_all_at(&pattern(3, 0, 3 << 20), 2 * MIB).expect("write");
    image
}

#[test]
fn an_export_is_converted_compared_mapped_and_shown() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    raw(d, "disk.img");
    let server = Server::start(d, "s", &["-t", "-e", "8", "-f", "raw", text(&d.join("disk.img"))]);
    let uri = server.uri();
    ringdisk(d, &["convert", "-U", &uri, "copy.qcow2"]).ok();
    assert_clean(&d.join("copy.qcow2"));
    qemu_img(d, &["compare", "-U", "-f", "raw", "disk.img", "copy.qcow2"]).ok();
    ringdisk(d, &["compare", &uri, "copy.qcow2"]).ok();
    // Holes are not copied.
    let holes = images::allocated(&d.join("copy.qcow2"));
    assert!(holes < 5 * MIB, "{holes}");
    let info = ringdisk(d, &["info", "--json", &uri]).ok().json();
    assert_eq!(info["filename"], uri.as_str());
    assert_eq!(info["virtual-size"], 16 * MIB);
    assert_eq!(info["children"][0]["info"]["format"], "nbd");
    assert!(ringdisk(d, &["info", &uri]).ok().out.contains("protocol type: nbd"));
    let map = ringdisk(d, &["map", "--json", &uri]).ok().json();
    let map = map.as_array().expect("a list");
    let data: Vec<_> = map.iter().filter(|it| it["data"] == true).collect();
    assert_eq!(data.len(), 1, "{map:?}");
    assert_eq!((&data[0]["start"], &data[0]["length"]), (&(2 * MIB).into(), &(3 * MIB).into()));
    let json = format!(
        r#"json:{{"driver":"raw","offset":{},"size":{},"file":{{"driver":"nbd","server.type":"unix","server.path":"{}"}}}}"#,
        2 * MIB,
        MIB,
        text(&server.socket)
    );
    ringdisk(d, &["convert", "-O", "raw", &json, "part.img"]).ok();
    assert!(fs::read(d.join("part.img")).expect("read") == pattern(3, 0, 1 << 20));
}

#[test]
fn an_image_is_converted_into_an_export() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    raw(d, "disk.img");
    images::raw(&d.join("target.img"), 16 * MIB, 9);
    {
        // One client only: it ends after that.
        let server = Server::start(d, "s", &["-f", "raw", text(&d.join("target.img"))]);
        ringdisk(d, &["convert", "disk.img", &server.uri()]).ok();
    }
    assert!(fs::read(d.join("disk.img")).unwrap() == fs::read(d.join("target.img")).unwrap());
    images::sparse(&d.join("small.img"), MIB);
    let server = Server::start(d, "s", &["-t", "-f", "raw", text(&d.join("small.img"))]);
    let ran = ringdisk(d, &["convert", "disk.img", &server.uri()]);
    assert!(ran.code != 0);
    ran.says("cannot hold a disk of");
}

#[test]
fn a_qcow2_inside_an_export_is_made_and_read_when_the_user_says_so() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    raw(d, "disk.img");
    images::sparse(&d.join("space.img"), 32 * MIB);
    let space = d.join("space.img");
    let server = Server::start(d, "s", &["-t", "-f", "raw", text(&space)]);
    let uri = server.uri();
    ringdisk(d, &["convert", "-O", "qcow2", "disk.img", &uri]).ok();
    ringdisk(d, &["compare", "disk.img", "-F", "qcow2", &uri]).ok();
    ringdisk(d, &["convert", "-f", "qcow2", "-O", "raw", &uri, "back.img"]).ok();
    assert!(fs::read(d.join("disk.img")).unwrap() == fs::read(d.join("back.img")).unwrap());
    let ran = ringdisk(d, &["convert", &uri, "other.img"]);
    assert!(ran.code != 0);
    ran.says("--format qcow2");
}

#[test]
fn a_mount_of_an_export_goes_on_when_its_server_is_replaced() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    // As root in a sandbox, where the helper process connects again.
    let mut server = Server::start(d, "s", &["-t", "-e", "4", "-f", "raw", text(&image)]);
    let disk = serve(Path::new(&server.uri()), &["-f", "raw"]);
    assert!(piece(disk.path(), 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
    images::raw(&d.join("new"), 4 * MIB, 8);
    for round in 0..3 {
        // Another process writes: the server is a child of this one, and would wait for itself
        // while it closes a file of this process that has something to be written.
        let to = format!("of={}", disk.text());
        let place = format!("seek={}", (4 + 4 * (round % 2)) * 64);
        let from = format!("if={}", text(&d.join("new")));
        let words = [&from, &to, &place, "bs=16k", "conv=notrunc,fsync", "oflag=dsync"];
        let mut client = Command::new("dd");
        client.args(words).stderr(Stdio::null());
        let mut client = client.spawn().expect("dd");
        server.replace();
        server.replace();
        assert!(client.wait().expect("dd").success());
    }
    assert_eq!(disk.stop().code(), Some(0));
    assert!(piece(&image, 4 * MIB, 4 << 20) == pattern(8, 0, 4 << 20));
    assert!(piece(&image, 8 * MIB, 4 << 20) == pattern(8, 0, 4 << 20));
}

#[test]
fn a_mount_whose_server_is_gone_answers_with_errors_and_ends() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    let server = Server::start(d, "s", &["-t", "-f", "raw", text(&image)]);
    let disk = serve(Path::new(&server.uri()), &["-f", "raw", "--reconnect", "500ms"]);
    drop(server);
    let file = open(disk.path());
    let error = file.read_exact_at(&mut [0; 4096], 12 * MIB).expect_err("no server");
    assert_eq!(error.raw_os_error(), Some(5), "{error}");
    drop(file);
    disk.stop();
}

#[test]
fn an_overlay_over_an_export_needs_leave_to_go_there() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = raw(d, "disk.img");
    let server = Server::start(d, "s", &["-t", "-e", "4", "-r", "-f", "raw", text(&image)]);
    let uri = server.uri();
    ringdisk(d, &["create", "-b", &uri, "-F", "raw", "top.qcow2"]).ok().says("--allow-host");
    let top = d.join("top.qcow2");
    refused(&[text(&top)], &["--allow-host", "unix:"]);
    let host = format!("unix:{}", text(&server.socket));
    let disk = serve(&top, &["--allow-host", &host]);
    assert!(piece(disk.path(), 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
    open(disk.path()).write_all_at(&pattern(4, 0, 4096), 3 * MIB).expect("write");
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&top);
    qemu_io(&top, "qcow2", &["read -P 0 0 1M"]);
    let chain =
        ringdisk(d, &["info", "--backing-chain", "--json", "--allow-host", &host, "top.qcow2"]);
    assert_eq!(chain.ok().json().as_array().map(Vec::len), Some(2));
    // Named on the command line it needs no leave.
    let overlay = d.join("work.qcow2");
    let disk = serve(Path::new(&uri), &["-f", "raw", "--overlay", text(&overlay)]);
    open(disk.path()).write_all_at(&pattern(5, 0, 4096), 0).expect("write");
    assert_eq!(disk.stop().code(), Some(0));
    assert_clean(&overlay);
}

#[test]
fn addresses_that_cannot_be_used_are_refused_in_words() {
    let directory = scratch();
    let d = directory.path();
    for (name, words) in [
        ("nbds://host/x", "tls-certificates=DIR"),
        ("nbd+unix:///x", "socket=PATH"),
        ("nbd://127.0.0.1:1/x", "no server listens"),
        ("nbd+unix:///?socket=nothing", "no server listens"),
        (r#"json:{"driver":"nbd","path":"nothing"}"#, "no server listens"),
    ] {
        let ran = ringdisk(d, &["info", name]);
        assert!(ran.code != 0, "{name}");
        ran.says(words);
        let ran = ringdisk(d, &["mount", name, "disk"]);
        assert!(ran.code != 0, "{name}");
        ran.says(words);
    }
    let ran = ringdisk(d, &["info", "--allow-host", "a b", "x"]);
    assert!(ran.code != 0);
    ran.says("names no host");
    let ran = ringdisk(d, &["create", "nbd://host/x", "1G"]);
    assert!(ran.code != 0);
    assert!(crate::common::tools::names(d).is_empty());
}
