//! Offline changes that are cut off: by a power failure at any operation, by an error of any
//! operation, by a full disk. The image is what it was, or what it should become, and leaks
//! nothing.

// Test images are small.
#![allow(clippy::cast_possible_truncation)]

use std::fmt;

use ringdisk_qcow2::{
    Bytes, CheckVerdict, Error, GuestOffset, ImageBytes, Nothing, OpenOptions, Preallocation,
    Qcow2, ResizeOptions, check_bytes,
};
use ringdisk_ring::{Errno, IoBuf, Ring, Runtime};
use ringdisk_testkit::layout::{Class, Guest, Layout};
use ringdisk_testkit::sim::{Fault, OpKind, Prng, SimStorage, When};

use crate::common::{KIB, runtime};
use crate::ops::Subject;

const SIZE: u64 = 700 * KIB + 512;

/// Images of every kind, with data, holes, zeroes, compressed clusters and two snapshots.
const SHAPES: [&str; 6] = [
    "compat=0.10,cluster_size=4096",
    "cluster_size=512",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4096,refcount_bits=4",
    "cluster_size=16384,extended_l2=on",
    "cluster_size=65536",
];

/// Seeds for the power cuts at one operation.
fn seeds() -> u64 {
    std::env::var("RINGDISK_OPS_SEEDS").map_or(3, |text| text.parse().expect("a number"))
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Create,
    Apply,
    DeleteFirst,
    DeleteLast,
    Grow(Preallocation),
    Shrink,
    Empty,
    Backing,
}

const CHANGES: [Change; 9] = [
    Change::Create,
    Change::Apply,
    Change::DeleteFirst,
    Change::DeleteLast,
    Change::Grow(Preallocation::Off),
    Change::Grow(Preallocation::Metadata),
    Change::Shrink,
    Change::Empty,
    Change::Backing,
];

async fn make(change: Change, image: &mut Qcow2, ring: &Ring) -> Result<(), Error> {
    match change {
        Change::Create => image.snapshot_create(ring, "new").await.map(drop),
        Change::Apply => image.snapshot_apply(ring, "first").await,
        Change::DeleteFirst => image.snapshot_delete(ring, "first").await,
        Change::DeleteLast => image.snapshot_delete(ring, "second").await,
        Change::Grow(preallocation) => {
            let options = ResizeOptions { shrink: false, preallocation };
            image.resize(ring, Bytes(3 * SIZE / 1024 * 512), &options, &Nothing).await
        }
        Change::Shrink => {
            let options = ResizeOptions { shrink: true, ..ResizeOptions::default() };
            image.resize(ring, Bytes(SIZE / 1024 * 512), &options, &Nothing).await
        }
        Change::Empty => image.make_empty(ring).await,
        Change::Backing => image.set_backing(ring, Some(b"another"), Some("raw")).await,
    }
}

/// Whether an image of version 2 with snapshots can do it.
fn is_for(change: Change, options: &str) -> bool {
    !(options.contains("0.10") && matches!(change, Change::Grow(_) | Change::Shrink))
}

fn prepared(options: &str) -> Vec<u8> {
    let mut subject = Subject::new(options, SIZE);
    subject.write(1, 0, 300 * KIB);
    subject.compress(2, 20);
    subject.create("first").expect("a snapshot");
    subject.write(3, 100 * KIB, 60 * KIB);
    subject.zero(200 * KIB, 30 * KIB, true);
    subject.create("second").expect("a snapshot");
    subject.write(4, 150 * KIB, 300 * KIB);
    subject.write(5, SIZE - 3 * KIB, 3 * KIB);
    subject.check(options);
    std::fs::read(subject.path()).expect("the image")
}

/// All that an image says.
#[derive(PartialEq)]
struct Content {
    backing: Vec<u8>,
    disk: Vec<u8>,
    snapshots: Vec<(String, String, Vec<u8>)>,
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let snapshots: Vec<_> = self.snapshots.iter().map(|(id, name, _)| (id, name)).collect();
        write!(f, "{} bytes, snapshots {snapshots:?}", self.disk.len())
    }
}

/// Reads everything by the specification. Errors: what is wrong.
fn content(file: &SimStorage) -> Result<Content, String> {
    let layout = Layout::of(file);
    if !layout.is_sound() || layout.leaks + layout.leaks_beyond > 0 {
        return Err(format!("{} leaks, {:?}", layout.leaks, layout.problems));
    }
    let below = |_, out: &mut [u8]| out.fill(0);
    let read = |guest: Guest<'_, SimStorage>| {
        let mut bytes = vec![0; guest.size as usize];
        guest.read(0, &mut bytes, &below).map(|()| bytes)
    };
    let disk = read(Guest::active(file, file)?)?;
    let mut snapshots = Vec::new();
    for snapshot in &layout.snapshots {
        let bytes = read(Guest::snapshot(file, snapshot)?)?;
        snapshots.push((snapshot.id.clone(), snapshot.name.clone(), bytes));
    }
    let mut head = [0; 512];
    file.peek(0, &mut head);
    // Where the name lies does not matter, only what it is.
    let at = u64::from_be_bytes(head[8..16].try_into().expect("8 bytes"));
    let len = u32::from_be_bytes(head[16..20].try_into().expect("4 bytes"));
    let mut backing = vec![0; len as usize];
    file.peek(at, &mut backing);
    Ok(Content { backing, disk, snapshots })
}

struct Look<'a>(&'a SimStorage);

impl ImageBytes for Look<'_> {
    fn image_len(&self) -> Bytes {
        Bytes(self.0.len())
    }

    fn read_into(&self, offset: u64, out: &mut [u8]) {
        let count = self.0.peek(offset, out);
        out[count..].fill(0);
    }
}

/// Runs the change on `file`, with no room for changed reference counts, so that they are written
/// on the way. The image is closed afterwards.
fn run(runtime: &mut Runtime, file: &SimStorage, change: Change) -> Result<(), Error> {
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let options = OpenOptions {
            writable: true,
            metadata_cache_bytes: Some(Bytes::ZERO),
            ..OpenOptions::default()
        };
        let mut image = Qcow2::open(&ring, file.storage(), &options).await?;
        let result = make(change, &mut image, &ring).await;
        let _ = image.close(&ring).await;
        result
    })
}

/// The image before and after, and how many operations the change takes.
fn around(runtime: &mut Runtime, start: &SimStorage, change: Change) -> (Content, Content, u64) {
    let old = content(start).expect("a sound image");
    let file = start.fork(1);
    run(runtime, &file, change).expect("the change");
    let new = content(&file.power_cut(1)).expect("a sound image, all of it durable");
    assert_ne!(old, new, "{change:?}");
    (old, new, file.log().len() as u64)
}

fn judge(case: &str, state: &SimStorage, old: &Content, new: &Content) -> bool {
    let report = check_bytes(&Look(state)).expect("an image");
    assert_eq!(report.verdict(), CheckVerdict::Clean, "{case}: {report:?}");
    let seen = content(state).unwrap_or_else(|error| panic!("{case}: {error}"));
    assert!(seen == *old || seen == *new, "{case}: {seen:?} is neither {old:?} nor {new:?}");
    seen == *new
}

#[test]
fn a_power_cut_leaves_the_old_image_or_the_new_one() {
    let mut runtime = runtime();
    let mut judged = 0u32;
    for options in SHAPES {
        let start = SimStorage::from_image(&prepared(options), 1);
        for change in CHANGES.into_iter().filter(|change| is_for(*change, options)) {
            let (old, new, operations) = around(&mut runtime, &start, change);
            let mut news = 0;
            for number in 0..=operations {
                let file = start.fork(number + 7);
                file.on(When::any().skip(number), Fault::Fail(Errno::IO));
                let finished = run(&mut runtime, &file, change).is_ok();
                for seed in 0..seeds() {
                    let case = format!("{options}, {change:?}, cut at {number}, seed {seed}");
                    let is_new = judge(&case, &file.crash_state(seed), &old, &new);
                    assert!(is_new || !finished, "{case}: it was reported as done");
                    news += u32::from(is_new);
                    judged += 1;
                }
            }
            assert!(news > 0, "{options}, {change:?}");
        }
    }
    println!("{judged} states");
}

#[test]
fn a_missing_barrier_would_show() {
    let mut runtime = runtime();
    let start = SimStorage::from_image(&prepared("cluster_size=4096"), 1);
    for change in CHANGES {
        if matches!(change, Change::Backing | Change::Grow(Preallocation::Off)) {
            // Nothing but the header is written: it needs no barrier before.
            continue;
        }
        let (old, new, operations) = around(&mut runtime, &start, change);
        let mut wrong = 0;
        for number in 0..=operations {
            let file = start.fork(number + 7);
            file.on(When::kind(OpKind::Flush), Fault::Lie);
            file.on(When::any().skip(number), Fault::Fail(Errno::IO));
            let _ = run(&mut runtime, &file, change);
            for seed in 0..8 {
                let seen = content(&file.crash_state(seed));
                wrong += u32::from(!seen.is_ok_and(|seen| seen == old || seen == new));
            }
        }
        assert!(wrong > 0, "{change:?}: nobody would notice that its barriers are gone");
    }
}

#[test]
fn an_error_of_any_operation_leaves_a_sound_image_that_can_be_changed_again() {
    let mut runtime = runtime();
    for options in ["cluster_size=512", "cluster_size=16384,extended_l2=on"] {
        let start = SimStorage::from_image(&prepared(options), 1);
        for change in CHANGES {
            let (old, new, operations) = around(&mut runtime, &start, change);
            for number in 0..operations {
                for errno in [Errno::IO, Errno::NOSPC] {
                    let case = format!("{options}, {change:?}, {errno} at {number}");
                    let file = start.fork(number);
                    file.on(When::number(number), Fault::Fail(errno));
                    let result = run(&mut runtime, &file, change);
                    let is_new = judge(&case, &file.fork(1), &old, &new);
                    // What fails after the switch costs space only; a failed flush says nothing.
                    assert!(result.is_err() || is_new, "{case}: it was reported as done");
                    file.clear_rules();
                    if !is_new {
                        let again = run(&mut runtime, &file, change);
                        again.unwrap_or_else(|error| panic!("{case}, again: {error}"));
                        assert!(judge(&case, &file.power_cut(1), &old, &new), "{case}, again");
                    }
                }
            }
        }
    }
}

/// As [`content`], of an image that may have leaks.
fn content_with_leaks(file: &SimStorage) -> (Vec<u8>, Vec<Vec<u8>>) {
    let layout = Layout::of(file);
    assert!(layout.is_sound(), "{:?}", layout.problems);
    let read = |guest: Guest<'_, SimStorage>| {
        let mut bytes = vec![0; guest.size as usize];
        guest.read(0, &mut bytes, &|_, out: &mut [u8]| out.fill(0)).expect("it can be read");
        bytes
    };
    let disk = read(Guest::active(file, file).expect("a disk"));
    let snapshot = |snapshot| read(Guest::snapshot(file, snapshot).expect("a snapshot"));
    (disk, layout.snapshots.iter().map(snapshot).collect())
}

/// No write that makes a cluster of the file's own finds room; old places can be overwritten.
fn make_full(file: &SimStorage) {
    file.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
    file.on(When::any().at(file.len()..u64::MAX), Fault::Fail(Errno::NOSPC));
}

#[test]
fn a_full_disk_is_emptied_in_place_and_a_power_cut_leaves_parts_of_it_at_most() {
    let mut runtime = runtime();
    for options in SHAPES {
        let start = SimStorage::from_image(&prepared(options), 1);
        let (old, snapshots) = content_with_leaks(&start);
        let file = start.fork(1);
        make_full(&file);
        run(&mut runtime, &file, Change::Empty).expect("it needs no space");
        let operations = file.log().len() as u64;
        let allocated = |bytes: &[u8]| bytes.iter().filter(|byte| **byte != 0).count();
        for number in 0..=operations {
            let file = start.fork(number + 7);
            make_full(&file);
            file.on(When::any().skip(number), Fault::Fail(Errno::IO));
            let finished = run(&mut runtime, &file, Change::Empty).is_ok();
            for seed in 0..seeds() {
                let case = format!("{options}, cut at {number}, seed {seed}");
                let state = file.crash_state(seed);
                let verdict = check_bytes(&Look(&state)).expect("an image").verdict();
                assert!(
                    matches!(verdict, CheckVerdict::Clean | CheckVerdict::Leaks),
                    "{case}: {verdict:?}"
                );
                let (disk, kept) = content_with_leaks(&state);
                assert!(kept == snapshots, "{case}: a snapshot has changed");
                let wrong = disk.iter().zip(&old).position(|(now, old)| *now != 0 && now != old);
                assert_eq!(wrong, None, "{case}");
                assert!(!finished || allocated(&disk) == 0, "{case}: it was reported as done");
            }
        }
        // All of it was given back, too.
        let report = check_bytes(&Look(&file)).expect("an image");
        assert_eq!(report.verdict(), CheckVerdict::Clean, "{options}: {report:?}");
        assert_eq!(allocated(&content(&file).expect("a sound image").disk), 0, "{options}");
    }
}

/// Whether our check finds leaks at most.
fn is_sound(file: &SimStorage) -> bool {
    let verdict = check_bytes(&Look(file)).map(|report| report.verdict());
    matches!(verdict, Ok(CheckVerdict::Clean | CheckVerdict::Leaks))
}

#[test]
fn rubbish_is_refused_or_survived() {
    let mut runtime = runtime();
    for options in SHAPES {
        let sound = prepared(options);
        let layout = Layout::of(&SimStorage::from_image(&sound, 1));
        let cluster = layout.header.cluster();
        let metadata: Vec<u64> = layout
            .references
            .iter()
            .filter(|(_, (class, _))| !matches!(class, Class::Data | Class::Free))
            .map(|(number, _)| *number)
            .collect();
        for seed in 0..40 * seeds() {
            let mut prng = Prng::new(seed);
            let mut bytes = sound.clone();
            for _ in 0..1 + prng.below(3) {
                let number = metadata[prng.below(metadata.len() as u64) as usize];
                let used = if number == 0 { 112 } else { cluster.min(4096) };
                let at = (number * cluster + prng.below(used)) as usize;
                bytes[at] = match prng.below(3) {
                    0 => 0,
                    1 => 0xff,
                    _ => prng.below(256) as u8,
                };
            }
            let file = SimStorage::from_image(&bytes, seed);
            let change = CHANGES[prng.below(CHANGES.len() as u64) as usize];
            let was_sound = is_sound(&file);
            let done = run(&mut runtime, &file, change);
            let case = format!("{options}, seed {seed}, {change:?}: {done:?}");
            assert!(is_sound(&file.fork(1)) || !was_sound, "{case}");
        }
    }
}

#[test]
fn an_image_goes_on_after_a_change() {
    let mut runtime = runtime();
    let start = SimStorage::from_image(&prepared("cluster_size=4096"), 1);
    let ring = runtime.ring().clone();
    runtime.block_on(async {
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let mut image = Qcow2::open(&ring, start.storage(), &options).await.expect("an image");
        for change in CHANGES {
            let buf = IoBuf::new(4096, 4096);
            buf.fill(0x33);
            let written = image.write(&ring, GuestOffset(64 * KIB), &buf, &Nothing).await;
            assert_eq!(written, Ok(4096), "before {change:?}");
            let _ = make(change, &mut image, &ring).await;
        }
        image.close(&ring).await.expect("a clean close");
    });
    content(&start.power_cut(1)).expect("a sound image");
}
