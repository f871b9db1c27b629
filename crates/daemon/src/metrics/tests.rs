use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_export::stats::QueueCells;
use ringdisk_fuse::QueueStats;
use ringdisk_throttle::Waits;

use super::disk::Cache;
use super::*;

/// Reads a text as strictly as `promtool check metrics`: each family has its help and its type, in
/// this order and once; samples follow their family; names, labels and values are well formed;
/// histograms are complete and cumulative. Gives the samples by name and labels.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let (mut family, mut kind) = (String::new(), String::new());
    let mut helped = String::new();
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("help");
            assert!(!help.is_empty() && seen.insert(name.to_owned()), "{name} twice");
            helped = name.to_owned();
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, word) = rest.split_once(' ').expect("a type");
            assert_eq!(name, helped);
            (family, kind) = (name.to_owned(), word.to_owned());
            continue;
        }
        let (id, value) = line.rsplit_once(' ').expect("a value");
        let name = id.split('{').next().expect("a name");
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        assert!(name.chars().all(is_name), "{line}");
        let suffix = name.strip_prefix(&family).unwrap_or_else(|| panic!("{line} in {family}"));
        match kind.as_str() {
            "histogram" => assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{line}"),
            "counter" => assert!(suffix.is_empty() && name.ends_with("_total"), "{line}"),
            "gauge" => assert!(suffix.is_empty() && !name.ends_with("_total"), "{line}"),
            other => panic!("no such type: {other}"),
        }
        if let Some(labels) = id.strip_prefix(name).filter(|labels| !labels.is_empty()) {
            assert!(labels.starts_with('{') && labels.ends_with("\"}"), "{line}");
        }
        let value: f64 = value.parse().expect("a number");
        assert!(samples.insert(id.to_owned(), value).is_none(), "{line} twice");
    }
    samples
}

fn facts(target: &str) -> DiskFacts {
    DiskFacts {
        image: String::from("/srv/\"a\\\n.qcow2"),
        target: target.to_owned(),
        kind: "mount",
        format: Some("qcow2"),
        size: 1 << 30,
        is_healthy: true,
        since: Duration::from_secs(1000),
        clients: Some(2),
        waits: Waits::default(),
        device_errors: Some(3),
        jobs: vec![JobFacts {
            id: String::from("commit-1"),
            kind: "commit",
            state: "running",
            done: 1 << 20,
            total: 2 << 20,
            rate: 1024.0,
            speed: 0,
        }],
        caches: vec![Cache { image: String::from("a"), loads: 1, ..Cache::default() }],
    }
}

fn stats() -> QueueStats {
    let cells = QueueCells::default();
    for nanos in [1000, 5000, 100_000, 3_000_000] {
        cells.begin();
        cells.end(nanos);
    }
    cells.snapshot(0, None, &ringdisk_ring::Counters::default())
}

#[test]
fn the_text_is_what_prometheus_reads() {
    let mut all = samples(&facts("/srv/a"), &stats());
    all.extend(samples(&facts("/srv/b"), &QueueStats::default()));
    all.push(Sample::up("/srv/a", true));
    let read = parse(&render(&all));
    assert_eq!(read["ringdisk_up{target=\"/srv/a\"}"], 1.0);
    assert_eq!(read["ringdisk_size_bytes{target=\"/srv/b\"}"], 1_073_741_824.0);
    assert_eq!(read["ringdisk_request_errors_total{target=\"/srv/a\"}"], 3.0);
    let info = read.keys().find(|id| id.starts_with("ringdisk_disk_info")).expect("info");
    assert!(info.contains(r#"image="/srv/\"a\\\n.qcow2""#), "{info}");
    let bucket = |bound: &str| {
        read[&format!(
            "ringdisk_request_duration_seconds_bucket{{target=\"/srv/a\",le=\"{bound}\"}}"
        )]
    };
    let counts = ["0.000004096", "0.000008192", "0.000131072", "0.004194304", "+Inf"].map(bucket);
    assert_eq!(counts, [1.0, 2.0, 3.0, 4.0, 4.0]);
    let of = |what: &str| {
        read[&format!("ringdisk_request_duration_seconds_{what}{{target=\"/srv/a\"}}")]
    };
    assert_eq!(of("count"), 4.0);
    assert!((0.003_106..0.0033).contains(&of("sum")), "{}", of("sum"));
}

#[test]
fn every_family_has_a_name_by_the_conventions_and_is_used() {
    let mut all = samples(&facts("x"), &stats());
    all.push(Sample::up("x", false));
    for family in FAMILIES {
        assert!(family.name.starts_with("ringdisk_"), "{}", family.name);
        assert_eq!(
            family.kind == Type::Counter,
            family.name.ends_with("_total"),
            "{}",
            family.name
        );
        assert!(all.iter().any(|sample| sample.family == family.name), "{}", family.name);
    }
}

#[test]
fn samples_go_to_another_process_and_what_is_none_is_left_out() {
    let all = samples(&facts("x"), &stats());
    assert_eq!(from_json(&to_json(&all)), all);
    let rubbish = json!([
        1,
        [],
        ["evil_total", "", [], 1],
        ["ringdisk_up", "_bucket", [], 1],
        ["ringdisk_up", "", [["a", "b"]], "x"],
        ["ringdisk_up", "", [["a\"b", "\n"]], 1]
    ]);
    let taken = from_json(&rubbish);
    assert_eq!(taken.len(), 1);
    parse(&render(&taken));
    assert!(from_json(&json!(null)).is_empty());
}

#[test]
fn the_dashboard_is_json_and_every_metric_that_it_names_exists() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/grafana/ringdisk.json");
    let text = std::fs::read_to_string(path).expect("the dashboard");
    let board: Value = serde_json::from_str(&text).expect("JSON");
    let panels = board["panels"].as_array().expect("panels");
    assert!(panels.len() >= 6);
    let mut named = BTreeSet::new();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for panel in panels {
        for target in panel["targets"].as_array().expect("targets") {
            let query = target["expr"].as_str().expect("a query");
            let words = query.split(|c: char| !is_part(c));
            named.extend(words.filter(|word| word.starts_with("ringdisk_")).map(str::to_owned));
        }
    }
    assert!(!named.is_empty());
    for name in named {
        let exists = FAMILIES.iter().any(|family| match family.kind {
            Type::Histogram => ["_bucket", "_sum", "_count"]
                .iter()
                .any(|it| name == format!("{}{it}", family.name)),
            Type::Counter | Type::Gauge => name == family.name,
        });
        assert!(exists, "{name}");
    }
}

/// A server with one disk; gives its address.
fn serve(health: Option<&'static str>) -> (MetricsServer, std::net::SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    listener.set_nonblocking(true).expect("set");
    let source: Source = Arc::new(|| samples(&facts("/srv/a"), &stats()));
    let health: Health = Arc::new(move || health.map(str::to_owned));
    let server = MetricsServer::start(vec![listener.into()], source, health).expect("a thread");
    (server, address)
}

fn ask(address: std::net::SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.write_all(request.as_bytes()).expect("write");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    text
}

fn get(address: std::net::SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n"))
}

#[test]
fn metrics_and_health_are_answered_and_nothing_else() {
    let (_server, address) = serve(None);
    let answer = get(address, "/metrics");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    parse(body);
    assert!(get(address, "/healthz").ends_with("ok\n"));
    assert!(get(address, "/readyz?x=1").ends_with("ready\n"));
    assert!(get(address, "/etc/passwd").starts_with("HTTP/1.1 404"));
    assert!(ask(address, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    assert!(ask(address, "\u{1}\u{2}\n\n").starts_with("HTTP/1.1 400"));
    let (_server, address) = serve(Some("a fault"));
    let answer = get(address, "/readyz");
    assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("a fault\n"), "{answer}");
}

#[test]
fn half_requests_and_slow_readers_hold_up_no_other_client() {
    let (server, address) = serve(None);
    let mut half: Vec<TcpStream> = Vec::new();
    for number in 0..100 {
        let mut stream = TcpStream::connect(address).expect("connect");
        let request = if number % 2 == 0 { "GET /metr" } else { "GET /metrics HTTP/1.1\r\n\r\n" };
        stream.write_all(request.as_bytes()).expect("write");
        half.push(stream);
    }
    let scrapers: Vec<_> =
        (0..100).map(|_| std::thread::spawn(move || get(address, "/metrics"))).collect();
    for scraper in scrapers {
        assert!(scraper.join().expect("no panic").starts_with("HTTP/1.1 200"));
    }
    let mut endless = TcpStream::connect(address).expect("connect");
    let line = vec![b'x'; 64 << 10];
    let _ = endless.write_all(&line);
    let mut answer = Vec::new();
    let _ = endless.read_to_end(&mut answer);
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"));
    drop(server);
}
