//! A client with one request at a time beside one with very many, on one queue thread: how many
//! others are served first. Counted in requests, in the order in which they come to the storage,
//! which is in this process; never in time.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringdisk_disk::{Disk, ImageOptions};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions, Transport};
use ringdisk_ring::pin_to_cpus;
use ringdisk_testkit::limits::{UringParameter, needs_root};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

/// `O_DIRECT` (open(2)).
const DIRECT: i32 = 0o40_000;
const BLOCK: u64 = 4096;
/// Requests of the deep client at once: threads, each with one.
const DEEP: u64 = 128;
/// Requests of the other one.
const ONES: u64 = 60;
/// Entries of a queue, far fewer.
const ENTRIES: u32 = 16;

/// An aligned block of memory.
fn read_block(file: &File, at: u64) {
    let mut memory = vec![0; 2 * usize::try_from(BLOCK).expect("small")];
    let start = memory.as_ptr().align_offset(4096);
    let block = &mut memory[start..start + 4096];
    file.read_exact_at(block, at).expect("read");
}

fn open(path: &Path) -> File {
    File::options().read(true).custom_flags(DIRECT).open(path).expect("the file")
}

/// The CPUs that this process may use, the first and the last.
fn cpus() -> [String; 2] {
    let all = std::fs::read_to_string("/proc/self/status").expect("status");
    let list =
        all.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("a line");
    let numbers: Vec<&str> = list.trim().split(['-', ',']).collect();
    [numbers[0].to_owned(), numbers[numbers.len() - 1].to_owned()]
}

fn pin(cpu: &str) {
    pin_to_cpus(&cpu.parse().expect("a CPU")).expect("a CPU of ours");
}

/// How many requests of the deep client came to the storage between the moment at which the other
/// one asked and its own: for each of its requests, sorted.
fn overtaken(transport: Transport) -> Vec<u64> {
    let size = (DEEP + ONES) * BLOCK;
    let sim = SimStorage::new(size, 1);
    // Long enough for all entries to be with the storage.
    sim.on(When::kind(OpKind::Read), Fault::Delay(Duration::from_millis(1)));
    let disk = Disk::from_storage(sim.storage(), &ImageOptions::default());
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk");
    File::create(&path).expect("a mountpoint");
    let options = ExportOptions {
        transport,
        common: CommonOptions::with_threads(1),
        queue_depth: Some(ENTRIES),
        ..ExportOptions::new(path.clone())
    };
    let export = Export::start(Arc::clone(&disk), options).expect("served");
    assert_eq!(export.transport(), transport);
    let [first, last] = cpus();
    let stop = AtomicBool::new(false);
    let mut overtaken = std::thread::scope(|scope| {
        for number in 0..DEEP {
            let (stop, path, cpu) = (&stop, &path, &first);
            scope.spawn(move || {
                pin(cpu);
                let file = open(path);
                while !stop.load(Ordering::Relaxed) {
                    read_block(&file, number * BLOCK);
                }
            });
        }
        let client = scope.spawn(|| {
            pin(&last);
            let file = open(&path);
            // All of them have come.
            while sim.count(OpKind::Read) < usize::try_from(4 * DEEP).expect("small") {
                std::thread::sleep(Duration::from_millis(5));
            }
            let one = |number: u64| {
                let at = (DEEP + number) * BLOCK;
                let before = u64::try_from(sim.count(OpKind::Read)).expect("few");
                read_block(&file, at);
                let log = sim.log();
                let reads = log.iter().filter(|record| record.kind == OpKind::Read);
                let own = reads.enumerate().find(|(_, record)| record.offset == at);
                u64::try_from(own.expect("it was read").0).expect("few") - before
            };
            (0..ONES).map(one).collect::<Vec<u64>>()
        });
        let overtaken = client.join();
        stop.store(true, Ordering::Relaxed);
        overtaken.expect("it got its blocks")
    });
    export.stop_handle().stop();
    export.wait().expect("a clean end");
    overtaken.sort_unstable();
    overtaken
}

/// Those that were there first, those that the storage had, and what comes while the client itself
/// waits for its CPU, which no server can help: so of every four requests three are looked at.
///
/// * `most`: how many may be served first.
fn judge(name: &str, overtaken: &[u64], most: u64) {
    let at = |part: usize| overtaken[overtaken.len() * part / 100];
    println!(
        "{name}: overtaken by {} (median), {} (p75), {} (most) of {DEEP} at once",
        at(50),
        at(75),
        at(99)
    );
    assert!(at(75) <= most, "{name}: {overtaken:?}");
}

#[test]
fn one_request_is_overtaken_by_those_before_it_over_dev_fuse() {
    if needs_root() {
        // All requests are in one queue of the kernel: those that were there before.
        judge("/dev/fuse", &overtaken(Transport::Dev), 2 * DEEP);
    }
}

#[test]
fn one_request_is_overtaken_by_those_before_it_over_rings() {
    if !needs_root() {
        return;
    }
    let Some(_switch) = UringParameter::set(true) else { return };
    // Each CPU has a queue of its own: one request for each entry of the other's, however many wait
    // there.
    judge("rings", &overtaken(Transport::Uring), 4 * u64::from(ENTRIES));
}
