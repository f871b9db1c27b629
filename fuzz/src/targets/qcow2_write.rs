//! Opens an image for writing, works on it, closes and checks it.
//!
//! Half of the inputs work on a sound image, which must hold what was written and be sound at the
//! end, whatever the operations are. The other half damage the image first: then every operation
//! may fail, and nothing may panic, hang or take memory without end.

use ringdisk_qcow2::{CheckVerdict, Qcow2};
use ringdisk_ring::Ring;
use ringdisk_testkit::layout::{Guest, Layout};
use ringdisk_testkit::sim::SimStorage;

use crate::{Input, damage, operate, options, shape, verdict, with_ring};

/// Operations of an input at most.
const OPERATIONS: usize = 60;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let is_damaged = input.byte() & 1 == 1;
    with_ring(|ring| async move { visit(&ring, &mut input, is_damaged).await });
}

async fn visit(ring: &Ring, input: &mut Input<'_>, is_damaged: bool) {
    let shape = shape(input);
    let sim = SimStorage::from_image(&shape.make(), 1);
    let mut model = vec![0; shape.size as usize];
    for _ in 0..1 + input.byte() % 3 {
        if is_damaged {
            damage(&sim, input);
        }
        let image = match Qcow2::open(ring, sim.storage(), &options(input)).await {
            Ok(image) => image,
            Err(_) if is_damaged => return,
            Err(error) => panic!("a sound image is refused: {error}"),
        };
        for _ in 0..OPERATIONS {
            if input.is_empty() {
                break;
            }
            let done = operate(ring, &image, input, &mut model).await;
            assert!(is_damaged || done.is_ok(), "{done:?}");
        }
        let closed = image.close(ring).await;
        assert!(is_damaged || closed.is_ok(), "{closed:?}");
    }
    let verdict = verdict(&sim);
    if is_damaged {
        return;
    }
    assert_eq!(verdict, Some(CheckVerdict::Clean));
    let layout = Layout::of(&sim);
    assert!(layout.is_sound() && layout.leaks == 0, "{layout}");
    let mut seen = vec![0; model.len()];
    let guest = Guest::active(&sim, &sim).expect("a sound header");
    guest.read(0, &mut seen, &|_, out| out.fill(0)).expect("a sound image");
    assert!(seen == model, "other bytes than were written");
}
