//! Changes of an image, and whether one has harmed what the image showed.

use ringdisk_qcow2::{Bytes, Error, Nothing, Preallocation, Qcow2, ResizeOptions};
use ringdisk_ring::{Errno, Ring};
use ringdisk_testkit::sim::{Fault, OpKind, SimStorage, When};

use crate::common::{KIB, runtime};
use crate::live::{read, writable};
use crate::ops_damaged::image::{CLUSTER, Contents, SIZE, Shown};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Create,
    Apply(char),
    Delete(char),
    Grow,
    Shrink,
    Empty,
    /// On a full file system: in place.
    EmptyFull,
    /// A bitmap more.
    Bitmap,
}

pub(crate) const CHANGES: [Change; 10] = [
    Change::Create,
    Change::Apply('s'),
    Change::Apply('t'),
    Change::Delete('s'),
    Change::Delete('t'),
    Change::Grow,
    Change::Shrink,
    Change::Empty,
    Change::EmptyFull,
    Change::Bitmap,
];

impl Change {
    pub(crate) async fn make(self, ring: &Ring, image: &mut Qcow2) -> Result<(), Error> {
        let resize = |preallocation| ResizeOptions { shrink: true, preallocation };
        match self {
            Change::Create => image.snapshot_create(ring, "n").await.map(drop),
            Change::Apply(name) => image.snapshot_apply(ring, &name.to_string()).await,
            Change::Delete(name) => image.snapshot_delete(ring, &name.to_string()).await,
            Change::Grow => {
                let options = resize(Preallocation::Metadata);
                image.resize(ring, Bytes(3 * SIZE), &options, &Nothing).await
            }
            Change::Shrink => {
                image
                    .resize(ring, Bytes(SIZE / 2 + 8 * KIB), &resize(Preallocation::Off), &Nothing)
                    .await
            }
            Change::Empty | Change::EmptyFull => image.make_empty(ring).await,
            Change::Bitmap => image.bitmap_add(ring, "new", Some(Bytes(64 * KIB))).await,
        }
    }
}

/// Every cluster that shows something shows it still. What shows nothing, since the file ends
/// before it, may become zeroes when the file has grown over it, and never the bytes of another
/// cluster.
pub(crate) fn assert_same(before: &[Shown], after: &[Shown], what: &str) {
    const ZEROES: Shown = Shown::Contents([0; 32]);
    for (cluster, (before, after)) in before.iter().zip(after).enumerate() {
        let is_hole = *before == Shown::Nothing && *after == ZEROES;
        if *before != Shown::Metadata && !is_hole {
            assert_eq!(before, after, "{what}: cluster {cluster}");
        }
    }
}

/// Returns whether the change was made.
///
/// * `is_known`: all of the disk was read before.
pub(crate) fn judge(damaged: &Contents, change: Change, is_known: bool, what: &str) -> bool {
    let sim = SimStorage::from_image(&damaged.0, 1);
    let mut runtime = runtime();
    let ring = runtime.ring().clone();
    let result = runtime.block_on(async {
        let mut image = crate::live::open(&ring, &sim, None, &writable()).await?;
        if is_known {
            for at in (0..SIZE).step_by(CLUSTER as usize) {
                let _ = read(&ring, &image, &Nothing, at, &mut [0; 512]).await;
            }
        }
        if change == Change::EmptyFull {
            sim.on(When::kind(OpKind::Write).once(), Fault::Fail(Errno::NOSPC));
            sim.on(When::any().at(sim.len()..u64::MAX), Fault::Fail(Errno::NOSPC));
        }
        let result = change.make(&ring, &mut image).await.map_err(|error| error.to_string());
        let _ = image.close(&ring).await;
        result
    });
    let after = Contents(sim.image());
    let disk = damaged.show(damaged.active());
    let shown = after.show(after.active());
    match (change, &result) {
        (Change::Apply(name), Ok(())) => {
            let l1 = damaged.snapshot(name).expect("there is one");
            assert_same(&damaged.show(l1), &shown, what);
        }
        (Change::Empty | Change::EmptyFull, Ok(())) => {
            assert!(shown.iter().all(|it| *it == Shown::Contents([0; 32])), "{what}");
        }
        (Change::Shrink, Ok(())) => {
            let left = (SIZE / 2 + 8 * KIB) / CLUSTER;
            assert_same(&disk[..left as usize], &shown, what);
        }
        _ => assert_same(&disk, &shown, what),
    }
    judge_bitmap(damaged, &after, change, what);
    // What was applied, or emptied, is another disk.
    if !matches!(change, Change::Apply(_) | Change::Empty | Change::EmptyFull) || result.is_err() {
        after.assert_counted(&disk, after.active(), what);
    }
    for (name, l1) in damaged.snapshots() {
        let is_gone = change == Change::Delete(name) && result.is_ok();
        let now = after.snapshot(name);
        assert_eq!(now.is_none(), is_gone, "{what}, snapshot {name}");
        if let Some(now) = now {
            let before = damaged.show(l1);
            assert_same(&before, &after.show(now), &format!("{what}, snapshot {name}"));
            after.assert_counted(&before, now, &format!("{what}, snapshot {name}"));
        }
    }
    result.is_ok()
}

/// What the bitmap says, where it is believed, is what it said before.
fn judge_bitmap(before: &Contents, after: &Contents, change: Change, what: &str) {
    // A bit for each sector that stays.
    let len = if change == Change::Shrink { SIZE / 2 + 8 * KIB } else { SIZE } / 512 / 8;
    let len = len as usize;
    if change == Change::Bitmap && before.bits(len).is_none() {
        return;
    }
    if let Some(now) = after.bits(len) {
        assert!(Some(now) == before.bits(len), "{what}: the bitmap");
    }
}
