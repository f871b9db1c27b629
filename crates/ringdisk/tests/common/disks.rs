//! Disks that tests may overwrite: those that the virtual machine of `tests/vm/run vhost-blk` makes
//! and names in `RINGDISK_TEST_DISKS` (tests/vm/suites/vhost-blk.job), and no others.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ringdisk_testkit::limits::{Alone, alone, needs};
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::command;

use super::accel::has_module;
use super::serving::{Place, SIZE};

/// One of them, nobody else's meanwhile.
pub(crate) struct Disk {
    pub(crate) place: Place,
    _alone: Alone,
}

/// A disk of which the kernel may serve the first [`SIZE`] bytes, which are zeroes. Says so when
/// there is none.
pub(crate) fn disk(name: &str) -> Option<Disk> {
    let disk = as_it_is(name)?;
    clear(&disk.place.image);
    Some(disk)
}

/// The same with the bytes that it has, or that cannot be read.
pub(crate) fn as_it_is(name: &str) -> Option<Disk> {
    if !has_module() {
        return None;
    }
    let disks = std::env::var("RINGDISK_TEST_DISKS").unwrap_or_default();
    let mut disks = disks.split_whitespace().filter_map(|each| each.split_once('='));
    let path = disks.find_map(|(known, path)| (known == name).then(|| PathBuf::from(path)));
    if !needs(&format!("disk {name:?} (tests/vm/run vhost-blk)"), path.is_some()) {
        return None;
    }
    Some(Disk { place: Place::on(&path?), _alone: alone() })
}

/// Puts zeroes where the bytes of a load will be, and everywhere, if the disk can be told to.
fn clear(path: &Path) {
    drop(command(&["blkdiscard", "-f", text(path)]).output());
    let file = File::options().write(true).open(path).expect("a disk");
    let zeroes = vec![0; usize::try_from(SIZE).expect("small")];
    file.write_all_at(&zeroes, 0).and_then(|()| file.sync_all()).expect("zeroes");
}

/// A directory on tmpfs, for an image.
pub(crate) fn in_memory() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let image = directory.path().join("disk");
    (directory, image)
}
