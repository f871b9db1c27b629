//! Jobs of disks for virtual machines and NBD clients.

use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, run, until};
use serde_json::Value;

use super::keep::kill;
use crate::common::serving::{Daemon, Place, ctl, judge, load, meanwhile, serve_command, stats};
use crate::common::tools::{Ran, child_of, ringdisk};

fn job(place: &Place, work: &str, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["job", work, text(&place.socket)], words].concat())
}

/// What the list says of a job; nothing while no process answers.
fn seen(place: &Place, id: &str) -> Value {
    let told = job(place, "list", &["--json"]);
    let list: Value = serde_json::from_str(&told.out).unwrap_or_default();
    let jobs = list.as_array().cloned().unwrap_or_default();
    jobs.into_iter().find(|job| job["id"] == id).unwrap_or(Value::Null)
}

fn layers(place: &Place) -> usize {
    stats(&place.socket)["layers"].as_array().expect("layers").len()
}

#[test]
fn a_guest_writes_while_jobs_run_are_cancelled_and_end() {
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(false), load(11));
    let socket = &place.socket;
    meanwhile(&mut vm, &mut load, || {
        for round in 0..4 {
            let overlay = place.path(&format!("over{round}.qcow2"));
            ctl(socket, &["snapshot", text(&overlay)]).ok();
            std::thread::sleep(Duration::from_millis(200));
            let speed = ["1M", "0"][round % 2];
            let id = ctl(socket, &["commit", "--background", "--speed", speed]).ok();
            let id = id.out.trim().to_owned();
            if round % 2 == 0 {
                job(&place, "pause", &[&id]).ok();
                job(&place, "cancel", &[&id]).ok();
                job(&place, "wait", &[&id]).ends(1);
                assert_eq!(layers(&place), 2);
                ctl(socket, &["commit", "--quiet"]).ok();
            } else {
                job(&place, "wait", &[&id]).ok();
            }
            assert_eq!(layers(&place), 1, "round {round}");
        }
    });
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}

/// Begins each kind of job on an overlay, has `next` change the process twice in the middle of it,
/// and ends it.
fn jobs_go_on(place: &Place, mut next: impl FnMut()) {
    let socket = &place.socket;
    let copy = place.path("copy.qcow2");
    for (round, kind) in ["commit", "stream", "mirror"].into_iter().enumerate() {
        ctl(socket, &["snapshot", text(&place.path(&format!("over{round}.qcow2")))]).ok();
        // A stream has nothing to copy where the guest has written everything.
        if kind != "stream" {
            std::thread::sleep(Duration::from_millis(200));
        }
        let target = (kind == "mirror").then_some(text(&copy));
        let words = ["--background", "--name", kind, "--speed", "16k"];
        let begun: Vec<&str> = [kind].into_iter().chain(target).chain(words).collect();
        ctl(socket, &begun).ok();
        let is = |state: &str| {
            let is_it = || (seen(place, kind)["state"] == state).then_some(());
            until(LIMIT, is_it).unwrap_or_else(|| panic!("not {state}: {}", seen(place, kind)));
        };
        // Each process copies some MiB before it waits for the limit, which is half of the disk.
        job(place, "pause", &[kind]).ok();
        for _ in 0..2 {
            next();
            is("paused");
            assert_eq!(seen(place, kind)["speed"], 16 << 10);
        }
        job(place, "limit", &[kind, "0"]).ok();
        job(place, "resume", &[kind]).ok();
        if kind == "mirror" {
            is("ready");
            next();
            is("ready");
            job(place, "complete", &[kind]).ok();
        }
        job(place, "wait", &[kind]).ok();
        assert_eq!(layers(place), 1, "{kind}");
    }
}

#[test]
fn jobs_of_a_guests_disk_go_on_in_the_next_process() {
    let place = Place::new("qcow2");
    let mut daemon = Some(place.start(&[]));
    let (mut vm, mut load) = (place.vm(true), load(12));
    meanwhile(&mut vm, &mut load, || {
        jobs_go_on(&place, || {
            let all = ["--upgrade", "--allow-path", text(place.directory.path())];
            let new = place.start(&all);
            daemon.replace(new).expect("one serves").ends(0);
        });
    });
    load.read_all(&mut vm);
    daemon.expect("one serves").stop(&[&place.socket]);
    judge(&place.path("copy.qcow2"), "qcow2", &mut load);
}

#[test]
fn jobs_of_a_kept_disk_begin_again_when_its_server_was_killed() {
    let place = Place::new("qcow2");
    let daemon = place.start(&["--keep"]);
    let (mut vm, mut load) = (place.vm(false), load(15));
    let helper = daemon.process.pid();
    meanwhile(&mut vm, &mut load, || {
        jobs_go_on(&place, || {
            // A new process is allowed 5 times in 10 s.
            std::thread::sleep(Duration::from_millis(2100));
            let server = child_of(helper).expect("a process serves");
            kill(server);
            let next = || child_of(helper).filter(|new| *new != server);
            until(LIMIT, next).unwrap_or_else(|| panic!("{}", daemon.process.output()));
        });
    });
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    judge(&place.path("copy.qcow2"), "qcow2", &mut load);
}

#[test]
fn a_guest_writes_while_streams_run() {
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), load(13));
    let socket = &place.socket;
    let overlay = |name: &str| {
        ctl(socket, &["snapshot", text(&place.path(name))]).ok();
        std::thread::sleep(Duration::from_millis(200));
    };
    let daemon = meanwhile(&mut vm, &mut load, || {
        overlay("one.qcow2");
        overlay("two.qcow2");
        let one = place.path("one.qcow2");
        ctl(socket, &["stream", "--base", text(&one)]).ends(2);
        overlay("three.qcow2");
        let id = ctl(socket, &["stream", "--base", text(&one), "--background"]).ok();
        job(&place, "wait", &[id.out.trim()]).ok();
        assert_eq!(layers(&place), 3);
        ctl(socket, &["stream", "--quiet"]).ok();
        assert_eq!(layers(&place), 1);
        overlay("four.qcow2");
        ctl(socket, &["commit", "--quiet"]).ok();
        // Nothing leads from the image on top to that of the command line any more.
        let words = [&place.words()[..], &["--upgrade", "--vhost-user-blk", text(socket)]].concat();
        let refused = run(&mut serve_command(&words));
        assert_eq!(refused.code(), Some(6), "{}", refused.output());
        assert!(refused.stderr.contains("--allow-path"), "{}", refused.output());
        let new = place.start(&["--upgrade", "--allow-path", text(place.directory.path())]);
        daemon.ends(0);
        let top = stats(socket)["layers"][0]["filename"].clone();
        assert_eq!(top, text(&place.path("three.qcow2")));
        new
    });
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    // It needs none of the others.
    for name in ["disk", "one.qcow2", "two.qcow2", "four.qcow2"] {
        std::fs::remove_file(place.path(name)).expect("remove");
    }
    judge(&place.path("three.qcow2"), "qcow2", &mut load);
}

#[test]
fn a_guest_writes_while_its_disk_moves_and_is_upgraded_there() {
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), load(14));
    let socket = &place.socket;
    let other = place.path("other");
    std::fs::create_dir(&other).expect("a directory");
    let [one, two] = ["one.raw", "two.qcow2"].map(|name| other.join(name));
    let daemon = meanwhile(&mut vm, &mut load, || {
        ctl(socket, &["mirror", "-f", "raw", "--name", "m", text(&one)]).ok();
        std::thread::sleep(Duration::from_millis(200));
        job(&place, "complete", &["m"]).ok();
        job(&place, "wait", &["m"]).ok();
        std::thread::sleep(Duration::from_millis(200));
        let words = ["mirror", "--complete", "--write-blocking", "-f", "qcow2", text(&two)];
        ctl(socket, &words).ok();
        assert_eq!(stats(socket)["layers"][0]["filename"], text(&two));
        // The old command line leads elsewhere; one that names the image takes the disk over.
        let words = [&place.words()[..], &["--upgrade", "--vhost-user-blk", text(socket)]].concat();
        let refused = run(&mut serve_command(&words));
        assert_eq!(refused.code(), Some(6), "{}", refused.output());
        assert!(refused.stderr.contains("--allow-path"), "{}", refused.output());
        let new = ["--format", "qcow2", "--queues", "2", "--threads", "2", "--upgrade", text(&two)];
        let new = Daemon::start(socket, &new);
        daemon.ends(0);
        assert_eq!(stats(socket)["layers"][0]["filename"], text(&two));
        new
    });
    load.read_all(&mut vm);
    daemon.stop(&[&place.socket]);
    std::fs::remove_file(&place.image).expect("remove");
    std::fs::remove_file(&one).expect("remove");
    judge(&two, "qcow2", &mut load);
}

/// Backups under a guest's load, one that is given up among them; the last one begins when the
/// guest rests, and is what the guest has written by then, whatever it writes meanwhile.
#[test]
fn a_guest_writes_while_its_disk_is_backed_up() {
    let place = Place::new("qcow2");
    let daemon = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), load(16));
    let socket = &place.socket;
    let copy = |name: &str| place.path(name);
    meanwhile(&mut vm, &mut load, || {
        for round in 0..3 {
            let to = copy(&format!("copy{round}.qcow2"));
            if round == 1 {
                let words = ["backup", "--background", "--speed", "64k", "--name", "slow"];
                ctl(socket, &[&words[..], &[text(&to)]].concat()).ok();
                std::thread::sleep(Duration::from_millis(200));
                job(&place, "cancel", &["slow"]).ok();
                job(&place, "wait", &["slow"]).ends(1).says("is incomplete");
            } else {
                ctl(socket, &["backup", "--quiet", text(&to)]).ok();
            }
            ringdisk_testkit::images::assert_clean(&to);
        }
    });
    load.read_all(&mut vm);
    let last = copy("last.qcow2");
    ctl(socket, &["backup", "--quiet", text(&last)]).ok();
    judge(&last, "qcow2", &mut load);
    daemon.stop(&[&place.socket]);
    place.judge(&mut load);
}
