//! Clients that know what must be there: each writes numbered blocks, reads them back, and
//! remembers the last number of each.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ringdisk_testkit::images::pattern;
use ringdisk_testkit::sim::Prng;
use rustix::fs::OFlags;

use crate::common::{Aligned, BLOCK, open_direct};
use crate::keep::kept::abandon;

/// Last number of each block, by offset in bytes.
pub(crate) type Written = HashMap<u64, u64>;

fn content(at: u64, number: u64) -> Vec<u8> {
    pattern(number, at, BLOCK)
}

/// Writes and reads until `stop`; every result is looked at. A flush now and then.
///
/// * `range`: bytes of the disk that are this client's alone.
/// * `done`: counts the requests of all clients.
fn work(disk: &Path, range: Range<u64>, seed: u64, stop: &AtomicBool, done: &AtomicU64) -> Written {
    let file = open_direct(disk);
    let mut prng = Prng::new(seed);
    let mut written = Written::new();
    let mut number = seed << 40;
    while !stop.load(Ordering::Relaxed) {
        let at = range.start + prng.below((range.end - range.start) / BLOCK as u64) * BLOCK as u64;
        number += 1;
        let bytes = Aligned::of(&content(at, number));
        file.write_all_at(bytes.bytes(), at)
            .unwrap_or_else(|error| panic!("write at {at}: {error}"));
        written.insert(at, number);
        let places = u64::try_from(written.len()).expect("few");
        let nth = usize::try_from(prng.below(places.min(8))).expect("small");
        let (at, number) = written.iter().nth(nth).expect("there are so many");
        let mut seen = Aligned::new(BLOCK);
        file.read_exact_at(seen.bytes_mut(), *at)
            .unwrap_or_else(|error| panic!("read at {at}: {error}"));
        assert!(seen.bytes() == content(*at, *number), "block at {at} is not number {number}");
        if prng.below(64) == 0 {
            file.sync_data().expect("flush");
        }
        done.fetch_add(2, Ordering::Relaxed);
    }
    written
}

/// `depth` clients work on their parts of `len` bytes while `meanwhile` runs. Returns all that they
/// wrote.
///
/// When `meanwhile` panics the mount is ended by force, so that the clients end too.
pub(crate) fn load(
    disk: &Path,
    len: u64,
    depth: u64,
    meanwhile: impl FnOnce(&AtomicU64),
) -> Written {
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let part = len / depth / BLOCK as u64 * BLOCK as u64;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..depth)
            .map(|index| {
                let range = index * part..(index + 1) * part;
                let (stop, done) = (&stop, &done);
                scope.spawn(move || work(disk, range, index + 1, stop, done))
            })
            .collect();
        let result = catch_unwind(AssertUnwindSafe(|| meanwhile(&done)));
        stop.store(true, Ordering::Relaxed);
        if let Err(panic) = result {
            // The clients may be waiting for a server that never comes.
            abandon(disk);
            resume_unwind(panic);
        }
        clients
            .into_iter()
            .flat_map(|client| client.join().expect("a client saw an error"))
            .collect()
    })
}

/// Waits until the clients have got on by so many requests. Panics when they do not within 10 s: a
/// request was lost.
pub(crate) fn get_on(done: &AtomicU64, requests: u64, output: impl FnOnce() -> String) {
    let goal = done.load(Ordering::Relaxed) + requests;
    let got = || (done.load(Ordering::Relaxed) >= goal).then_some(());
    let got = ringdisk_testkit::process::until(Duration::from_secs(60), got);
    assert!(got.is_some(), "nobody gets on: {}", output());
}

/// Compares every block.
pub(crate) fn judge(disk: &Path, written: &Written) {
    let flags = i32::try_from(OFlags::DIRECT.bits()).expect("a flag of open");
    let file =
        File::options().read(true).custom_flags(flags).open(disk).expect("open with O_DIRECT");
    let mut seen = Aligned::new(BLOCK);
    for (at, number) in written {
        file.read_exact_at(seen.bytes_mut(), *at).expect("a direct read");
        assert!(seen.bytes() == content(*at, *number), "block at {at} is not number {number}");
    }
}
