//! `--limit` of disks for virtual machines and NBD clients: groups, ends, hand-overs.

use std::path::Path;

use ringdisk_testkit::model::Request;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{LIMIT, Process, command, ok_words, until};
use serde_json::Value;

use crate::common::program;
use crate::common::serving::{Daemon, Place, ctl, load, meanwhile, serve_command};
use crate::common::tools::ringdisk;

fn limits(socket: &Path) -> Value {
    serde_json::from_str(&ctl(socket, &["limit", "--json"]).ok().out).expect("JSON")
}

fn until_limited(socket: &Path) {
    let waits = || (limits(socket)["waiting"].as_u64() > Some(0)).then_some(());
    until(LIMIT, waits).expect("a request waits for the limit");
}

#[test]
fn a_guest_is_limited_and_its_driver_stops_all_the_same() {
    let place = Place::new("qcow2");
    let daemon = place.start(&["--limit", "iops=2000,iops-max=4000"]);
    let (mut vm, mut load) = (place.vm(false), load(5));
    let socket = &place.socket;
    meanwhile(&mut vm, &mut load, || {
        for change in ["iops=100", "none", "bps-write=1M,iops=0", "iops=5000,bps-write=0"] {
            ctl(socket, &["limit", change]).ok();
        }
        until(LIMIT, || {
            ctl(socket, &["limit", "iops=300"]).ok();
            (limits(socket)["waited"].as_u64() > Some(0)).then_some(())
        })
        .expect("requests waited");
    });
    load.read_all(&mut vm);
    // The next one waits for a quarter of an hour; the driver stops its queues, and a reset of the
    // device must not wait for that.
    ctl(socket, &["limit", "iops=0,bps=4"]).ok();
    for at in 0..8 {
        let _ = vm.submit(0, Request::read(at * 8, 4096));
    }
    until_limited(socket);
    for index in 0..2 {
        vm.front.vring_base(index).expect("the queue stops");
    }
    assert_eq!(limits(socket)["waiting"], 0);
    ctl(socket, &["stop"]).ok();
    daemon.ends(0);
    place.judge(&mut load);
}

#[test]
fn a_successor_takes_over_a_disk_whose_requests_wait_for_the_limit() {
    let place = Place::new("qcow2");
    let daemon = place.start(&["--limit", "bps=4"]);
    let mut vm = place.vm(false);
    for at in 0..8 {
        let _ = vm.submit(0, Request::read(at * 8, 4096));
    }
    until_limited(&place.socket);
    let next = place.start(&["--upgrade", "--limit", "iops=100000"]);
    daemon.ends(0);
    assert_eq!(limits(&place.socket)["limits"], "iops=100000");
    assert_eq!(vm.status(1, Request::read(0, 4096)), 0);
    next.stop(&[&place.socket]);
}

#[test]
fn limits_that_a_command_has_set_go_to_the_successor_and_the_hand_over_is_an_event() {
    let place = Place::new("qcow2");
    let socket = &place.socket;
    let of = || limits(socket)["limits"].as_str().map(str::to_owned);
    let words = ["--limit", "iops=1000"];
    let first = place.start(&words);
    ctl(socket, &["limit", "iops=2000,bps=1G"]).ok();
    let changed = of();
    let follower = Process::spawn(&mut command(&[&program(), "ctl", text(socket), "events"]));
    // It follows from the moment that its command is answered on: this is an event, too.
    let follows = until(LIMIT, || {
        ctl(socket, &["limit", "iops=2001"]).ok();
        ctl(socket, &["limit", "iops=2000"]).ok();
        follower.output().contains("limited").then_some(())
    });
    follows.expect("events");
    let second = place.start(&[&["--upgrade"], &words[..]].concat());
    first.ends(0);
    let events = follower.finish(LIMIT).output();
    assert!(events.lines().any(|line| line.contains(r#""event":"handed-over""#)), "{events}");
    assert_eq!((of(), changed.as_deref()), (changed.clone(), Some("iops=2000,bps=1073741824")));
    // What the second one has taken over goes on to the third; a new command line is newer.
    let third = place.start(&[&["--upgrade"], &words[..]].concat());
    second.ends(0);
    assert_eq!(of(), changed);
    let last = place.start(&["--upgrade", "--limit", "iops=500"]);
    third.ends(0);
    assert_eq!(of().as_deref(), Some("iops=500"));
    ctl(socket, &["limit", "none"]).ok();
    let unlimited = place.start(&["--upgrade", "--limit", "iops=500"]);
    last.ends(0);
    assert_eq!(of().as_deref(), Some("none"));
    unlimited.stop(&[socket]);
}

#[test]
fn a_group_goes_to_the_successor_with_the_limits_that_a_command_has_set() {
    let (a, b) = (Place::new("qcow2"), Place::new("raw"));
    let disk = |place: &Place, limit: &str| {
        let (image, format) = (text(&place.image), place.format);
        let socket = text(&place.socket);
        format!("image={image},format={format},socket={socket},limit={limit}")
    };
    // The disk that says what the limits are is the second one.
    let specs = [disk(&a, "group=web"), disk(&b, "group=web,limit=iops=1000")];
    let words = ["--disk", &specs[0], "--disk", &specs[1]];
    let first = Daemon::of(&mut serve_command(&words));
    ctl(&a.socket, &["limit", "iops=2000"]).ok();
    let second = Daemon::of(&mut serve_command(&[&["--upgrade"], &words[..]].concat()));
    first.ends(0);
    for place in [&a, &b] {
        assert_eq!(limits(&place.socket)["limits"], "iops=2000");
    }
    second.stop(&[&a.socket, &b.socket]);
}

#[test]
fn disks_of_a_group_share_its_limits() {
    let (a, b) = (Place::new("qcow2"), Place::new("raw"));
    let socket = a.path("nbd.sock");
    let disk = |place: &Place, name: &str, limit: &str| {
        let (image, format) = (text(&place.image), place.format);
        format!("image={image},format={format},export-name={name},limit={limit}")
    };
    let (first, second) =
        (disk(&a, "a", "group=one,,bps=4,limit=iops-write=9"), disk(&b, "b", "group=one"));
    let words = ["--nbd", text(&socket), "--disk", &first, "--disk", &second];
    let daemon = Daemon::of(&mut serve_command(&words));
    let (named_a, named_b) = (socket.join("a"), socket.join("b"));
    assert_eq!(limits(&named_b)["limits"], "iops-write=9,bps=4");
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", text(&socket));
    let client = Process::spawn(&mut command(&["nbdcopy", "--no-extents", &uri("b"), "null:"]));
    until_limited(&named_b);
    // What one uses the other lacks.
    let other = Process::spawn(&mut command(&["nbdcopy", "--no-extents", &uri("a"), "null:"]));
    until_limited(&named_a);
    ctl(&named_a, &["limit", "none"]).ok();
    for client in [client, other] {
        let finished = client.finish(LIMIT);
        assert_eq!(finished.code(), Some(0), "{}", finished.output());
    }
    assert_eq!(limits(&named_b)["limits"], "none");
    ok_words(&["nbdinfo", &uri("a")]);
    daemon.stop(&[&socket]);
    // Two disks that say different things of one group.
    let second = disk(&b, "b", "group=one,,bps=5");
    let words = ["serve", "--nbd", text(&socket), "--disk", &first, "--disk", &second];
    ringdisk(Path::new("/"), &words).ends(2).says("the group 'one' has the limits");
}

#[test]
fn the_host_kernel_knows_no_limits() {
    let place = Place::new("raw");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let words = ["serve", image, "-f", "raw", "--vhost-user-blk", socket, "--accel", "require"];
    let refused = ringdisk(Path::new("/"), &[&words[..], &["--limit", "iops=5"]].concat());
    refused.ends(2).says("--accel require and --limit contradict each other");
    let daemon = place.start(&["--accel", "auto", "--limit", "iops=5000"]);
    ctl(&place.socket, &["accel", "on"]).ends(11).says("has limits");
    daemon.stop(&[&place.socket]);
}
