//! The promise of `CAN_MULTI_CONN` of the program: a flush that is answered on one connection
//! covers every write that was answered before it was sent on another one, whatever happens to the
//! server then.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Mutex;

use ringdisk_testkit::images::{qcow2, reference, sparse};
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{LIMIT, command, run, until};
use ringdisk_testkit::sim::Prng;
use rustix::process::Signal;

use crate::common::BLOCK;
use crate::common::nbd_client::{FLUSH, NbdClient, WRITE};
use crate::common::nbd_storage::{NbdStorage, with_room};
use crate::common::serving::{Daemon, serve_command};

/// Blocks of the disk: 1 MiB.
const BLOCKS: usize = 256;
/// Writes in flight.
const DEPTH: usize = 16;

/// Writes numbers that grow to all blocks, many at once, until the server is gone. A block has one
/// write in flight at a time.
///
/// * `answered`: the number of the last answered write of each block.
///
/// Gives the last number that was sent.
fn work(mut client: NbdClient, answered: &Mutex<Vec<u64>>) -> u64 {
    let mut prng = Prng::new(3);
    let mut in_flight = HashMap::new();
    for number in 1_u64.. {
        let block = loop {
            let block = usize::try_from(prng.below(BLOCKS as u64)).expect("small");
            if !in_flight.values().any(|(other, _)| *other == block) {
                break block;
            }
        };
        let bytes = number.to_le_bytes().repeat(BLOCK / 8);
        let len = u32::try_from(BLOCK).expect("small");
        let Ok(cookie) = client.ask(WRITE, (block * BLOCK) as u64, len, &bytes) else {
            return number;
        };
        in_flight.insert(cookie, (block, number));
        if in_flight.len() == DEPTH {
            let Ok((cookie, error)) = client.answer() else { return number };
            assert_eq!(error, 0, "a write failed");
            let (block, number) = in_flight.remove(&cookie).expect("a request of ours");
            answered.lock().expect("no panic")[block] = number;
        }
    }
    unreachable!("numbers do not end")
}

/// What a disk must hold.
struct Promised {
    /// For each block the number of a write that was flushed, or 0.
    flushed: Vec<u64>,
    last: u64,
}

/// Writes on one connection and flushes on another one; kills the server when so many flushes were
/// answered.
fn kill(mut daemon: Daemon, socket: &Path, flushes: u32) -> Promised {
    let writer = NbdClient::connect(socket, "");
    let mut flusher = NbdClient::connect(socket, "");
    let answered = Mutex::new(vec![0; BLOCKS]);
    let mut flushed = vec![0; BLOCKS];
    let last = std::thread::scope(|scope| {
        let working = scope.spawn(|| work(writer, &answered));
        let mut flush = || -> std::io::Result<()> {
            let is_written = || answered.lock().expect("no panic").iter().any(|last| *last > 0);
            until(LIMIT, || is_written().then_some(())).expect("writes are answered");
            for _ in 0..flushes {
                let before = answered.lock().expect("no panic").clone();
                let cookie = flusher.ask(FLUSH, 0, 0, &[])?;
                assert_eq!(flusher.answer()?, (cookie, 0));
                flushed = before;
            }
            Ok(())
        };
        let result = flush();
        daemon.process.signal(Signal::KILL);
        result.expect("a server");
        working.join().expect("no panic")
    });
    daemon.process.wait(LIMIT).expect("it was killed");
    assert!(flushed.iter().any(|number| *number > 0), "nothing was written before a flush");
    Promised { flushed, last }
}

impl Promised {
    /// Whether the disk holds it: each block has a whole number, which is not older.
    fn judge(&self, disk: &[u8], what: &str) {
        for (block, flushed) in self.flushed.iter().enumerate() {
            let bytes = &disk[block * BLOCK..(block + 1) * BLOCK];
            let numbers = bytes.chunks(512).map(|sector| {
                let number = u64::from_le_bytes(sector[..8].try_into().expect("8 bytes"));
                assert!(sector == number.to_le_bytes().repeat(64), "{what}: a torn sector");
                number
            });
            for number in numbers {
                let is_new = (*flushed..=self.last).contains(&number);
                assert!(is_new, "{what}: block {block} has {number}, and {flushed} was flushed");
            }
        }
    }
}

fn serve(image: &str, format: &str, socket: &Path) -> Daemon {
    let words = [image, "-f", format, "--threads", "2", "--nbd", text(socket)];
    Daemon::of(&mut serve_command(&words))
}

/// An image of a format; 2 MiB for a disk of 1 MiB.
fn image(d: &Path, format: &str) -> std::path::PathBuf {
    let image = d.join("disk.img");
    match format {
        "raw" => sparse(&image, 1 << 20),
        _ => qcow2(&image, "1M", "cluster_size=4k"),
    }
    image
}

/// The disk in an image that nobody serves, which is sound but for leaks.
fn content(image: &Path, format: &str) -> Vec<u8> {
    if format == "qcow2" {
        let check = run(command(&["qemu-img", "check", "-f", "qcow2", text(image)]));
        assert!(matches!(check.code(), Some(0 | 3)), "{}", check.output());
    }
    std::fs::read(reference(image, format)).expect("the disk")
}

/// The storage knows what was flushed, and the rest is lost as in a power cut.
#[test]
fn a_flush_on_one_connection_is_one_of_the_storage_for_all() {
    for format in ["raw", "qcow2"] {
        for flushes in [1, 2, 13] {
            let directory = scratch();
            let d = directory.path();
            let image = image(d, format);
            let size = if format == "raw" { 1 << 20 } else { 4 << 20 };
            let storage = NbdStorage::new(with_room(&image, size));
            let socket = d.join("disk.sock");
            let promised = kill(serve(&storage.uri(), format, &socket), &socket, flushes);
            let what = format!("{format}, {flushes} flushes");
            for bytes in [storage.durable(), storage.bytes()] {
                std::fs::write(&image, bytes).expect("room");
                promised.judge(&content(&image, format), &what);
            }
        }
    }
}

/// The image is a file: what the server kept to itself is lost.
#[test]
fn a_flush_on_one_connection_leaves_nothing_in_the_server() {
    for flushes in [1, 2, 13] {
        let directory = scratch();
        let image = image(directory.path(), "qcow2");
        let socket = directory.path().join("disk.sock");
        let promised = kill(serve(text(&image), "qcow2", &socket), &socket, flushes);
        promised.judge(&content(&image, "qcow2"), &format!("{flushes} flushes of a file"));
    }
}
