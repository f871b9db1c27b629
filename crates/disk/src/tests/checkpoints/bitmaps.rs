//! The bitmaps of a checkpoint, beside a model and beside QEMU's.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringdisk_qcow2::{Bytes, Qcow2};
use ringdisk_ring::Ring;
use ringdisk_testkit::sim::{Fault, OpKind, Prng, SimStorage, When};
use tempfile::TempDir;

use super::{HOLD, chain, freeze, options, writable};
use crate::disk::Parts;
use crate::open::qcow2_layer;
use crate::tests::{assert_same, buffer, directory, qemu_img, qemu_io, read_steps, run};
use crate::{
    Checkpoint, CheckpointEnd, CheckpointOptions, CommitOptions, Disk, ErrorKind, ImageOptions,
    NewBitmap, Progress,
};

const GRANULE: u64 = 64 << 10;
const SIZE: u64 = 4 << 20;

fn wanted(new: Option<&str>, since: Option<&str>) -> CheckpointOptions {
    let bitmap = new.map(|name| NewBitmap { name: name.into(), granularity_bytes: None });
    CheckpointOptions { bitmap, since: since.map(str::to_owned), ..options() }
}

/// Random changes; gives the granules that they touch, and the same for `qemu-io`.
async fn stream(ring: &Ring, disk: &Disk, seed: u64, count: u64) -> (Vec<bool>, Vec<String>) {
    let mut prng = Prng::new(seed);
    let mut marked = vec![false; usize::try_from(SIZE / GRANULE).expect("small")];
    let mut commands = Vec::new();
    for _ in 0..count {
        let at = prng.below(SIZE / 512 - 300) * 512;
        let len = (1 + prng.below(299)) * 512;
        let bytes = usize::try_from(len).expect("small");
        match prng.below(3) {
            0 => {
                disk.write_zeroes(ring, at, Bytes(len), true).await.expect("zeroes");
                commands.push(format!("write -z -u {at} {len}"));
            }
            _ => {
                disk.write(ring, at, &buffer(&vec![7; bytes])).await.expect("write");
                commands.push(format!("write -P 7 {at} {len}"));
            }
        }
        for granule in at / GRANULE..=(at + len - 1) / GRANULE {
            marked[usize::try_from(granule).expect("small")] = true;
        }
    }
    (marked, commands)
}

/// Runs of marked granules, bytes.
fn runs(marked: &[bool]) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (index, _) in marked.iter().enumerate().filter(|(_, marked)| **marked) {
        let at = index as u64 * GRANULE;
        match runs.last_mut().filter(|last| last.1 == at) {
            Some(last) => last.1 = at + GRANULE,
            None => runs.push((at, at + GRANULE)),
        }
    }
    runs
}

fn dirty(checkpoint: &Checkpoint) -> Vec<(u64, u64)> {
    let dirty = checkpoint.dirty().expect("a bitmap");
    dirty.ranges.iter().map(|range| (range.start, range.end)).collect()
}

/// What a bitmap of an image that nobody uses says; `None`: there is none that is valid.
async fn saved(ring: &Ring, place: &TempDir, image: &str, name: &str) -> Option<Vec<(u64, u64)>> {
    let options = ringdisk_storage::OpenOptions {
        read_only: true,
        lock: ringdisk_storage::Lock::None,
        ..Default::default()
    };
    let path = place.path().join(image);
    let storage = Arc::new(ringdisk_storage::Storage::open(&path, &options).expect("open"));
    let image = Qcow2::open(ring, storage, &Default::default()).await.expect("open");
    let contents = image.bitmap_contents(ring, name).await.ok()?;
    let bytes = |range: Range<ringdisk_qcow2::GuestOffset>| (range.start.0, range.end.0);
    Some(contents.ranges().map(bytes).collect())
}

#[test]
fn bitmaps_are_split_at_the_instant() {
    let place = directory();
    let name = chain(&place);
    qemu_img(&place, &["bitmap", "--add", "-g", "64k", name, "old"]);
    std::fs::copy(place.path().join(name), place.path().join("theirs.qcow2")).expect("copy");
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let prepared = disk.prepare_checkpoint(&ring, wanted(Some("new"), Some("old"))).await;
        let prepared = prepared.expect("prepared");
        // Between preparation and instant.
        let (first, commands) = stream(&ring, &disk, 1, 12).await;
        let mut held = disk.hold(&ring, HOLD).await.expect("held");
        let checkpoint = held.freeze(&prepared).expect("frozen");
        drop(held);
        let (second, later) = stream(&ring, &disk, 2, 12).await;
        assert_eq!(dirty(&checkpoint), runs(&first), "a model");
        checkpoint.end(&ring, CheckpointEnd::Keep).await.expect("the end");
        let (third, last) = stream(&ring, &disk, 3, 3).await;
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        let both = |a: &[bool], b: &[bool]| a.iter().zip(b).map(|(a, b)| a | b).collect::<Vec<_>>();
        let after = both(&second, &third);
        let all = both(&first, &after);
        assert_eq!(saved(&ring, &place, name, "new").await, Some(runs(&after)));
        assert_eq!(saved(&ring, &place, name, "old").await, Some(runs(&all)));
        qemu_img(&place, &["check", "-q", name]);

        // QEMU on the same stream.
        let words = |commands: &[String]| commands.to_vec();
        let theirs = "theirs.qcow2";
        qemu_img(&place, &["rebase", "-u", "-b", "base.qcow2", "-F", "qcow2", theirs]);
        let first = words(&commands);
        qemu_io(&place, "qcow2", theirs, &first.iter().map(String::as_str).collect::<Vec<_>>());
        let at_instant = saved(&ring, &place, theirs, "old").await.expect("valid");
        assert_eq!(dirty(&checkpoint), at_instant, "QEMU");
        qemu_img(&place, &["bitmap", "--add", "-g", "64k", theirs, "new"]);
        let rest = [later, last].concat();
        qemu_io(&place, "qcow2", theirs, &rest.iter().map(String::as_str).collect::<Vec<_>>());
        for bitmap in ["old", "new"] {
            let ours = saved(&ring, &place, name, bitmap).await;
            assert_eq!(ours, saved(&ring, &place, theirs, bitmap).await, "{bitmap}, QEMU");
        }
        qemu_img(&place, &["compare", "-q", name, theirs]);
    });
}

#[test]
fn after_a_backup_the_new_bitmap_replaces_the_old_one() {
    let place = directory();
    let name = chain(&place);
    qemu_img(&place, &["bitmap", "--add", "-g", "64k", name, "old"]);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let (first, _) = stream(&ring, &disk, 5, 6).await;
        let checkpoint = freeze(&ring, &disk, wanted(Some("new"), Some("old"))).await;
        let checkpoint = checkpoint.expect("a checkpoint");
        let (second, _) = stream(&ring, &disk, 6, 6).await;
        assert_eq!(dirty(&checkpoint), runs(&first));
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("a second end does nothing");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        assert_eq!(saved(&ring, &place, name, "new").await, Some(runs(&second)));
        assert_eq!(saved(&ring, &place, name, "old").await, None);
        qemu_img(&place, &["check", "-q", name]);
    });
}

#[test]
fn after_a_backup_that_failed_the_old_bitmap_has_all() {
    let place = directory();
    let name = chain(&place);
    qemu_img(&place, &["bitmap", "--add", "-g", "64k", name, "old"]);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let (first, _) = stream(&ring, &disk, 7, 6).await;
        let checkpoint = freeze(&ring, &disk, wanted(Some("new"), Some("old"))).await;
        let checkpoint = checkpoint.expect("a checkpoint");
        let (second, _) = stream(&ring, &disk, 8, 6).await;
        checkpoint.end(&ring, CheckpointEnd::Merge).await.expect("the end");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        let all: Vec<bool> = first.iter().zip(&second).map(|(a, b)| a | b).collect();
        assert_eq!(saved(&ring, &place, name, "old").await, Some(runs(&all)));
        assert_eq!(saved(&ring, &place, name, "new").await, None);
    });
}

#[test]
fn an_old_bitmap_that_does_not_record_gets_the_bits_of_the_new_one() {
    let place = directory();
    let name = chain(&place);
    qemu_img(&place, &["bitmap", "--add", "-g", "64k", name, "old"]);
    qemu_io(&place, "qcow2", name, &["write 0 64k"]);
    qemu_img(&place, &["bitmap", "--disable", name, "old"]);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let checkpoint = freeze(&ring, &disk, wanted(Some("new"), Some("old"))).await;
        let checkpoint = checkpoint.expect("a checkpoint");
        disk.write(&ring, 3 * GRANULE, &buffer(&[1; 512])).await.expect("write");
        assert_eq!(dirty(&checkpoint), [(0, GRANULE)]);
        checkpoint.end(&ring, CheckpointEnd::Merge).await.expect("the end");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        let both = vec![(0, GRANULE), (3 * GRANULE, 4 * GRANULE)];
        assert_eq!(saved(&ring, &place, name, "old").await, Some(both));
        assert_eq!(saved(&ring, &place, name, "new").await, None);
    });
}

#[test]
fn a_full_backup_that_failed_leaves_no_bitmap() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let prepared = disk.prepare_checkpoint(&ring, wanted(Some("a"), None)).await;
        prepared.expect("prepared").abandon(&ring).await.expect("abandoned");
        let checkpoint = freeze(&ring, &disk, wanted(Some("b"), None)).await.expect("frozen");
        assert_eq!(checkpoint.dirty(), None);
        checkpoint.end(&ring, CheckpointEnd::Merge).await.expect("the end");
        let kept = freeze(&ring, &disk, wanted(Some("c"), None)).await.expect("frozen");
        kept.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        let text = qemu_img(&place, &["info", name]);
        assert!(text.contains("name: c") && !text.contains("name: a") && !text.contains("name: b"));
        qemu_img(&place, &["check", "-q", name]);
    });
}

/// Two rounds of incremental backups are put together again.
#[test]
fn incremental_rounds_give_the_last_state() {
    let place = directory();
    let name = chain(&place);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let mut backup = Vec::new();
        let mut since: Option<String> = None;
        for round in 0..5 {
            let new = format!("round{round}");
            let checkpoint = freeze(&ring, &disk, wanted(Some(&new), since.as_deref())).await;
            let checkpoint = checkpoint.expect("a checkpoint");
            stream(&ring, &disk, 20 + round, 5).await;
            let shown = read_steps(&ring, checkpoint.disk(), 1 << 20).await;
            match checkpoint.dirty() {
                None => backup = shown.clone(),
                Some(dirty) => {
                    for marked in dirty.ranges.iter() {
                        let range = usize::try_from(marked.start).expect("small")
                            ..usize::try_from(marked.end).expect("small");
                        backup[range.clone()].copy_from_slice(&shown[range]);
                    }
                }
            }
            assert_same(&backup, &shown);
            // A backup that failed, now and then: the next one begins where the last good one did.
            let end = if round == 3 { CheckpointEnd::Merge } else { CheckpointEnd::Drop };
            checkpoint.end(&ring, end).await.expect("the end");
            if end == CheckpointEnd::Drop {
                since = Some(new);
            }
            stream(&ring, &disk, 40 + round, 5).await;
        }
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn a_crash_leaves_bitmaps_that_nobody_trusts() {
    let place = directory();
    let name = chain(&place);
    qemu_img(&place, &["bitmap", "--add", "-g", "64k", name, "old"]);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let look = async |left: &str| {
            std::fs::copy(place.path().join(name), place.path().join(left)).expect("copy");
            (saved(&ring, &place, left, "old").await, saved(&ring, &place, left, "new").await)
        };
        let prepared = disk.prepare_checkpoint(&ring, wanted(Some("new"), Some("old"))).await;
        let prepared = prepared.expect("prepared");
        let mut held = disk.hold(&ring, HOLD).await.expect("held");
        let checkpoint = held.freeze(&prepared).expect("frozen");
        drop(held);
        let nothing = Some(Vec::new());
        assert_eq!(look("a.qcow2").await, (nothing.clone(), nothing), "nothing was written");
        disk.write(&ring, 0, &buffer(&[1; 512])).await.expect("write");
        assert_eq!(disk.flush(&ring).await, Ok(()));
        assert_eq!(look("b.qcow2").await, (None, None), "in use");
        checkpoint.end(&ring, CheckpointEnd::Keep).await.expect("the end");
        assert_eq!(look("c.qcow2").await, (None, None), "in use");
        let text = qemu_img(&place, &["info", "c.qcow2"]);
        assert_eq!(text.matches("in-use").count(), 2, "{text}");
        assert_eq!(disk.close(&ring).await, Ok(()));
        let marked = Some(vec![(0, GRANULE)]);
        assert_eq!(look("d.qcow2").await, (marked.clone(), marked));
    });
}

#[test]
fn bitmaps_stay_with_their_image_under_an_overlay() {
    let place = directory();
    let name = chain(&place);
    qemu_img(&place, &["bitmap", "--add", "-g", "64k", name, "old"]);
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        let checkpoint = freeze(&ring, &disk, wanted(Some("new"), Some("old"))).await;
        let checkpoint = checkpoint.expect("a checkpoint");
        disk.write(&ring, 0, &buffer(&[1; 512])).await.expect("write");
        let over = place.path().join("over.qcow2");
        disk.add_overlay(&ring, over, Default::default()).await.expect("an overlay");
        let error = checkpoint.end(&ring, CheckpointEnd::Drop).await.expect_err("bitmaps stay");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("the bitmap 'old' is not in"), "{error}");
        let progress = Arc::new(Progress::new());
        disk.commit(&ring, CommitOptions::TOP, &progress).await.expect("a commit");
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the top has it again");
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        assert_eq!(saved(&ring, &place, name, "old").await, None);
        let new = saved(&ring, &place, name, "new").await.expect("valid");
        assert!(new.contains(&(0, GRANULE)));
    });
}

/// A qcow2 image in memory, with data and with a bitmap `old`, as a disk.
async fn simulated(ring: &Ring, place: &TempDir) -> (SimStorage, Arc<Disk>) {
    qemu_img(place, &["create", "-q", "-f", "qcow2", "sim.qcow2", "4M"]);
    qemu_io(place, "qcow2", "sim.qcow2", &["write -P 1 0 4M"]);
    qemu_img(place, &["bitmap", "--add", "-g", "64k", "sim.qcow2", "old"]);
    let bytes = std::fs::read(place.path().join("sim.qcow2")).expect("read");
    let sim = SimStorage::from_image(&bytes, 1);
    let open = ringdisk_qcow2::OpenOptions { writable: true, ..Default::default() };
    let image = Qcow2::open(ring, sim.storage(), &open).await.expect("the image opens");
    let disk = Disk::build(vec![qcow2_layer(image, true)], Parts::new(&ImageOptions::default()));
    (sim, disk)
}

#[test]
fn a_bitmap_is_added_while_a_request_is_in_flight() {
    let place = directory();
    run(async |ring| {
        ring.offload_here();
        let (sim, disk) = simulated(&ring, &place).await;
        disk.write(&ring, 0, &buffer(&[1; 512])).await.expect("write");
        // Data of clients only: nothing else is written at the places of old data.
        let data = sim.log().last().expect("the write").offset;
        sim.on(When::kind(OpKind::Write).at(data..data + 512), Fault::Hold);
        let (client, handle) = (Arc::clone(&disk), ring.clone());
        let write = async move { client.write(&handle, 0, &buffer(&[2; 512])).await };
        let write = crate::task_join::spawn(&ring, write);
        ring.sleep(Duration::from_millis(5)).await;
        let begun = Instant::now();
        let prepared = disk.prepare_checkpoint(&ring, wanted(Some("new"), Some("old"))).await;
        let prepared = prepared.expect("prepared beside the request");
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        sim.clear_rules();
        sim.release_all();
        assert_eq!(write.await, Some(Ok(512)));
        let mut held = disk.hold(&ring, HOLD).await.expect("held");
        let checkpoint = held.freeze(&prepared).expect("frozen");
        drop(held);
        disk.write(&ring, 2 * GRANULE, &buffer(&[3; 512])).await.expect("write");
        assert_eq!(dirty(&checkpoint), [(0, GRANULE)]);
        checkpoint.end(&ring, CheckpointEnd::Keep).await.expect("the end");
        assert_eq!(disk.close(&ring).await, Ok(()));
        std::fs::write(place.path().join("left.qcow2"), sim.image()).expect("a copy");
        let new = saved(&ring, &place, "left.qcow2", "new").await;
        assert_eq!(new, Some(vec![(2 * GRANULE, 3 * GRANULE)]));
        qemu_img(&place, &["check", "-q", "left.qcow2"]);
    });
}

#[test]
fn a_bitmap_without_room_is_refused_and_clients_go_on() {
    let place = directory();
    run(async |ring| {
        ring.offload_here();
        let (sim, disk) = simulated(&ring, &place).await;
        disk.write(&ring, 0, &buffer(&[1; 512])).await.expect("write");
        let end = sim.image().len() as u64;
        sim.on(When::any().at(end..u64::MAX), Fault::Fail(crate::Errno::NOSPC));
        let error = disk.prepare_checkpoint(&ring, wanted(Some("new"), None)).await;
        assert_eq!(error.expect_err("no room").errno(), Some(crate::Errno::NOSPC));
        disk.write(&ring, GRANULE, &buffer(&[1; 512])).await.expect("write");
        sim.clear_rules();
        let checkpoint = freeze(&ring, &disk, wanted(Some("new"), Some("old"))).await;
        let checkpoint = checkpoint.expect("a checkpoint");
        assert_eq!(dirty(&checkpoint), [(0, 2 * GRANULE)]);
        checkpoint.end(&ring, CheckpointEnd::Drop).await.expect("the end");
        assert_eq!(disk.close(&ring).await, Ok(()));
    });
}

#[test]
fn bitmaps_can_be_added_again_and_again() {
    let place = directory();
    let name = chain(&place);
    let rounds = 40;
    run(async |ring| {
        let disk = writable(&ring, &place, name).await;
        for round in 0..rounds {
            let new = format!("b{round}");
            let checkpoint = freeze(&ring, &disk, wanted(Some(&new), None)).await.expect("frozen");
            disk.write(&ring, round * GRANULE, &buffer(&[1; 512])).await.expect("write");
            checkpoint.end(&ring, CheckpointEnd::Keep).await.expect("the end");
        }
        assert_eq!(disk.close(&ring).await, Ok(()));
        drop(disk);
        for round in [0, 1, 31, 32, 33, 39] {
            let all = Some(vec![(round * GRANULE, rounds * GRANULE)]);
            assert_eq!(saved(&ring, &place, name, &format!("b{round}")).await, all, "{round}");
        }
        qemu_img(&place, &["check", "-q", name]);
    });
}
