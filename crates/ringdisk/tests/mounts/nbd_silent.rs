//! A mount whose image is an export of a server that falls silent: in the handshake, in the middle
//! of a reply, and when the client leaves. Programs get errors in time, commands are answered, and
//! a stop or `ringdisk umount` ends the mount within its limits.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ringdisk_testkit::limits::{mount_at, needs_root};
use ringdisk_testkit::mount::Mounted;
use ringdisk_testkit::process::{LIMIT, Process, patient, pause, until};
use rustix::process::Signal;

use crate::common::nbd_storage::{NbdStorage, Silence};
use crate::common::tools::ringdisk;
use crate::common::{BLOCK, MIB, mount, open};

/// Connecting and the handshake take so long at most (docs/nbd-client.md), and the server has so
/// long to come back (`--reconnect`).
const CONNECTING: Duration = Duration::from_secs(10);
const RECONNECT: Duration = Duration::from_secs(1);
/// A command that needs no storage, on a machine that does other things, too.
const SOON: Duration = Duration::from_secs(5);
/// `--stop-timeout`.
const STOP: Duration = Duration::from_secs(2);
/// Storage that does not answer is given up after so long at the end.
const LAST_FLUSH: Duration = Duration::from_secs(10);

fn mounted(storage: &NbdStorage) -> Mounted {
    let uri = storage.uri();
    mount(&[&uri, "-f", "raw", "--reconnect", "1s", "--stop-timeout", "2s", "--threads", "1"])
}

/// Reads the first block.
fn read(path: &Path) -> std::io::Result<usize> {
    open(path).read_at(&mut [0; BLOCK], 0)
}

/// A program that reads and is not answered. (A thread of this process would not do: each child of
/// this process would close its descriptor, which waits for the server.)
fn stuck(disk: &Mounted, storage: &NbdStorage, silence: Silence) -> Process {
    open(disk.path()).write_all_at(&[7; BLOCK], MIB / 2).expect("write");
    storage.fall_silent(silence);
    if silence != Silence::Reply {
        storage.cut();
    }
    let mut command = Command::new("dd");
    command.args([&format!("if={}", disk.text()), "of=/dev/null", "bs=4k", "count=1"]);
    let mut reader = Process::spawn(&mut command);
    pause(Duration::from_millis(300));
    assert!(reader.ended().is_none(), "{silence:?}: {}", reader.output());
    reader
}

/// Commands about the mount are answered.
fn assert_answers(disk: &Mounted) {
    let begun = Instant::now();
    ringdisk(Path::new("/"), &["ctl", disk.text(), "stats"]).ok();
    assert_eq!(std::fs::metadata(disk.path()).expect("attributes").len(), MIB);
    assert!(begun.elapsed() < patient(SOON), "it took {:?}", begun.elapsed());
}

#[test]
fn programs_get_an_error_when_the_server_is_silent_in_the_handshake() {
    if !needs_root() {
        return;
    }
    for silence in [Silence::Greeting, Silence::Handshake] {
        let storage = NbdStorage::new(vec![5; 1 << 20]);
        let disk = mounted(&storage);
        let begun = Instant::now();
        let reader = stuck(&disk, &storage, silence);
        assert_answers(&disk);
        let ended = reader.finish(LIMIT);
        assert_eq!(ended.code(), Some(1), "{silence:?}");
        assert!(ended.stderr.contains("Input/output error"), "{silence:?}: {}", ended.stderr);
        let limit = patient(RECONNECT + CONNECTING + SOON);
        assert!(begun.elapsed() < limit, "{silence:?}: {:?}", begun.elapsed());
        storage.go_on();
        let is_back = until(LIMIT, || read(disk.path()).ok());
        assert_eq!(is_back, Some(BLOCK), "{silence:?}");
        assert_eq!(disk.stop().code(), Some(0), "{silence:?}");
    }
}

#[test]
fn a_stop_waits_for_no_server_that_is_silent_for_longer_than_it_says() {
    if !needs_root() {
        return;
    }
    for silence in [Silence::Greeting, Silence::Reply] {
        let storage = NbdStorage::new(vec![5; 1 << 20]);
        let mut disk = mounted(&storage);
        let reader = stuck(&disk, &storage, silence);
        assert_answers(&disk);
        // It is in use, which is said at once.
        let begun = Instant::now();
        ringdisk(Path::new("/"), &["umount", disk.text()]).ends(5);
        assert!(begun.elapsed() < patient(SOON), "{silence:?}: {:?}", begun.elapsed());
        let begun = Instant::now();
        disk.process().signal(Signal::TERM);
        let finished = disk.finish();
        let (took, limit) = (begun.elapsed(), patient(STOP + LAST_FLUSH + SOON));
        assert!(took < limit, "{silence:?}: {took:?}: {}", finished.output());
        assert_eq!(finished.code(), Some(12), "{silence:?}: {}", finished.output());
        assert_ne!(reader.finish(LIMIT).code(), Some(0), "{silence:?}");
    }
}

#[test]
fn a_server_that_does_not_let_its_client_go_keeps_no_mount() {
    if !needs_root() {
        return;
    }
    for by_command in [false, true] {
        let storage = NbdStorage::new(vec![5; 1 << 20]);
        let mut disk = mounted(&storage);
        open(disk.path()).write_all_at(&[7; BLOCK], 0).expect("write");
        storage.fall_silent(Silence::Disconnect);
        let (path, begun) = (disk.path().to_owned(), Instant::now());
        if by_command {
            ringdisk(Path::new("/"), &["umount", disk.text()]).ok();
        } else {
            disk.process().signal(Signal::TERM);
        }
        let ended = disk.process().wait(LIMIT).expect("an end");
        let took = begun.elapsed();
        assert!(ended.success() && took < patient(SOON), "{took:?}: {}", disk.output());
        assert_eq!(mount_at(&path), None);
        // The last flush came before.
        assert_eq!(storage.durable()[..BLOCK], [7; BLOCK]);
    }
}
