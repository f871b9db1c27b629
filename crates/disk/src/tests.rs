//! Tests of the crate on real files. Images are made by `qemu-img` and `qemu-io` (Debian package
//! `qemu-utils`), which are also the reference for every byte and every answer.

mod backing;
mod chains;
mod change_table;
mod changes_at_bad_moments;
mod checkpoints;
mod commit_faults;
mod crash_under_changes;
mod draining;
mod faults;
mod format_notes;
mod frozen_layout;
mod guarding;
mod images;
mod last_pass;
mod limits;
mod live;
mod load;
mod maps;
mod names;
mod names_notes;
mod null;
mod operations;
mod options;
mod ownership;
mod passthrough;
mod paths;
mod probing;
mod raw;
mod scattered;
mod task_mutex;
mod walk;
mod windows;
mod writing;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_ring::{Config, IoBuf, Ring, Runtime};
use tempfile::TempDir;

use crate::{Disk, Error, ErrorKind, ImageOptions, Source};

/// Runs a test's future on a ring of its own.
pub(crate) fn run<T, F: Future<Output = T>>(test: impl FnOnce(Ring) -> F) -> T {
    let mut runtime = Runtime::new(Config::default()).expect("io_uring is needed by these tests");
    let ring = runtime.ring().clone();
    runtime.block_on(test(ring))
}

/// A directory for one test.
pub(crate) fn directory() -> TempDir {
    tempfile::tempdir().expect("temporary directory")
}

/// How often something is tried again because an image is locked, 10 ms apart. A child of another
/// test has copies of all descriptors between fork and exec, so a lock may outlive its holder for a
/// moment.
const LOCKED_RETRIES: usize = 200;

/// Runs a program in a directory and returns what it prints.
pub(crate) fn program(directory: &Path, name: &str, arguments: &[&str]) -> String {
    let mut output = output(directory, name, arguments);
    for _ in 0..LOCKED_RETRIES {
        if !String::from_utf8_lossy(&output.stderr).contains(" lock") {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        output = self::output(directory, name, arguments);
    }
    assert!(
        output.status.success(),
        "{name} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

fn output(directory: &Path, name: &str, arguments: &[&str]) -> Output {
    Command::new(name)
        .args(arguments)
        .current_dir(directory)
        .output()
        .unwrap_or_else(|error| panic!("{name} is needed by these tests: {error}"))
}

/// Runs `qemu-img`, or the program that the variable `QEMU_IMG` names, for another version.
pub(crate) fn qemu_img(directory: &TempDir, arguments: &[&str]) -> String {
    let name = std::env::var("QEMU_IMG").unwrap_or_else(|_| "qemu-img".to_owned());
    program(directory.path(), &name, arguments)
}

/// Runs `qemu-io` commands on an image.
pub(crate) fn qemu_io(directory: &TempDir, format: &str, image: &str, commands: &[&str]) {
    let mut arguments = vec!["-f", format];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    arguments.push(image);
    program(directory.path(), "qemu-io", &arguments);
}

/// Options of a reader.
pub(crate) fn reading() -> ImageOptions {
    ImageOptions { read_only: true, ..ImageOptions::default() }
}

/// Opens an image by its path.
pub(crate) async fn open(
    ring: &Ring,
    path: impl Into<PathBuf>,
    options: &ImageOptions,
) -> Result<Arc<Disk>, Error> {
    let path = path.into();
    for _ in 0..LOCKED_RETRIES {
        match Disk::open(ring, Source::Path(path.clone()), options).await {
            Err(error) if error.kind() == ErrorKind::Locked => {
                ring.sleep(Duration::from_millis(10)).await;
            }
            result => return result,
        }
    }
    Disk::open(ring, Source::Path(path), options).await
}

/// The error of an open that must fail.
pub(crate) fn refusal(path: impl Into<PathBuf>, options: &ImageOptions) -> Error {
    let path = path.into();
    run(async |ring| open(&ring, path, options).await.expect_err("this image must be refused"))
}

/// Reads a range in requests of `step` bytes.
pub(crate) async fn read_steps(ring: &Ring, disk: &Disk, step: usize) -> Vec<u8> {
    let buf = IoBuf::new(step, 4096);
    let mut bytes = Vec::new();
    loop {
        // What a read does not fill would show.
        buf.fill(0xa5);
        let done = disk.read(ring, bytes.len() as u64, &buf).await.expect("read");
        bytes.extend_from_slice(&buf.to_vec()[..done]);
        if done < step {
            return bytes;
        }
    }
}

/// A buffer with these bytes.
pub(crate) fn buffer(bytes: &[u8]) -> IoBuf {
    let buf = IoBuf::new(bytes.len(), 4096);
    buf.copy_from_slice(0, bytes);
    buf
}

/// The same bytes, without printing megabytes when they differ.
pub(crate) fn assert_same(ours: &[u8], theirs: &[u8]) {
    assert_eq!(ours.len(), theirs.len(), "length");
    let differs = ours.iter().zip(theirs).position(|(a, b)| a != b);
    assert_eq!(differs, None, "first byte that differs");
}
