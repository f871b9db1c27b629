//! Mirrors of disks that NBD clients and virtual machines use, with requests in flight.

use std::path::{Path, PathBuf};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs;
use ringdisk_testkit::model::Discards;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, command, has, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::serving::{
    Daemon, Place, SIZE, ctl, judge, load, load_of, meanwhile, serve_command, stats,
};
use crate::common::tools::{Ran, qemu_img, ringdisk};

fn job(socket: &Path, work: &str, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["job", work, text(socket)], words].concat())
}

fn top(socket: &Path) -> Value {
    stats(socket)["layers"][0]["filename"].clone()
}

/// A server of an empty export that others wrote.
fn qemu_nbd(directory: &Path) -> (Process, String, PathBuf) {
    let [image, socket] = ["export.raw", "export.sock"].map(|name| directory.join(name));
    images::sparse(&image, SIZE);
    let words = ["qemu-nbd", "-f", "raw", "--persistent", "--shared=9", "-k"];
    let process = Process::spawn(command(&words).arg(&socket).arg(&image));
    until(LIMIT, || socket.exists().then_some(())).expect("it listens");
    (process, format!("nbd+unix:///?socket={}", text(&socket)), image)
}

#[test]
fn nbd_clients_verify_what_they_write_while_the_disk_moves() {
    if !needs("fio", has("fio")) {
        return;
    }
    let place = Place::new("qcow2");
    let words = ["--nbd", text(&place.socket), "--format", "qcow2", "--threads", "2"];
    let daemon = Daemon::of(&mut serve_command(&[&words[..], &[text(&place.image)]].concat()));
    let uri = format!("--uri=nbd+unix:///?socket={}", text(&place.socket));
    let mut fio = command(&["fio", "--name=nbd", "--ioengine=nbd", &uri, "--rw=randwrite"]);
    fio.args(["--bs=4k", "--iodepth=16", "--thread", "--numjobs=4", "--size=2m"]);
    fio.args(["--offset_increment=2m", "--verify=crc32c", "--verify_state_save=0"]);
    fio.args(["--time_based", "--runtime=4", "--rate_iops=4000"]);
    let fio = Process::spawn(fio.current_dir(place.directory.path()));
    let mut names = Vec::new();
    for (round, format) in ["raw", "qcow2", "raw", "qcow2"].into_iter().enumerate() {
        let path = place.path(&format!("{round}.{format}"));
        let blocks: &[&str] = if round % 2 == 0 { &[] } else { &["--write-blocking"] };
        let words = [&["mirror", "--complete", "-f", format, text(&path)], blocks].concat();
        ctl(&place.socket, &words).ok();
        assert_eq!(top(&place.socket), text(&path));
        names.push(path);
    }
    let ended = fio.finish(LIMIT);
    assert_eq!(ended.code(), Some(0), "{}", ended.output());
    let total = &stats(&place.socket)["total"];
    assert_eq!(total["errors"], 0, "{total}");
    daemon.stop(&[&place.socket]);
    images::assert_clean(&place.image);
    images::assert_clean(&names[1]);
    qemu_img(Path::new("/"), &["check", text(&names[3])]).ok();
}

/// The target stands still while the machine has requests in flight, then goes on or dies.
#[test]
fn a_machine_loses_nothing_when_its_target_hangs_or_dies() {
    if !needs("qemu-nbd", has("qemu-nbd")) {
        return;
    }
    for (seed, comes_back) in [(31, true), (32, false)] {
        let place = Place::new("qcow2");
        let daemon = place.start(&[]);
        // A server may do nothing about a discard.
        let (mut vm, mut load) = (place.vm(seed % 2 == 0), load_of(seed, Discards::Hint));
        let (server, uri, export) = qemu_nbd(place.directory.path());
        let socket = &place.socket;
        meanwhile(&mut vm, &mut load, || {
            ctl(socket, &["mirror", "-f", "raw", "--name", "m", &uri]).ok();
        });
        server.signal(Signal::STOP);
        meanwhile(&mut vm, &mut load, || {
            job(socket, "complete", &["m"]).ok();
            std::thread::sleep(std::time::Duration::from_secs(1));
        });
        assert_eq!(top(socket), text(&place.image));
        load.read_all(&mut vm);
        meanwhile(&mut vm, &mut load, || {
            if comes_back {
                server.signal(Signal::CONT);
                job(socket, "wait", &["m"]).ok();
            } else {
                server.signal(Signal::KILL);
                job(socket, "cancel", &["m"]).ok();
                job(socket, "wait", &["m"]).ends(1);
            }
        });
        load.read_all(&mut vm);
        drop(daemon.stop(&[&place.socket]));
        match comes_back {
            true => judge(&export, "raw", &mut load),
            false => place.judge(&mut load),
        }
    }
}

/// What else is asked for while a mirror runs is refused, and names the job.
#[test]
fn a_machine_works_while_other_changes_are_refused_for_a_mirror() {
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), load(33));
    let socket = &place.socket;
    let copy = place.path("copy.qcow2");
    meanwhile(&mut vm, &mut load, || {
        ctl(socket, &["mirror", "--name", "m", text(&copy)]).ok();
        let over = place.path("over.qcow2");
        for words in [&["snapshot", text(&over)][..], &["resize", "+1M"], &["mirror", text(&over)]]
        {
            ctl(socket, words).ends(5).says("'m'");
        }
        ctl(socket, &["mirror", "--existing", text(&copy)]).ends(5).says("in use for writing");
        assert!(!over.exists());
        job(socket, "complete", &["m"]).ok();
        job(socket, "wait", &["m"]).ok();
        ctl(socket, &["resize", "+1M"]).ok();
        ctl(socket, &["snapshot", text(&over)]).ok();
    });
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    images::assert_clean(&copy);
    judge(&place.path("over.qcow2"), "qcow2", &mut load);
}

#[test]
fn a_stop_ends_a_mirror_of_a_machine() {
    for way in ["copying", "ready"] {
        let place = Place::new("raw");
        let daemon = place.start(&[]);
        let (mut vm, mut load) = (place.vm(false), load(34));
        load.run(&mut vm, 500);
        let copy = place.path("copy.raw");
        let speed = if way == "copying" { "64k" } else { "0" };
        let words = ["mirror", "--background", "-f", "raw", "--name", "m", "--speed", speed];
        meanwhile(&mut vm, &mut load, || {
            ctl(&place.socket, &[&words[..], &[text(&copy)]].concat()).ok();
            if way == "ready" {
                job(&place.socket, "wait", &["m"]).ok();
            }
        });
        load.read_all(&mut vm);
        daemon.stop(&[&place.socket]);
        place.judge(&mut load);
    }
}

/// The words for the next process are about the image on top, which has another format by now; and
/// a raw target has overlays like any other image.
#[test]
fn a_disk_that_moved_to_another_format_gets_overlays_and_is_upgraded() {
    for (seed, from, to) in [(35, "qcow2", "raw"), (36, "raw", "qcow2")] {
        let place = Place::new(from);
        let daemon = place.start(&[]);
        let (mut vm, mut load) = (place.vm(true), load(seed));
        let socket = &place.socket;
        let [copy, over] = ["copy", "over.qcow2"].map(|name| place.path(name));
        let daemon = meanwhile(&mut vm, &mut load, || {
            ctl(socket, &["mirror", "--complete", "-f", to, text(&copy)]).ok();
            ctl(socket, &["snapshot", text(&over)]).ok();
            ctl(socket, &["commit", "--quiet"]).ok();
            let words = ["--format", to, "--queues", "2", "--threads", "2", "--upgrade"];
            let new = Daemon::start(socket, &[&words[..], &[text(&copy)]].concat());
            daemon.ends(0);
            new
        });
        load.read_all(&mut vm);
        daemon.stop(&[&place.socket]);
        judge(&copy, to, &mut load);
    }
}
