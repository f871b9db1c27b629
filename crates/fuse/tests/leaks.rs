//! Exports that come and go leave nothing behind. Alone in its program, so that the counts are
//! exact.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::FileExt;
use std::time::Duration;

use ringdisk_disk::{Bytes, Disk, NullOptions};
use ringdisk_fuse::mount::table;
use ringdisk_fuse::{CommonOptions, Export, ExportOptions};
use ringdisk_testkit::process::until;

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

#[test]
fn two_hundred_exports_leave_no_descriptor_thread_or_mount_behind() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    std::fs::write(&path, b"").unwrap();
    let mut before = (0, 0);
    for round in 0..201 {
        let disk = Disk::null(&NullOptions {
            size: Bytes(1 << 20),
            read_zeroes: true,
            ..NullOptions::default()
        });
        let options = ExportOptions {
            common: CommonOptions::with_threads(2),
            ..ExportOptions::new(path.clone())
        };
        let export = Export::start(disk, options).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        file.read_exact_at(&mut [1; 512], 4096).unwrap();
        drop(file);
        export.stop_handle().stop();
        export.wait().unwrap();
        if round == 20 {
            // The first ones start the helper threads of the process, which stay.
            before = (entries("/proc/self/fd"), entries("/proc/self/task"));
        }
    }
    // A thread that has done its work may take a moment to be gone.
    let counts = || (entries("/proc/self/fd"), entries("/proc/self/task"));
    let none_more = |now: (usize, usize)| now.0 <= before.0 && now.1 <= before.1;
    let gone = until(Duration::from_secs(5), || none_more(counts()).then_some(()));
    assert!(gone.is_some(), "{:?} after {before:?}", counts());
    let path = path.canonicalize().unwrap();
    assert_eq!(table::at(&path).unwrap(), None);
}
