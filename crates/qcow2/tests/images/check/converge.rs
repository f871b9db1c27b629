//! Repairs of images that are damaged at random, again and again: they come to an end, at each step
//! everything that could be read (of the disk and of its snapshots) reads the same, and what a
//! repair calls clean can be written to without harm to anything else.
//!
//! `RINGDISK_CHECK_IMAGES=N`, `RINGDISK_CHECK_SEED=N` as for the others.

use std::collections::BTreeMap;

use ringdisk_qcow2::{GuestOffset, Nothing, OpenOptions, Qcow2, Repair, check_bytes};
use ringdisk_ring::{IoBuf, Runtime};
use ringdisk_testkit::sim::{Prng, SimStorage};

use crate::check::damage::damage;
use crate::check::{repair_on, seeds, shapes};
use crate::common::{Images, read, runtime};

/// Repairs of one image: one of leaks, one of all, one that gives back what that has kept, and the
/// one that finds nothing to do.
const REPAIRS_MAX: usize = 4;

/// Header fields.
const DISK_SIZE: usize = 24;
const L1_ENTRIES: usize = 36;
const L1_OFFSET: usize = 40;
const SNAPSHOTS: usize = 60;
const SNAPSHOTS_OFFSET: usize = 64;

/// What a reader sees of one disk, cluster by cluster; `None`: cannot be read.
type Contents = Vec<Option<Vec<u8>>>;

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |b| u64::from_be_bytes(b.try_into().expect("8 bytes")))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_be_bytes(b.try_into().expect("4 bytes")))
}

fn contents(runtime: &mut Runtime, bytes: &[u8]) -> Contents {
    let ring = runtime.ring().clone();
    let (cluster, size) = (1 << bytes[23], word(bytes, DISK_SIZE));
    let sim = SimStorage::from_image(bytes, 1);
    runtime.block_on(async {
        let Ok(image) = Qcow2::open(&ring, sim.storage(), &OpenOptions::default()).await else {
            return Vec::new();
        };
        let mut all = Vec::new();
        for at in (0..size).step_by(cluster) {
            all.push(read(&ring, &image, &[], at, cluster).await.ok());
        }
        all
    })
}

/// The disk, and each snapshot by its names: a header that leads to the snapshot's L1 table shows
/// what it has.
fn views(runtime: &mut Runtime, bytes: &[u8]) -> BTreeMap<Vec<u8>, Contents> {
    let mut views = BTreeMap::from([(Vec::new(), contents(runtime, bytes))]);
    let mut at = word(bytes, SNAPSHOTS_OFFSET) as usize;
    for _ in 0..half(bytes, SNAPSHOTS).min(8) {
        let lens = half(bytes, at + 12);
        let names = at + 40 + half(bytes, at + 36) as usize;
        let end = names + (lens >> 16) as usize + (lens & 0xffff) as usize;
        let Some(name) = bytes.get(names..end) else { break };
        let mut copy = bytes.to_vec();
        copy[L1_OFFSET..L1_OFFSET + 8].copy_from_slice(&bytes[at..at + 8]);
        copy[L1_ENTRIES..L1_ENTRIES + 4].copy_from_slice(&bytes[at + 8..at + 12]);
        copy[SNAPSHOTS..SNAPSHOTS + 4].fill(0);
        views.insert(name.to_vec(), contents(runtime, &copy));
        at = end.next_multiple_of(8);
    }
    views
}

/// What was readable and is something else, in words.
fn lost(old: &BTreeMap<Vec<u8>, Contents>, new: &BTreeMap<Vec<u8>, Contents>) -> Vec<String> {
    let mut lost = Vec::new();
    for (name, old) in old {
        let name_shown = String::from_utf8_lossy(name);
        let Some(new) = new.get(name) else {
            // One that says impossible things is removed, and nothing of it could be read.
            if old.iter().any(Option::is_some) {
                lost.push(format!("snapshot {name_shown} is gone"));
            }
            continue;
        };
        for (at, old) in old.iter().enumerate() {
            if old.is_some() && new.get(at) != Some(old) {
                lost.push(format!("'{name_shown}', cluster {at}"));
            }
        }
    }
    lost
}

/// Writes to clusters all over the disk, so that new ones are taken, and looks at the others.
/// Returns what is wrong.
fn write_around(runtime: &mut Runtime, bytes: &[u8], prng: &mut Prng) -> Vec<String> {
    let ring = runtime.ring().clone();
    let (cluster, size) = (1u64 << bytes[23], word(bytes, DISK_SIZE));
    let mut expected = views(runtime, bytes);
    let sim = SimStorage::from_image(bytes, 1);
    let options = OpenOptions { writable: true, ..OpenOptions::default() };
    let clusters = size / cluster;
    let result = runtime.block_on(async {
        let image =
            Qcow2::open(&ring, sim.storage(), &options).await.map_err(|error| error.to_string())?;
        let disk = expected.get_mut(&Vec::new()).expect("the disk");
        for number in 0..24u64 {
            let at = prng.below(clusters);
            let buf = IoBuf::new(cluster as usize, 4096);
            let value = 0xa0 | number as u8;
            buf.fill(value);
            // Compressed data may be rubbish, of which nobody else can make sense either.
            let whole = image.write(&ring, GuestOffset(at * cluster), &buf, &Nothing).await;
            if whole != Ok(cluster as usize) {
                return Err(format!("writing cluster {at}: {whole:?} ({:?})", image.fault()));
            }
            if let Some(place) = disk.get_mut(at as usize) {
                *place = Some(vec![value; cluster as usize]);
            }
        }
        image.close(&ring).await.map_err(|errno| format!("the close: {errno}"))
    });
    if let Err(text) = result {
        return vec![text];
    }
    let after = sim.image();
    let mut wrong = lost(&expected, &views(runtime, &after));
    match check_bytes(&after[..]) {
        // What blocks count past the end of the file is leaked once that has grown. Of two entries
        // that shared a cluster the second one does not know that it is alone.
        Ok(report) if report.messages.iter().all(|text| is_harmless(text)) => {}
        other => wrong.push(format!("the check says {other:?}")),
    }
    wrong
}

fn is_harmless(message: &str) -> bool {
    message.starts_with("Leaked") || message.contains("the COPIED flag is missing in")
}

#[test]
fn repairs_come_to_an_end_and_lose_nothing_on_the_way() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    // Without its data file nothing of that one can be read; the large one takes long.
    let mut shapes = shapes;
    shapes.retain(|(name, _)| !["external", "large"].contains(name));
    let mut runtime = runtime();
    let (mut wrong, mut clean) = (Vec::new(), 0);
    let range = seeds(150);
    let count = range.end - range.start;
    for seed in range {
        let mut prng = Prng::new(seed);
        let (name, good) = &shapes[prng.next_u64() as usize % shapes.len()];
        let (mut bytes, what) = damage(good, &mut prng);
        if prng.below(8) == 0 && bytes[7] == 3 {
            bytes[79] |= 1;
        }
        let case = format!("seed {seed}: {name} with {what:?}");
        let mut before = views(&mut runtime, &bytes);
        let mut ended = false;
        for number in 0..REPAIRS_MAX {
            let sim = SimStorage::from_image(&bytes, seed);
            let is_of_leaks = number == 0 && prng.below(4) == 0;
            let how = if is_of_leaks { Repair::Leaks } else { Repair::All };
            let report = repair_on(&mut runtime, &sim, how);
            let after = sim.image();
            if after == bytes && how == Repair::All {
                ended = true;
                if report.is_ok_and(|report| report.is_clean()) {
                    clean += 1;
                    let texts = write_around(&mut runtime, &after, &mut prng);
                    wrong.extend(texts.first().map(|text| format!("{case}, written to: {text}")));
                }
                break;
            }
            let now = views(&mut runtime, &after);
            let texts = lost(&before, &now);
            wrong.extend(texts.first().map(|text| {
                format!("{case}, repair {number} ({how:?}), {} lost: {text}", texts.len())
            }));
            (before, bytes) = (now, after);
        }
        if !ended {
            wrong.push(format!("{case}: no end after {REPAIRS_MAX} repairs"));
        }
    }
    assert!(wrong.is_empty(), "{}: {wrong:#?}", wrong.len());
    assert!(clean * 4 > count, "only {clean} of {count} images were made clean");
}
