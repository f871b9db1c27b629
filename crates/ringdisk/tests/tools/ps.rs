//! `ringdisk ps`: what is served, where, by whom, who uses it, and what is left of killed servers.

use std::path::Path;
use std::process::Command;

use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::model::{FrontEnd, Request, Vm, VmOptions};
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, run, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::confined::children;
use crate::common::tools::ringdisk;
use crate::common::{program, serve};

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

/// A server whose control socket is below a directory of the test: others do not clear it away.
fn serve_below(directory: &Path, words: &[&str]) -> Process {
    let mut command = Command::new(program());
    command.arg("serve").args(words).env("XDG_RUNTIME_DIR", directory).env_remove("NOTIFY_SOCKET");
    Process::spawn(&mut command)
}

/// The list that a user with that directory sees, with its text.
fn listed_below(directory: &Path, words: &[&str]) -> String {
    let mut command = Command::new(program());
    command.arg("ps").args(words).env("XDG_RUNTIME_DIR", directory);
    let finished = run(&mut command);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    if words.is_empty() { finished.output() } else { finished.stdout }
}

/// The entry of a directory whose place, or command, holds this text, once it is so.
fn found_below(directory: &Path, part: &str, is_it: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let found = until(LIMIT, || {
        last = serde_json::from_str(&listed_below(directory, &["--json"])).expect("JSON");
        let has = |one: &Value, key: &str| one[key].as_str().is_some_and(|it| it.contains(part));
        let mut all = last.as_array().expect("a list").iter();
        all.find(|one| (has(one, "where") || has(one, "command")) && is_it(one)).cloned()
    });
    found.unwrap_or_else(|| panic!("{part}: {last}"))
}

#[test]
fn the_control_socket_of_a_killed_server_is_listed_as_stale_with_what_clears_it_away() {
    let directory = scratch();
    let d = directory.path();
    let socket = d.join("vm.sock");
    let mut server = serve_below(d, &["--null", "1G", "--vhost-user-blk", text(&socket)]);
    found_below(d, text(&socket), |one| one["state"] == "serving");
    server.signal(Signal::KILL);
    until(LIMIT, || server.ended().map(|_| ())).expect("it ends");
    let stale = found_below(d, text(d), |one| one["state"] == "stale");
    assert_eq!((&stale["pid"], &stale["used-by"]), (&Value::Null, &serde_json::json!([])));
    let clears = stale["command"].as_str().expect("a command");
    let told = listed_below(d, &[]);
    assert!(told.contains(&format!("its control socket is left: `{clears}`")), "{told}");
    run(Command::new("sh").args(["-c", clears]));
    let left = listed_below(d, &["--json"]);
    assert!(!left.contains(text(d)), "{left}");
}

#[test]
fn a_disk_that_waits_for_a_migration_is_listed_as_inactive_until_a_front_end_starts_it() {
    let directory = scratch();
    let d = directory.path();
    let [image, socket, metrics] =
        ["disk.qcow2", "vm.sock", "metrics.sock"].map(|name| d.join(name));
    images::qcow2(&image, "16M", "");
    let served = ["--vhost-user-blk", text(&socket), "--metrics", text(&metrics)];
    let server =
        serve_below(d, &[&[text(&image), "--incoming", "--queues", "1"], &served[..]].concat());
    let one = found_below(d, text(&socket), |one| one["state"] == "inactive");
    assert!(one["why"].as_str().is_some_and(|why| why.contains("migration")), "{one}");
    // It is as it should be, for who watches it.
    let asked = |path: &str| {
        let mut stream = std::os::unix::net::UnixStream::connect(&metrics).expect("connect");
        std::io::Write::write_all(&mut stream, format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())
            .expect("asked");
        std::io::read_to_string(stream).expect("an answer")
    };
    assert!(asked("/readyz").ends_with("ready\n"), "{}", asked("/readyz"));
    let told = asked("/metrics");
    let healthy = told.lines().find(|line| line.starts_with("ringdisk_healthy{"));
    assert!(healthy.is_some_and(|line| line.ends_with(" 1")), "{told}");
    let options = VmOptions { queues: 1, ..VmOptions::default() };
    let mut vm = Vm::started(FrontEnd::connect(&socket), options);
    assert_eq!(vm.status(0, Request::read(0, 512)), 0);
    found_below(d, text(&socket), |one| one["state"] == "serving" && one["why"].is_null());
    drop(vm);
    server.signal(Signal::TERM);
    assert_eq!(server.finish(LIMIT).code(), Some(0));
}

#[test]
fn a_mount_in_use_that_was_told_to_end_is_listed_as_stopping_with_its_users() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let mut disk = serve(&image, &[]);
    let file = crate::common::open(disk.path());
    disk.process().signal(Signal::TERM);
    let one = found(disk.text(), |one| one["state"] == "stopping");
    let why = one["why"].as_str().expect("a reason");
    assert!(why.contains(&format!("process {}", std::process::id())), "{why}");
    drop(file);
    let finished = disk.finish();
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn a_mount_whose_helper_was_killed_is_listed_and_serves_on() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let disk = serve(&image, &["--sandbox", "on", "--transport", "dev"]);
    found(disk.text(), |one| one["state"] == "serving");
    let helpers = children(disk.pid());
    assert_eq!(helpers.len(), 1, "the helper process");
    let helper = i32::try_from(helpers[0]).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(helper, Signal::KILL).expect("it runs");
    let one = found(disk.text(), |one| one["state"] == "helper-gone");
    assert!(one["why"].as_str().is_some_and(|why| why.contains("unmount")), "{one}");
    let file = crate::common::open(disk.path());
    std::os::unix::fs::FileExt::write_all_at(&file, b"served on", 0).expect("write");
    drop(file);
    let path = disk.path().to_owned();
    ringdisk(Path::new("/"), &["umount", text(&path)]).ok();
    disk.finish();
    assert_eq!(entry(text(&path)), None);
}

#[test]
fn a_mount_whose_control_socket_is_elsewhere_is_listed_all_the_same() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let (image, path) = (d.join("disk.qcow2"), d.join("disk"));
    images::qcow2(&image, "16M", "");
    let mut command = Command::new(program());
    command.args(["mount", text(&image), text(&path)]).env("XDG_RUNTIME_DIR", d);
    let disk = Mounted::from_command(&mut command, &path);
    let one = found(text(&path), |one| one["state"] == "no-control");
    assert_eq!((&one["kind"], &one["command"]), (&"mount".into(), &Value::Null));
    found_below(d, text(&path), |one| one["state"] == "serving" && one["pid"] == disk.pid());
    assert_eq!(disk.stop().code(), Some(0));
}
