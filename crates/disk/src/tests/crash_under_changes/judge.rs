//! What a power cut leaves, and whether it may.

use std::collections::BTreeMap;

use ringdisk_qcow2::{OpenOptions, Qcow2, check_bytes};
use ringdisk_ring::Ring;
use ringdisk_testkit::oracle::Oracle;
use ringdisk_testkit::sim::SimStorage;

use super::super::commit_faults::{Images, chain};
use super::{Change, KEPT, OVER, Shore, Stage, TOP, buffer};

/// What may be left of a moment.
pub(super) struct State {
    images: BTreeMap<String, Vec<u8>>,
    /// Names under which the disk may be opened.
    tops: Vec<&'static str>,
    /// What it may hold; a change that may be on the media or not makes two.
    worlds: Vec<Oracle>,
    /// What else is kept in the images.
    kept: Option<(Kept, Oracle)>,
    pub(super) label: String,
}

/// What shows an older state.
#[derive(Clone, Copy, Debug)]
enum Kept {
    Snapshot,
    /// The former top, below the overlay.
    Top,
}

/// The power fails: one of the states that this may leave.
pub(super) fn cut(shore: &Shore, seed: u64) -> State {
    shore.look();
    let stage = shore.stage.get();
    let now = shore.oracle.borrow().clone();
    let mut worlds = Vec::new();
    if stage == Stage::Under {
        worlds.extend(shore.changed(&now));
    }
    worlds.push(now);
    let mut tops = match shore.what {
        // Who was not told of the commit opens the old top; both show the same.
        Change::Commit(_, after) if stage == Stage::Put => vec![after, TOP],
        Change::Overlay if stage == Stage::Put => vec![OVER],
        _ => vec![TOP],
    };
    tops.dedup();
    let then = shore.then.borrow().clone();
    let kept = match shore.what {
        Change::Create | Change::Apply | Change::Delete => then.map(|then| (Kept::Snapshot, then)),
        Change::Overlay => then.map(|then| (Kept::Top, then)),
        _ => None,
    };
    let left = |(name, sim): (&String, &SimStorage)| (name.clone(), sim.crash_image(seed));
    let mut images: BTreeMap<String, Vec<u8>> = shore.images.iter().map(left).collect();
    if !tops.contains(&OVER) {
        // It may be there in part.
        images.remove(OVER);
    }
    State { images, tops, worlds, kept, label: format!("{stage:?}, state {seed:#x}") }
}

/// All images are sound, the disk is one of the worlds, and what is kept is what it was.
pub(super) async fn judge(ring: &Ring, state: &State) -> Result<(), String> {
    for (name, image) in &state.images {
        let report = check_bytes(image.as_slice()).map_err(|error| format!("{name}: {error}"))?;
        if report.corruptions > 0 {
            return Err(format!("{name}: {:?}", report.messages));
        }
    }
    for top in &state.tops {
        let bytes = show(ring, &storages(state), top).await?;
        one_of(&state.worlds, &bytes).map_err(|wrong| format!("{top}: {wrong}"))?;
    }
    let Some((kept, then)) = &state.kept else { return Ok(()) };
    let images = storages(state);
    if matches!(kept, Kept::Snapshot) {
        let open = OpenOptions { writable: true, ..OpenOptions::default() };
        let image = Qcow2::open(ring, images[TOP].storage(), &open).await;
        let mut image = image.map_err(|error| error.to_string())?;
        image.snapshot_apply(ring, KEPT).await.map_err(|error| error.to_string())?;
        image.close(ring).await.map_err(|errno| errno.to_string())?;
    }
    let bytes = show(ring, &images, TOP).await?;
    one_of(std::slice::from_ref(then), &bytes).map_err(|wrong| format!("{kept:?}: {wrong}"))
}

fn storages(state: &State) -> Images {
    let storage =
        |(name, bytes): (&String, &Vec<u8>)| (name.clone(), SimStorage::from_image(bytes, 1));
    state.images.iter().map(storage).collect()
}

/// All bytes of a disk.
async fn show(ring: &Ring, images: &Images, top: &str) -> Result<Vec<u8>, String> {
    let disk = chain(ring, images, top, false).await;
    let mut bytes = vec![0; usize::try_from(disk.size()).expect("small")];
    let buf = buffer(&bytes);
    let read = disk.read(ring, 0, &buf).await;
    if read != Ok(bytes.len()) {
        return Err(format!("{top}: {read:?}"));
    }
    buf.copy_to_slice(0, &mut bytes);
    Ok(bytes)
}

/// Errors: in what way the bytes are none of the worlds.
fn one_of(worlds: &[Oracle], bytes: &[u8]) -> Result<(), String> {
    let mut wrong = Vec::new();
    for world in worlds {
        if world.size() != bytes.len() as u64 {
            wrong.push(format!("{} bytes, not {}", bytes.len(), world.size()));
            continue;
        }
        let seen = world.judge_crash(|at, out| {
            let at = usize::try_from(at).map_err(|error| error.to_string())?;
            out.copy_from_slice(&bytes[at..at + out.len()]);
            Ok(())
        });
        match seen {
            Ok(()) => return Ok(()),
            Err(mismatch) => wrong.push(mismatch.to_string()),
        }
    }
    Err(wrong.join("; or "))
}
