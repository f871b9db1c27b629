//! `x-dirty-bitmap`: a bitmap of an NBD server as the map of its export, with qemu-nbd and with our
//! own server, beside what qemu-img shows of the same server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images::{self, qemu_io};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{Process, until};
use rustix::process::Signal;
use serde_json::Value;

use super::nbd::{Server, there};
use crate::common::program;
use crate::common::tools::{Ran, qemu_img, ringdisk};

const BITMAP: &str = "qemu:dirty-bitmap:b0";

/// `disk.qcow2` with data, and with a bitmap `b0` in which three places are marked.
fn image(d: &Path) {
    let image = d.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    qemu_io(&image, "qcow2", &["write -P 1 0 2M"]);
    qemu_img(d, &["bitmap", "--add", "disk.qcow2", "b0"]).ok();
    qemu_io(&image, "qcow2", &["write -P 2 0 64k", "write -P 2 1M 128k", "write -P 3 15M 1M"]);
}

/// Words after `--image-opts` for the export of a socket.
fn options(socket: &Path, bitmap: &str) -> String {
    format!("driver=nbd,server.type=unix,server.path={},x-dirty-bitmap={bitmap}", text(socket))
}

/// What a map says, without what only one version of qemu-img says.
fn ranges(map: &Ran) -> Value {
    let mut map = map.json();
    for range in map.as_array_mut().expect("a list") {
        range.as_object_mut().expect("a range").remove("compressed");
    }
    map
}

/// Maps, copies and refusals, whichever server serves.
fn judge(d: &Path, socket: &Path) {
    let name = options(socket, BITMAP);
    let json = format!(
        r#"json:{{"driver":"raw","file":{{"driver":"nbd","server":{{"type":"unix","path":"{}"}},"x-dirty-bitmap":"{BITMAP}"}}}}"#,
        text(socket)
    );
    let uri = format!("nbd+unix:///?socket={}&x-dirty-bitmap={BITMAP}", text(socket));
    let theirs = ranges(&qemu_img(d, &["map", "--output=json", "--image-opts", &name]).ok());
    let marked: Vec<(u64, u64)> = theirs
        .as_array()
        .expect("a list")
        .iter()
        .filter(|range| range["data"] == false)
        .map(|range| (range["start"].as_u64().unwrap(), range["length"].as_u64().unwrap()))
        .collect();
    let wanted = [(0, 64 << 10), (1 << 20, 128 << 10), (15 << 20, 1 << 20)];
    assert_eq!(marked, wanted, "{theirs}");
    for words in [&["--image-opts", &name][..], &[&json], &[&uri]] {
        let ours = ringdisk(d, &[&["map", "--output=json"], words].concat()).ok();
        assert_eq!(ranges(&ours), theirs, "{words:?}");
    }
    // For people: what is not marked.
    let columns = |ran: &Ran| -> Vec<Vec<String>> {
        let lines = ran.out.lines().skip(1);
        lines.map(|line| line.split_whitespace().take(3).map(str::to_owned).collect()).collect()
    };
    let human = ["map", "--image-opts", &name];
    assert_eq!(columns(&ringdisk(d, &human).ok()), columns(&qemu_img(d, &human).ok()));
    // Without the bitmap: holes, as ever.
    let plain = options(socket, "base:allocation");
    let words = ["map", "--output=json", "--image-opts", &plain];
    assert_eq!(ranges(&ringdisk(d, &words).ok()), ranges(&qemu_img(d, &words).ok()));
    // The bytes are those of the disk, all of them.
    ringdisk(d, &["convert", "-O", "raw", "--image-opts", &name, "ours.raw"]).ok();
    qemu_img(d, &["convert", "-O", "raw", "--image-opts", &name, "theirs.raw"]).ok();
    let read = |name: &str| fs::read(d.join(name)).expect("read");
    assert!(read("ours.raw") == read("theirs.raw"));
    let info = ringdisk(d, &["info", "--output=json", "--image-opts", &name]).ok().json();
    assert_eq!(info["virtual-size"], 16 << 20);
    // What makes no sense.
    let gone = options(socket, "qemu:dirty-bitmap:gone");
    for command in ["map", "info"] {
        let ran = ringdisk(d, &[command, "--image-opts", &gone]);
        assert_ne!(ran.code, 0);
        ran.says("the server does not offer 'qemu:dirty-bitmap:gone' of this export");
    }
    let wrong = ringdisk(d, &["map", "--image-opts", &options(socket, "b0")]);
    wrong.ends(3).says("has to be `qemu:dirty-bitmap:NAME`");
    let written = ringdisk(d, &["convert", "-n", "ours.raw", &uri]);
    assert_ne!(written.code, 0);
    written.says("for writing: with `x-dirty-bitmap` it shows a bitmap");
}

#[test]
fn a_bitmap_of_qemu_nbd_is_mapped_as_qemu_img_maps_it() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    image(d);
    let disk = d.join("disk.qcow2");
    let server = Server::start(d, "s", &["-t", "-e", "8", "-f", "qcow2", "-B", "b0", text(&disk)]);
    judge(d, &server.socket);
}

#[test]
fn a_bitmap_of_our_server_is_mapped_as_qemu_img_maps_it() {
    let directory = scratch();
    let d = directory.path();
    image(d);
    let socket: PathBuf = d.join("s");
    let mut command = Command::new(program());
    let words = ["nbd", "-t", "-e", "8", "-f", "qcow2", "-B", "b0", "-k", text(&socket)];
    let mut server = Process::spawn(command.args(words).arg(d.join("disk.qcow2")));
    until(Duration::from_secs(20), || socket.exists().then_some(())).expect("it listens");
    judge(d, &socket);
    server.signal(Signal::TERM);
    server.wait(Duration::from_secs(20)).expect("it ends");
}

#[test]
fn a_bitmap_of_an_export_with_a_qcow2_in_it_is_mapped_as_bytes_only() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    image(d);
    qemu_img(d, &["create", "-q", "-f", "qcow2", "outer.qcow2", "16M"]).ok();
    qemu_img(d, &["bitmap", "--add", "outer.qcow2", "b0"]).ok();
    let outer = d.join("outer.qcow2");
    let server = Server::start(d, "s", &["-t", "-e", "8", "-f", "qcow2", "-B", "b0", text(&outer)]);
    let plain = format!("nbd+unix:///?socket={}", text(&server.socket));
    qemu_img(d, &["create", "-q", "-f", "qcow2", &plain, "4M"]).ok();
    let uri = format!("{plain}&x-dirty-bitmap={BITMAP}");
    let refused = ringdisk(d, &["map", "-f", "qcow2", &uri]);
    refused.ends(2).says("the bitmap is of the bytes of the export");
    let map = ringdisk(d, &["map", "-f", "raw", "--output=json", &uri]).ok().json();
    let first = &map[0];
    assert_eq!((&first["start"], &first["data"]), (&Value::from(0), &Value::from(false)), "{map}");
}
