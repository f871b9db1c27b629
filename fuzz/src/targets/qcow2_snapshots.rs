//! Snapshot tables that nobody would write: opened, used, applied, deleted.
//!
//! The image is sound but for the table, which comes from the input as a whole or is a good one
//! with damage. What was sound stays so.

use ringdisk_qcow2::Qcow2;
use ringdisk_ring::Ring;
use ringdisk_testkit::layout::{Guest, Layout};
use ringdisk_testkit::sim::SimStorage;

use crate::{Input, operate, options, shape, verdict, with_ring};

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    with_ring(|ring| async move { visit(&ring, &mut input).await });
}

async fn visit(ring: &Ring, input: &mut Input<'_>) {
    let mut shape = shape(input);
    shape.refcount_order = shape.refcount_order.max(1);
    let sim = SimStorage::from_image(&shape.make(), 1);
    let mut model = vec![0; shape.size as usize];
    let mut image = Qcow2::open(ring, sim.storage(), &options(input)).await.expect("sound");
    for _ in 0..input.byte() % 4 {
        operate(ring, &image, input, &mut model).await.expect("sound");
        let _ = image.snapshot_create(ring, "good").await;
    }
    image.close(ring).await.expect("sound");
    damage_table(&sim, input);
    let before = Layout::of(&sim);
    let disk = active(&sim);
    let Ok(mut image) = Qcow2::open(ring, sim.storage(), &options(input)).await else { return };
    let mut changed = false;
    for _ in 0..6 {
        let ids: Vec<String> = image.info().snapshots.iter().map(|s| s.id.clone()).collect();
        let id = ids.get(usize::from(input.byte()) % ids.len().max(1)).cloned().unwrap_or_default();
        let _ = match input.byte() % 4 {
            0 => image.snapshot_create(ring, "fuzz").await.map(drop),
            1 => {
                changed = true;
                image.snapshot_apply(ring, &id).await
            }
            2 => image.snapshot_delete(ring, &id).await,
            _ => {
                changed = true;
                let _ = operate(ring, &image, input, &mut model).await;
                Ok(())
            }
        };
    }
    let _ = image.close(ring).await;
    let _ = verdict(&sim);
    if before.is_sound() {
        let after = Layout::of(&sim);
        assert!(after.is_sound() && after.leaks <= before.leaks, "{before}\n{after}");
        assert!(changed || disk == active(&sim), "the disk changed by itself");
    }
}

/// What the guest sees.
fn active(sim: &SimStorage) -> Option<Vec<u8>> {
    let guest = Guest::active(sim, sim).ok()?;
    let mut bytes = vec![0; usize::try_from(guest.size.min(1 << 20)).ok()?];
    guest.read(0, &mut bytes, &|_, out| out.fill(0)).ok()?;
    Some(bytes)
}

/// Damages the table, or puts another one at the end of the file.
fn damage_table(sim: &SimStorage, input: &mut Input<'_>) {
    let layout = Layout::of(sim);
    let offset = layout.header.snapshots_offset;
    if input.byte() & 1 == 0 && offset != 0 {
        for _ in 0..1 + input.byte() % 6 {
            sim.put(offset + input.below(200), &[input.byte()]);
        }
        return;
    }
    let at = sim.len().next_multiple_of(layout.header.cluster());
    let count = u32::from(input.byte());
    let table: Vec<u8> = (0..256).map(|_| input.byte()).collect();
    sim.put(at, &table);
    sim.put(60, &count.to_be_bytes());
    sim.put(64, &at.to_be_bytes());
}
