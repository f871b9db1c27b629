//! What a disk does: `ctl stats` in words, events as they happen, metrics over HTTP and of all
//! processes.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use ringdisk_testkit::images::{self, pattern};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, Process, ok_words, until};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::serving::{Daemon, serve_command};
use crate::common::tools::ringdisk;
use crate::common::{MIB, open, program, serve};

#[test]
fn stats_are_one_screen_in_plain_words_and_internals_are_all_counters() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = d.join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let disk = serve(&image, &[]);
    let file = open(disk.path());
    file.write_all_at(&pattern(1, 0, 1 << 20), MIB).and_then(|()| file.sync_all()).expect("write");
    let ran = ringdisk(d, &["ctl", disk.text(), "stats"]).ok();
    for words in
        ["(qcow2, 16 MiB)", "served     as ", "on average ", "latency    p50 ", "errors     none"]
    {
        assert!(ran.out.contains(words), "{words}: {}", ran.out);
    }
    let user = format!("process {} ", std::process::id());
    assert!(ran.out.contains(&user), "{}", ran.out);
    for words in ["SQE", "enters", "kicks", "polls"] {
        assert!(!ran.out.contains(words), "{words}: {}", ran.out);
    }
    assert!(ran.out.lines().count() <= 24, "{}", ran.out);
    let all = ringdisk(d, &["ctl", disk.text(), "stats", "--internals"]).ok().out;
    assert!(all.contains("enters") && all.contains("queue 0"), "{all}");
    let json = ringdisk(d, &["ctl", disk.text(), "stats", "--json"]).ok().json();
    assert!(json["queues"][0]["ring"]["enters"].is_u64() && json["total"]["writes"].is_u64());
    assert_eq!(json["serving"]["where"], disk.text());
    let mut again = Command::new(program());
    again.args(["ctl", disk.text(), "stats", "--every", "100ms"]);
    let again = Process::spawn(&mut again);
    let told = until(LIMIT, || (again.output().matches("  now   ").count() >= 2).then_some(()));
    assert!(told.is_some(), "{}", again.output());
    again.signal(Signal::INT);
    again.finish(LIMIT);
    drop(file);
    assert_eq!(disk.stop().code(), Some(0));
}

/// `ringdisk ctl TARGET events`, with its lines.
fn follow(target: &str) -> (std::process::Child, BufReader<std::process::ChildStdout>) {
    let mut command = Command::new(program());
    command.args(["ctl", target, "events"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the program starts");
    let out = BufReader::new(child.stdout.take().expect("a pipe"));
    (child, out)
}

fn next(lines: &mut impl BufRead) -> Value {
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
}

#[test]
fn a_full_disk_is_an_event_a_line_of_the_log_and_an_error_in_the_stats() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let small = d.join("small");
    fs::create_dir(&small).expect("mkdir");
    ok_words(&["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", text(&small)]);
    let image = small.join("disk.img");
    fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("an image");
    let disk = serve(&image, &["--format", "raw"]);
    let (mut child, mut lines) = follow(disk.text());
    // It follows from the moment that its command is answered on: a client is listed by then.
    std::thread::sleep(Duration::from_millis(500));
    let file = open(disk.path());
    let wrote = file.write_all_at(&[7; 4 << 20], 0).and_then(|()| file.sync_all());
    assert!(wrote.is_err());
    let event = next(&mut lines);
    assert_eq!(event["event"], "disk-full", "{event}");
    assert!(event["text"].as_str().expect("text").starts_with("a write of "), "{event}");
    assert!(event["time"]["seconds"].as_u64().expect("a time") > 1_600_000_000);
    assert!(disk.output().contains("failed for a client: No space left"), "{}", disk.output());
    let ran = ringdisk(d, &["ctl", disk.text(), "stats"]).ok();
    assert!(ran.out.contains("answered with an "), "{}", ran.out);
    drop(file);
    assert!(matches!(disk.stop().code(), Some(0 | 12)));
    // The server has ended, and so has who followed it.
    child.wait().expect("it ends");
    ok_words(&["umount", text(&small)]);
}

/// A free port of this machine.
fn port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound").port().to_string()
}

pub(super) fn get(stream: &mut (impl Read + Write), path: &str) -> String {
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").expect("write");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn clients_of_nbd_are_events_and_metrics_count_them() {
    let directory = scratch();
    let d = directory.path();
    let (socket, metrics) = (d.join("nbd.sock"), d.join("metrics.sock"));
    let port = port();
    let mut command = Command::new(program());
    command.args(["serve", "--null", "1G", "--read-zeroes", "--nbd", text(&socket)]);
    command.args(["--metrics", &port, "--metrics", text(&metrics)]).env_remove("NOTIFY_SOCKET");
    let server = Process::spawn(&mut command);
    let connected = until(LIMIT, || UnixStream::connect(&metrics).ok());
    let mut connected = connected.unwrap_or_else(|| panic!("{}", server.output()));
    let answer = get(&mut connected, "/metrics");
    assert!(answer.contains("ringdisk_clients{"), "{answer}");
    let (mut child, mut lines) = follow(text(&socket));
    std::thread::sleep(Duration::from_millis(500));
    let url = format!("nbd+unix:///?socket={}", text(&socket));
    ringdisk(d, &["info", &url]).ok();
    let came = next(&mut lines);
    assert_eq!(came["event"], "client-came", "{came}");
    assert!(came["text"].as_str().expect("text").contains("in process "), "{came}");
    assert_eq!(next(&mut lines)["event"], "client-gone");
    let tcp = || TcpStream::connect(format!("127.0.0.1:{port}")).expect("connect");
    assert!(get(&mut tcp(), "/healthz").ends_with("ok\n"));
    assert!(get(&mut tcp(), "/readyz").ends_with("ready\n"));
    let of_all = ringdisk(Path::new("."), &["metrics"]).ok().out;
    let target = text(&socket);
    let up = of_all.lines().find(|line| line.starts_with("ringdisk_up") && line.contains(target));
    assert!(up.is_some_and(|line| line.ends_with(" 1")), "{of_all}");
    assert_eq!(of_all.matches("# TYPE ringdisk_reads_total counter").count(), 1);
    server.signal(Signal::TERM);
    assert_eq!(server.finish(LIMIT).code(), Some(0));
    assert!(!metrics.exists(), "its socket is removed");
    child.wait().expect("it ends");
}

/// The lines that `ringdisk ctl TARGET events` prints from now on.
fn following(target: &str) -> Process {
    let mut command = Command::new(program());
    let events = Process::spawn(command.args(["ctl", target, "events"]));
    // It follows when it tells of something.
    let follows = || {
        ringdisk(Path::new("/"), &["ctl", target, "limit", "none"]).ok();
        events.output().contains("\"event\":\"limited\"").then_some(())
    };
    until(LIMIT, follows).unwrap_or_else(|| panic!("{}", events.output()));
    events
}

/// The events of a follower that are so.
fn told(events: &Process, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
    let output = events.output();
    // The last line may be on its way.
    let lines = output.lines().filter_map(|line| serde_json::from_str(line).ok());
    lines.filter(|event| is_it(event)).collect()
}

/// The states of a job that were told, once the last one is `end`.
fn states(events: &Process, id: &str, end: &str) -> Vec<String> {
    let found = until(LIMIT, || {
        let of = told(events, |event| event["event"] == "job" && event["id"] == id);
        let mut states: Vec<String> =
            of.iter().filter_map(|event| event["state"].as_str().map(str::to_owned)).collect();
        // A state that is told again says how far the job is.
        states.dedup();
        Some(states).filter(|states| states.last().is_some_and(|last| last == end))
    });
    found.unwrap_or_else(|| panic!("{id} is not {end}: {}", events.output()))
}

#[test]
fn each_state_of_a_job_is_an_event_with_its_name() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let image = d.join("disk.qcow2");
    images::qcow2(&image, "32M", "");
    let disk = serve(&image, &[]);
    let file = open(disk.path());
    file.write_all_at(&pattern(1, 0, 16 << 20), 0).and_then(|()| file.sync_all()).expect("write");
    drop(file);
    let events = following(disk.text());
    let run = |words: &[&str]| ringdisk(d, words);
    let mirror = ["ctl", disk.text(), "mirror", "--background", "--name"];
    run(&[&mirror[..], &["m", "copy.qcow2"]].concat()).ok();
    states(&events, "m", "ready");
    run(&["job", "cancel", "m"]).ok();
    let mut seen = states(&events, "m", "concluded");
    // One that is ready at once does not run for long enough.
    seen.retain(|state| state != "running");
    assert_eq!(seen, ["created", "ready", "concluded"]);
    run(&[&mirror[..], &["slow", "slow.qcow2", "--speed", "64k"]].concat()).ok();
    states(&events, "slow", "running");
    run(&["job", "pause", "slow"]).ok();
    states(&events, "slow", "paused");
    run(&["job", "resume", "slow"]).ok();
    states(&events, "slow", "running");
    run(&["job", "cancel", "slow"]).ok();
    let seen = states(&events, "slow", "concluded");
    assert_eq!(seen, ["created", "running", "paused", "running", "aborting", "concluded"]);
    let ended = told(&events, |event| event["id"] == "slow" && event["state"] == "concluded");
    assert_eq!(ended[0]["kind"], "mirror");
    assert!(ended[0]["why"].as_str().is_some_and(|why| why.contains("cancelled")), "{ended:?}");
    run(&["ctl", disk.text(), "stop"]).ok();
    let stopping =
        || (!told(&events, |event| event["event"] == "stopping").is_empty()).then_some(());
    assert!(until(LIMIT, stopping).is_some(), "{}", events.output());
    assert_eq!(disk.finish().code(), Some(0));
}

#[test]
fn a_front_end_that_comes_and_goes_is_two_events() {
    let directory = scratch();
    let socket = directory.path().join("vm.sock");
    // A command that comes too early connects to see who listens, which is a front end, too.
    let server = Daemon::start(&socket, &["--null", "1G"]);
    let events = following(text(&socket));
    let count = |name: &str| told(&events, |event| event["event"] == name).len();
    for round in 1..3 {
        let front = UnixStream::connect(&socket).expect("connect");
        let came = || (count("client-came") == round).then_some(());
        assert!(until(LIMIT, came).is_some(), "{}", events.output());
        assert_eq!(count("client-gone"), round - 1);
        drop(front);
        let gone = || (count("client-gone") == round).then_some(());
        assert!(until(LIMIT, gone).is_some(), "{}", events.output());
    }
    server.stop(&[&socket]);
}

#[test]
fn an_error_of_the_storage_that_a_client_gets_is_an_event() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let (image, socket) = (d.join("disk.img"), d.join("nbd.sock"));
    images::sparse(&image, 16 << 20);
    let words = [text(&image), "-f", "raw", "--nbd", text(&socket)];
    let server = Daemon::of(&mut serve_command(&words));
    let address = format!("nbd+unix:///?socket={}", text(&socket));
    let disk = serve(Path::new(&address), &["-f", "raw", "--reconnect", "0s"]);
    let events = following(disk.text());
    server.kill();
    let file = open(disk.path());
    let wrote = file.write_all_at(&[1; 4096], 0).and_then(|()| file.sync_all());
    assert!(wrote.is_err(), "nobody has taken it");
    let failed = || told(&events, |event| event["event"] == "io-error").first().cloned();
    let failed = until(LIMIT, failed).unwrap_or_else(|| panic!("{}", events.output()));
    assert!(failed["text"].as_str().expect("text").starts_with("a write of "), "{failed}");
    drop(file);
    // What was written is lost with its server.
    disk.stop();
}

#[test]
fn metrics_of_a_confined_mount_are_scraped_by_many_at_once() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let port = port();
    let disk = serve(&image, &["--sandbox", "on", "--metrics", &port]);
    let scrapers: Vec<_> = (0..100)
        .map(|_| {
            let address = format!("127.0.0.1:{port}");
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect(address).expect("connect");
                get(&mut stream, "/metrics")
            })
        })
        .collect();
    for scraper in scrapers {
        let answer = scraper.join().expect("no panic");
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        let label = format!("target=\"{}\"", disk.text());
        assert!(answer.contains(&label) && answer.contains("kind=\"mount\""), "{answer}");
    }
    // A second process cannot have the port, and says so before it mounts anything.
    let place = directory.path().join("other");
    let finished = crate::common::try_mount(&["--null", "1M", "--metrics", &port], &place);
    assert_eq!(finished.code(), Some(5), "{}", finished.output());
    assert!(finished.stderr.contains("cannot serve metrics at"), "{}", finished.stderr);
    assert_eq!(disk.stop().code(), Some(0));
}

#[test]
fn limits_that_begin_to_hold_requests_back_are_one_event() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "16M", "");
    let disk = serve(&image, &["--limit", "iops=20", "-v"]);
    let (mut child, mut lines) = follow(disk.text());
    std::thread::sleep(Duration::from_millis(500));
    let file = open(disk.path());
    for number in 0..60 {
        file.write_all_at(&[1; 4096], number << 16).and_then(|()| file.sync_data()).expect("write");
    }
    let event = next(&mut lines);
    assert_eq!(event["event"], "rate-limited", "{event}");
    assert!(event["text"].as_str().expect("text").contains("iops=20"), "{event}");
    assert_eq!(disk.output().matches("requests wait for the limits").count(), 1);
    ringdisk(directory.path(), &["ctl", disk.text(), "limit", "iops=0"]).ok();
    assert_eq!(next(&mut lines)["event"], "limited");
    drop(file);
    assert_eq!(disk.stop().code(), Some(0));
    child.wait().expect("it ends");
}

/// A server whose journal is read by the test.
struct Journalled {
    server: Process,
    reader: UnixDatagram,
}

impl Journalled {
    /// In a mount namespace, where the journal of this machine is a directory below `d`.
    ///
    /// * `script`: what else is done there, each with ` && `.
    /// * `words`: of the server.
    fn start(d: &Path, script: &str, words: &str) -> Journalled {
        let journal = d.join("journal");
        fs::create_dir(&journal).expect("mkdir");
        let reader = UnixDatagram::bind(journal.join("socket")).expect("bind");
        let script = format!(
            "mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal && \
             mount --bind {}/journal /run/systemd/journal && {script} exec {} {words}",
            text(d),
            program()
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).env_remove("NOTIFY_SOCKET");
        // Other names for control sockets would be in the namespace only.
        command.env("XDG_RUNTIME_DIR", text(d));
        Journalled { server: Process::spawn(&mut command), reader }
    }

    /// The next message, if one comes in time.
    fn next(&self, limit: Duration) -> Option<String> {
        self.reader.set_read_timeout(Some(limit)).expect("a setting");
        let mut bytes = [0; 4096];
        let len = self.reader.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..len]).into_owned())
    }

    /// The first message with these words.
    fn message(&self, words: &str) -> String {
        let mut all = std::iter::from_fn(|| self.next(LIMIT));
        let found = all.find(|message| message.contains(words));
        found.unwrap_or_else(|| panic!("no '{words}': {}", self.server.output()))
    }
}

#[test]
fn each_event_has_its_disk_and_its_name_as_fields_of_the_journal() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let (image, socket) = (d.join("disk.qcow2"), d.join("nbd.sock"));
    images::qcow2(&image, "16M", "");
    let words = format!("serve -v --nbd {} --log journal {}", text(&socket), text(&image));
    let journalled = Journalled::start(d, "", &words);
    let ready = until(LIMIT, || UnixStream::connect(&socket).ok());
    assert!(ready.is_some(), "{}", journalled.server.output());
    let ctl = |words: &[&str]| {
        let mut command = Command::new(program());
        command.args(["ctl", text(&socket)]).args(words).env("XDG_RUNTIME_DIR", text(d));
        let out = command.output().expect("the program starts");
        assert!(out.status.success(), "{out:?}");
    };
    let url = format!("nbd+unix:///?socket={}", text(&socket));
    // Until it says that it serves, and for a moment after that, messages go to standard error.
    let begins = until(LIMIT, || {
        ringdisk(d, &["info", &url]).ok();
        journalled.next(Duration::from_millis(200))
    });
    assert!(begins.is_some(), "{}", journalled.server.output());
    ringdisk(d, &["info", &url]).ok();
    let told = |event: &str, words: &str| {
        let message = journalled.message(words);
        let has = |field: &str| message.lines().any(|line| line == field);
        assert!(has(&format!("RINGDISK_EVENT={event}")), "{message}");
        assert!(has("RINGDISK_DISK=NBD export ''") && has("PRIORITY=6"), "{message}");
    };
    told("client-came", "has connected");
    told("client-gone", "has gone");
    ctl(&["limit", "iops=2000"]);
    told("limited", "the limits are iops=2000 now");
    let overlay = d.join("overlay.qcow2");
    ctl(&["snapshot", text(&overlay)]);
    ctl(&["commit", "--quiet"]);
    told("job", "is concluded");
    ctl(&["stop"]);
    told("stopping", "asks for the end");
    assert_eq!(journalled.server.finish(LIMIT).code(), Some(0));
}

#[test]
fn an_error_of_a_client_has_its_disk_and_its_event_as_fields_of_the_journal() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    fs::create_dir(d.join("small")).expect("mkdir");
    let socket = d.join("nbd.sock");
    let small = format!("{}/small", text(d));
    let script =
        format!("mount -t tmpfs -o size=1M tmpfs {small} && truncate -s 16M {small}/disk.img && ");
    let socket_word = text(&socket);
    let words = format!("serve --format raw --nbd {socket_word} --log journal {small}/disk.img");
    let journalled = Journalled::start(d, &script, &words);
    let server = &journalled.server;
    let ready = until(LIMIT, || UnixStream::connect(&socket).ok());
    assert!(ready.is_some(), "{}", server.output());
    let url = format!("nbd+unix:///?socket={}", text(&socket));
    let mut client = Command::new("qemu-io");
    let client = client.args(["-f", "raw", "-c", "write 0 4M", &url]).output().expect("qemu-io");
    assert!(!client.status.success(), "{client:?}");
    let message = journalled.message("failed for a client");
    let fields: Vec<&str> = message.lines().collect();
    assert!(fields.contains(&"RINGDISK_EVENT=disk-full"), "{message}");
    assert!(fields.contains(&"PRIORITY=3"), "{message}");
    let disk = fields.iter().find_map(|field| field.strip_prefix("RINGDISK_DISK="));
    assert!(disk.is_some_and(|disk| !disk.is_empty()), "{message}");
    let text = fields.iter().find_map(|field| field.strip_prefix("MESSAGE="));
    assert!(text.is_some_and(|text| text.starts_with("error: ") && !text.contains("event=")));
    server.signal(Signal::TERM);
    assert!(journalled.server.finish(LIMIT).code().is_some());
}
