//! What a power cut leaves.

use super::image::Image;
use super::prng::Prng;
use super::state::{Action, Change, State};

/// What a disk writes in one piece or not at all.
const SECTOR: u64 = 512;

/// How much of one change arrives.
enum Luck {
    All,
    Nothing,
    Torn,
}

/// The durable image with any part of the changes that were not flushed, in their order, and of the
/// writes that were running.
pub(crate) fn crash_image(state: &State, seed: u64) -> Image {
    let mut prng = Prng::new(seed);
    let mut image = state.durable.clone();
    let running = state.pending.values().filter_map(|pending| match pending.action {
        Action::Write { offset, ref bytes } => Some(Change::Write { offset, bytes: bytes.clone() }),
        Action::Zero { offset, len, unmap, .. } => Some(Change::Zero { offset, len, unmap }),
        _ => None,
    });
    let settled = state.journal.iter().map(|(_, change)| change.clone());
    for change in settled.chain(running) {
        match luck(&mut prng) {
            Luck::All => change.apply(&mut image),
            Luck::Nothing => {}
            Luck::Torn => {
                sectors(&change).into_iter().filter(|_| prng.coin()).for_each(|sector| {
                    sector.apply(&mut image);
                });
            }
        }
    }
    image
}

fn luck(prng: &mut Prng) -> Luck {
    match prng.below(4) {
        0 => Luck::All,
        1 => Luck::Nothing,
        _ => Luck::Torn,
    }
}

/// The pieces of a change that arrive independently.
fn sectors(change: &Change) -> Vec<Change> {
    let cut = |offset: u64, len: u64| {
        let mut at = offset;
        std::iter::from_fn(move || {
            let end = offset + len;
            (at < end).then(|| {
                let stop = ((at / SECTOR + 1) * SECTOR).min(end);
                let piece = (at, stop - at);
                at = stop;
                piece
            })
        })
    };
    match change {
        Change::Write { offset, bytes } => cut(*offset, bytes.len() as u64)
            .map(|(at, len)| {
                let start = usize::try_from(at - offset).expect("inside the write");
                let stop = start + usize::try_from(len).expect("a sector");
                Change::Write { offset: at, bytes: bytes[start..stop].to_vec() }
            })
            .collect(),
        // The kept part of a zeroed range is never torn inside a page by the unmapping.
        Change::Zero { offset, len, .. } => cut(*offset, *len)
            .map(|(offset, len)| Change::Zero { offset, len, unmap: false })
            .collect(),
        whole => vec![whole.clone()],
    }
}
