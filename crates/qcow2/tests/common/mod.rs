//! What the tests of this crate share: images made by `qemu-img` and `qemu-io`, opened and read
//! through the library.

// Each test binary uses its own part.
#![allow(dead_code, missing_docs, unreachable_pub)]
// Test images are small.
#![allow(clippy::cast_possible_truncation)]

pub mod memory;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use ringdisk_qcow2::{Bytes, Error, Extent, ExtentKind, GuestOffset, OpenOptions, Qcow2};
use ringdisk_ring::{Config, Errno, IoBuf, Ring, Runtime};
use ringdisk_storage::{Lock, Storage};
use ringdisk_testkit::images::differs_at;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;

/// A directory of its own for the images of one test.
pub struct Images(pub tempfile::TempDir);

impl Images {
    pub fn new() -> Images {
        Images(tempfile::tempdir().expect("a temporary directory"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `qemu-img create` with `-o options`.
    pub fn create(&self, name: &str, options: &str, size: u64) -> PathBuf {
        let options = if options.is_empty() { "compat=1.1" } else { options };
        let size = size.to_string();
        self.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, name, &size]);
        self.path(name)
    }

    /// Runs `qemu-img` in the directory.
    pub fn qemu_img(&self, arguments: &[&str]) -> String {
        self.run("qemu-img", arguments)
    }

    /// Runs `qemu-io -c COMMAND …` on an image. Discards are passed down.
    pub fn qemu_io(&self, name: &str, commands: &[String]) {
        let mut arguments = vec!["-f", "qcow2", "-d", "unmap"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        arguments.push(name);
        self.run("qemu-io", &arguments);
    }

    /// The contents of an image, according to `qemu-img convert`.
    pub fn converted(&self, name: &str) -> Vec<u8> {
        let raw = format!("{name}.raw");
        self.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", name, &raw]);
        std::fs::read(self.path(&raw)).expect("the converted image")
    }

    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = Command::new(program)
            .args(arguments)
            .current_dir(self.0.path())
            .output()
            .unwrap_or_else(|error| panic!("{program} is needed for this test: {error}"));
        let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {stdout}{stderr}");
        stdout
    }
}

pub fn runtime() -> Runtime {
    Runtime::new(Config::default()).expect("io_uring is needed for this test")
}

pub fn storage(path: &Path) -> Arc<Storage> {
    let options =
        ringdisk_storage::OpenOptions { read_only: true, lock: Lock::None, ..Default::default() };
    Arc::new(Storage::open(path, &options).expect("the image file"))
}

/// Opens the image at `path` with default options.
pub fn try_open(runtime: &mut Runtime, path: &Path) -> Result<Qcow2, Error> {
    try_open_with(runtime, path, &OpenOptions::default())
}

pub fn try_open_with(
    runtime: &mut Runtime,
    path: &Path,
    options: &OpenOptions,
) -> Result<Qcow2, Error> {
    let ring = runtime.ring().clone();
    runtime.block_on(Qcow2::open(&ring, storage(path), options))
}

/// As [`try_open`], with the external data file that the image names.
pub fn open(runtime: &mut Runtime, path: &Path) -> Qcow2 {
    let mut image = try_open(runtime, path).unwrap_or_else(|error| panic!("{error}"));
    if let Some(name) = image.info().data_file.clone() {
        let name = String::from_utf8(name).expect("a name of ours");
        let data = path.parent().expect("a directory").join(name);
        image.set_data_file(storage(&data)).expect("a data file is wanted");
    }
    image
}

/// Reads `len` bytes at `offset`. Unallocated parts come from `backing`, zeroes past its end.
pub async fn read(
    ring: &Ring,
    image: &Qcow2,
    backing: &[u8],
    offset: u64,
    len: usize,
) -> Result<Vec<u8>, Errno> {
    let mut bytes = Vec::with_capacity(len);
    while bytes.len() < len {
        let at = offset + bytes.len() as u64;
        let left = len - bytes.len();
        let extent = image.map(ring, GuestOffset(at), Bytes::of(left)).await?;
        bytes.extend(read_extent(ring, image, backing, at, extent).await?);
    }
    Ok(bytes)
}

async fn read_extent(
    ring: &Ring,
    image: &Qcow2,
    backing: &[u8],
    at: u64,
    extent: Extent,
) -> Result<Vec<u8>, Errno> {
    let len = usize::try_from(extent.len).expect("no longer than asked for");
    let buf = IoBuf::new(len, 4096);
    match extent.kind {
        ExtentKind::Data { offset } => {
            let done = image.data_storage().read(ring, offset.0, &buf).await?;
            assert_eq!(done, len, "a data extent lies before the end of its file");
        }
        ExtentKind::Zero { .. } => {}
        ExtentKind::Compressed(cluster) => {
            image.read_compressed(ring, cluster, GuestOffset(at), &buf).await?;
        }
        ExtentKind::Unallocated => {
            let start = backing.len().min(usize::try_from(at).expect("a small image"));
            let end = backing.len().min(start + len);
            buf.copy_from_slice(0, &backing[start..end]);
        }
    }
    Ok(buf.to_vec())
}

/// Reads the whole disk in pieces of `piece` bytes.
pub fn read_all(runtime: &mut Runtime, image: &Qcow2, backing: &[u8], piece: usize) -> Vec<u8> {
    let ring = runtime.ring().clone();
    let size = usize::try_from(image.virtual_size()).expect("a small image");
    runtime.block_on(async {
        let mut bytes = Vec::with_capacity(size);
        while bytes.len() < size {
            let len = piece.min(size - bytes.len());
            let at = bytes.len() as u64;
            let part = read(&ring, image, backing, at, len).await;
            bytes.extend(part.unwrap_or_else(|errno| panic!("reading at {at}: {errno}")));
        }
        bytes
    })
}

/// Compares without printing megabytes.
pub fn assert_same(case: &str, ours: &[u8], theirs: &[u8]) {
    assert_eq!(ours.len(), theirs.len(), "{case}: length");
    if let Some(at) = differs_at(ours, theirs) {
        panic!("{case}: byte {at} is {:#x}, should be {:#x}", ours[at], theirs[at]);
    }
}

/// Reads the image through the library, in several ways, and compares with `qemu-img convert`.
pub fn check(runtime: &mut Runtime, images: &Images, name: &str, backing: &[u8]) {
    let expected = images.converted(name);
    let image = open(runtime, &images.path(name));
    for piece in [MIB as usize, 37 * 1024 + 513] {
        let ours = read_all(runtime, &image, backing, piece);
        assert_same(&format!("{name}, pieces of {piece}"), &ours, &expected);
    }
    check_small_reads(runtime, &image, backing, name, &expected);
}

/// Small reads at scattered places, with a metadata cache that is too small for the image.
fn check_small_reads(
    runtime: &mut Runtime,
    image: &Qcow2,
    backing: &[u8],
    name: &str,
    expected: &[u8],
) {
    let ring = runtime.ring().clone();
    let size = expected.len() as u64;
    runtime.block_on(async {
        for step in 0..200u64.min(size) {
            // A cheap scatter: an odd multiplier walks all residues.
            let at = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) % size;
            let len = usize::try_from((step * 97 % 5000 + 1).min(size - at)).expect("small");
            let ours = read(&ring, image, backing, at, len).await.expect("a good image");
            let start = usize::try_from(at).expect("small");
            assert_same(&format!("{name} at {at}"), &ours, &expected[start..start + len]);
        }
    });
}

/// Commands for qemu-io that leave a bit of everything in an image of `size` bytes whose clusters
/// have `cluster` bytes: data in whole and in part, zeroes, discarded, untouched.
pub fn mixed(cluster: u64, size: u64) -> Vec<String> {
    let mut commands = Vec::new();
    let mut add = |command: &str, at: u64, len: u64| {
        if at + len <= size {
            commands.push(format!("{command} {at} {len}"));
        }
    };
    add("write -q -P 1", 0, 3 * cluster);
    add("write -q -P 2", 4 * cluster + 512, 512);
    add("write -q -P 3", 6 * cluster, 4 * cluster);
    add("write -q -P 4", 7 * cluster + cluster / 2, cluster);
    add("write -q -z", 8 * cluster, cluster);
    add("write -q -z", 12 * cluster, 2 * cluster);
    add("write -q -z -u", cluster, cluster);
    add("discard -q", 9 * cluster, cluster);
    add("write -q -P 5", 13 * cluster + 512, 512);
    // Out of order, so that host clusters do not follow on.
    add("write -q -P 6", 20 * cluster, cluster);
    add("write -q -P 7", 19 * cluster, cluster);
    add("write -q -P 8", 18 * cluster, cluster);
    add("write -q -c -P 9", 16 * cluster, cluster);
    if size >= 1024 {
        add("write -q -P 10", size - 512, 512);
        // Around the middle, which for large disks is another L2 table.
        add("write -q -P 11", (size / 2) / 512 * 512, (3 * cluster).min(size / 4) / 512 * 512);
    }
    commands
}
