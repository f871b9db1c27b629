//! x
use ringdisk_disk::{Disk, NullOptions};
use ringdisk_vhost::export::{Listen, Threads};
use ringdisk_vhost::{Export, ExportOptions};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let disk = Disk::null(&NullOptions { size: 10 << 30, ..NullOptions::default() });
    let e = Export::start(
        disk,
        ExportOptions {
            queues: a[2].parse().unwrap(),
            threads: Threads::Auto,
            ..ExportOptions::new(Listen::Path(a[1].clone().into()))
        },
    )
    .unwrap();
    let s = e.stats_reader();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(std::time::Duration::from_secs(2));
            let t = s().total();
            eprintln!(
                "req {} err {} kicks {} calls {} enters {} sleeps {} paid {} missed {} cpu {}ms max {}",
                t.requests,
                t.errors,
                t.kicks,
                t.calls,
                t.enters,
                t.sleeps,
                t.polls_paid,
                t.polls_missed,
                t.cpu_ns / 1000000,
                t.in_flight_max
            );
        }
    });
    println!("{:?}", e.wait().map(|_| ()));
}
