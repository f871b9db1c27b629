//! Prometheus' own judge, `promtool check metrics`, on what a process and a host tell. Where it is
//! not installed the test says so and is left out (`./test` gets it with `tests/promtool`).

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use ringdisk_testkit::images;
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, ok, ok_words, until};

use super::watch::get;
use crate::common::serve;
use crate::common::serving::{Daemon, serve_command};
use crate::common::tools::ringdisk;

/// Where promtool is.
fn promtool() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/promtool");
    let output = Command::new(script).arg("path").output().expect("bash");
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    needs("promtool (tests/promtool install)", output.status.success()).then_some(path)
}

/// What promtool says of a text: nothing where all is well.
fn said(promtool: &str, metrics: &str) -> String {
    let mut command = Command::new(promtool);
    command.args(["check", "metrics"]).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
    child.stdin.take().expect("a pipe").write_all(metrics.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert_eq!(output.status.success(), said.is_empty(), "{said}");
    said
}

#[test]
fn promtool_finds_nothing_wrong_with_the_metrics_of_a_process_and_of_a_host() {
    let Some(promtool) = promtool().filter(|_| needs_root()) else { return };
    let directory = scratch();
    let at = |name: &str| directory.path().join(name);
    let (image, other) = (at("disk \"1\".qcow2"), at("other.qcow2"));
    images::qcow2(&image, "8M", "");
    images::qcow2(&other, "8M", "");
    let [socket, metrics] = ["nbd.sock", "metrics.sock"].map(at);
    let words = ["--nbd", text(&socket), "--metrics", text(&metrics), "--limit", "iops=1000"];
    let daemon = Daemon::of(&mut serve_command(&[&words[..], &[text(&image)]].concat()));
    let disk = serve(&other, &[]);
    // Requests, a client and a job, so that each family has a sample.
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    ok_words(&["qemu-io", "-f", "raw", "-c", "write 0 1M", "-c", "read 0 1M", &uri]);
    let copy = at("copy.qcow2");
    let begin = ["ctl", disk.text(), "mirror", "--background", text(&copy)];
    ringdisk(Path::new("/"), &begin).ok();
    let mut connected = until(LIMIT, || UnixStream::connect(&metrics).ok()).expect("it listens");
    let answer = get(&mut connected, "/metrics");
    let (_, of_one) = answer.split_once("\r\n\r\n").expect("a body");
    let of_all = ringdisk(Path::new("/"), &["metrics"]).ok().out;
    assert!(of_one.contains("ringdisk_request_seconds") || of_one.contains("_bucket{"), "{of_one}");
    assert!(of_all.contains("ringdisk_job_info{"), "{of_all}");
    for metrics in [of_one, &of_all] {
        assert_eq!(said(&promtool, metrics), "", "{metrics}");
        // It would see a family without its help.
        let begin = metrics.find("# HELP").expect("help");
        let end = begin + metrics[begin..].find('\n').expect("a line") + 1;
        let wrong = [&metrics[..begin], &metrics[end..]].concat();
        assert!(said(&promtool, &wrong).contains("no help text"), "{}", said(&promtool, &wrong));
    }
    ok(Command::new(crate::common::program()).args(["job", "cancel", disk.text(), "mirror-1"]));
    assert_eq!(disk.stop().code(), Some(0));
    daemon.stop(&[&socket, &metrics]);
}
