use ringdisk_vhost::export::QueueCounters;

use super::*;

#[test]
fn nothing_served_has_numbers_too() {
    let stats = Stats { queues: vec![QueueStats::default()] };
    let text = Report { stats, ..Report::default() }.to_string();
    assert!(text.contains("0 (0 IOPS), 0 B (0 B/s)"), "{text}");
    assert!(text.contains("CPU      0.00 us per request"), "{text}");
    assert!(text.contains("no requests yet"), "{text}");
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    assert!(!Report::default().to_string().contains("NaN"));
}

#[test]
fn totals_are_the_sums_of_the_queues() {
    let queue = QueueStats {
        cpu: Some(1),
        requests: 1000,
        reads: 600,
        writes: 400,
        read_bytes: 600 * 4096,
        write_bytes: 400 * 4096,
        in_flight_max: 16,
        enters: 500,
        zero_copy: 7,
        cpu_ns: 2_500_000,
        ..QueueStats::default()
    };
    let other = QueueStats { thread: 1, cpu: None, in_flight_max: 3, ..queue.clone() };
    let report = Report {
        name: String::from("disk.img"),
        elapsed: Duration::from_secs(2),
        stats: Stats { queues: vec![queue, other] },
        device: None,
        accel: None,
    };
    let text = report.to_string();
    assert!(text.starts_with("ringdisk: disk.img after 2.0 s\n"), "{text}");
    assert!(text.contains("reads    1200 (600 IOPS), 4.69 MiB (2.34 MiB/s)"), "{text}");
    assert!(text.contains("at most 16 in one queue"), "{text}");
    assert!(text.contains("CPU      2.50 us per request"), "{text}");
    assert!(text.contains("queue 0 on CPU 1: 1000 requests"), "{text}");
    assert!(text.contains("queue 1 on any CPU: 1000 requests"), "{text}");
    assert!(text.contains("500 enters (0.50 per request)"), "{text}");
    assert!(!text.contains("guest") && !text.contains("device"), "{text}");
    assert!(report.to_json().get("device").is_none());
    assert_eq!(report.to_json()["total"]["zero-copy"], 14);
}

#[test]
fn a_device_tells_what_a_guest_does_and_why_it_needs_a_reset() {
    let queue = QueueStats { kicks: 7, calls: 5, ..QueueStats::default() };
    let health = Health { io_errors: 3, image_errors: 2, refused: 1, ..Health::default() };
    let mut report = Report {
        stats: Stats { queues: vec![queue.clone(), queue] },
        device: Some(health.clone()),
        ..Report::default()
    };
    let text = report.to_string();
    assert!(text.contains("guest    14 kicks, 10 calls"), "{text}");
    assert!(text.contains("3 requests answered with an I/O error; 2 errors of"), "{text}");
    assert!(!text.to_lowercase().contains("reset"), "{text}");
    let value = report.to_json();
    assert_eq!((&value["total"]["kicks"], &value["device"]["io-errors"]), (&json!(14), &json!(3)));
    assert_eq!(value["device"]["broken-reason"], Value::Null);
    let reason = Some(String::from("virtqueue 1: a loop\x1b[2J"));
    report.device = Some(Health { breaks: 1, broken_reason: reason, ..health.clone() });
    let text = report.to_string();
    assert!(text.contains("NEEDS A RESET by its driver: virtqueue 1: a loop"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    assert_eq!(report.to_json()["device"]["needs-reset"], true);
    report.device = Some(Health { breaks: 1, ..health });
    assert!(report.to_string().contains("needed a reset 1 times, not now"));
}

#[test]
fn what_the_kernel_served_counts_and_is_told_apart() {
    let here =
        QueueStats { requests: 10, reads: 6, writes: 4, cpu_ns: 20_000, ..QueueStats::default() };
    let mut there = QueueCounters::default();
    (there.reads, there.writes, there.flushes, there.errors) = (100, 50, 2, 3);
    (there.read_bytes, there.in_flight, there.state) = (100 * 4096, 2, State::Running);
    let report = Report {
        elapsed: Duration::from_secs(2),
        stats: Stats { queues: vec![here] },
        device: Some(Health::default()),
        accel: Some(Acceleration {
            required: false,
            on: true,
            obstacle: None,
            engine: Engine::Default,
            engine_in_force: Some(Engine::Bio),
            workers: Vec::new(),
            queues: vec![
                QueueInKernel { stats: there, worker: Some(77) },
                QueueInKernel::default(),
            ],
        }),
        ..Report::default()
    };
    let text = report.to_string();
    assert!(text.contains("reads    106 (53 IOPS), 400 KiB"), "{text}");
    assert!(text.contains("requests 160, 3 answered with an error"), "{text}");
    assert!(text.contains("2 in flight"), "{text}");
    assert!(text.contains("(0 threads, bio): 100 reads, 50 writes, 3 errors"), "{text}");
    assert!(text.contains("CPU      2.00 us per request (those of queue threads)"), "{text}");
    let value = report.to_json();
    assert_eq!((&value["total"]["requests"], &value["total"]["reads"]), (&json!(160), &json!(106)));
    assert_eq!(value["queues"][0]["requests"], 10);
    let accel = &value["accel"];
    assert_eq!((&accel["engine"], &accel["engine-in-force"]), (&json!("auto"), &json!("bio")));
    let queues = [&accel["queues"][0], &accel["queues"][1]];
    assert_eq!(queues.map(|queue| queue["in-kernel"].clone()), [json!(true), json!(false)]);
    assert_eq!(queues.map(|queue| queue["state"].clone()), [json!("running"), json!("idle")]);
    assert_eq!(queues.map(|queue| queue["worker"].clone()), [json!(77), Value::Null]);
    assert_eq!(value["device"]["io-errors"], 3);
}
