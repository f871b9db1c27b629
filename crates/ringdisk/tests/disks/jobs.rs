//! Jobs of disks for virtual machines and NBD clients.

use std::path::Path;
use std::time::Duration;

use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{run, until};
use serde_json::Value;

use crate::common::serving::{Daemon, Place, ctl, judge, load, meanwhile, serve_command, stats};
use crate::common::tools::{Ran, ringdisk};

const LIMIT: Duration = Duration::from_secs(30);

fn job(place: &Place, work: &str, words: &[&str]) -> Ran {
    ringdisk(Path::new("/"), &[&["job", work, text(&place.socket)], words].concat())
}

fn seen(place: &Place, id: &str) -> Value {
    let list = job(place, "list", &["--json"]).ok().json();
    let jobs = list.as_array().expect("a list").iter();
    jobs.into_iter().find(|job| job["id"] == id).cloned().unwrap_or(Value::Null)
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

#[test]
fn an_upgrade_waits_for_no_job_and_is_refused_while_one_runs() {
    let place = Place::new("qcow2");
    let old = place.start(&[]);
    let (mut vm, mut load) = (place.vm(true), load(12));
    let socket = &place.socket;
    let new = meanwhile(&mut vm, &mut load, || {
        ctl(socket, &["snapshot", text(&place.path("over.qcow2"))]).ok();
        std::thread::sleep(Duration::from_millis(200));
        ctl(socket, &["commit", "--background", "--name", "slow", "--speed", "4k"]).ok();
        until(LIMIT, || (seen(&place, "slow")["state"] == "running").then_some(()))
            .expect("it runs");
        let words = [&place.words()[..], &["--upgrade", "--vhost-user-blk", text(socket)]].concat();
        let refused = run(&mut serve_command(&words));
        assert_ne!(refused.code(), Some(0), "{}", refused.output());
        assert!(refused.stderr.contains("a commit"), "{}", refused.output());
        assert_eq!(seen(&place, "slow")["state"], "running", "the job goes on");
        job(&place, "cancel", &["slow"]).ok();
        job(&place, "wait", &["slow"]).ends(1);
        let new = place.start(&["--upgrade"]);
        old.ends(0);
        new
    });
    assert_eq!(layers(&place), 2);
    assert!(seen(&place, "slow").is_null(), "the list is that of the process");
    ctl(socket, &["commit", "--quiet"]).ok();
    load.read_all(&mut vm);
    new.stop(&[&place.socket]);
    place.judge(&mut load);
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
