//! Bounds: memory, time, cancellation, storage that cannot grow.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;

use ringdisk_qcow2::{Bytes, CheckHooks, CheckOptions, ErrorKind, Repair, check, check_bytes};
use ringdisk_ring::Errno;
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use crate::check::{repair_on, shapes};
use crate::common::{Images, MIB, runtime, storage};

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let pages: u64 = statm.split(' ').nth(1).and_then(|p| p.parse().ok()).expect("a number");
    pages * 4096
}

#[test]
fn a_sparse_file_of_64_tib_takes_little_memory() {
    let images = Images::new();
    let path = images.create("sparse", "", 64 << 40);
    images.qemu_io("sparse", &["write -q -P 1 63T 64k".to_owned()]);
    let sim = SimStorage::from_image(&std::fs::read(&path).expect("the image"), 1);
    sim.set_len_behind(64 << 40);
    let mut runtime = runtime();
    let before = resident_bytes();
    let report = repair_on(&mut runtime, &sim, Repair::Nothing).expect("a good image");
    assert!(report.is_clean(), "{report:?}");
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes");
}

#[test]
fn clusters_all_over_a_huge_file_end_with_an_error_before_memory_does() {
    let images = Images::new();
    let path = images.create("scattered", "cluster_size=2M", 1 << 40);
    images.qemu_io("scattered", &["write -q -P 1 0 64k".to_owned()]);
    let good = std::fs::read(&path).expect("the image");
    let l1 = u64::from_be_bytes(good[40..48].try_into().expect("8"));
    let table = &good[l1 as usize..l1 as usize + 8];
    let table = u64::from_be_bytes(table.try_into().expect("8")) & 0x00ff_ffff_ffff_fe00;
    let file = File::options().write(true).open(&path).expect("the image");
    // Each of 262144 entries is for a cluster 4096 clusters after the one before.
    let entries: Vec<u8> =
        (1..=262_144u64).flat_map(|n| ((1 << 63) | (n * 4096 * 2 * MIB)).to_be_bytes()).collect();
    file.write_all_at(&entries, table).expect("room");
    // The largest file that the file system allows: the rest of the entries lies behind it.
    file.set_len(8 << 40).expect("a sparse file");
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let options = CheckOptions::default();
    let before = resident_bytes();
    let result =
        runtime.block_on(check(&ring, &storage(&path), None, &options, CheckHooks::none()));
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 256 << 20, "{grown} bytes");
    assert!(result.is_ok_and(|report| report.corruptions > 200_000));
}

#[test]
fn a_cancelled_check_ends_soon_with_its_own_kind_and_changes_nothing() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    for (name, good) in shapes {
        let mut bytes = good;
        let blocks = u64::from_be_bytes(bytes[48..56].try_into().expect("8")) as usize;
        // No refcount block at all: there is much to repair.
        bytes[blocks..blocks + 8].fill(0);
        let before = check_bytes(&bytes[..]).expect("an image");
        for steps in 0..6 {
            let sim = SimStorage::from_image(&bytes, 1);
            let left = Cell::new(steps);
            let cancelled = || left.replace(left.get() - 1) <= 0;
            let hooks = CheckHooks { progress: &|_, _| {}, cancelled: &cancelled };
            let options = CheckOptions { repair: Repair::All };
            let file = sim.storage();
            let result = runtime.block_on(check(&ring, &file, None, &options, hooks));
            match result {
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Cancelled, "{name}, {steps}: {error}");
                    // A repair that was finished stays.
                    let after = check_bytes(&sim.image()[..]).expect("an image");
                    assert!(after.corruptions <= before.corruptions, "{name}, {steps}");
                    assert!(after.leaks <= before.leaks, "{name}, {steps}");
                }
                Ok(report) => assert!(report.corruptions_fixed > 0, "{name}: {report:?}"),
            }
        }
    }
}

#[test]
fn progress_goes_up_to_its_end() {
    let images = Images::new();
    let shapes = shapes::make(&images);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    for (name, bytes) in shapes {
        let seen = Cell::new((Bytes::ZERO, Bytes::ZERO));
        let progress = |done: Bytes, total: Bytes| {
            assert!(done >= seen.get().0 && done <= total, "{name}");
            seen.set((done, total));
        };
        let hooks = CheckHooks { progress: &progress, cancelled: &|| false };
        let file = SimStorage::from_image(&bytes, 1).storage();
        let options = CheckOptions::default();
        let checked = check(&ring, &file, None, &options, hooks);
        runtime.block_on(checked).expect("a good image");
        let (done, total) = seen.get();
        assert!(done == total && total > Bytes::ZERO, "{name}: {done} of {total}");
    }
}

#[test]
fn a_rebuild_that_finds_no_space_is_an_error_and_changes_nothing() {
    let images = Images::new();
    let mut runtime = runtime();
    for (name, good) in shapes::make(&images) {
        let mut bytes = good;
        let table = u64::from_be_bytes(bytes[48..56].try_into().expect("8")) as usize;
        bytes[table..table + 8].fill(0);
        let before = check_bytes(&bytes[..]).expect("an image");
        let sim = SimStorage::from_image(&bytes, 1);
        // No write succeeds past the end, as on a full disk.
        let behind = bytes.len() as u64..u64::MAX;
        sim.on(When::kind(OpKind::Write).at(behind), Fault::Fail(Errno::NOSPC));
        match repair_on(&mut runtime, &sim, Repair::All) {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Io, "{name}: {error}");
                let after = check_bytes(&sim.image()[..]).expect("an image");
                assert_eq!(after.corruptions, before.corruptions, "{name}");
                assert_eq!(after.leaks, before.leaks, "{name}");
            }
            // There was room inside the file.
            Ok(report) => assert!(report.is_clean(), "{name}: {report:?}"),
        }
    }
}
