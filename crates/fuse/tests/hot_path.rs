//! What a request costs once everything is warm: no allocation on queue threads, few system calls,
//! one thread woken.

#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, ImageOptions, NullOptions, Source};
use ringdisk_fuse::{CommonOptions, Export, ExportOptions};
use ringdisk_ring::{Config, Runtime};
use ringdisk_testkit::allocations::{Counting, of_all_threads};
use ringdisk_testkit::process::until;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const REQUESTS: u64 = 2000;
const BLOCK: usize = 4096;

/// Memory that direct I/O accepts.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

fn direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

/// Serves `disk` at a fresh place and hands the file to `client`.
fn served<T>(disk: Arc<Disk>, threads: usize, client: impl FnOnce(&Export, &Path) -> T) -> T {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::write(&path, b"").unwrap();
    let options = ExportOptions {
        common: CommonOptions::with_threads(threads),
        ..ExportOptions::new(path.clone())
    };
    let export = Export::start(disk, options).unwrap();
    let result = client(&export, &path);
    export.stop_handle().stop();
    export.wait().unwrap();
    result
}

fn null(latency: Duration) -> Arc<Disk> {
    Disk::null(&NullOptions { size: Bytes(1 << 30), read_zeroes: false, latency })
}

/// Allocations during `REQUESTS` reads and writes, after as many that warm up.
fn allocations(file: &File) -> u64 {
    let mut block = Box::new(Block([5; BLOCK]));
    let mut before = 0;
    for number in 0..2 * REQUESTS {
        if number == REQUESTS {
            before = of_all_threads();
        }
        let offset = number % 128 * BLOCK as u64;
        assert_eq!(file.read_at(&mut block.0, offset).unwrap(), BLOCK);
        assert_eq!(file.write_at(&block.0, offset).unwrap(), BLOCK);
    }
    of_all_threads() - before
}

/// One test, so that nothing else of this program allocates meanwhile.
#[test]
fn warm_requests_allocate_nothing_and_cost_few_system_calls() {
    let count = served(null(Duration::ZERO), 2, |_, path| allocations(&direct(path)));
    assert_eq!(count, 0, "allocations of {REQUESTS} reads and writes on null");

    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::write(&image, vec![3u8; 1 << 20]).unwrap();
    let mut runtime = Runtime::new(Config::default()).unwrap();
    let ring = runtime.ring().clone();
    let options =
        ImageOptions { format: Some(ringdisk_disk::Format::Raw), ..ImageOptions::default() };
    let disk = runtime.block_on(Disk::open(&ring, Source::Path(image), &options)).unwrap();
    drop(runtime);
    let count = served(disk, 2, |_, path| allocations(&direct(path)));
    assert_eq!(count, 0, "allocations of {REQUESTS} reads and writes on a file");

    // Of four threads that are idle, a request wakes one, and one enter or two serve it.
    served(null(Duration::ZERO), 4, |export, path| {
        let file = direct(path);
        let mut block = Box::new(Block([0; BLOCK]));
        let before = export.stats().total();
        for _ in 0..200 {
            assert_eq!(file.read_at(&mut block.0, 0).unwrap(), BLOCK);
            std::thread::sleep(Duration::from_millis(2));
        }
        let after = export.stats().total();
        assert_eq!(after.reads - before.reads, 200);
        assert!(after.eagain - before.eagain <= 20, "lost races: {}", after.eagain - before.eagain);
        assert!(after.enters - before.enters <= 600, "enters: {}", after.enters - before.enters);
    });

    // An idle export does nothing at all.
    served(null(Duration::ZERO), 4, |export, _| {
        let enters = || export.stats().total().enters;
        // It becomes idle when what the start began is over, however slow the machine is.
        let is_idle = until(Duration::from_secs(20), || {
            let before = enters();
            std::thread::sleep(Duration::from_millis(300));
            (enters() == before).then_some(())
        });
        assert_eq!(is_idle, Some(()), "{} enters", enters());
    });
}
