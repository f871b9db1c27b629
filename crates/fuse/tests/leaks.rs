//! Exports that come and go leave nothing behind. Alone in its program, so that the counts are exact.

use std::os::unix::fs::FileExt;

use ringdisk_disk::{Disk, NullOptions};
use ringdisk_fuse::mount::table;
use ringdisk_fuse::{Export, ExportOptions, Threads};

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
        let disk =
            Disk::null(&NullOptions { size: 1 << 20, read_zeroes: true, ..NullOptions::default() });
        let options =
            ExportOptions { threads: Threads::Count(2), ..ExportOptions::new(path.clone()) };
        let export = Export::start(disk, options).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        file.read_exact_at(&mut [1; 512], 4096).unwrap();
        drop(file);
        export.stop_handle().stop();
        export.wait().unwrap();
        if round == 0 {
            // The first one starts the helper threads of the process, which stay.
            before = (entries("/proc/self/fd"), entries("/proc/self/task"));
        }
    }
    assert_eq!((entries("/proc/self/fd"), entries("/proc/self/task")), before);
    let path = path.canonicalize().unwrap();
    assert_eq!(table::at(&path).unwrap(), None);
}
