//! Checkpoints of a disk that the host kernel serves: the data path is in the process for as long
//! as one runs, since the kernel copies nothing away before it overwrites.

use std::fs;
use std::path::Path;

use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, ok_words, until};
use ringdisk_testkit::skips::needs;

use crate::common::accel::{accel, accelerated, answered, becomes, has_module};
use crate::common::serving::{ctl, load, meanwhile};

/// Begins one; gives its URI.
fn begin(socket: &Path, words: &[&str]) -> String {
    let begun = ctl(socket, &[&["checkpoint", "--json"], words].concat()).ok().json();
    begun["disks"][0]["uri"].as_str().expect("a URI").to_owned()
}

fn end(socket: &Path, name: &str) {
    ctl(socket, &["checkpoint", "--end", name]).ok();
}

/// The disk as readers see it.
fn read(uri: &str) -> Vec<u8> {
    let directory = scratch();
    let copy = directory.path().join("copy");
    ok_words(&["nbdcopy", uri, text(&copy)]);
    fs::read(copy).expect("the copy")
}

fn there() -> bool {
    has_module() && needs("nbdcopy", ringdisk_testkit::process::has("nbdcopy"))
}

#[test]
fn a_checkpoint_takes_the_disk_back_and_its_end_gives_it() {
    if !there() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&["-v"]);
    let mut load = load(12);
    for round in 0..3 {
        load.run(&mut vm, 300);
        load.drain(&mut vm);
        let uri = begin(&place.socket, &["c1"]);
        let shown = becomes(&place, false);
        let why = "a checkpoint is running";
        assert!(shown["reason"].as_str().is_some_and(|it| it.contains(why)), "{shown}");
        let first = read(&uri);
        load.judge(&first);
        let second = meanwhile(&mut vm, &mut load, || read(&uri));
        assert!(first == second, "round {round}: the kept state has changed: {shown}");
        // Nothing brings it back to the kernel before the end.
        ctl(&place.socket, &["accel", "on"]).ends(2).says(why);
        let before = answered(&accel(&place));
        meanwhile(&mut vm, &mut load, || read(&uri));
        assert_eq!(answered(&accel(&place)), before, "requests in the kernel");
        end(&place.socket, "c1");
        becomes(&place, true);
        load.run(&mut vm, 300);
        assert!(answered(&accel(&place)) > before);
    }
    let said = daemon.process.output();
    let words = "the data path is in this process while the state of the disk is kept";
    assert_eq!(said.matches(words).count(), 3, "{said}");
    load.drain(&mut vm);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn a_backup_takes_the_disk_back_and_its_end_gives_it() {
    if !there() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    let mut load = load(15);
    load.run(&mut vm, 300);
    load.drain(&mut vm);
    let [first, second] = ["first.raw", "second.raw"].map(|name| place.path(name));
    ctl(&place.socket, &["backup", text(&first), "--format", "raw"]).ok();
    becomes(&place, true);
    let first = fs::read(first).expect("the copy");
    load.judge(&first);
    let slow = ["--format", "raw", "--background", "--name", "b", "--speed", "64k"];
    ctl(&place.socket, &[&["backup", text(&second)], &slow[..]].concat()).ok();
    becomes(&place, false);
    ctl(&place.socket, &["accel", "on"]).ends(2).says("a checkpoint is running");
    let job = |work: &str, words: &[&str]| {
        let words = [&["job", work, text(&place.socket)], words].concat();
        crate::common::tools::ringdisk(Path::new("/"), &words)
    };
    meanwhile(&mut vm, &mut load, || {
        job("limit", &["b", "0"]).ok();
        job("wait", &["b"]).ok();
    });
    becomes(&place, true);
    assert!(first == fs::read(second).expect("the copy"), "the state of the instant");
    load.run(&mut vm, 300);
    load.drain(&mut vm);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn checkpoints_begin_and_end_under_load_and_nothing_is_lost() {
    if !there() {
        return;
    }
    let (place, daemon, mut vm) = accelerated(&[]);
    let mut load = load(13);
    meanwhile(&mut vm, &mut load, || {
        for round in 0..5 {
            let name = format!("c{round}");
            let uri = begin(&place.socket, &[&name]);
            let first = read(&uri);
            assert!(first == read(&uri), "round {round}");
            end(&place.socket, &name);
            becomes(&place, true);
        }
        // One that is given up: of a disk that is not there.
        let gone = place.path("gone");
        let words = ["checkpoint", "c", "--with", text(&gone)];
        assert_ne!(ctl(&place.socket, &words).code, 0);
        becomes(&place, true);
    });
    load.drain(&mut vm);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

#[test]
fn what_was_said_of_the_kernel_meanwhile_holds_after_the_end() {
    if !there() {
        return;
    }
    let place = crate::common::serving::Place::new("raw");
    let daemon = place.start(&["--cache", "none", "--accel", "auto"]);
    let mut vm = place.vm(true);
    let mut load = load(14);
    becomes(&place, true);
    load.run(&mut vm, 100);
    for (off, on) in [
        (&["accel", "off"][..], &["accel", "on"][..]),
        (&["limit", "iops=100000"], &["limit", "none"]),
    ] {
        begin(&place.socket, &["c1"]);
        ctl(&place.socket, off).ok();
        end(&place.socket, "c1");
        // As long as it would take to return.
        let returns = until(LIMIT / 30, || (accel(&place)["on"] == true).then_some(()));
        assert_eq!(returns, None, "{off:?} does not hold");
        load.run(&mut vm, 100);
        ctl(&place.socket, on).ok();
        ctl(&place.socket, &["accel", "on"]).ok();
        becomes(&place, true);
    }
    load.drain(&mut vm);
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}
