//! `ringdisk report`: what a bug report needs, and no secret of those that may be near it.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use ringdisk_testkit::certificates;
use ringdisk_testkit::images;
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{Mounted, scratch, text};

use crate::common::serving::{Daemon, serve_command};
use crate::common::tools::{qemu_img, ringdisk};
use crate::common::{program, serve};

/// Every secret of these tests has this in it.
const PLANTED: &str = "planted";
const LOG: &str = "log";

fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port()
}

/// The text of a report. The environment of this process has a secret, too.
fn report(directory: &Path) -> String {
    let mut command = Command::new(program());
    command.args(["report", "-o", "-"]).current_dir(directory);
    command.env("RINGDISK_PASSWORD", "planted-here").env_remove("NOTIFY_SOCKET");
    let finished = ringdisk_testkit::process::run(&mut command);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    finished.stdout
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
    fs::write(&log, "ringdisk: warning: an old line\n").expect("write");
    let disk = serve(&image, &["--log-file", text(&log)]);
    ringdisk(d, &["report", "-o", "report.txt"]).ok();
    let report = fs::read_to_string(d.join("report.txt")).expect("text");
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
    let mode = d.join("report.txt").metadata().expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(disk.stop().code(), Some(0));
}

/// A raw disk over NBD; its environment has a secret.
fn server(directory: &Path, name: &str, at: &str, words: &[&str]) -> Daemon {
    let image = directory.join(name);
    images::sparse(&image, 16 << 20);
    let own = [text(&image), "-f", "raw", "--nbd", at];
    Daemon::of(serve_command(&[&own, words].concat()).env("RINGDISK_SECRET", "planted-there"))
}

#[test]
fn a_report_has_none_of_the_secrets_of_addresses_logs_headers_keys_and_environments() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let keys = d.join("keys");
    fs::create_dir(&keys).expect("a directory");
    let _authority = certificates::all(&keys);
    let (plain, encrypted) = (port(), d.join("encrypted.sock"));
    let host = format!("127.0.0.1:{plain}");
    let below = server(d, "below.raw", &host, &[]);
    let target = server(d, "target.raw", text(&encrypted), &["--tls-creds", text(&keys)]);
    // What writes its log begins where a key ends, and has been there before.
    let key = fs::read_to_string(keys.join("server-key.pem")).expect("a key");
    let log = d.join(LOG);
    let lines = [
        "ringdisk: an old line",
        "cannot open 'nbd://me:planted-a@host/x': gone",
        "{\"password\": \"planted b\", \"name\": \"kept\"}",
        "json:{\\\"tls-secret\\\": \\\"planted-c\\\"}",
        "rbd:pool/image:id=me:key=planted-d== and --token=planted-e",
        "Authorization: Bearer planted-f",
        key.trim_end(),
    ];
    fs::write(&log, lines.join("\n") + "\n").expect("write");
    let backing = format!("nbd://me:planted-header@{host}/");
    let words = ["create", "-q", "-u", "-f", "qcow2", "-b", &backing, "-F", "raw", "top.qcow2"];
    qemu_img(d, &[&words[..], &["16M"]].concat()).ok();
    let top = d.join("top.qcow2");
    let words =
        ["--allow-host", &host, "--allow-path", text(&keys), "--log-file", text(&log), "-v"];
    let disk = serve(&top, &words);
    let to = format!(
        "nbds+unix://me:planted-target@localhost/?socket={}&tls-certificates={}",
        text(&encrypted),
        text(&keys)
    );
    let words = ["mirror", &to, "-f", "raw", "--background", "--name", "m"];
    ringdisk(d, &[&["ctl", disk.text()], &words[..]].concat()).ok();
    let address = format!("nbd://me:planted-p@ss@{host}/");
    let other: Mounted = serve(Path::new(&address), &["-f", "raw", "--read-only"]);
    let told = report(d);
    assert!(!told.contains(PLANTED), "{told}");
    let secret = key.lines().filter(|line| !line.contains("-----"));
    assert!(secret.clone().count() > 0);
    secret.for_each(|line| assert!(!told.contains(line), "a key: {told}"));
    for words in [
        "an old line",
        "\"name\": \"kept\"",
        &format!("nbd://(left out)@{host}/"),
        text(&top),
        text(&keys),
        disk.text(),
        other.text(),
        "\"id\": \"m\"",
        "cluster-size",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    // Nor do other commands show them.
    for words in [&["ps"][..], &["ps", "--json"], &["metrics"], &["job", "list", "--json"]] {
        let shown = ringdisk(d, words).ok().out;
        assert!(!shown.contains(PLANTED), "{words:?}: {shown}");
    }
    let said = other.output();
    assert!(!said.contains(PLANTED), "{said}");
    let logged = fs::read_to_string(&log).expect("text");
    let new = &logged[lines.join("\n").len()..];
    assert!(!new.trim().is_empty() && !new.contains(PLANTED), "{new}");
    ringdisk(d, &["job", "cancel", "m"]).ok();
    assert_eq!(other.stop().code(), Some(0));
    assert_eq!(disk.stop().code(), Some(0));
    target.stop(&[]);
    below.stop(&[]);
}

/// A command line is what its process says it is, and root may read every file.
#[test]
fn a_report_has_no_file_that_a_process_only_names_as_its_log() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = d.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let log = d.join(LOG);
    let disk = serve(&image, &["--log-file", text(&log), "-v"]);
    fs::rename(&log, d.join("moved")).expect("rename");
    fs::write(&log, "planted: a file of somebody else\n").expect("write");
    let told = report(d);
    assert!(!told.contains(PLANTED), "{told}");
    assert!(told.contains("the process does not write it"), "{told}");
    assert_eq!(disk.stop().code(), Some(0));
}
