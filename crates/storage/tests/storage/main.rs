//! Storage on real files, file systems and loop devices. Runs as root; what the machine lacks is
//! skipped loudly.

#![allow(clippy::unwrap_used)]
#![allow(clippy::cast_possible_truncation)] // Small numbers of the tests themselves.

mod devices;
mod extend;
mod faults;
mod files;
mod locks;
mod opening;

use std::future::Future;
use std::path::{Path, PathBuf};

use ringdisk_ring::{Config, Errno, IoBuf, Ring, Runtime};
use ringdisk_storage::{OpenOptions, Storage};
use ringdisk_testkit::limits::{needs, needs_root};
use ringdisk_testkit::mount::{FileSystem, Loop, scratch};
use ringdisk_testkit::process::{has, ok_words};

/// Runs a test on a ring of its own.
fn block_on<F: Future>(test: impl FnOnce(Ring) -> F) -> F::Output {
    let mut runtime = Runtime::new(Config::default()).expect("a ring");
    let ring = runtime.ring().clone();
    runtime.block_on(test(ring))
}

const DIRECT: OpenOptions = OpenOptions {
    no_flush: false,
    read_only: false,
    direct: true,
    lock: ringdisk_storage::Lock::Auto,
    create: false,
    create_new: false,
    opener: None,
};

/// A sparse file in a scratch directory.
fn image(directory: &Path, name: &str, len: u64) -> PathBuf {
    let path = directory.join(name);
    std::fs::File::create(&path).expect("an image").set_len(len).expect("its length");
    path
}

fn open(path: &Path, options: &OpenOptions) -> Storage {
    Storage::open(path, options).expect("storage")
}

/// A buffer whose address is odd where `odd`, i.e. aligned to nothing.
fn buffer(bytes: &[u8], odd: bool) -> IoBuf {
    let shift = usize::from(odd);
    let whole = IoBuf::new(bytes.len() + shift, 4096);
    let buf = whole.slice(shift..whole.len());
    buf.copy_from_slice(0, bytes);
    buf
}

async fn write(ring: &Ring, storage: &Storage, offset: u64, bytes: &[u8]) -> Result<usize, Errno> {
    storage.write(ring, offset, &buffer(bytes, false)).await
}

async fn read(ring: &Ring, storage: &Storage, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
    let buf = buffer(&vec![0xee; len], false);
    let done = storage.read(ring, offset, &buf).await?;
    Ok(buf.to_vec()[..done].to_vec())
}

/// A loop device over a sparse file, with its directory. `None` where there are no loop devices:
/// the test is noted as skipped then.
fn loop_device(len: u64, options: &[&str]) -> Option<(Loop, tempfile::TempDir)> {
    let directory = scratch();
    let device = Loop::attach(&image(directory.path(), "device", len), options);
    device.map(|device| (device, directory))
}

/// A small file system on a loop mount. `None` where it cannot be made: the test is noted as
/// skipped then.
///
/// The directory comes first, so that it is dropped last.
fn file_system(kind: &str, len: u64) -> Option<(tempfile::TempDir, FileSystem)> {
    let maker = format!("mkfs.{kind}");
    let has_loops = Path::new("/dev/loop-control").exists();
    if !(needs_root() && needs(&maker, has(&maker)) && needs("loop devices", has_loops)) {
        return None;
    }
    let directory = scratch();
    let path = image(directory.path(), "file-system", len);
    ok_words(&[&maker, "-q", path.to_str().expect("UTF-8")]);
    let mounted = FileSystem::of(&path, &directory.path().join("mounted"), "loop");
    Some((directory, mounted))
}
