//! A bitmap that records: whenever it says that it can be trusted it names everything that differs
//! from what was there at its beginning.

use ringdisk_qcow2::{Bytes, Qcow2};
use ringdisk_ring::Ring;
use ringdisk_testkit::oracle::{Oracle, SECTOR};

use crate::live::{open, writable};
use crate::world::{Case, World};

/// Its name.
pub(crate) const NAME: &str = "recording";

impl World {
    /// Adds the bitmap to the new image.
    pub(crate) async fn add_bitmap(&mut self) -> Result<(), String> {
        let mut image = open(&self.ring, &self.file, self.data.as_ref(), &writable()).await?;
        let granularity = 512 << self.prng.below(6);
        let added = image.bitmap_add(&self.ring, NAME, Some(Bytes(granularity))).await;
        added.map_err(|error| format!("adding a bitmap: {error}"))?;
        image.close(&self.ring).await.map_err(|errno| format!("close: {errno}"))
    }
}

/// Judges the bitmap of a state.
///
/// * `read`: fills the bytes of the disk from an offset on.
pub(crate) async fn judge(
    ring: &Ring,
    image: &Qcow2,
    case: &Case,
    world: &Oracle,
    read: impl Fn(u64, &mut [u8]) -> Result<(), String>,
) -> Result<(), String> {
    let Some(bitmap) = image.info().bitmaps.iter().find(|bitmap| bitmap.name == NAME) else {
        return Err("the bitmap is gone".into());
    };
    if bitmap.in_use {
        let closed = "the bitmap is inconsistent although the image was closed";
        return if case.closed { Err(closed.into()) } else { Ok(()) };
    }
    let contents = image.bitmap_contents(ring, NAME).await.map_err(|error| error.to_string())?;
    let set: Vec<std::ops::Range<u64>> =
        contents.ranges().map(|range| range.start.0..range.end.0).collect();
    let is_set = |at: u64| set.iter().any(|range| range.contains(&at));
    for range in world.touched() {
        for at in range.step_by(512) {
            if is_set(at) {
                continue;
            }
            let len = usize::try_from((world.size() - at).min(SECTOR)).unwrap_or(0);
            let (mut now, mut then) = (vec![0; len], vec![0; len]);
            read(at, &mut now)?;
            world.fill_below(at, &mut then);
            if now != then {
                return Err(format!("a trusted bitmap knows nothing of a write to {at:#x}"));
            }
        }
    }
    Ok(())
}
