//! Locks against ourselves and against the real QEMU tools.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ringdisk_storage::{Cause, Error, ErrorKind, Lock, OpenOptions, OtherUse, Storage};
use ringdisk_testkit::limits::needs;
use ringdisk_testkit::mount::scratch;
use ringdisk_testkit::process::{command, has, run};

use crate::{image, open};

fn options(read_only: bool, lock: Lock) -> OpenOptions {
    OpenOptions { read_only, lock, ..OpenOptions::default() }
}

fn writer() -> OpenOptions {
    options(false, Lock::Auto)
}

fn reader() -> OpenOptions {
    options(true, Lock::Auto)
}

fn force_share() -> OpenOptions {
    options(true, Lock::ForceShare)
}

fn refusal(path: &Path, options: &OpenOptions) -> Error {
    let error = Storage::open(path, options).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    error
}

fn in_use(path: &Path, by: OtherUse) -> Cause {
    Cause::InUse { file: path.display().to_string(), by }
}

#[test]
fn two_writers_of_ours_refuse_each_other() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let first = open(&path, &writer());
    let error = refusal(&path, &writer());
    assert!(error.to_string().contains("is in use for writing by"), "{error}");
    let own = format!("this process ({})", std::process::id());
    assert!(error.to_string().contains(&own), "{error}");
    assert_eq!(error.cause(), Some(&in_use(&path, OtherUse::Writes)));
    drop(first);
    drop(open(&path, &writer()));
}

#[test]
fn readers_share_and_keep_writers_out() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let _first = open(&path, &reader());
    let _second = open(&path, &reader());
    let error = refusal(&path, &writer());
    assert!(error.to_string().contains("does not let others write"), "{error}");
    assert_eq!(error.cause(), Some(&in_use(&path, OtherUse::NoOtherWriter)));
}

#[test]
fn writer_keeps_readers_out_unless_they_insist() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let _writer = open(&path, &writer());
    let error = refusal(&path, &reader());
    assert!(error.to_string().contains("is in use for writing by"), "{error}");
    let _insists = open(&path, &force_share());
    let _ignores = open(&path, &options(false, Lock::None));
}

#[test]
fn refused_opener_leaves_no_lock() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let first = open(&path, &reader());
    refusal(&path, &writer());
    let _second = open(&path, &reader());
    drop(first);
}

/// Runs a QEMU tool on the image; returns whether it could open it, and what it said. `None`
/// without the tool: the test is noted as skipped then.
fn qemu(words: &[&str], path: &Path) -> Option<(bool, String)> {
    if !needs(words[0], has(words[0])) {
        return None;
    }
    let words: Vec<&str> = words
        .iter()
        .map(|&word| if word == "IMAGE" { path.to_str().unwrap() } else { word })
        .collect();
    let finished = run(command(&words));
    Some((finished.status.success(), finished.output()))
}

const QEMU_WRITE: &[&str] = &["qemu-io", "-f", "raw", "-c", "write 0 512", "IMAGE"];
const QEMU_READ: &[&str] = &["qemu-io", "-r", "-f", "raw", "-c", "read 0 512", "IMAGE"];
const QEMU_SHARE: &[&str] = &["qemu-io", "-r", "-U", "-f", "raw", "-c", "read 0 512", "IMAGE"];
const QEMU_RESIZE: &[&str] = &["qemu-img", "resize", "-f", "raw", "IMAGE", "1M"];
const QEMU_INFO: &[&str] = &["qemu-img", "info", "IMAGE"];
const QEMU_COMPARE: &[&str] = &["qemu-img", "compare", "-f", "raw", "-F", "raw", "IMAGE", "IMAGE"];

#[test]
fn our_writer_refuses_writers_of_qemu() {
    let directory = scratch();
    let path = image(directory.path(), "image", 65536);
    let storage = open(&path, &writer());
    for words in [QEMU_WRITE, QEMU_RESIZE] {
        let Some((opened, said)) = qemu(words, &path) else { return };
        assert!(!opened && said.contains("lock"), "{words:?}: {said}");
    }
    for words in [QEMU_SHARE, QEMU_INFO] {
        let Some((opened, said)) = qemu(words, &path) else { return };
        assert!(opened, "{words:?}: {said}");
    }
    drop(storage);
    let Some((opened, said)) = qemu(QEMU_WRITE, &path) else { return };
    assert!(opened, "{said}");
}

#[test]
fn our_reader_shares_with_readers_of_qemu_only() {
    let directory = scratch();
    let path = image(directory.path(), "image", 65536);
    let _storage = open(&path, &reader());
    let writes = qemu(QEMU_WRITE, &path);
    assert!(writes.is_none_or(|(opened, _)| !opened));
    for words in [QEMU_READ, QEMU_SHARE, QEMU_INFO, QEMU_COMPARE] {
        let reads = qemu(words, &path);
        assert!(reads.as_ref().is_none_or(|(opened, _)| *opened), "{words:?}: {reads:?}");
    }
}

#[test]
fn our_force_share_does_not_disturb_qemu() {
    let directory = scratch();
    let path = image(directory.path(), "image", 65536);
    let _storage = open(&path, &force_share());
    for words in [QEMU_WRITE, QEMU_READ, QEMU_RESIZE] {
        let opened = qemu(words, &path);
        assert!(opened.as_ref().is_none_or(|(opened, _)| *opened), "{words:?}: {opened:?}");
    }
}

/// A QEMU process that keeps the image open; ends with the guard.
struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts qemu-io, which waits for commands, and waits until it has its locks.
fn hold(args: &[&str], path: &Path) -> Option<Holder> {
    if !needs("qemu-io", has("qemu-io")) {
        return None;
    }
    let mut program = Command::new("qemu-io");
    program.args(args).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut guard = Holder(program.spawn().expect("qemu-io"));
    // It asks for commands when it has the image with all its locks.
    let mut prompt = [0; 7];
    let said = guard.0.stdout.as_mut().map(|stdout| stdout.read_exact(&mut prompt));
    assert!(said.is_some_and(|said| said.is_ok()) && prompt == *b"qemu-io", "{prompt:?}");
    Some(guard)
}

#[test]
fn raw_writer_of_qemu_refuses_us_and_is_named() {
    let directory = scratch();
    let path = image(directory.path(), "image", 65536);
    let Some(holder) = hold(&["-f", "raw"], &path) else { return };
    let error = refusal(&path, &writer());
    let name = format!("process {} (qemu-io)", holder.0.id());
    assert!(error.to_string().contains(&name), "{error}");
    assert!(refusal(&path, &reader()).to_string().contains("is in use for writing by"));
    drop(open(&path, &force_share()));
    drop(holder);
    drop(open(&path, &writer()));
}

#[test]
fn raw_reader_of_qemu_shares_with_our_readers() {
    let directory = scratch();
    let path = image(directory.path(), "image", 65536);
    let Some(_holder) = hold(&["-r", "-f", "raw"], &path) else { return };
    // QEMU's raw reader shares writing: it says so by locking byte 100 only.
    drop(open(&path, &reader()));
    drop(open(&path, &writer()));
}

#[test]
fn qcow2_users_of_qemu_refuse_our_writer() {
    let directory = scratch();
    let path = directory.path().join("image");
    let Some((made, said)) = qemu(&["qemu-img", "create", "-f", "qcow2", "IMAGE", "1M"], &path)
    else {
        return;
    };
    assert!(made, "{said}");
    let Some(reading) = hold(&["-r", "-f", "qcow2"], &path) else { return };
    assert!(refusal(&path, &writer()).to_string().contains("does not let others write"));
    drop(open(&path, &reader()));
    drop(reading);
    let Some(_writing) = hold(&["-f", "qcow2"], &path) else { return };
    refusal(&path, &writer());
    refusal(&path, &reader());
    drop(open(&path, &force_share()));
}

#[test]
fn dropped_storage_is_free_at_once_although_a_ring_used_it() {
    let directory = scratch();
    let path = image(directory.path(), "image", 1 << 20);
    let mut runtime = ringdisk_ring::Runtime::new(ringdisk_ring::Config::default()).unwrap();
    let ring = runtime.ring().clone();
    for _ in 0..20 {
        let storage = open(&path, &writer());
        runtime.block_on(async {
            crate::write(&ring, &storage, 0, &[1; 4096]).await.unwrap();
            storage.write_zeroes(&ring, 0, 4096, true, true).await.unwrap();
            storage.flush(&ring).await.unwrap();
        });
    }
}

#[test]
fn a_reader_becomes_a_writer_and_a_reader_again() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let first = open(&path, &reader());
    let second = first.reopen(&writer()).expect("a file").expect("nobody else is there");
    drop(first);
    refusal(&path, &reader());
    let third = second.reopen(&reader()).expect("a file").expect("one's own lock is no obstacle");
    drop(second);
    drop(open(&path, &reader()));
    refusal(&path, &writer());
    drop(third);
    drop(open(&path, &writer()));
}

#[test]
fn a_reader_that_is_not_alone_cannot_become_a_writer_and_stays_a_reader() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let first = open(&path, &reader());
    let other = open(&path, &reader());
    let error = first.reopen(&writer()).expect("a file").map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    drop(other);
    refusal(&path, &writer());
    drop(first);
    drop(open(&path, &writer()));
}

#[test]
fn locks_that_went_over_are_taken_back() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let first = open(&path, &writer());
    let second = first.reopen(&reader()).expect("a file").expect("one's own lock");
    first.reclaim(&second).expect("nobody came");
    drop(second);
    refusal(&path, &reader());
    drop(first);
    drop(open(&path, &writer()));
}

#[test]
fn locks_are_not_taken_back_when_somebody_has_come_who_excludes_them() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let first = open(&path, &writer());
    let second = first.reopen(&reader()).expect("a file").expect("one's own lock");
    let other = open(&path, &reader());
    let error = first.reclaim(&second).expect_err("another reader is there");
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    drop((first, second, other));
    drop(open(&path, &writer()));
}

#[test]
fn a_descriptor_without_the_lock_that_it_should_have_is_not_adopted_beside_another_user() {
    let directory = scratch();
    let path = image(directory.path(), "image", 4096);
    let other = open(&path, &writer());
    let file = || std::fs::File::options().read(true).write(true).open(&path).expect("open");
    let error = Storage::adopt(file().into(), "image", &writer()).expect_err("it has another user");
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    drop(other);
    drop(Storage::adopt(file().into(), "image", &writer()).expect("nobody else is there"));
}
