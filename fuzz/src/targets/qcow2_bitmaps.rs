//! Bitmap directories that nobody would write: opened, written under, changed, saved.

use ringdisk_qcow2::Qcow2;
use ringdisk_ring::Ring;
use ringdisk_testkit::layout::{Class, Layout};
use ringdisk_testkit::sim::SimStorage;

use crate::{Input, operate, options, shape, verdict, with_ring};

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    with_ring(|ring| async move { visit(&ring, &mut input).await });
}

async fn visit(ring: &Ring, input: &mut Input<'_>) {
    let mut shape = shape(input);
    shape.version = 3;
    let sim = SimStorage::from_image(&shape.make(), 1);
    let mut model = vec![0; shape.size as usize];
    let mut image = Qcow2::open(ring, sim.storage(), &options(input)).await.expect("sound");
    for number in 0..1 + input.byte() % 3 {
        let _ = image.bitmap_add(ring, &format!("b{number}"), None).await;
        let _ = operate(ring, &image, input, &mut model).await;
    }
    let _ = image.close(ring).await;
    let sound = damage_directory(&sim, input) && Layout::of(&sim).is_sound();
    let Ok(mut image) = Qcow2::open(ring, sim.storage(), &options(input)).await else { return };
    let _ = format!("{:?}", image.info());
    for _ in 0..8 {
        let names: Vec<String> = image.info().bitmaps.iter().map(|b| b.name.clone()).collect();
        let at = |byte: u8| usize::from(byte) % names.len().max(1);
        let pick = |byte: u8| names.get(at(byte)).cloned().unwrap_or_default();
        let (name, other) = (pick(input.byte()), pick(input.byte()));
        match input.byte() % 7 {
            0 => drop(image.bitmap_remove(ring, &name).await),
            1 => drop(image.bitmap_clear(ring, &name).await),
            2 => drop(image.bitmap_enable(ring, &name).await),
            3 => drop(image.bitmap_disable(ring, &name).await),
            4 => drop(image.bitmap_contents(ring, &other).await),
            _ => drop(operate(ring, &image, input, &mut model).await),
        }
    }
    let _ = image.close(ring).await;
    let _ = verdict(&sim);
    if sound {
        let after = Layout::of(&sim);
        assert!(after.is_sound(), "{after}");
    }
}

/// Damages directory, tables or the extension. Returns whether nothing was.
fn damage_directory(sim: &SimStorage, input: &mut Input<'_>) -> bool {
    let layout = Layout::of(sim);
    let bits = layout.header.cluster_bits;
    let bitmaps = layout.references.iter().filter(|(_, (class, _))| *class == Class::Bitmaps);
    let places: Vec<u64> = bitmaps.map(|(cluster, _)| cluster << bits).collect();
    let count = input.byte() % 6;
    for _ in 0..count {
        let place = places.get(usize::from(input.byte()) % places.len().max(1)).copied();
        // The extension is in the first cluster.
        let at = place.filter(|_| input.0.first().is_some_and(|b| b & 3 != 0)).unwrap_or(104);
        sim.put(at + input.below(64), &[input.byte()]);
    }
    count == 0
}
