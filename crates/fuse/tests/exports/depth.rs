//! Requests of one queue run at once: depth counts.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, ImageOptions, NullOptions};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions};
use ringdisk_testkit::process::{command, run};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

fn served<T>(disk: Arc<Disk>, threads: usize, client: impl FnOnce(&Export, &Path) -> T) -> T {
    served_at_depth(disk, threads, None, client)
}

fn served_at_depth<T>(
    disk: Arc<Disk>,
    threads: usize,
    queue_depth: Option<u32>,
    client: impl FnOnce(&Export, &Path) -> T,
) -> T {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::write(&path, b"").unwrap();
    let options = ExportOptions {
        common: CommonOptions::with_threads(threads),
        queue_depth,
        ..ExportOptions::new(path.clone())
    };
    let export = Export::start(disk, options).unwrap();
    let result = client(&export, &path);
    export.stop_handle().stop();
    export.wait().unwrap();
    result
}

fn fio(path: &Path, arguments: &[&str]) {
    let file = format!("--filename={}", path.display());
    let mut words = vec!["fio", "--name=t", &file, "--direct=1", "--thread", "--norandommap"];
    words.extend(arguments);
    let finished = run(command(&words));
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn one_queue_serves_sixty_four_requests_at_once() {
    // In this time all of them must come, also to a busy machine.
    let latency = Duration::from_millis(50);
    let disk = Disk::null(&NullOptions { size: Bytes(1 << 30), read_zeroes: false, latency });
    served(disk, 1, |export, path| {
        fio(
            path,
            &[
                "--rw=randread",
                "--bs=4k",
                "--ioengine=libaio",
                "--iodepth=64",
                "--io_size=4m",
                "--size=1g",
            ],
        );
        assert_eq!(export.stats().total().in_flight_max, 64);
    });
}

#[test]
fn requests_that_end_in_any_order_each_get_their_own_bytes() {
    let sim = SimStorage::new(4 << 20, 11);
    let content: Vec<u8> = (0..=250u8).cycle().flat_map(|byte| [byte; 512]).take(4 << 20).collect();
    sim.put(0, &content);
    sim.on(When::kind(OpKind::Read), Fault::DelayBetween(Duration::ZERO, Duration::from_millis(3)));
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    served(disk, 2, |_, path| {
        // fio reads at depth; the check reads all bytes with many threads at once.
        fio(
            path,
            &[
                "--rw=randread",
                "--bs=4k",
                "--ioengine=libaio",
                "--iodepth=32",
                "--io_size=1m",
                "--size=4m",
            ],
        );
        let threads: Vec<_> = (0..8usize)
            .map(|thread| {
                let (path, content) = (path.to_owned(), content.clone());
                std::thread::spawn(move || {
                    use std::os::unix::fs::FileExt;
                    let file = std::fs::File::open(path).unwrap();
                    for number in 0..64 {
                        let at = (thread * 64 + number) * 8192;
                        let mut bytes = vec![0; 8192];
                        file.read_exact_at(&mut bytes, at as u64).unwrap();
                        assert_eq!(bytes, content[at..at + 8192]);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// All entries of a queue answer at once, after a pause in which the thread has stopped polling:
/// nothing is armed then, and the thread must not sleep past its own replies.
#[test]
fn a_queue_whose_entries_all_answer_at_once_goes_on() {
    for (threads, depth, clients) in [(1, 1, 1), (2, 1, 3), (1, 4, 16), (2, 4, 32), (1, 8, 32)] {
        let sim = SimStorage::new(4 << 20, 3);
        sim.on(When::kind(OpKind::Read), Fault::Delay(Duration::from_millis(5)));
        let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
        served_at_depth(disk, threads, Some(depth), |_, path| {
            let depth = format!("--iodepth={clients}");
            let batch = format!("--iodepth_batch_submit={clients}");
            fio(
                path,
                &[
                    "--rw=randread",
                    "--bs=4k",
                    "--ioengine=libaio",
                    &depth,
                    &batch,
                    "--io_size=1m",
                    "--size=4m",
                ],
            );
        });
    }
}
