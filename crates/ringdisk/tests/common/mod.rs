//! What the end-to-end tests share: the program, and its usual ways to be started.

// Each test program uses a part of this.
#![allow(dead_code)]

pub(crate) mod accel;
pub(crate) mod confined;
pub(crate) mod disks;
pub(crate) mod forbid;
pub(crate) mod kept;
pub(crate) mod mapping;
pub(crate) mod nbd_client;
pub(crate) mod nbd_storage;
pub(crate) mod numa;
pub(crate) mod peer;
pub(crate) mod serving;
pub(crate) mod tools;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use ringdisk_testkit::images;
use ringdisk_testkit::mount::{Mounted, scratch, text};
use ringdisk_testkit::process::{Finished, LIMIT, Process};
use rustix::fs::OFlags;
use tempfile::TempDir;

/// One mebibyte.
pub(crate) const MIB: u64 = 1 << 20;
/// The size of an aligned piece that every storage accepts.
pub(crate) const BLOCK: usize = 4096;

/// The program under test; `RINGDISK_TEST_PROGRAM` names another one.
pub(crate) fn program() -> String {
    let built = option_env!("CARGO_BIN_EXE_ringdisk").unwrap_or("ringdisk");
    std::env::var("RINGDISK_TEST_PROGRAM").unwrap_or_else(|_| built.to_owned())
}

/// Whether the kernel is this one or newer.
pub(crate) fn kernel_is(major: u32, minor: u32) -> bool {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}

/// `ringdisk mount ARGS… MOUNTPOINT` on a new file.
pub(crate) fn mount(args: &[&str]) -> Mounted {
    Mounted::start(&program(), args)
}

/// A raw image of `len` bytes, full of a pattern with `seed`, and its directory.
pub(crate) fn raw_image(len: u64, seed: u64) -> (TempDir, PathBuf) {
    let directory = scratch();
    let image = directory.path().join("disk.img");
    images::raw(&image, len, seed);
    (directory, image)
}

/// Whether the kernel has passthrough: asked once by each program, by a mount of its own.
pub(crate) fn has_passthrough() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(ask_for_passthrough)
}

fn ask_for_passthrough() -> bool {
    let (directory, image) = raw_image(4096, 1);
    let mountpoint = directory.path().join("disk");
    std::fs::write(&mountpoint, "").expect("a mountpoint");
    let words =
        ["mount", "--daemonize", "--passthrough", "-f", "raw", text(&image), text(&mountpoint)];
    let ran = tools::ringdisk(directory.path(), &words);
    if ran.code == 0 {
        let limit = format!("{}s", LIMIT.as_secs());
        tools::ringdisk(directory.path(), &["umount", "--timeout", &limit, text(&mountpoint)]).ok();
    } else {
        assert!(ran.err.contains("Linux 6.9"), "{}", ran.err);
    }
    ran.code == 0
}

/// A raw image that is mounted: fields are dropped in this order.
pub(crate) struct Served {
    pub(crate) mounted: Mounted,
    pub(crate) image: PathBuf,
    pub(crate) directory: TempDir,
}

/// Serves a raw image of `len` bytes full of pattern 1.
pub(crate) fn serve_raw(len: u64, args: &[&str]) -> Served {
    let (directory, image) = raw_image(len, 1);
    let mounted = serve(&image, &[&["--format", "raw"], args].concat());
    Served { mounted, image, directory }
}

/// Serves an image of the caller.
pub(crate) fn serve(image: &Path, args: &[&str]) -> Mounted {
    mount(&[args, &[text(image)]].concat())
}

/// Opens for reading and writing.
pub(crate) fn open(path: &Path) -> File {
    File::options().read(true).write(true).open(path).expect("open for reading and writing")
}

/// The same past the page cache.
pub(crate) fn open_direct(path: &Path) -> File {
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a flag of open");
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    options.open(path).expect("open with O_DIRECT")
}

/// A block of memory that O_DIRECT accepts.
pub(crate) struct Aligned {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub(crate) fn new(len: usize) -> Aligned {
        let memory = vec![0; len + BLOCK];
        let start = memory.as_ptr().align_offset(BLOCK);
        Aligned { memory, start, len }
    }

    pub(crate) fn of(bytes: &[u8]) -> Aligned {
        let mut out = Aligned::new(bytes.len());
        out.bytes_mut().copy_from_slice(bytes);
        out
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// Reads `len` bytes at `offset` past the page cache.
pub(crate) fn read_direct(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    let mut out = Aligned::new(len);
    open_direct(path).read_exact_at(out.bytes_mut(), offset).expect("a direct read");
    out.bytes().to_vec()
}

/// The errno of a failed call.
pub(crate) fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<rustix::io::Errno> {
    result.err().and_then(|error| rustix::io::Errno::from_io_error(&error))
}

/// Runs `ringdisk mount ARGS… MOUNTPOINT` to its end, with a limit.
pub(crate) fn try_mount(args: &[&str], mountpoint: &Path) -> Finished {
    let mut command = Command::new(program());
    Process::spawn(command.arg("mount").args(args).arg(mountpoint)).finish(Duration::from_secs(20))
}

/// It ended by itself with an error of its own: no success, no panic, no signal; and said each of
/// `words`.
pub(crate) fn assert_refused(finished: &Finished, words: &[&str]) {
    let output = finished.output();
    let code = finished.code();
    assert!(code.is_some_and(|c| c != 0 && c != 101), "{code:?}: {output}");
    assert!(!output.contains("panicked"), "{output}");
    let lower = finished.stderr.to_lowercase();
    let missing: Vec<&&str> = words.iter().filter(|w| !lower.contains(&w.to_lowercase())).collect();
    assert!(missing.is_empty(), "nothing about {missing:?} in: {output}");
}

/// Mounting with `args` on a fresh file is refused, with `words` in the message.
pub(crate) fn refused(args: &[&str], words: &[&str]) {
    let directory = scratch();
    let mountpoint = directory.path().join("disk");
    std::fs::write(&mountpoint, "").expect("a mountpoint");
    let finished = try_mount(args, &mountpoint);
    assert_refused(&finished, words);
    assert_eq!(ringdisk_testkit::limits::mount_at(&mountpoint), None, "left behind");
}

/// A qcow2 with some data, and its directory.
pub(crate) fn sample() -> (TempDir, PathBuf) {
    let directory = scratch();
    let image = directory.path().join("disk.qcow2");
    images::qcow2(&image, "8M", "");
    images::qemu_io(&image, "qcow2", &["write -P 0x11 0 1M", "write -P 0x22 5M 100k"]);
    (directory, image)
}

/// Puts bytes into an image.
pub(crate) fn patch(image: &Path, offset: u64, bytes: &[u8]) {
    File::options()
        .write(true)
        .open(image)
        .and_then(|file| file.write_all_at(bytes, offset))
        .expect("patch an image");
}
