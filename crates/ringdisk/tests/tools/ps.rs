//! `ringdisk ps`: what is served, where, by whom, who uses it, and what is left of killed servers.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{Process, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::tools::ringdisk;
use crate::common::{program, serve};

const LIMIT: Duration = Duration::from_secs(20);

/// The entry whose place holds this text.
fn entry(place: &str) -> Option<Value> {
    let all = ringdisk(Path::new("."), &["ps", "--json"]).ok().json();
    let is_it = |entry: &&Value| entry["where"].as_str().is_some_and(|at| at.contains(place));
    all.as_array().expect("a list").iter().find(is_it).cloned()
}

fn found(place: &str, is_it: impl Fn(&Value) -> bool) -> Value {
    let mut last = None;
    let found = until(LIMIT, || {
        last = entry(place);
        last.clone().filter(&is_it)
    });
    found.unwrap_or_else(|| panic!("{place}: {last:?}"))
}

/// A process that serves a null disk over a socket.
fn served(words: &[&str]) -> Process {
    let mut command = Command::new(program());
    command.args(["serve", "--null", "1G"]).args(words).env_remove("NOTIFY_SOCKET");
    Process::spawn(&mut command)
}

#[test]
fn a_mount_is_listed_with_its_users() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let disk = serve(&image, &["--read-only"]);
    let one = found(disk.text(), |one| one["state"] == "serving");
    assert_eq!((&one["kind"], &one["format"]), (&"mount".into(), &"qcow2".into()));
    assert_eq!(one["pid"], disk.pid());
    assert_eq!((&one["size"], &one["read-only"]), (&(16_u64 << 20).into(), &true.into()));
    assert!(one["image"].as_str().expect("a name").ends_with("disk.qcow2"));
    assert!(one["since"].as_u64().expect("a time") > 1_600_000_000);
    assert_eq!(one["used-by"], serde_json::json!([]));
    let mut user = Command::new("sh");
    user.args(["-c", &format!("exec sleep 600 < '{}'", disk.text())]);
    let user = Process::spawn(&mut user);
    let used = found(disk.text(), |one| one["used-by"] != serde_json::json!([]));
    let by = used["used-by"][0].as_str().expect("a user").to_owned();
    assert!(by.contains(&format!("process {} (sleep)", user.pid())), "{by}");
    let lines = ringdisk(Path::new("."), &["ps"]).ok().out;
    let line = lines.lines().find(|line| line.contains(disk.text())).expect("a line");
    assert!(line.contains("(sleep)") && line.contains("read-only"), "{line}");
    let targets = ringdisk(Path::new("."), &["ps", "--targets"]).ok().out;
    assert!(targets.lines().any(|line| line == disk.text()), "{targets}");
    drop(user);
    assert_eq!(disk.stop().code(), Some(0));
    assert_eq!(entry(text(&image)), None);
}

#[test]
fn a_server_that_stands_still_is_listed_with_what_helps() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let mut disk = serve(&image, &[]);
    disk.process().signal(Signal::STOP);
    let one = entry(disk.text()).expect("it is listed");
    assert_eq!(one["state"], "silent");
    assert_eq!(one["command"], format!("kill -CONT {}", disk.pid()));
    disk.process().signal(Signal::CONT);
    found(disk.text(), |one| one["state"] == "serving");
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn disks_over_sockets_are_listed_with_their_clients_and_when_killed_as_stale() {
    let directory = scratch();
    let socket = directory.path().join("vm.sock");
    let mut vhost = served(&["--vhost-user-blk", text(&socket)]);
    let one = found(text(&socket), |one| one["state"] == "serving");
    assert_eq!(one["kind"], "vhost-user-blk");
    // A front end is known by its process as soon as it has connected.
    let front = std::os::unix::net::UnixStream::connect(&socket).expect("connect");
    let this = format!("process {} ", std::process::id());
    let used = found(text(&socket), |one| one["used-by"] != serde_json::json!([]));
    assert!(used["used-by"][0].as_str().is_some_and(|by| by.starts_with(&this)), "{used}");
    drop(front);
    found(text(&socket), |one| one["used-by"] == serde_json::json!([]));
    vhost.signal(Signal::KILL);
    until(LIMIT, || vhost.ended().map(|_| ())).expect("it ends");
    // Its sockets may live a moment longer: its rings have them.
    let asked = || ringdisk(directory.path(), &["ctl", "vm.sock", "stats"]);
    let ran = until(LIMIT, || Some(asked()).filter(|ran| ran.err.contains("is gone")));
    let ran = ran.expect("it is gone").ends(4);
    assert!(ran.err.contains("is gone") && ran.err.contains("`rm vm.sock`"), "{}", ran.err);

    // The next server clears control sockets away that were left.
    let next = directory.path().join("next.sock");
    let other = served(&["--vhost-user-blk", text(&next)]);
    found(text(&next), |one| one["state"] == "serving");
    drop(other);
    asked().ends(4).says("is gone");

    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("bound").port().to_string();
    drop(free);
    let nbd = served(&["--nbd", &port]);
    let pid = nbd.pid();
    let by_pid = || {
        let all = ringdisk(Path::new("."), &["ps", "--json"]).ok().json();
        all.as_array().expect("a list").iter().find(|one| one["pid"] == pid).cloned()
    };
    let one = until(LIMIT, by_pid).expect("it is listed, without a socket of its own");
    assert_eq!((&one["kind"], &one["state"]), (&"nbd".into(), &"serving".into()));
    let target = format!("127.0.0.1:{port}");
    assert_eq!(one["where"], target.as_str());
    let targets = ringdisk(Path::new("."), &["ps", "--targets"]).ok().out;
    assert!(targets.lines().any(|line| line == target), "{targets}");
    nbd.signal(Signal::TERM);
    drop(nbd);
}

#[test]
fn a_report_has_what_a_bug_report_needs_and_no_byte_of_the_disk() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = d.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    images::qemu_io(&image, "qcow2", &["write -P 0x5a 0 1M"]);
    let log = d.join("log");
    std::fs::write(&log, "ringdisk: warning: an old line\n").expect("write");
    let disk = serve(&image, &["--log-file", text(&log)]);
    ringdisk(d, &["report", "-o", "report.txt"]).ok();
    let report = std::fs::read_to_string(d.join("report.txt")).expect("text");
    for words in [
        "== Versions ==",
        "== Served ==",
        disk.text(),
        "--log-file",
        "\"enters\"",
        "cluster-size",
        "warning: an old line",
    ] {
        assert!(report.contains(words), "{words}: {report}");
    }
    assert!(!report.contains(&"Z".repeat(64)), "it has data of the disk");
    // It is made new, for its user alone.
    ringdisk(d, &["report", "-o", "report.txt"]).ends(1).says("cannot write the report");
    use std::os::unix::fs::PermissionsExt;
    let mode = d.join("report.txt").metadata().expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(disk.stop().code(), Some(0));
}
